"""The ops from the PTX that Triton emits, run on the CPU: numbers beside the reference in float64, bounds, races."""

import importlib
import shutil
import sys
from pathlib import Path

import pytest
import torch
from compiled import compiling
from expected import ROUNDING, SLOW_STACKS, STACKS, StackCase, wanted
from ptxemu import KernelFault
from ptxemu.triton_driver import emulated_gpu
from torch.utils._python_dispatch import TorchDispatchMode

from lrd_kernels import testing
from lrd_kernels.ops import triton
from lrd_kernels.testing import relative_error

OPS = triton.OPS
NEEDS = (True, True, True, False)
# S, R, batch, values, dtype, layout, mask and fused diagonal: ragged sizes, one row, tiles above 64 columns
CASES = [
    (203, 8, 2, 1, torch.float32, "row", False),
    (130, 7, 1, 1, torch.float32, "rank", True),
    (1, 1, 3, 1, torch.float32, "row", False),
    (67, 20, 2, 1, torch.bfloat16, "row", True),
    (45, 64, 1, 1, torch.float32, "rank", False),
    (33, 5, 2, 3, torch.float64, "row", True),
]
SLOW = [
    (40, 12, 1, 1, torch.float16, "rank", False),
    (203, 129, 1, 1, torch.float32, "row", False),
    (140, 66, 1, 2, torch.float32, "rank", True),
    (90, 33, 2, 17, torch.float64, "rank", True),
    (300, 16, 2, 0, torch.bfloat16, "rank", False),
    (70, 64, 1, 1, torch.float64, "row", False),
]


