"""The CUDA ops through their own launchers, their PTX run on the CPU: numbers beside the reference in float64, bounds,
races, barriers, memory that nobody wrote, and the same bits in whatever order the blocks run."""

import re

import emulated_cuda
import pytest
import torch
from emulated_cuda import LARGEST_SHARED, emulated_gpu
from expected import ROUNDING, SLOW_STACKS, STACKS, StackCase, wanted

from lrd_kernels import reference, testing
from lrd_kernels.ops import dispatch, registry
from lrd_kernels.ops.views import is_rank_major
from lrd_kernels.testing import relative_error

if reason := emulated_cuda.why_not():
    pytest.skip(reason, allow_module_level=True)

OPS = torch.ops.lrd_cuda
ORDERS = ("forward", "reverse", 5)  # of blocks and warps
# S, R, factors, Gaussians of each, values, dtype, layout, mask and fused diagonal
CASES = [
    (203, 8, 2, 1, 1, torch.float32, "row", False),
    (130, 7, 1, 1, 1, torch.float32, "rank", True),
    (1, 1, 3, 1, 1, torch.float32, "row", False),
    (45, 64, 1, 1, 1, torch.float32, "rank", False),
    (300, 16, 2, 1, 1, torch.float32, "row", False),
    (70, 32, 2, 1, 1, torch.float32, "row", True),
    (90, 8, 2, 2, 2, torch.float32, "row", True),
    (37, 7, 1, 1, 6, torch.float32, "rank", True),
    (67, 20, 2, 1, 1, torch.bfloat16, "row", True),
    (33, 5, 2, 1, 3, torch.float64, "row", True),
]
SLOW = [
    (40, 12, 1, 1, 1, torch.float16, "rank", False),
    (70, 129, 1, 1, 1, torch.float32, "row", False),
    (35, 512, 1, 1, 1, torch.float32, "rank", False),
    (140, 66, 1, 2, 2, torch.float32, "rank", True),
    (1100, 16, 1, 1, 1, torch.float32, "row", True),
    (90, 33, 2, 1, 17, torch.float64, "rank", True),
    (300, 16, 2, 1, 0, torch.bfloat16, "rank", False),
    (70, 64, 1, 1, 1, torch.float64, "row", False),
    (66, 129, 1, 1, 1, torch.float16, "rank", True),
    (2049, 1, 1, 1, 1, torch.float64, "rank", False),
]


def arguments(S, R, F, shared, N, dtype, layout, masked):
    """The leading inputs of the ops; what is masked out holds NaN everywhere."""
    B = F * shared
    inputs = testing.make_inputs((B,), S, R, dtype=dtype, layout=layout)
    generator = torch.Generator().manual_seed(3)
    factor, diag = inputs.cov_factor[::shared], inputs.cov_diag
    value = None if N == 0 else inputs.value[:, None] + torch.rand(B, N, 1, generator=generator).to(dtype)
    loc = None if N == 0 else inputs.loc[:, None].expand(B, N, S)
    if not masked:
        return factor, diag, value, loc, None, None
    mask = torch.rand(B, S, generator=generator) > 0.3
    diag = diag.masked_fill(~mask, torch.nan)
    if N:
        value = value.masked_fill(~mask[:, None], torch.nan)
    if shared == 1:
        factor.masked_fill_(~mask[..., None], torch.nan)
    return factor, diag, value, loc, mask, 0.01


def run(inputs, precision=0, **options):
    """Forward and backward pass: (result, gradients), and the emulation."""
    with emulated_gpu(**options) as gpu:
        result, *state = OPS.log_prob_fwd(*inputs, precision, None, None, -0.5, -0.5, 0.0)
        needs = (True, True, inputs[2] is not None, False)
        grads = OPS.log_prob_bwd(*inputs, precision, *state, torch.ones_like(result), -0.5, -0.5, *needs)
    return (result, *grads), gpu


