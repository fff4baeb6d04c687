"""The contract of every backend: values and gradients, layouts, dtypes, batches, masks, determinism."""

import itertools

import pytest
import torch
from contract import FUNCTIONS, SCALARS, SHAPES, LargestResult, all_pairs, arguments, check, covering

import lrd_kernels as lrd
from lrd_kernels import reference, testing


def options(name, backend):
    return {} if name == "matvec" else {"backend": backend}


@pytest.mark.parametrize(("name", "dtype", "layout"), covering(FUNCTIONS, testing.DTYPES, testing.LAYOUTS))
def test_values_and_gradients(backend, name, dtype, layout):
    for batch, S, R in SHAPES:
        inputs = testing.make_inputs(batch, S, R, dtype=dtype, layout=layout)
        check(name, inputs, **options(name, backend))


def test_quick_combinations_cover_all_pairs():
    rows = list(itertools.product("abc", "de", "fghi"))
    chosen = all_pairs(rows)
    assert len(chosen) <= 14 < len(rows)  # 12 pairs of the two longest axes are the least
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert {(row[first], row[second]) for row in chosen} == {(row[first], row[second]) for row in rows}


@pytest.mark.parametrize("precision", ["auto", "float64"])
@pytest.mark.parametrize("name", SCALARS)
def test_precision_is_within_budget(backend, name, precision):
    for R in (3, 40):
        check(name, testing.make_inputs((2,), 700, R, dtype=torch.float32), backend=backend, precision=precision)


@pytest.mark.parametrize("layout", ["row", "rank"])
@pytest.mark.parametrize(("S", "R"), [(700, 257), (1100, 520), (8700, 530)])
def test_ranks_of_several_panels(S, R, layout):
    """Above 256 columns products go by panels: in double where S < 16 R, else in float32."""
    check("log_prob", testing.make_inputs((), S, R, dtype=torch.float32, layout=layout), backend="cpu")


def test_forced_float32_is_as_good_as_torchs_class(backend):
    def torchs(value, loc, cov_factor, cov_diag):
        return torch.distributions.LowRankMultivariateNormal(loc, cov_factor, cov_diag).log_prob(value)

    for R in (3, 40):
        inputs = testing.make_inputs((2,), 700, R, dtype=torch.float32)
        actual = testing.value_and_grads(lambda *a: lrd.log_prob(*a, precision="float32", backend=backend), inputs)
        truth = testing.value_and_grads(torchs, [t.double() for t in inputs])
        plain = testing.value_and_grads(torchs, inputs)
        for what, a, t, p in zip(("log_prob", *inputs._fields), actual, truth, plain, strict=True):
            testing.assert_within_budget(a, t, p, what)


def test_float64_accumulation_is_what_auto_gives_and_float32_is_less(backend):
    """Small diagonals ruin float32 sums: the forced precisions must differ, and auto must be the good one."""
    inputs = testing.hard_inputs("diagonal", 1e6, 2000, 8)
    truth = reference.log_prob(*(t.double() for t in inputs))
    error = {
        p: testing.relative_error(lrd.log_prob(*inputs, precision=p, backend=backend), truth)
        for p in ("auto", "float64", "float32")
    }
    assert error["auto"] <= 1e-6
    assert error["float64"] <= 1e-6
    if backend == "cpu":
        assert error["float32"] > 1e-4


# (value, loc, factor, diag) batches: many values, shared factors, shared diagonals, all mixed
BROADCASTS = [
    ((5,), (), (), ()),
    ((5, 2), (2,), (2,), (2,)),
    ((), (4,), (), ()),
    ((4,), (4,), (), (4,)),
    ((), (), (3,), ()),
    ((2, 1, 3), (4, 1), (3,), (1, 3)),
    ((), (2, 1), (1, 3), (2, 1)),
    ((3,), (2, 1), (2, 3), (3,)),
    ((0, 2), (2,), (2,), (2,)),
    ((), (), (1,), (0,)),
]


