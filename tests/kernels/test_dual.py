"""More columns than outputs: by a Cholesky factorisation of the covariance where that is accurate, else by QR."""

import pytest
import torch

import lrd_kernels as lrd
from lrd_kernels import _policy, reference, testing
from lrd_kernels.linalg import dual

pytestmark = pytest.mark.skipif(not lrd.backends()["cpu"].available, reason="no compiled kernels")


def inputs(S, R, batch=(), dtype=torch.float64, layout="row", trace=None):
    """With `trace`, the factor is scaled so that D^-1/2 P P^T D^-1/2 has this trace."""
    found = testing.make_inputs(batch, S, R, dtype=dtype, layout=layout)
    if trace is not None:
        has = (found.cov_factor.square() / found.cov_diag[..., None]).sum()
        found = found._replace(cov_factor=found.cov_factor * (trace / has).sqrt())
    return found


def gradients(call, given, **options):
    leaves = [t.detach().clone().requires_grad_() for t in given]
    result = call(*leaves, **options)
    return [result.detach(), *torch.autograd.grad(result.sum(), leaves)]


@pytest.fixture
def roots(monkeypatch):
    """What `Dual` took its roots from."""
    found, kept = [], dual.Dual._root_by_cholesky
    monkeypatch.setattr(dual.Dual, "_root_by_cholesky", lambda *a: found.append(kept(*a)) or found[-1])
    return found


@pytest.mark.parametrize("layout", ["row", "rank"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("S", "R", "batch"), [(1, 40, ()), (40, 100, (2,)), (100, 101, ())])
def test_values_and_gradients(roots, S, R, batch, dtype, layout):
    given = inputs(S, R, batch, dtype, layout)
    wanted = gradients(reference.log_prob, [t.double() for t in given])
    for actual, truth in zip(gradients(lrd.log_prob, given), wanted, strict=True):
        assert testing.relative_error(actual, truth) <= (1e-11 if dtype == torch.float64 else 2e-7)
    assert len(roots) == 2  # forward and backward
    assert all(root is not None for root in roots)


def test_mask(roots):
    given, mask = inputs(40, 100, (2,)), torch.rand(2, 40, generator=torch.Generator().manual_seed(0)) > 0.3
    wanted = gradients(reference.log_prob, given, mask=mask)
    torch.testing.assert_close(gradients(lrd.log_prob, given, mask=mask), wanted, rtol=1e-10, atol=1e-10)
    assert all(root is not None for root in roots)


def test_close_to_the_limit_it_is_as_accurate_as_qr(roots):
    given = inputs(40, 100, trace=0.99 * _policy.DUAL_TRACE)
    by_cholesky, by_qr = gradients(lrd.log_prob, given), gradients(lrd.log_prob, given, precision="qr")
    for actual, truth in zip(by_cholesky, by_qr, strict=True):
        assert testing.relative_error(actual, truth) <= 1e-7
    assert len(roots) == 2  # precision="qr" is QR
    assert all(root is not None for root in roots)
    gradients(lrd.log_prob, inputs(40, 100, trace=1.01 * _policy.DUAL_TRACE))
    assert roots[2:] == [None, None]


def test_a_bad_number_is_named():
    given = inputs(40, 100, (2,))
    given.cov_factor[1, 3, 2] = torch.nan
    with pytest.raises(ValueError, match=r"cov_factor\[1, 3, 2\] must be finite"):
        lrd.log_prob(*given)
