"""Compiles what the launchers launch, for any architecture and without a GPU, and reads back what it takes."""

from __future__ import annotations

import contextlib
import itertools
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from ptxemu import build, triton_driver
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver as active_driver

import lrd_kernels.ops.triton
from lrd_kernels import testing
from lrd_kernels.ops.triton import configs
from lrd_kernels.ops.triton.configs_table import TABLE
from lrd_kernels.ops.triton.gram import launch_gram_fwd, one_tile

NVIDIA = (75, 80, 86, 89, 90, 100, 120)
AMD = ("gfx90a", "gfx942")
# Most shared memory of a block, in bytes, and registers of a thread.
SHARED_LIMIT = {75: 65536, 80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
SHARED_LIMIT |= dict.fromkeys(AMD, 65536)
REGISTER_LIMIT = dict.fromkeys(NVIDIA, 255) | dict.fromkeys(AMD, 512)


# Ops of the table, by what calls them.
FORWARD_OPS, BACKWARD_OPS = ("row_sums", "tile_sums", "finish", "again"), ("row_grads", "tile_grads")
OTHER_OPS = ("gram", "log_prob_bwd", "project_fold")

_devices = itertools.count()


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes of an architecture."""

    kernel: str
    registers: int
    spills: int  # bytes that a thread stores and loads for want of registers
    shared: int
    warps: int


@contextlib.contextmanager
def compiling(architecture: int | str) -> Iterator[list[CompiledKernel]]:
    """Inside, launches compile for an architecture and do not run; what they compiled is in the list."""
    amd = isinstance(architecture, str)
    found: list[CompiledKernel] = []
    device = f"compile:{architecture}:{next(_devices)}"  # a new one, for which nothing is loaded yet

    class Launcher:
        def __init__(self, src, metadata):
            pass

        def __call__(self, grid_x, grid_y, grid_z, stream, function, *_):
            found.append(function)

    class Driver(triton_driver._EmulatedDriver):
        launcher_cls = Launcher

        def get_current_device(self):
            return device

        def get_current_target(self):
            return GPUTarget("hip", architecture, 64) if amd else super().get_current_target()

    def keep(compiled: CompiledKernel) -> None:
        initialise(compiled)
        compiled.function = compiled

    def named(device: torch.device) -> str:
        return name_of(architecture)

    previous, initialise = active_driver._active, CompiledKernel._init_handles
    gpu = triton_driver.EmulatedGpu(100 if amd else architecture, False, False, "forward")
    active_driver.set_active(Driver(gpu))
    CompiledKernel._init_handles = keep
    own, configs.architecture = configs.architecture, named
    try:
        yield found
    finally:
        configs.architecture = own
        CompiledKernel._init_handles = initialise
        active_driver.set_active(previous)


def resources(compiled: CompiledKernel) -> Resources:
    name, metadata = compiled.metadata.name, compiled.metadata
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]

        def number(key: str) -> int:
            return int(re.search(rf"\.{key}:\s+(\d+)", text)[1])

        registers, spills = number("vgpr_count"), number("private_segment_fixed_size")
    else:
        ptx, capability = compiled.asm["ptx"], metadata.target.arch
        report = build.kept_text([f"sm_{capability}", ptx], lambda: _assemble(ptx, capability))
        registers = int(re.search(r"Used (\d+) registers", report)[1])
        spills = sum(map(int, re.findall(r"(\d+) bytes spill", report)))
    return Resources(name, registers, spills, metadata.shared, metadata.num_warps)


def _assemble(ptx: str, capability: int) -> str:
    """What ptxas reports of a kernel, by the assembler that Triton itself uses."""
    tool = get_ptxas(capability).path
    suffix = "a" if capability >= 90 else ""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [tool, "-v", f"--gpu-name=sm_{capability}{suffix}", source, "-o", Path(folder) / "kernel.cubin"]
        done = build.run_compiler(command)
        done.check_returncode()
        return done.stderr


def name_of(architecture: int | str) -> str:
    """As the table has it."""
    return architecture if isinstance(architecture, str) else f"sm_{architecture}"


def entries(architecture: int | str) -> Iterator[tuple[str, str, str, int]]:
    """(op, compute, layout, rank) of every entry of the table that serves an architecture."""
    name = name_of(architecture)
    for (op, served, compute, layout), ranks in TABLE.items():
        if served == name or (served == "any" and (op, name, compute, layout) not in TABLE):
            for rank in ranks:
                yield op, compute, layout, rank


def matrix(architecture: int | str, op: str | None = None) -> Iterator[tuple[tuple[str, str, str, int], Resources]]:
    """Every entry, or those of one op, with what its kernels take."""
    for entry in entries(architecture):
        if op not in (None, entry[0]):
            continue
        with compiling(architecture) as found:
            launch(*entry)
        for kernel in found:
            if serves(entry[0], kernel):
                yield entry, resources(kernel)


def serves(op: str, kernel: CompiledKernel) -> bool:
    """Whether the entries of an op are of this kernel: a call may launch several."""
    return (op in FORWARD_OPS + BACKWARD_OPS and kernel.metadata.name == f"_{op}_kernel") or op in OTHER_OPS


def launch(op: str, compute: str, layout: str, rank: int, dtype: torch.dtype | None = None) -> None:
    """Calls what an entry of the table serves with everything it can be given, at one rank."""
    prepare(op, compute, layout, rank, dtype)()


def prepare(
    op: str,
    compute: str,
    layout: str,
    rank: int,
    dtype: torch.dtype | None = None,
    rows: int = 70,
    device: str = "cpu",
) -> Callable[[], None]:
    """Inputs, and a call of the launchers with them."""
    dtype = dtype or (torch.float64 if compute == "float64" else torch.float32)
    inputs = testing.make_inputs((2,), rows, rank, dtype=dtype, layout=layout)
    inputs = type(inputs)(*(t.to(device) for t in inputs))
    with torch.device(device):
        mask = torch.ones(2, rows, dtype=torch.bool)
        chol_inv, summary = torch.zeros(2, rank, rank).double(), torch.ones(2, 2).double()
        z, info, grad = torch.zeros(2, 1, rank).double(), torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1)
        basis, again = torch.zeros(2, rank + 1, rank).double(), torch.ones(2, dtype=torch.int32)
    factor, value = inputs.cov_factor, inputs.value[:, None]
    arguments = (factor, inputs.cov_diag, value, inputs.loc[:, None], mask, 0.01)
    narrow = [t.float() if t.is_floating_point() else t for t in arguments[:5]]
    stack = (factor[:, None], value, 0.5, 0.5, True)
    ops = lrd_kernels.ops.triton.OPS
    precision = {"float32": 0, "float64": 1, "tf32x3": 2}[compute]

    def forward() -> None:
        every = (narrow, arguments) if op == "again" else (arguments,)
        for own in every:  # the second pass of float32 inputs, and the only one of float64
            ops["log_prob_fwd"](*own[:5], 0.01, 0 if op == "again" else precision, None, None, -0.5, -0.5, 0.0)

    def gram() -> None:
        if compute == "float64":  # and as the second launch of float32 inputs
            launch_gram_fwd(*narrow, 0.01, compute=compute, again=again)
        launch_gram_fwd(*arguments, compute=compute)
        if compute == "float32" and one_tile(factor):
            launch_gram_fwd(*arguments, compute=compute, want_gram=False, again=again, shift=z)
        # A joint Gram matrix is made in float64, or with precision "float32" on tensor cores where the table has them.
        on_cores = configs.choose("gram", factor, rank, "tf32x3").input_precision == "tf32x3"
        if compute != "float32" or not on_cores:
            ops["joint_gram_fwd"](factor[:, None, :, 1:], *stack[1:], precision or 2)

    def log_prob_bwd() -> None:
        state = (chol_inv, summary, z, info, grad)
        ops["log_prob_bwd"](*arguments, precision, *state, -0.5, -0.5, True, True, True, False)

    def project_fold() -> None:
        ops["project_fold_fwd"](*stack, inputs.cov_diag, basis, True, layout == "rank")

    if op in FORWARD_OPS:
        return forward
    return {"gram": gram, "project_fold": project_fold}.get(op, log_prob_bwd)
