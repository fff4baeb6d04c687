"""Positive diagonals, filtered gradients, the QR path."""

import math

import numpy as np
import pytest
import torch

import lrd_kernels as lrd
from benchmarks.stress import exact
from lrd_kernels import testing
from lrd_kernels.linalg import qr

RAW = [-3e38, -1e4, -90.0, -1.0, 0.0, 3.0, 79.0, 81.0, 1e3, 3e38]


def test_positive_diag_is_eps_plus_exp():
    raw = torch.linspace(-20, 20, 50, dtype=torch.float64)
    torch.testing.assert_close(lrd.positive_diag(raw, 0.01), 0.01 + raw.exp())
    torch.testing.assert_close(lrd.positive_diag(raw, eps_std=0.1), 0.01 + raw.exp())
    softplus = torch.nn.functional.softplus(raw)
    torch.testing.assert_close(lrd.positive_diag(raw, 0.5, transform="softplus"), 0.5 + softplus)


@pytest.mark.parametrize("transform", ["exp", "softplus"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_positive_diag_stays_finite_with_its_gradient(dtype, transform):
    limit = torch.finfo(dtype).max
    raw = torch.tensor([max(min(x, limit), -limit) for x in RAW]).to(dtype).clamp(-limit, limit).requires_grad_()
    if transform == "softplus" and dtype == torch.float16:
        raw = raw.detach().clamp(max=6e4).requires_grad_()
    result = lrd.positive_diag(raw, 0.01, transform=transform)
    assert result.dtype == dtype
    assert result.isfinite().all()
    assert (result > 0).all()
    (gradient,) = torch.autograd.grad(result.sum(), raw)
    assert gradient.isfinite().all()
    assert (gradient[4:] > 0).all()  # never stuck above
    assert (result.diff() >= 0).all()


def test_positive_diag_gradients():
    raw = torch.tensor([-5.0, 0.0, 2.0], dtype=torch.float64, requires_grad=True)
    for transform in ("exp", "softplus"):
        assert torch.autograd.gradcheck(lambda r, t=transform: lrd.positive_diag(r, 0.1, transform=t), raw)
        assert torch.autograd.gradgradcheck(lambda r, t=transform: lrd.positive_diag(r, 0.1, transform=t), raw)


def test_positive_diag_refuses():
    raw = torch.zeros(3)
    with pytest.raises(ValueError, match="one of eps and eps_std must be given"):
        lrd.positive_diag(raw)
    with pytest.raises(ValueError, match="one of eps and eps_std must be given"):
        lrd.positive_diag(raw, 0.1, eps_std=0.1)
    with pytest.raises(ValueError, match="eps_std must be finite and not negative; got -1"):
        lrd.positive_diag(raw, eps_std=-1)
    with pytest.raises(TypeError, match="raw must be float32"):
        lrd.positive_diag(torch.zeros(3, dtype=torch.int64), 0.1)
    with pytest.raises(ValueError, match="transform"):
        lrd.positive_diag(raw, 0.1, transform="square")


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fused_diagonal_is_the_same(backend, dtype):
    if not lrd.backends()[backend].available:
        pytest.skip(lrd.backends()[backend].detail)
    value, mean, factor, _ = testing.make_inputs((), len(RAW), 3, dtype=dtype)
    raw = torch.tensor(RAW, dtype=dtype, requires_grad=True)
    fused = lrd.nll_loss(mean, raw, factor, value, eps=0.01, backend=backend)
    (gradient,) = torch.autograd.grad(fused, raw)
    apart = -lrd.log_prob(value, mean, factor, lrd.positive_diag(raw, 0.01), backend=backend) / len(RAW)
    (wanted,) = torch.autograd.grad(apart, raw)
    torch.testing.assert_close(fused, apart)
    assert gradient.isfinite().all()
    torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [(torch.float64, 350.0), (torch.float32, 80.0), (torch.bfloat16, 80.0), (torch.float16, 11.0)],
    ids=lambda x: str(x).removeprefix("torch."),
)
def test_fused_diagonal_has_the_limit_of_positive_diag(backend, dtype, limit):
    value, mean, factor, _ = testing.make_inputs((), 12, 3, dtype=dtype)

    def losses(raw):
        """The loss, its gradient, and the diagonal."""
        raw = torch.full((12,), raw, dtype=dtype, requires_grad=True)
        loss = lrd.nll_loss(mean, raw, factor, value, backend=backend)
        (gradient,) = torch.autograd.grad(loss, raw)
        return loss.detach(), gradient, lrd.positive_diag(raw, 0.01).detach()

    at, below, above = losses(limit), losses(limit - 0.5), losses(limit + 9)
    for a, b in zip(at, above, strict=True):
        assert torch.equal(a, b)
    assert below[0] < at[0]
    assert (at[1] > 0).all()


def test_error_tells_the_diagonal_of_a_large_raw_one():
    """exp(200) is a number of float64, and within the limit."""
    value, mean, factor, _ = testing.make_inputs((), 10, 3, dtype=torch.float64)
    factor[3, 1] = math.nan
    with pytest.raises(lrd.NotPositiveDefiniteError, match=r"cov_factor\[3, 1\]") as caught:
        lrd.nll_loss(mean, torch.full((10,), 200.0, dtype=torch.float64), factor, value)
    assert caught.value.smallest_diag == pytest.approx(math.exp(200), rel=1e-12)


def test_infinite_raw_diagonal_is_still_refused():
    value, mean, factor, _ = testing.make_inputs((), 10, 3, dtype=torch.float32)
    for bad in (math.inf, math.nan):
        raw = torch.zeros(10)
        raw[4] = bad
        with pytest.raises(lrd.NotPositiveDefiniteError, match=r"raw_diag\[4\]"):
            lrd.nll_loss(mean, raw, factor, value)


def test_floor_of_the_standard_deviation_and_softplus_in_the_loss():
    value, mean, factor, raw = testing.make_inputs((), 12, 3)
    torch.testing.assert_close(
        lrd.nll_loss(mean, raw, factor, value, eps_std=0.3), lrd.nll_loss(mean, raw, factor, value, eps=0.09)
    )
    diag = lrd.positive_diag(raw, 0.2, transform="softplus")
    wanted = -lrd.log_prob(value, mean, factor, diag) / 12
    torch.testing.assert_close(lrd.nll_loss(mean, raw, factor, value, eps=0.2, transform="softplus"), wanted)


@pytest.mark.parametrize("mode", ["zero", "skip"])
def test_filter_gradients(mode):
    layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    layers(torch.ones(2, 3)).sum().backward()
    before = [p.grad.clone() for p in layers.parameters()]
    assert lrd.filter_gradients(layers.parameters(), mode) == 0
    assert all(torch.equal(p.grad, b) for p, b in zip(layers.parameters(), before, strict=True))
    layers[0].weight.grad[1, 1] = math.nan
    layers[1].bias.grad[0] = math.inf
    assert lrd.filter_gradients(layers.parameters(), mode) == 2
    left = [p.grad for p in layers.parameters()]
    assert all(g is None for g in left) if mode == "skip" else all(not g.any() for g in left)
    assert lrd.filter_gradients(layers.parameters(), mode) == 0


def test_filter_gradients_takes_what_optimizers_take():
    weight = torch.nn.Parameter(torch.ones(3))
    assert lrd.filter_gradients(weight) == 0  # no gradient yet
    weight.grad = torch.tensor([1.0, math.nan, 0.0])
    assert lrd.filter_gradients(weight) == 1
    table = torch.nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1, 1])).sum().backward()
    assert lrd.filter_gradients(table.parameters()) == 0
    table.weight.grad = table.weight.grad * math.inf
    assert lrd.filter_gradients(table.parameters()) == 1
    with pytest.raises(ValueError, match="mode"):
        lrd.filter_gradients(weight, "clip")


