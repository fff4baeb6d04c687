"""Factors of no columns: every function answers, and refuses invalid numbers, as for one column of zeros."""

import math

import pytest
import torch

import lrd_kernels as lrd

BACKENDS = [name for name in ("cpu", "reference") if lrd.backends()[name].available]
S = 5
BAD = (math.nan, 0.0, -1.0, math.inf)
SCALARS = ("log_prob", "mahalanobis", "logdet", "entropy", "nll_loss")
PRECISIONS = ("auto", "float64", "float32", "qr")


def gaussian(columns, bad=None, batch=(2,), dtype=torch.float64):
    """Mean, factor, diagonal and a value; only the last batch item is bad."""
    g = torch.Generator().manual_seed(0)
    value, loc = (torch.randn(*batch, S, generator=g, dtype=dtype) for _ in range(2))
    diag = 0.5 + torch.rand(*batch, S, generator=g, dtype=dtype)
    if bad is not None:
        diag.reshape(-1, S)[-1, 2] = bad
    return value, loc, torch.zeros(*batch, S, columns, dtype=dtype), diag


def call(name, value, loc, P, D, **options):
    if name == "nll_loss":  # of a raw diagonal; eps is no part of it, so that the diagonal may be bad
        return lrd.nll_loss(loc, D.log(), P, value, eps=1e-300, reduction="none", **options)
    arguments = {"log_prob": (value, loc, P, D), "mahalanobis": (value - loc, P, D)}
    return getattr(lrd, name)(*arguments.get(name, (P, D)), **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", SCALARS)
def test_values_and_gradients(name, precision, backend):
    def of(columns):
        value, loc, P, D = gaussian(columns)
        value, loc, D = (t.requires_grad_() for t in (value, loc, D))
        result = call(name, value, loc, P, D, precision=precision, backend=backend)
        grads = torch.autograd.grad(result.sum(), [value, loc, D], allow_unused=True)
        return result, *(g for g in grads if g is not None)

    for none, zeros in zip(of(0), of(1), strict=True):
        torch.testing.assert_close(none, zeros)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("name", SCALARS)
def test_bad_diagonal_is_named_or_nan(name, bad, precision, backend):
    if name == "nll_loss" and bad == 0:
        pytest.skip("eps keeps it positive")
    for batch in ((), (3,), (2, 2)):
        value, loc, P, D = gaussian(0, bad, batch)
        D.requires_grad_()
        with pytest.raises(lrd.NotPositiveDefiniteError, match="_diag"):
            call(name, value, loc, P, D, precision=precision, backend=backend)
        found = call(name, value, loc, P, D, precision=precision, backend=backend, on_failure="nan")
        fine = torch.ones(batch, dtype=torch.bool)
        fine.view(-1)[-1] = False
        assert torch.equal(~found.isnan(), fine)
        assert found[fine].isfinite().all()
        (grad,) = torch.autograd.grad(found[fine].sum(), D)
        assert grad[fine].isfinite().all()


@pytest.mark.skipif(not lrd.backends()["triton"].available, reason="needs Triton, or its interpreter")
@pytest.mark.parametrize("name", ["log_prob", "logdet"])
def test_bad_diagonal_is_named_by_triton(name):
    for bad in BAD:
        inputs = gaussian(0, bad)
        with pytest.raises(lrd.NotPositiveDefiniteError, match=r"cov_diag\[1, 2\]"):
            call(name, *inputs, backend="triton")
        assert call(name, *inputs, backend="triton", on_failure="nan").isnan().tolist() == [False, True]


@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("precision", ["auto", "qr"])
def test_bad_diagonal_cannot_be_solved(bad, precision):
    value, _, P, D = gaussian(0, bad)
    with pytest.raises(lrd.NotPositiveDefiniteError, match=r"cov_diag\[1, 2\]"):
        lrd.solve(value, P, D, precision=precision)


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_diagnostics_of_a_bad_item_are_nan(bad):
    _, _, P, D = gaussian(0, bad)
    health = lrd.diagnose(P, D)
    assert health.bad_entries.tolist() == [0, 1]
    assert "Invalid covariance: 1 entries" in health.verdict
    found = [lrd.capacitance_condition(P, D), *lrd.condition_bounds(P, D), health.capacitance_condition]
    found += [health.largest_leverage, lrd.extreme_eigenvalues(P, D).largest]
    for numbers in found:
        assert numbers[0].isfinite()
        assert numbers[1].isnan()
    mask = torch.ones(S, dtype=torch.bool)
    mask[2] = False  # a masked entry may be anything
    assert lrd.capacitance_condition(P, D, mask=mask).tolist() == [1, 1]
    assert lrd.capacitance_condition(P[0], D, mask=mask).tolist() == [1, 1]


def test_other_functions():
    value, loc, P, D = gaussian(0)
    zero = torch.zeros(2, S, 1, dtype=P.dtype)
    for precision in PRECISIONS[:1] + PRECISIONS[3:]:
        torch.testing.assert_close(lrd.solve(value, P, D, precision=precision), value / D)
    torch.testing.assert_close(lrd.matvec(value, P, D), value * D)
    a, b = (lrd.LowRankMultivariateNormal(loc, factor, D) for factor in (P, zero))
    assert lrd.diagnose(P, D).largest_leverage.max() < 1e-15
    for attribute in ("precision_matrix", "covariance_matrix", "scale_tril", "variance"):
        torch.testing.assert_close(getattr(a, attribute), getattr(b, attribute))
    torch.testing.assert_close(a.condition([0], value[:, :1]).variance, b.condition([0], value[:, :1]).variance)
    torch.testing.assert_close(a.whiten(value), b.whiten(value))
    torch.testing.assert_close(torch.distributions.kl_divergence(a, a), torch.zeros(2, dtype=P.dtype))