def check(case, **options):
    inputs, dtype = arguments(*case), case[5]
    results, gpu = run(inputs, **options)
    exact = wanted(*inputs)
    assert relative_error(results[0].double(), exact[0].reshape(results[0].shape)) <= (
        1e-12 if dtype == torch.float64 else 2e-7
    )
    for name, grad, right in zip(("factor", "diag", "loc"), results[1:], exact[1:], strict=False):
        assert grad.isfinite().all(), name
        assert relative_error(grad.double(), right) <= ROUNDING[dtype], name
    assert is_rank_major(results[1]) == is_rank_major(inputs[0]) or case[1] == 1
    return inputs, results, gpu


def name(case):
    return "-".join(map(str, case)).replace("torch.", "")


@pytest.mark.parametrize("case", CASES, ids=name)
def test_log_prob_and_gradients(case):
    inputs, results, _ = check(case)
    for order in ORDERS[1:]:
        for a, b in zip(results, run(inputs, order=order)[0], strict=True):
            assert torch.equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=name)
def test_log_prob_and_gradients_of_other_sizes_and_types(case):
    inputs, results, _ = check(case)
    again, _ = run(inputs, order="reverse")
    assert all(torch.equal(a, b) for a, b in zip(results, again, strict=True))


@pytest.mark.parametrize("precision", [1, 2], ids=["float64", "float32"])
def test_a_precision_that_is_asked_for(precision):
    inputs = arguments(*CASES[0])
    results, gpu = run(inputs, precision)
    kernels = [re.search(r"cuda\d+(\w+?)_kernel(I\w+?E)?E", launch.name).groups() for launch in gpu.launches]
    assert kernels == (
        [("gram", "IfdLi16E"), ("finish", None), ("log_prob_bwd", "IfdE")]
        if precision == 1
        else [
            ("row_sums", "IfLi8ELb1ENS0_4PairE"),
            ("finish", None),
            ("again", "IfLi16ENS0_4PairE"),
            ("row_grads", "IfLi8ELb1E"),
            ("log_prob_bwd", "IfdE"),
        ]
    )
    for result, exact in zip(results, wanted(*inputs), strict=True):
        assert relative_error(result.double(), exact.reshape(result.shape)) <= 2e-6


def test_a_known_factorisation_spares_the_gram_matrix():
    """Many values: M by an L^-1 from an earlier call."""
    inputs = arguments(90, 7, 2, 1, 6, torch.float32, "row", False)
    with emulated_gpu() as gpu:
        first = OPS.log_prob_fwd(*inputs, 0, None, None, 1.0, 0.0, 0.0)
        count = len(gpu.launches)
        again = OPS.log_prob_fwd(*inputs, 0, first[1], first[2], 1.0, 0.0, 0.0)
    assert [t.numel() for t in again[1:3]] == [0, 0]
    assert not any("capacitance" in launch.name for launch in gpu.launches[count:])
    assert relative_error(again[0].double(), first[0].double()) <= 2e-7
    assert relative_error(again[3], first[3]) <= 1e-9


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(torch.float16, id="float16")]
    + [pytest.param(t, marks=pytest.mark.slow, id=str(t)[6:]) for t in (torch.float64, torch.float32)],
)
def test_fused_diagonal_has_the_limit_of_the_cpu(dtype):
    factor, diag, value, loc, mask, _ = arguments(40, 3, 1, 1, 1, dtype, "row", False)
    inputs = (factor, torch.full_like(diag, 400.0), value, loc, mask, 0.01)
    results, _ = run(inputs)
    on_cpu, *state = registry.OPS["cpu"].log_prob_fwd(*inputs, 0, None, None, -0.5, -0.5, 0.0)
    needs = (True, True, True, False)
    grads = registry.OPS["cpu"].log_prob_bwd(*inputs, 0, *state, torch.ones_like(on_cpu), -0.5, -0.5, *needs)
    for got, right in zip(results, (on_cpu, *grads), strict=True):
        assert relative_error(got.double(), right.double()) <= ROUNDING[dtype]


def test_gram_sums():
    inputs = arguments(203, 8, 2, 1, 1, torch.float32, "row", False)
    with emulated_gpu():
        sums = OPS.gram_fwd(*inputs, 0)
    for got, right in zip(sums, registry.OPS["cpu"].gram_fwd(*inputs, 1), strict=True):
        assert relative_error(got, right) <= 1e-12