def test_qr_agrees_where_cholesky_is_good():
    inputs = testing.make_inputs((3,), 50, 4, dtype=torch.float64)
    wanted = testing.value_and_grads(lrd.log_prob, inputs)
    actual = testing.value_and_grads(lambda *a: lrd.log_prob(*a, precision="qr"), inputs)
    for a, w in zip(actual, wanted, strict=True):
        torch.testing.assert_close(a, w)


@pytest.mark.parametrize("precision", ["auto", "qr"])
@pytest.mark.parametrize("R", [2, 8, 32])
def test_qr_keeps_the_digits_of_one_dominant_row(R, precision):
    """One output with a tiny diagonal entry: its scaled row is longer than the others by up to 21 orders."""
    exact.precise()
    for smallest in (1e-20, 1e-30, 1e-38, 1e-42) if R == 2 else (1e-30, 1e-42):
        inputs = testing.make_inputs((), 40, R, dtype=torch.float32)
        inputs.cov_diag[17] = smallest
        inputs.value[17] = inputs.loc[17] + 0.5 * inputs.cov_factor[17].sum()
        wanted = exact_log_prob(inputs)
        actual = testing.value_and_grads(lambda *a: lrd.log_prob(*a, precision=precision), inputs)
        assert float(actual[0]) == pytest.approx(wanted[0], rel=1e-6)
        for name, a, w in zip(("value", "loc", "cov_factor", "cov_diag"), actual[1:], wanted[1:], strict=True):
            assert np.abs(a.double().numpy() - w).max() <= 1e-6 * np.abs(w).max(), name


