"""The CUDA library as it is built: symbols, architectures, registers, plans; and that a broken kernel is caught."""

import importlib.util
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import emulated_cuda
import pytest
import torch
from cuda_resources import ARCHITECTURES, assemble, readable
from emulated_cuda import emulated_gpu
from ptxemu import KernelFault, cuda

from lrd_kernels.ops import dispatch, load

if reason := emulated_cuda.why_not():
    pytest.skip(reason, allow_module_level=True)

import test_cuda_code

core = pytest.importorskip("_core_testing", reason="built with -DLRD_TESTING=ON (make build)")
ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "lrd_kernels/_C_cuda.abi3.so"
BUILT = (75, 90, 120)  # what `make build` makes machine code for
QUICK = (75,)
# Most shared memory of a block, in bytes.
SHARED_LIMIT = {75: 65536, 80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}


def symbols(*options):
    shown = subprocess.run(["nm", "-D", *options, LIBRARY], check=True, capture_output=True, text=True).stdout
    return {(line.split()[-2], line.split()[-1].partition("@")[0]) for line in shown.splitlines()}


def test_asks_for_the_stable_interface_of_torch_alone():
    undefined = {name for kind, name in symbols("--undefined-only") if kind == "U"}
    of_torch = {name for name in undefined if "torch" in name}
    assert {"aoti_torch_create_cuda_guard", "aoti_torch_get_current_cuda_stream", "torch_library_impl"} <= of_torch
    assert {name for name in of_torch if not re.match(r"(aoti_)?torch_\w+$", name)} == set()
    assert {name for name in undefined if re.match(r"_ZN?K?(2at|3c10|5torch)", name)} == set()
    assert {name for name in undefined if name.startswith(("cu", "__cuda"))} == set()  # the runtime is linked in


def test_what_this_torch_lacks_is_of_cuda_alone():
    """Of the CPU build of torch, everything else is there."""
    libtorch = Path(torch.__file__).parent / "lib/libtorch_cpu.so"
    given = subprocess.run(["nm", "-D", "--defined-only", libtorch], check=True, capture_output=True, text=True).stdout
    defined = {line.split()[-1] for line in given.splitlines()}
    missing = {name for _, name in symbols("--undefined-only") if "torch" in name} - defined
    stub = (ROOT / "csrc/cuda/torch_cuda_stub.cpp").read_text()
    assert missing == set(re.findall(r"STUB\((\w+)\)$", stub, re.MULTILINE))


def test_exports_its_entry_point_alone():
    markers = {"__bss_start", "_edata", "_end"}
    exported = {name for kind, name in symbols("--defined-only") if kind in "TDBRGS"}
    assert exported - markers == {"PyInit__C_cuda"}


def test_needs_libraries_by_name_alone():
    dynamic = subprocess.run(["readelf", "-dW", LIBRARY], check=True, capture_output=True, text=True).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic))
    assert {"libtorch_cuda.so", "libtorch_cpu.so"} <= needed
    assert not any("cudart" in name for name in needed)
    assert not re.search(r"\((RPATH|RUNPATH)\)", dynamic)


def test_is_not_loaded_by_a_torch_without_cuda():
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA")
    script = "import sys, lrd_kernels as lrd; print(lrd.backends()['cuda'].detail); print(*sys.modules)"
    said, loaded = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert said.startswith("CUDA kernels need a torch that was built for CUDA")
    assert "lrd_kernels._C_cuda" not in loaded.split()


def test_says_why_it_did_not_load():
    """As under a CUDA torch whose library is not there: here because libtorch_cuda is not."""
    script = "import torch; torch.version.cuda = '13.0'; import lrd_kernels.info as i; print('\\n'.join(i.report()))"
    report = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    (line,) = [line for line in report.splitlines() if line.strip().startswith("cuda ")]
    assert "lrd_kernels/_C_cuda.abi3.so did not load: libtorch_cuda.so" in line