@pytest.mark.parametrize("R", [1, 7, 8, 64, 128, 129])
@pytest.mark.parametrize("shared_limit", [emulated_cuda.SMALLEST_SHARED, LARGEST_SHARED])
def test_capacitance(R, shared_limit):
    check_capacitance(R, 2, shared_limit)


@pytest.mark.slow
@pytest.mark.parametrize("R", [33, 512, 1030])
def test_capacitance_of_other_ranks(R):
    check_capacitance(R, 1, LARGEST_SHARED)


def check_capacitance(R, B, shared_limit):
    generator = torch.Generator().manual_seed(R)
    X = torch.randn(B, R + 3, R, generator=generator).double()
    sums = (X.mT @ X, torch.randn(B, 3, R, generator=generator).double(), torch.rand(B, 3).double() + R, torch.zeros(B))
    sums = tuple(t.double() for t in sums)
    with emulated_gpu(shared_limit=shared_limit) as gpu:
        found = OPS.capacitance_fwd(*sums)
    fused = R <= 128 and (R < 127 or shared_limit == LARGEST_SHARED)
    assert (len(gpu.launches) == 1) == fused
    for got, right in zip(found, registry.OPS["cpu"].capacitance_fwd(*sums), strict=True):
        assert relative_error(got, right) <= 1e-11
    assert found[0].equal(found[0].tril())
    assert found[1].equal(found[1].tril())


@pytest.mark.parametrize("R", [4, 130])
def test_failures_and_near_duplicate_columns(R):
    """A matrix that is not finite fails alone; pivots that rounding made too small are put right."""
    gram = torch.eye(R).double().repeat(3, 1, 1)
    gram[0, R - 1, 0] = gram[0, 0, R - 1] = torch.nan
    gram[1] = 1e20  # of rank one: the exact pivots are 1
    rest = (torch.ones(3, 1, R).double(), torch.full((3, 1), 10.0).double(), torch.zeros(3).double())
    with emulated_gpu():
        *_, logdet, growth = OPS.capacitance_fwd(gram, *rest)
    assert growth[0].isinf()
    assert growth[1].isfinite()
    assert logdet[1].isfinite()
    assert growth[2] == 1
    assert relative_error(logdet[2:], torch.tensor([R * 2.0]).double().log() * 0 + R * 0.6931471805599453) <= 1e-12


def test_items_that_float32_does_not_serve_are_done_again():
    """Near-duplicate columns: the certificate fails, and the second pass does that item alone, in double."""
    factor, diag, value, loc, _, _ = arguments(90, 12, 2, 1, 1, torch.float32, "row", False)
    value[0] = loc[0]  # so that nothing cancels there
    factor[1, :, 1] = factor[1, :, 0] * (1 + 1e-4)
    diag[1] *= 1e-3
    inputs = (factor, diag, value, loc, None, None)
    results, gpu = run(inputs, race=False, stats=True)
    (again,) = gpu.of("again_kernel")
    assert again.traffic(factor).bytes_read == factor[1].nbytes
    for result, right in zip(results, wanted(*inputs), strict=True):
        assert relative_error(result.double(), right.reshape(result.shape)) <= 1e-5
    assert relative_error(results[0].double(), wanted(*inputs)[0].reshape(results[0].shape)) <= 2e-7