@pytest.mark.parametrize("precision", ["auto", "qr"])
@pytest.mark.parametrize("scale", [1e-17, 1e3, 1e6, 1e12])
def test_qr_gradients_of_duplicate_columns_and_tiny_factors(scale, precision):
    exact.precise()
    inputs = testing.make_inputs((), 40, 4, dtype=torch.float32)
    inputs.cov_factor.mul_(scale)[:, 0] = inputs.cov_factor[:, 3]
    wanted = exact_log_prob(inputs)
    actual = testing.value_and_grads(lambda *a: lrd.log_prob(*a, precision=precision), inputs)
    for a, w in zip(actual, wanted, strict=True):
        assert np.abs(a.double().numpy() - w).max() <= 1e-5 * np.abs(w).max()


def exact_log_prob(inputs):
    """Log-density and gradients in long arithmetic, as float64."""
    y, mu, P, D = map(exact.exact, inputs)
    g = exact.Gaussian(P, D)
    a, z = g.solve(y - mu), g.fitted(y - mu)
    log_p = -(exact.total((y - mu) * a) + g.logdet + len(D) * exact.log(2 * exact.PI)) / 2
    found = (log_p, -a, a, np.outer(a, z) - g.precision_factor, (a * a - g.precision_diag) / 2)
    return [np.asarray(t, dtype=float) for t in found]


def test_qr_without_columns():
    inputs = testing.make_inputs((2,), 9, 0)
    wanted = testing.value_and_grads(lrd.log_prob, inputs)
    actual = testing.value_and_grads(lambda *a: lrd.log_prob(*a, precision="qr"), inputs)
    for a, w in zip(actual, wanted, strict=True):
        torch.testing.assert_close(a, w)


@pytest.mark.parametrize("layout", ["row", "rank"])
@pytest.mark.parametrize("hardness", [1e14, 1e16])
def test_qr_is_right_beyond_cholesky(hardness, layout):
    inputs = testing.hard_inputs("condition", hardness, 900, 8)
    inputs = inputs._replace(cov_factor=testing.in_layout(inputs.cov_factor, layout))
    truth = testing.extended_log_prob(inputs)
    actual = testing.value_and_grads(lambda *a: lrd.log_prob(*a, precision="qr"), inputs)
    errors = [np.abs(a.double().numpy() - t).max() / np.abs(t).max() for a, t in zip(actual, truth, strict=True)]
    assert errors[0] <= 1e-6
    assert max(errors[1:]) <= 1e-3


def test_qr_with_masks_values_and_shared_factors(monkeypatch):
    monkeypatch.setattr(qr, "CHUNK_ELEMENTS", 64)  # several chunks, the last one short
    factor = testing.make_inputs((2, 1), 33, 3).cov_factor
    diag, loc = testing.make_inputs((3,), 33, 3).cov_diag, testing.make_inputs((), 33, 3).loc
    value = testing.make_inputs((5, 1, 1), 33, 3).value
    mask = torch.rand(3, 33, generator=torch.Generator().manual_seed(0)) > 0.3
    spoiled = torch.where(mask, diag, math.nan)
    wanted = testing.value_and_grads(lambda *a: lrd.log_prob(*a, mask=mask), (value, loc, factor, spoiled))
    actual = testing.value_and_grads(
        lambda *a: lrd.log_prob(*a, mask=mask, precision="qr"), (value, loc, factor, spoiled)
    )
    for a, w in zip(actual, wanted, strict=True):
        torch.testing.assert_close(a, w)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_qr_gradients(backend):
    if not lrd.backends()[backend].available:
        pytest.skip(lrd.backends()[backend].detail)
    inputs = [t.requires_grad_() for t in testing.make_inputs((2,), 9, 3)]
    options = {"precision": "qr", "backend": backend}
    assert torch.autograd.gradcheck(lambda *a: lrd.log_prob(*a, **options), inputs)
    assert torch.autograd.gradcheck(lambda P, D: lrd.entropy(P, D, **options), inputs[2:])
    value, mean, factor, raw = inputs
    assert torch.autograd.gradcheck(lambda *a: lrd.nll_loss(*a, value, **options), (mean, raw, factor))