def test_machine_code_for_three_architectures_and_ptx():
    listed = subprocess.run(
        [emulated_cuda.find_cuobjdump(), "--list-elf", "--list-ptx", LIBRARY],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert {int(a) for a in re.findall(r"sm_(\d+)\.cubin", listed)} >= set(BUILT)
    assert set(re.findall(r"sm_(\d+)\.ptx", listed)) == {"75"}


@pytest.mark.parametrize(
    "architecture", [pytest.param(a, marks=() if a in QUICK else pytest.mark.slow) for a in ARCHITECTURES]
)
def test_no_kernel_spills(architecture):
    found = assemble(architecture)
    assert {readable(name)[0] for name in found} == {
        *("gram", "add_slots", "mean", "capacitance", "factor_panel", "inverse_panel", "capacitance_finish", "solve"),
        *("prepare", "take", "judge", "settle", "log_prob_bwd", "project_fold"),
        *("row_sums", "gram_tiles", "finish", "again", "row_grads", "gradient_tiles"),
    }
    assert len([name for name in found if "gram_kernel" in name]) == 21  # seven pairs of types, three tiles
    for name, taken in found.items():
        assert taken.spills == taken.stack == 0, (name, taken)
        assert taken.registers <= 255, (name, taken)
        assert taken.shared <= 48 * 1024, (name, taken)


SIZES = list(itertools.product((0, 1, 3, 1000), (0, 1, 100, 65537, 10**8), (0, 1, 7, 8, 64, 129, 512, 1024)))


@pytest.mark.parametrize("limit", sorted(set(SHARED_LIMIT.values())))
@pytest.mark.parametrize("wide", [False, True], ids=["float32", "float64"])
def test_plans_fit_every_gpu(wide, limit):
    for B, S, R in SIZES:
        gram = core.plan_gram(B, S, R, 1, wide, True)
        rows_plans = [
            core.plan_log_prob_bwd(B, 2, S, R, 9, wide, limit),
            core.plan_project_fold(B, S, R, max(R // 2, 1), wide, limit),
        ]
        capacitance = core.plan_capacitance(B, 9, R, limit)
        launches = [gram["sums"], gram["add"], core.plan_mean(B, S), *core.plan_log_prob_fwd(B)]
        launches += [plan["launch"] for plan in rows_plans]
        launches += [capacitance[key] for key in ("whole", "inverse", "entries", "finish", "solve")]
        fast, gradients = core.plan_fast_sums(B, S, R), core.plan_fast_gradients(B, S, R, limit)
        launches += [fast["sums"], gradients["launch"], *core.plan_finish(B, S, 1, R, limit)]
        assert not fast["width"] or fast["splits"] * fast["rows_per_split"] >= S
        assert fast["width"] >= R or R > 64 or R == 0
        if gradients["width"]:
            assert gradients["blocks"] * gradients["rows"] >= S
            # a block of the second launch lies in one of the first
            assert gradients["rows"] % core.plan_log_prob_bwd(B, 1, S, R, 1, True, limit)["rows"] == 0
        for grid, block, shared in launches:
            assert 0 <= grid < 2**31 or B * S >= 10**11
            assert block % 32 == 0
            assert block <= 288
            assert shared + 1024 <= limit, (B, S, R)
        assert gram["splits"] * gram["rows_per_split"] >= S
        for plan in rows_plans:
            assert plan["blocks"] * plan["rows"] >= S
            assert plan["pitch"] >= R
            assert 256 % plan["width"] == 0
            assert plan["rows"] <= 8 * 256 // plan["width"]
        narrow, double = (core.plan_log_prob_bwd(B, 1, S, R, 1, w, limit)["rows"] for w in (False, True))
        assert narrow % double == 0  # a block of the second launch lies in one of the first


def test_launches_are_as_planned():
    """What the launchers did is what the plans of the same sizes say."""
    case = (203, 20, 2, 1, 1, torch.float32, "row", False)
    _, gpu = test_cuda_code.run(test_cuda_code.arguments(*case), precision=2)
    S, R, B, _, N = case[:5]
    limit = emulated_cuda.SMALLEST_SHARED
    finish, again = core.plan_finish(B, S, N, R, limit)
    planned = [
        ("gram_tiles", core.plan_fast_sums(B, S, R)["sums"]),
        ("finish", finish),
        ("again", again),
        ("gradient_tiles", core.plan_fast_gradients(B, S, R, limit)["launch"]),
        ("log_prob_bwd", core.plan_log_prob_bwd(B, 1, S, R, N, True, limit)["launch"]),
    ]
    assert [(readable(x.name)[0], (x.grid, x.block, x.shared)) for x in gpu.launches] == planned


# What is broken: (file, right, wrong, which kernels of which file, how it shows)
MUTATIONS = {
    "a barrier removed": (
        "capacitance.cuh",
        "chol[static_cast<int64_t>(k) * R + j] = 0.0;\n    }\n    __syncthreads();\n",
        "chol[static_cast<int64_t>(k) * R + j] = 0.0;\n    }\n",
        ("finish.cuh", ""),
        "shared memory race",
    ),
    "an index shifted": (
        "row_grads.cuh",
        "grad_factor + row * p.out_s",
        "grad_factor + (row + 1) * p.out_s",
        ("row_grads.cuh", "row_grads_kernel<float, 8, false>(const lrd::cuda::BackwardArgs);"),
        "global memory out of bounds",
    ),
    "rows one too far": (
        "row_sums.cuh",
        "row < until; row += kThreads",
        "row <= until; row += kThreads",
        ("row_sums.cuh", "row_sums_kernel<float, 8, false, lrd::cuda::Pair>(const lrd::cuda::GramArgs);"),
        "global memory out of bounds",
    ),
    "a fence removed": (
        "common.cuh",
        "  __threadfence();\n  __syncthreads();\n  int last = 0;",
        "  __syncthreads();\n  int last = 0;",
        ("finish.cuh", ""),
        "race",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_broken_kernels_are_caught(name, tmp_path):
    """The check itself: the very call that passes with the library's kernels must not pass with such a mistake."""
    file, right, wrong, (source, kernel), fault = MUTATIONS[name]
    folder = tmp_path / "cuda"
    for own in ("core", "cuda"):
        (tmp_path / own).mkdir()
        for copied in (*(ROOT / "csrc" / own).glob("*.h"), *(ROOT / "csrc" / own).glob("*.cuh")):
            (tmp_path / own / copied.name).write_text(copied.read_text())
    text = (folder / file).read_text()
    assert text.count(right) == 1
    (folder / file).write_text(text.replace(right, wrong))
    kernels = kernel and f"template __global__ void lrd::cuda::{kernel}"
    (folder / "broken.cu").write_text(f'#include "{source}"\n{kernels}\n')
    ptx = cuda.compile(folder / "broken.cu", arch="compute_75", options=["-std=c++20"])
    inputs = test_cuda_code.arguments(130, 7, 1, 1, 1, torch.float32, "row", False)
    test_cuda_code.run(inputs, precision=2)
    with pytest.raises(KernelFault, match=fault):
        test_cuda_code.run(inputs, precision=2, texts=(ptx,))


def test_the_triton_backend_takes_the_capacitance_kernel(monkeypatch):
    if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("Triton's compiler is not here")
    import lrd_kernels.ops.triton
    from lrd_kernels.ops.triton import capacitance

    inputs = (torch.eye(5)[None], torch.ones(1, 2, 5), torch.ones(1, 2), torch.ones(1))
    inputs = tuple(t.double() for t in inputs)
    plain = lrd_kernels.ops.triton.OPS["capacitance_fwd"](*inputs)
    monkeypatch.setattr(capacitance, "_serves", lambda gram: True)
    with emulated_gpu() as gpu:
        found = lrd_kernels.ops.triton.OPS["capacitance_fwd"](*inputs)
    assert len(gpu.launches) == 1
    for a, b in zip(found, plain, strict=True):
        torch.testing.assert_close(a, b)


def test_serves_gpus_where_triton_does_not(monkeypatch):
    monkeypatch.setattr(dispatch, "_serves", lambda name, device, index: name == "cuda" and device == "cuda")
    assert dispatch.choose(None, torch.device("cuda")) == "cuda"
    assert dispatch.choose(None, torch.device("cpu")) == "reference"


@pytest.mark.parametrize(
    ("present", "capability", "said"),
    [
        (False, None, "CUDA kernels need a GPU that torch can use"),
        (True, (7, 0), "need compute capability 7.5, which an old one does not have"),
        (True, (9, 0), None),
    ],
)
def test_says_what_it_needs_of_a_gpu(monkeypatch, present, capability, said):
    monkeypatch.setattr(load, "cuda_error", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: present)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "an old one")
    monkeypatch.setattr(dispatch, "_first_launch", lambda index: None)
    status = dispatch._cuda.__wrapped__()
    assert status.available == (said is None)
    assert said is None or said in status.detail