def drawn_from_the_model(S, R, batch, seed=0):
    """Values with the covariance of the Gaussian, which lie along P for a good part."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    factor, diag = draw(batch, S, R) / R**0.5, 0.2 + torch.rand(batch, S, generator=generator)
    loc = draw(batch, 1, S)
    value = loc + (factor @ draw(batch, R, 1)).mT + draw(batch, 1, S) * diag.sqrt()[:, None]
    return factor, diag, value, loc, None, None


@pytest.mark.parametrize(("R", "ratio", "read"), [(8, 32, 0), (8, 2, 0), (16, 32, 1), (16, 2, 1), (24, 32, 1)], ids=str)
def test_values_drawn_from_the_model_need_no_pass_in_float64(R, ratio, read):
    """Up to rank 8 the sums are good enough; above, the second pass reads the residuals, once."""
    inputs = drawn_from_the_model(2000, R, 2)
    results, gpu = run(inputs, race=False, stats=True, float64_ratio=ratio)
    (sums,) = gpu.of("row_sums" if R <= 16 else "gram_tiles")
    assert R > 8 or ("Lb1EdE" in sums.name) == (ratio == 2)
    (again,) = gpu.of("again_kernel")
    assert again.traffic(inputs[0]).bytes_read == read * inputs[0].nbytes
    if read:
        assert (
            again.result.stats.memory["shared", "load"].requests < again.result.stats.memory["global", "load"].requests
        )
    exact = wanted(*inputs)
    assert relative_error(results[0].double(), exact[0].reshape(results[0].shape)) <= 2e-7
    for result, right in zip(results[1:], exact[1:], strict=True):
        assert relative_error(result.double(), right) <= 2e-6


@pytest.mark.parametrize("R", [4, 12, 40])
def test_values_far_along_the_factor(R):
    """M cancels by eight digits: the residuals, or sums of pairs and residuals, keep log p."""
    factor, diag, value, loc, _, _ = arguments(90, R, 2, 1, 1, torch.float32, "rank", False)
    value, loc = value.clone(), loc.clone()
    value[1] = loc[1] + 1e4 * factor[1].sum(-1) + torch.linspace(-1, 1, 90)
    inputs = (factor, diag, value, loc, None, None)
    results, _ = run(inputs)
    exact = wanted(*inputs)
    assert relative_error(results[0].double(), exact[0].reshape(results[0].shape)) <= 2e-7
    for result, right in zip(results[1:], exact[1:], strict=True):
        assert relative_error(result.double(), right) <= 1e-5


@pytest.mark.parametrize("ratio", [32, 2], ids=["pairs", "float64"])
def test_gradients_where_the_values_of_tiny_variance_lie_along_the_factor(ratio):
    """The residuals are a millionth of the values, so that z must be right to more than float32's digits."""
    inputs = testing.hard_inputs("diagonal", 1e6, 300, 16)
    value, loc, factor, diag = (t[None] for t in inputs)
    results, _ = run((factor, diag, value[:, None], loc[:, None], None, None), race=False, float64_ratio=ratio)
    exact = wanted(factor, diag, value[:, None], loc[:, None], None, None)
    for result, right in zip(results[1:], exact[1:], strict=True):
        assert relative_error(result.double(), right) <= 1e-6


@pytest.mark.parametrize("R", [8, 16, 33])
@pytest.mark.parametrize("scale", [1e-30, 1e30], ids=str)
@pytest.mark.parametrize("precision", [0, 2], ids=["auto", "float32"])
def test_a_diagonal_beyond_the_range_of_pairs(R, scale, precision):
    factor, diag, value, loc, _, _ = arguments(70, R, 2, 1, 1, torch.float32, "row", False)
    diag[1, 3] *= scale
    if scale < 1:
        factor[1, 3], value[1, 0, 3] = 1e-16, loc[1, 0, 3] + 1e-16
    inputs = (factor, diag, value, loc, None, None)
    results, _ = run(inputs, precision, race=False)
    exact = wanted(*inputs)
    assert relative_error(results[0].double(), exact[0].reshape(results[0].shape)) <= 2e-7
    for result, right in zip(results[1:], exact[1:], strict=True):
        assert relative_error(result.double(), right) <= 1e-5


@pytest.mark.parametrize("R", [1, 8, 16, 17, 64, 100])
@pytest.mark.parametrize("N", [0, 1, 4])
def test_launches(R, N):
    """Three forward and two backward, whatever the certificate says."""
    inputs = arguments(50, R, 2, 1, N, torch.float32, "row", False)
    with emulated_gpu(race=False) as gpu:
        result, *state = OPS.log_prob_fwd(*inputs, 0, None, None, -0.5, -0.5, 0.0)
        assert len(gpu.launches) == 3
        OPS.log_prob_bwd(*inputs, 0, *state, torch.ones_like(result), -0.5, -0.5, True, True, N > 0, False)
        assert len(gpu.launches) == 5