def test_qr_with_more_columns_than_outputs_and_bad_items():
    inputs = testing.make_inputs((3,), 4, 7)
    wanted = lrd.log_prob(*inputs)
    torch.testing.assert_close(lrd.log_prob(*inputs, precision="qr"), wanted)
    inputs.cov_diag[1, 2] = 0.0
    with pytest.raises(lrd.NotPositiveDefiniteError, match=r"cov_diag\[1, 2\]"):
        lrd.log_prob(*inputs, precision="qr")
    result, *gradients = testing.value_and_grads(lambda *a: lrd.log_prob(*a, precision="qr", on_failure="nan"), inputs)
    assert result.isnan().tolist() == [False, True, False]
    torch.testing.assert_close(result[[0, 2]], wanted[[0, 2]])
    assert all(g.isfinite().all() and not g[1].any() for g in gradients)


def test_qr_in_compiled_and_transformed_code():
    inputs = testing.make_inputs((2,), 12, 3)
    wanted = lrd.log_prob(*inputs)
    mapped = torch.func.vmap(lambda *a: lrd.log_prob(*a, precision="qr"))(*inputs)
    torch.testing.assert_close(mapped, wanted)
    gradient = torch.func.grad(lambda m: lrd.log_prob(inputs[0], m, *inputs[2:], precision="qr").sum())(inputs[1])
    torch.testing.assert_close(gradient, testing.value_and_grads(lrd.log_prob, inputs)[2])


def nearly_equal_columns(gap, S=60, dtype=torch.float64, scale=1e6):
    """Two columns that differ by `gap` of their length: the capacitance's growth is about 1 / gap^2."""
    inputs = testing.make_inputs((), S, 3, dtype=dtype)
    inputs.cov_factor.mul_(scale)
    inputs.cov_factor[:, 1] = inputs.cov_factor[:, 0] + gap * inputs.cov_factor[:, 1]
    return inputs


@pytest.mark.parametrize(
    ("gap", "scale", "by_qr"), [(1e-4, 1e3, False), (1e-4, 1e6, True), (1e-6, 1e6, True), (0.0, 1e6, True)]
)
def test_auto_takes_qr_beyond_cholesky(gap, scale, by_qr):
    inputs = nearly_equal_columns(gap, scale=scale)
    auto = lrd.log_prob(*inputs)
    assert torch.equal(auto, lrd.log_prob(*inputs, precision="qr")) == by_qr
    truth = testing.extended_log_prob(inputs)[0]
    assert abs(float(auto) - float(truth)) <= 1e-7 * abs(float(truth))


def test_only_the_items_that_need_it_take_qr():
    good, hard = testing.make_inputs((), 60, 3), nearly_equal_columns(0.0)
    both = [torch.stack([a, b, a]) for a, b in zip(good, hard, strict=True)]
    result, *gradients = testing.value_and_grads(lrd.log_prob, both)
    expected = [testing.value_and_grads(lrd.log_prob, x) for x in (good, hard, good)]
    for found, apart in zip((result, *gradients), zip(*expected, strict=True), strict=True):
        assert torch.equal(found, torch.stack(apart))


def test_distribution_beyond_cholesky():
    value, *parameters = nearly_equal_columns(0.0)
    distribution = lrd.LowRankMultivariateNormal(*parameters)
    wanted = lrd.log_prob(value, *parameters)
    for _ in range(2):
        assert torch.equal(distribution.log_prob(value), wanted)


@pytest.mark.alone
def test_qr_hardly_depends_on_the_number_of_threads():
    inputs = testing.hard_inputs("condition", 1e16, 3000, 12)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(lrd.log_prob(*inputs, precision="qr"))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-6, atol=0)