@pytest.mark.parametrize("batches", BROADCASTS, ids=str)
def test_batches_broadcast_and_gradients_are_summed(backend, batches):
    make = [testing.make_inputs(b, 19, 4, seed=i, layout="rank" if i else "row")[i] for i, b in enumerate(batches)]
    actual = testing.value_and_grads(lambda *a: lrd.log_prob(*a, backend=backend), make)
    truth = testing.value_and_grads(reference.log_prob, make)
    assert actual[0].shape == torch.broadcast_shapes(*batches)
    for a, t in zip(actual, truth, strict=True):
        torch.testing.assert_close(a, t, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("batches", BROADCASTS, ids=str)
@pytest.mark.parametrize("R", [4, 20, 40])
def test_parameters_get_the_same_gradient_when_the_value_needs_none(batches, R):
    """Then the gradient of a mean that many values share is summed inside the kernel."""
    value, *rest = (testing.make_inputs(b, 19, R, seed=i)[i] for i, b in enumerate(batches))
    actual = testing.value_and_grads(lambda *a: lrd.log_prob(value, *a, backend="cpu"), rest)
    truth = testing.value_and_grads(lambda *a: reference.log_prob(value, *a), rest)
    for a, t in zip(actual, truth, strict=True):
        torch.testing.assert_close(a, t, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("layout", testing.LAYOUTS)
@pytest.mark.parametrize("values", [4, 16, 17, 50])
@pytest.mark.parametrize("R", [0, 2, 8, 16, 17, 33])
def test_many_values_against_one_gaussian(R, values, layout):
    """More than one block of rows and more than one chunk of values."""
    inputs = testing.make_inputs((), 1100, R, layout=layout, value_batch=(values,))
    actual = testing.value_and_grads(lambda *a: lrd.log_prob(*a, backend="cpu"), inputs)
    truth = testing.value_and_grads(reference.log_prob, inputs)
    for a, t in zip(actual, truth, strict=True):
        torch.testing.assert_close(a, t, rtol=1e-9, atol=1e-9)


def test_permuted_batch_of_factors_is_not_copied():
    P = torch.randn(3, 2, 50, 6).transpose(0, 1)
    value, D = torch.randn(2, 3, 50), torch.rand(2, 3, 50) + 0.5
    with LargestResult() as largest:
        actual = lrd.log_prob(value, value * 0, P, D, backend="cpu")
    assert largest.numel < P.numel(), largest.op
    torch.testing.assert_close(actual, reference.log_prob(value, value * 0, P, D))


@pytest.mark.parametrize("layout", ["row", "rank"])
@pytest.mark.parametrize("shape", ["one", "batch", "many values", "shared factor"])
def test_nothing_of_the_factors_size_is_made(layout, shape):
    """Forward makes no tensor of S x R elements, backward one: the gradient. No batch is materialised."""
    S, R = 4096, 16  # 64 capacitance matrices of R x R stay below S x R
    batches = {
        "one": ((), (), (), ()),
        "batch": ((3,), (3,), (3,), (3,)),
        "many values": ((64,), (64,), (), ()),
        "shared factor": ((64,), (64,), (), (64,)),
    }[shape]
    tensors = [
        testing.make_inputs(b, S, R, dtype=torch.float32, layout=layout)[i].requires_grad_()
        for i, b in enumerate(batches)
    ]
    factor = tensors[2]
    others = max(t.numel() for i, t in enumerate(tensors) if i != 2)
    with LargestResult() as largest:
        result = lrd.log_prob(*tensors, backend="cpu").sum()
    assert largest.numel < factor.numel(), largest.op
    with LargestResult() as largest:
        grads = torch.autograd.grad(result, tensors)
    assert largest.numel <= max(factor.numel(), others), largest.op
    assert grads[2].stride() == factor.stride()


@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
@pytest.mark.parametrize("name", SCALARS)
def test_masked_outputs_do_not_exist(backend, name, dtype):
    """Whatever stands in a masked output, the result is that of the others alone, and its gradients are zero."""
    full = testing.make_inputs((2,), 90, 6, dtype=dtype)
    mask = torch.rand(90, generator=torch.Generator().manual_seed(3)) < 0.6
    kept = type(full)(*(t[..., mask] if i != 2 else t[..., mask, :] for i, t in enumerate(full)))
    poisoned = type(full)(*(t.clone() for t in full))
    poisoned.value[..., ~mask] = torch.inf
    poisoned.loc[..., ~mask] = torch.nan
    poisoned.cov_factor[..., ~mask, :] = torch.nan
    poisoned.cov_diag[..., ~mask] = -1.0
    actual = testing.value_and_grads(
        lambda *a: FUNCTIONS[name][0](*a, mask=mask, backend=backend), arguments(name, poisoned)
    )
    expected = testing.value_and_grads(lambda *a: FUNCTIONS[name][0](*a, backend=backend), arguments(name, kept))
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-6, atol=1e-6)
    for field, a, e in zip(FUNCTIONS[name][2], actual[1:], expected[1:], strict=True):
        a = a if field != "cov_factor" else a.mT
        e = e if field != "cov_factor" else e.mT
        torch.testing.assert_close(a[..., mask], e, rtol=3 * torch.finfo(dtype).eps, atol=1e-6)
        assert not a[..., ~mask].any(), field


@pytest.mark.parametrize("batch", [(), (2,), (3, 1)], ids=str)
def test_masks_vary_by_item_and_share_the_factor(backend, batch):
    mask = torch.rand(3, 2, 30, generator=torch.Generator().manual_seed(1)) < 0.5
    inputs = testing.make_inputs(batch, 30, 4)
    actual = testing.value_and_grads(lambda *a: lrd.log_prob(*a, mask=mask, backend=backend), inputs)
    truth = testing.value_and_grads(lambda *a: reference.log_prob(*a, mask=mask), inputs)
    for a, t in zip(actual, truth, strict=True):
        torch.testing.assert_close(a, t, rtol=1e-10, atol=1e-10)


def test_everything_masked_is_a_gaussian_of_no_outputs(backend):
    inputs = testing.make_inputs((2,), 12, 3)
    mask = torch.zeros(12, dtype=torch.bool)
    assert lrd.log_prob(*inputs, mask=mask, backend=backend).tolist() == [0, 0]
    loss = lrd.nll_loss(inputs.loc, inputs.cov_diag, inputs.cov_factor, inputs.value, mask=mask, backend=backend)
    assert loss.item() == 0


@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("masked", [False, True])
def test_nll_loss(backend, dtype, reduction, masked):
    inputs = testing.make_inputs((3,), 60, 5, dtype=dtype)
    raw = (inputs.cov_diag * 3 - 2).to(dtype)
    mask = torch.rand(3, 60, generator=torch.Generator().manual_seed(1)) < 0.5 if masked else None
    tensors = [inputs.loc, raw, inputs.cov_factor, inputs.value]

    def loss(mean, raw_diag, cov_factor, target):
        return lrd.nll_loss(
            mean, raw_diag, cov_factor, target, eps=0.05, mask=mask, reduction=reduction, backend=backend
        )

    def spelt_out(compute):
        def function(mean, raw_diag, cov_factor, target):
            diag = 0.05 + raw_diag.to(compute).exp()
            if mask is not None:
                diag = torch.where(mask, diag, 1)
            logp = reference.log_prob(
                target.to(compute), mean.to(compute), cov_factor.to(compute), diag, mask=mask, dtype=compute
            )
            each = -logp / (60 if mask is None else mask.sum(-1))
            return each if reduction == "none" else getattr(each, reduction)()

        return function

    actual = testing.value_and_grads(loss, tensors)
    truth = testing.value_and_grads(spelt_out(torch.float64), [t.double() for t in tensors])
    plain = testing.value_and_grads(spelt_out(torch.float32), [t.float() for t in tensors])
    for what, a, t, p in zip(("loss", "mean", "raw_diag", "cov_factor", "target"), actual, truth, plain, strict=True):
        testing.assert_within_budget(a, t, p, what)


@pytest.mark.parametrize("eps", [0.0, 1e-4])
def test_nll_loss_of_extreme_raw_diagonals(backend, eps):
    """exp inside the kernels: from vanishing to huge."""
    raw = torch.linspace(-60 if eps == 0 else -800, 60, 101, dtype=torch.float64)
    mean, P, target = torch.zeros(101).double(), torch.zeros(101, 0).double(), torch.zeros(101).double()
    actual = testing.value_and_grads(
        lambda r: lrd.nll_loss(mean, r, P, target, eps=eps, reduction="sum", backend=backend), [raw]
    )
    diag = eps + raw.exp()
    expected = (diag.log().sum() + 101 * reference.LOG_2PI) / 2 / 101
    torch.testing.assert_close(actual[0], expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(actual[1], raw.exp() / diag / 2 / 101, rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_half_number_is_read_and_written_exactly(dtype):
    """With D = 1 and no factor, the gradient for loc is value - loc: all finite bit patterns must come through."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(dtype)
    every = every[every.isfinite()]
    P, D = torch.zeros(len(every), 0, dtype=dtype), torch.ones(len(every), dtype=dtype)
    _, grad = testing.value_and_grads(
        lambda loc: -lrd.mahalanobis(loc, P, D, on_failure="nan", backend="cpu") / 2, [every]
    )
    assert torch.equal(grad, -every)
    # and rounding: scaled by a power of two and by a third, through the diagonal
    for scale in (0.5, 0.75, 3.0):
        _, grad = testing.value_and_grads(
            lambda loc, s=scale: -lrd.mahalanobis(loc, P, D * s, backend="cpu") / 2, [every]
        )
        expected = (-every.double() / scale).float().to(dtype)
        torch.testing.assert_close(grad, expected, rtol=0, atol=0)


@pytest.mark.alone
@pytest.mark.parametrize("layout", ["row", "rank"])
@pytest.mark.parametrize(("B", "S", "R"), [(2, 30000, 9), (200, 2500, 4), (1, 700_003, 8)])
def test_bitwise_the_same_for_any_number_of_threads(B, S, R, layout):
    """Chunks that wait for their turn, items that each are one worker's, and gradients written past the caches."""
    inputs = testing.make_inputs((B,), S, R, dtype=torch.float32, layout=layout)
    results = []
    for threads in (1, 2, 3, 8, 1):
        torch.set_num_threads(threads)
        results.append(testing.value_and_grads(lambda *a: lrd.log_prob(*a, backend="cpu"), inputs))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


def test_unaligned_and_overlapping_memory():
    """Storage offsets that no vector load likes, and expanded (stride 0) vectors."""
    flat = torch.randn(1 + 40 * 7)
    P = flat[1:].view(40, 7)
    value, loc = torch.randn(41)[1:], torch.randn(1).expand(40)
    D = torch.rand(1).add(0.5).expand(40)
    torch.testing.assert_close(
        lrd.log_prob(value, loc, P, D, backend="cpu"), reference.log_prob(value, loc, P, D), rtol=1e-6, atol=1e-5
    )


def test_rsample_draws_torchs_numbers_and_reaches_the_parameters():
    loc, P, D = testing.make_inputs((2,), 11, 3, dtype=torch.float32)[1:]
    torch.manual_seed(5)
    expected = torch.distributions.LowRankMultivariateNormal(loc, P, D).rsample((4,))
    torch.manual_seed(5)
    torch.testing.assert_close(lrd.rsample(loc, P, D, (4,)), expected)
    generator = torch.Generator().manual_seed(5)
    torch.testing.assert_close(lrd.rsample(loc, P, D, (4,), generator=generator), expected)
    wide = [t.double().requires_grad_() for t in (loc, P, D)]

    def draw(*parameters):
        return lrd.rsample(*parameters, (2,), generator=torch.Generator().manual_seed(0))

    assert torch.autograd.gradcheck(draw, wide)


@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
def test_rsample_has_the_right_moments(dtype):
    loc, P, D = testing.make_inputs((), 5, 2, dtype=dtype)[1:]
    samples = lrd.rsample(loc, P, D, (40000,), generator=torch.Generator().manual_seed(0))
    assert samples.dtype == dtype
    covariance = torch.diag(D.double()) + P.double() @ P.double().mT
    torch.testing.assert_close(samples.double().mean(0), loc.double(), atol=0.05, rtol=0)
    torch.testing.assert_close(samples.double().T.cov(), covariance, atol=0.08, rtol=0)


def test_capacitance_cholesky(backend):
    inputs = testing.make_inputs((2,), 50, 7, dtype=torch.float32)
    P, D = inputs.cov_factor.double(), inputs.cov_diag.double()
    expected = torch.linalg.cholesky(torch.eye(7, dtype=P.dtype) + P.mT @ (P / D[..., None]))
    L, info = lrd.capacitance_cholesky(inputs.cov_factor, inputs.cov_diag, backend=backend)
    torch.testing.assert_close(L, expected.float())
    assert info.tolist() == [0, 0]
    broken = inputs.cov_diag.clone()
    broken[1, 3] = -1
    L, info = lrd.capacitance_cholesky(inputs.cov_factor, broken, backend=backend)
    assert info.tolist() == [0, 1]
    assert L[0].isfinite().all()
    assert L[1].isnan().all()


def test_nearly_singular_in_float32_is_solved(backend):
    """Two equal columns and a tiny diagonal: torch's class fails or is far off, float64 is not."""
    generator = torch.Generator().manual_seed(0)
    column = torch.randn(3000, 1, generator=generator)
    P = torch.cat([column, column, torch.randn(3000, 18, generator=generator)], 1)
    D = torch.full((3000,), 1e-5)
    value = torch.randn(3000, generator=generator)
    actual = lrd.log_prob(value, value * 0, P, D, backend=backend)
    truth = reference.log_prob(value.double(), value.double() * 0, P.double(), D.double())
    assert testing.relative_error(actual, truth) < 1e-6