def test_a_bad_value_fails_alone():
    inputs = arguments(40, 3, 2, 1, 2, torch.float32, "row", False)
    inputs[2][1, 0, 5] = torch.inf
    results, _ = run(inputs)
    assert results[0].isnan().tolist() == [[False, False], [True, False]]
    assert all(t.isfinite().all() for t in results[1:])
    assert (results[3][1, 0] == 0).all()


@pytest.mark.parametrize("shape", [(0, 3, 1), (5, 0, 1), (5, 3, 0)], ids=["no rows", "no columns", "no items"])
def test_nothing_to_do(shape):
    S, R, F = shape
    inputs = arguments(max(S, 1), max(R, 1), max(F, 1), 1, 1, torch.float32, "row", False)
    factor, diag, value, loc = inputs[0][:F, :S, :R], *(t[:F, ..., :S] for t in inputs[1:4])
    (result, *grads), _ = run((factor, diag, value, loc, None, None))
    for got, right in zip((result, *grads), wanted(factor, diag, value, loc, None, None), strict=True):
        assert got.numel() == right.numel()
        torch.testing.assert_close(got.double(), right.reshape(got.shape), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("maha", "logdet"), [(1.0, 0.0), (0.0, 1.0)], ids=["mahalanobis", "logdet"])
def test_one_term_alone_with_sums_over_the_values(maha, logdet):
    inputs = arguments(70, 5, 2, 1, 6, torch.float32, "row", False)
    with emulated_gpu():
        result, *state = OPS.log_prob_fwd(*inputs, 0, None, None, maha, logdet, 0.0)
        grads = OPS.log_prob_bwd(*inputs, 0, *state, torch.ones_like(result), maha, logdet, True, True, True, True)
    leaves = [t.double().requires_grad_() for t in (inputs[0], inputs[1], inputs[3])]
    exact = reference.terms(
        inputs[2].double(), leaves[2], leaves[0][:, None], leaves[1][:, None], maha=maha, logdet=logdet
    )
    right = torch.autograd.grad(exact.sum(), leaves, allow_unused=True)
    assert relative_error(result.double(), exact.detach().expand(result.shape)) <= 1e-6
    assert relative_error(grads[0].double(), right[0]) <= 2e-6
    assert relative_error(grads[1].double(), right[1]) <= 2e-6
    if maha:
        assert relative_error(grads[2].double(), right[2].sum(1, keepdim=True)) <= 2e-6
    else:
        assert (grads[2] == 0).all()


def check_stack(*case):
    columns, layout = StackCase(*case), case[-1]
    with emulated_gpu():
        gram, narrow = (OPS.joint_gram_fwd(*columns.stack, precision) for precision in (0, 2))
        projected, folded = OPS.project_fold_fwd(*columns.stack, columns.diag, columns.basis, True, layout == "rank")
    columns.check_gram(gram, 1e-12)
    columns.check_gram(narrow, 2e-6)
    columns.check_projection(projected, folded)
    assert is_rank_major(projected) == (layout == "rank")


@pytest.mark.parametrize("case", STACKS, ids=name)
def test_joint_gram_and_projection(case):
    check_stack(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*SLOW_STACKS, (3, 41, 40, 9, torch.float16, "rank")], ids=name)
def test_joint_gram_and_projection_of_other_types(case):
    check_stack(*case)


def test_the_public_functions_by_this_backend(monkeypatch):
    """From lrd.log_prob down to the emulated launch: what is passed on is what the ops take."""
    import contract

    monkeypatch.setattr(dispatch, "_serves", lambda backend, device, index: True)
    inputs = testing.make_inputs((2,), 33, 7)
    with emulated_gpu():
        for function in ("log_prob", "mahalanobis", "entropy", "solve"):
            contract.check(function, inputs, backend="cuda")