class Torch(TorchDispatchMode):
    """Records the names of the operators of torch that are called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _table_of_a_gpu(monkeypatch):
    """The block sizes that a GPU would get."""
    monkeypatch.setattr("lrd_kernels.ops.triton.configs.architecture", lambda device: "sm_80")


def arguments(S, R, B, N, dtype, layout, masked):
    inputs = testing.make_inputs((B,), S, R, dtype=dtype, layout=layout)
    generator = torch.Generator().manual_seed(3)
    value = None if N == 0 else inputs.value[:, None] + torch.rand(B, N, 1, generator=generator).to(dtype)
    loc = None if N == 0 else inputs.loc[:, None].expand(B, N, S)
    mask = torch.rand(B, S, generator=generator) > 0.3 if masked else None
    return (inputs.cov_factor, inputs.cov_diag, value, loc, mask, 0.01 if masked else None)


def check(capability, case, **options):
    inputs = arguments(*case)
    dtype, N = case[4], case[3]
    with emulated_gpu(capability, race=True, **options) as gpu:
        result, *state = OPS["log_prob_fwd"](*inputs, 0, None, None, -0.5, -0.5, 0.0)
        needs = (True, True, N > 0, False)
        grads = OPS["log_prob_bwd"](*inputs, 0, *state, torch.ones_like(result), -0.5, -0.5, *needs)
    exact = wanted(*inputs)
    assert relative_error(result.double(), exact[0].reshape(result.shape)) <= (
        1e-12 if dtype == torch.float64 else 2e-7
    )
    for name, grad, right in zip(("factor", "diag", "loc"), grads, exact[1:], strict=False):
        assert grad.isfinite().all(), name
        assert relative_error(grad.double(), right) <= ROUNDING[dtype], name
    assert grads[0].stride() == inputs[0].stride()
    return gpu


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
def test_log_prob_and_gradients(case):
    check(80, case)


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=m, id="-".join(map(str, c))) for c, m in zip(CASES, ((), pytest.mark.slow), strict=False)],
)
def test_log_prob_and_gradients_on_blackwell(case):
    check(120, case, order="reverse")


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 120])
@pytest.mark.parametrize("case", SLOW, ids=lambda c: "-".join(map(str, c)))
def test_log_prob_and_gradients_of_larger_ranks(capability, case):
    if capability == 120 and torch.float16 in case:
        pytest.skip("the emulator does not know the additions of float16 to float32 of this GPU")
    check(capability, case)


def check_stack(capability, *case):
    columns = StackCase(*case)
    with emulated_gpu(capability, race=True):
        gram = OPS["joint_gram_fwd"](*columns.stack, 2)
        results = OPS["project_fold_fwd"](*columns.stack, columns.diag, columns.basis, True, case[-1] == "rank")
    columns.check_gram(gram, 2e-6)
    columns.check_projection(*results)


@pytest.mark.parametrize("case", STACKS, ids=lambda c: "-".join(map(str, c)))
def test_joint_gram_and_projection(case):
    check_stack(80, *case)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 120])
@pytest.mark.parametrize("case", SLOW_STACKS, ids=lambda c: "-".join(map(str, c)))
def test_joint_gram_and_projection_of_other_types(capability, case):
    check_stack(capability, *case)


def test_items_that_float32_does_not_serve_are_done_again():
    """Near-duplicate columns: the certificate fails, and both launches in float64 do the work."""
    factor, diag, value, loc, _, _ = arguments(90, 9, 2, 1, torch.float32, "row", False)
    value[0] = loc[0]  # so that nothing cancels there
    factor[1, :, 1] = factor[1, :, 0] * (1 + 1e-4)
    diag[1] *= 1e-3
    inputs = (factor, diag, value, loc, None, None)
    with emulated_gpu(80, race=True, stats=True) as gpu:
        result, *state = OPS["log_prob_fwd"](*inputs, 0, None, None, -0.5, -0.5, 0.0)
        grads = OPS["log_prob_bwd"](*inputs, 0, *state, torch.ones_like(result), -0.5, -0.5, *NEEDS)
    assert gpu.last("_again_kernel").buffer("factor").bytes_read == factor[1].nbytes  # that item alone
    exact = wanted(*inputs)
    assert relative_error(result.double(), exact[0].reshape(result.shape)) <= 2e-7
    for grad, right in zip(grads, exact[1:], strict=True):
        assert relative_error(grad.double(), right) <= 1e-5


@pytest.mark.parametrize(("S", "R"), [(90, 12), pytest.param(260, 40, marks=pytest.mark.slow)])
def test_values_far_along_the_factor_take_a_pass_over_residuals(S, R):
    """M cancels, the capacitance is fine: of that item alone P is read a second time, and once."""
    factor, diag, value, loc, _, _ = arguments(S, R, 2, 1, torch.float32, "rank", False)
    value, loc = value.clone(), loc.clone()
    value[0] = loc[0]
    value[1] = loc[1] + 1e4 * factor[1].sum(-1) + torch.linspace(-1, 1, S)
    inputs = (factor, diag, value, loc, None, None)
    with emulated_gpu(80, race=True, stats=True) as gpu:
        result, *state = OPS["log_prob_fwd"](*inputs, 0, None, None, -0.5, -0.5, 0.0)
        grads = OPS["log_prob_bwd"](*inputs, 0, *state, torch.ones_like(result), -0.5, -0.5, *NEEDS)
    again = gpu.last("_again_kernel")
    assert again.buffer("factor").bytes_read == factor[1].nbytes
    assert again.buffer("chol_inv").bytes_written == 0  # which float64 sums would have made again
    exact = wanted(*inputs)
    assert relative_error(result.double(), exact[0].reshape(result.shape)) <= 2e-7
    for grad, right in zip(grads, exact[1:], strict=True):
        assert relative_error(grad.double(), right) <= 1e-5


@pytest.mark.parametrize(("precision", "launches"), [(0, (3, 2)), (1, (2, 1)), (2, (3, 2))])
def test_launches(precision, launches):
    """No kernel of torch runs in between: what makes tensors leaves them empty."""
    inputs = arguments(40, 5, 2, 1, torch.float32, "row", True)
    with compiling(80) as found, Torch() as torch_ops:
        result, *state = OPS["log_prob_fwd"](*inputs, precision, None, None, -0.5, -0.5, 0.0)
        forward = len(found)
        grad = torch.empty_like(result)
        OPS["log_prob_bwd"](*inputs, precision, *state, grad, -0.5, -0.5, *NEEDS)
    assert (forward, len(found) - forward) == launches, [k.metadata.name for k in found]
    assert torch_ops.names <= {"empty", "new_empty", "empty_like", "view", "slice", "transpose", "detach"}


MUTATIONS = {
    "a mask left out": ("rows", "present & (k < R)", "present"),
    "rows one too far": ("row_sums", "rows, rows < end,", "rows, rows < end + 1,"),
    "an offset off by one": ("row_grads", "grad_factor + b * out_b, rows,", "grad_factor + b * out_b, rows + 1,"),
    "a fence left out": ("algebra", 'sem="acq_rel"', 'sem="relaxed"'),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_broken_kernels_are_caught(name, tmp_path, monkeypatch):
    """The check itself: a kernel with one such mistake must not pass."""
    module, right, wrong = MUTATIONS[name]
    source = (Path(triton.__file__).parent / f"{module}.py").read_text()
    assert source.count(right) == 1
    folder = tmp_path / "broken_kernels"
    shutil.copytree(Path(triton.__file__).parent, folder)
    (folder / f"{module}.py").write_text(source.replace(right, wrong))
    for path in folder.glob("*.py"):  # which import one another
        path.write_text(path.read_text().replace("lrd_kernels.ops.triton", folder.name))
    monkeypatch.syspath_prepend(tmp_path)
    broken = importlib.import_module(folder.name)
    monkeypatch.setattr(f"{folder.name}.configs.architecture", lambda device: "sm_80")
    for op in ("log_prob_fwd", "log_prob_bwd"):
        monkeypatch.setitem(OPS, op, broken.OPS[op])
    try:
        with pytest.raises((KernelFault, AssertionError)):
            check(80, (130, 12, 2, 1, torch.float32, "row", False))
    finally:
        for loaded in [m for m in sys.modules if m.split(".")[0] == folder.name]:
            del sys.modules[loaded]
