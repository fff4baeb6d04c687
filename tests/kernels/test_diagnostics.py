"""Condition numbers and their bounds, eigenvalues at the ends, and the record of them all."""

import math

import numpy as np
import pytest
import torch

import lrd_kernels as lrd
from lrd_kernels import testing
from lrd_kernels.linalg import eigen


def exact(factor, diag, mask=None):
    """Eigenvalues of the dense matrices in float64, of what is not masked."""
    factor, diag = factor.double(), diag.double()
    dense = torch.diag_embed(diag) + factor @ factor.mT
    if mask is not None:
        dense = dense[mask][:, mask]
    return torch.linalg.eigvalsh(dense)


def covariance(S, R, *, batch=(), hardness=1.0, dtype=torch.float64, layout="row", seed=0):
    inputs = testing.make_inputs(batch, S, R, dtype=dtype, layout=layout, seed=seed)
    return inputs.cov_factor, inputs.cov_diag / hardness


@pytest.mark.parametrize(("S", "R"), [(40, 5), (560, 8), (30, 30), (12, 20), (7, 1), (1, 1), (1, 3), (9, 0)])
@pytest.mark.parametrize("layout", ["row", "rank"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_bounds_enclose_the_condition_number(S, R, layout, dtype):
    for seed in range(5):
        factor, diag = covariance(S, R, batch=(3,), hardness=10.0**seed, dtype=dtype, layout=layout, seed=seed)
        values = exact(factor, diag)
        lower, upper = lrd.condition_bounds(factor, diag)
        condition = values[..., -1] / values[..., 0]
        assert lower.shape == upper.shape == (3,)
        assert lower.dtype == torch.float64
        assert (lower <= condition * (1 + 1e-9)).all()
        assert (condition <= upper * (1 + 1e-9)).all()


def test_bounds_are_the_formulas():
    factor, diag = covariance(50, 4, batch=(2,))
    norm = torch.linalg.matrix_norm(factor, 2).square()
    ascending = diag.sort(-1).values
    lower, upper = lrd.condition_bounds(factor, diag)
    torch.testing.assert_close(lower, (norm + ascending[:, 0]) / ascending[:, 4])
    torch.testing.assert_close(upper, (norm + ascending[:, -1]) / ascending[:, 0])


def test_masked_outputs_do_not_count():
    factor, diag = covariance(40, 3)
    mask = torch.rand(40, generator=torch.Generator().manual_seed(0)) > 0.4
    spoiled_factor, spoiled_diag = factor.clone(), diag.clone()
    spoiled_factor[~mask], spoiled_diag[~mask] = math.nan, math.nan
    lower, upper = lrd.condition_bounds(spoiled_factor, spoiled_diag, mask=mask)
    wanted = lrd.condition_bounds(factor[mask], diag[mask])
    torch.testing.assert_close(torch.stack([lower, upper]), torch.stack(wanted))
    condition = lrd.capacitance_condition(spoiled_factor, spoiled_diag, mask=mask)
    torch.testing.assert_close(condition, lrd.capacitance_condition(factor[mask], diag[mask]))


def test_batches_broadcast():
    factor, _ = covariance(20, 3, batch=(4, 1))
    _, diag = covariance(20, 3, batch=(2,))
    lower, upper = lrd.condition_bounds(factor, diag)
    assert lower.shape == upper.shape == lrd.capacitance_condition(factor, diag).shape == (4, 2)
    one = lrd.condition_bounds(factor[1, 0], diag[1])
    torch.testing.assert_close(torch.stack([lower[1, 1], upper[1, 1]]), torch.stack(one))
    found = lrd.extreme_eigenvalues(factor, diag)
    torch.testing.assert_close(found.largest[2, 1], exact(factor[2, 0], diag[1])[-1])
    assert lrd.diagnose(factor, diag).condition_upper.shape == (4, 2)


@pytest.mark.parametrize("hardness", [1e2, 1e6, 1e10, 1e12])
def test_capacitance_condition(hardness):
    inputs = testing.hard_inputs("condition", hardness, 300, 12)
    scaled = inputs.cov_factor.double() / inputs.cov_diag.double().sqrt()[:, None]
    stacked = torch.cat([torch.eye(12, dtype=torch.float64), scaled])  # its singular values are those of L
    wanted = torch.linalg.cond(stacked) ** 2
    torch.testing.assert_close(lrd.capacitance_condition(inputs.cov_factor, inputs.cov_diag), wanted, rtol=1e-4, atol=0)


def test_capacitance_condition_beyond_cholesky():
    factor = torch.randn(100, 1, generator=torch.Generator().manual_seed(0)).double() * torch.tensor([1e10, 1e10, 1.0])
    diag = torch.ones(100, dtype=torch.float64)
    wanted = 1 + 2e20 * float((factor[:, 2] ** 2).sum())  # the smallest eigenvalue is 1, as two columns coincide
    assert float(lrd.capacitance_condition(factor, diag)) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("method", ["lanczos", "power"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_extreme_eigenvalues(method, dtype):
    factor, diag = covariance(60, 4, batch=(2,), dtype=dtype)
    values = exact(factor, diag)
    found = lrd.extreme_eigenvalues(factor, diag, method=method, tol=1e-6, max_iter=20000)
    assert found.converged.all()
    assert (found.smallest_residual <= 1e-6).all()
    torch.testing.assert_close(found.smallest, values[..., 0], rtol=1e-5, atol=0)
    torch.testing.assert_close(found.largest, values[..., -1], rtol=1e-5, atol=0)
    torch.testing.assert_close(found.condition, values[..., -1] / values[..., 0], rtol=1e-5, atol=0)


def test_residuals_are_honest_before_convergence():
    factor, diag = covariance(400, 6)
    values = exact(factor, diag)
    for method in ("lanczos", "power"):
        for steps in (2, 5, 9):
            found = lrd.extreme_eigenvalues(factor, diag, method=method, tol=1e-12, max_iter=steps)
            assert not found.converged
            for value, residual in ((found.smallest, found.smallest_residual), (found.largest, found.largest_residual)):
                assert (values - value).abs().min() <= residual * value * (1 + 1e-9)


def test_lanczos_needs_far_fewer_steps_for_the_smallest():
    factor, diag = covariance(2000, 8)
    lanczos = lrd.extreme_eigenvalues(factor, diag)
    power = lrd.extreme_eigenvalues(factor, diag, method="power", max_iter=500)
    assert lanczos.converged
    assert lanczos.iterations < 150
    assert not power.converged
    torch.testing.assert_close(lanczos.smallest, exact(factor, diag)[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("method", ["lanczos", "power"])
def test_smallest_eigenvalue_at_a_shared_floor(method):
    factor, diag = covariance(200, 4)
    diag[:50] = 1e-4
    found = lrd.extreme_eigenvalues(factor, diag, method=method, max_iter=5000)
    assert float(found.smallest) == pytest.approx(1e-4, rel=1e-6)


@pytest.mark.parametrize(("S", "R"), [(1, 1), (2, 5), (6, 6), (40, 0)])
def test_extreme_eigenvalues_of_odd_sizes(S, R):
    factor, diag = covariance(S, R)
    found = lrd.extreme_eigenvalues(factor, diag, tol=1e-8)
    values = exact(factor, diag)
    torch.testing.assert_close(found.smallest, values[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(found.largest, values[-1], rtol=1e-6, atol=0)


def test_ill_conditioned_eigenvalues():
    factor, diag = covariance(300, 5, hardness=1e10)
    found = lrd.extreme_eigenvalues(factor, diag)
    assert found.converged
    torch.testing.assert_close(found.largest, exact(factor, diag)[-1], rtol=1e-6, atol=0)
    assert diag.min() * (1 - 1e-9) <= found.smallest <= diag.kthvalue(6).values


def test_diagnose_is_what_its_parts_are():
    factor, diag = covariance(80, 6, batch=(2,))
    found = lrd.diagnose(factor, diag)
    lower, upper = lrd.condition_bounds(factor, diag)
    torch.testing.assert_close(found.condition_lower, lower)
    torch.testing.assert_close(found.condition_upper, upper)
    torch.testing.assert_close(found.capacitance_condition, lrd.capacitance_condition(factor, diag))
    spectrum = torch.linalg.svdvals(factor).square()
    torch.testing.assert_close(found.spectrum, spectrum)
    shares = spectrum / spectrum.sum(-1, keepdim=True)
    torch.testing.assert_close(found.effective_rank, (-(shares * shares.log()).sum(-1)).exp())
    dense = torch.diag_embed(diag) + factor @ factor.mT
    leverage = 1 - diag * torch.linalg.inv(dense).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(found.largest_leverage, leverage.amax(-1))
    torch.testing.assert_close(found.diag_quantiles[:, 0], diag.amin(-1))
    torch.testing.assert_close(found.diag_quantiles[:, -1], diag.amax(-1))
    median = torch.from_numpy(np.quantile(diag.numpy(), 0.5, axis=-1, method="nearest"))
    assert ((found.diag_quantiles[:, 3] - median).abs() < 0.05).all()
    assert (found.bad_entries == 0).all()


def test_share_at_the_floor():
    factor, diag = covariance(100, 2)
    diag = diag + 0.01
    diag[:30] = 0.01
    assert float(lrd.diagnose(factor, diag, eps=0.01).share_at_floor) == pytest.approx(0.3)
    assert float(lrd.diagnose(factor, diag).share_at_floor) == pytest.approx(0.3)
    assert float(lrd.diagnose(factor, diag, eps=1e-5).share_at_floor) == 0


def test_diagnose_speaks_plainly():
    factor, diag = covariance(100, 6)
    assert lrd.diagnose(factor, diag).verdict.startswith("Healthy.")
    assert "float32 arithmetic may fail" in lrd.diagnose(factor, diag * 1e-7).verdict
    assert "raise eps" in lrd.diagnose(factor, diag * 1e-7).verdict
    twice = torch.cat([factor, factor], 1)
    assert 'precision="qr"' in lrd.diagnose(twice, diag * 1e-16).verdict
    floored = torch.full_like(diag, 0.01)
    assert "at its floor" in lrd.diagnose(factor, floored, eps=0.01).verdict
    repeated = factor[:, :1].expand(-1, 6)
    assert "with 6 columns" in lrd.diagnose(repeated, diag).verdict
    text = str(lrd.diagnose(factor, diag))
    for part in ("100 outputs", "rank 6", "condition of capacitance", "quantiles of D", "largest leverage", "Healthy"):
        assert part in text


def test_bad_items_are_told_and_spoil_no_other():
    factor, diag = covariance(20, 3, batch=(3,))
    factor[0, 4, 1] = math.nan
    diag[2, 5] = -1.0
    found = lrd.diagnose(factor, diag)
    assert found.bad_entries.tolist() == [1, 0, 1]
    assert found.condition_upper.isnan().tolist() == [True, False, True]
    assert found.largest_leverage.isnan().tolist() == [True, False, True]
    assert "Invalid covariance: 2 entries" in str(found)
    assert lrd.condition_bounds(factor, diag)[0].isnan().tolist() == [True, False, True]
    assert lrd.capacitance_condition(factor, diag).isnan().tolist() == [True, False, True]
    extremes = lrd.extreme_eigenvalues(factor, diag)
    assert extremes.largest.isnan().tolist() == [True, False, True]
    assert extremes.converged.tolist() == [False, True, False]


def test_empty_and_half_inputs():
    empty = lrd.diagnose(torch.zeros(0, 20, 3), torch.ones(0, 20))
    assert "no covariances to diagnose" in str(empty)
    factor, diag = covariance(50, 4, dtype=torch.bfloat16)
    lower, upper = lrd.condition_bounds(factor, diag)
    values = exact(factor, diag)
    assert lower <= values[-1] / values[0] <= upper
    assert lrd.extreme_eigenvalues(factor, diag).converged


def test_wrong_arguments():
    factor, diag = covariance(20, 3)
    with pytest.raises(ValueError, match="method must be one of 'lanczos', 'power'; got 'qr'"):
        lrd.extreme_eigenvalues(factor, diag, method="qr")
    with pytest.raises(ValueError, match="tol"):
        lrd.extreme_eigenvalues(factor, diag, tol=-1)
    with pytest.raises(ValueError, match="cov_diag must have shape"):
        lrd.condition_bounds(factor, diag[:5])
    with pytest.raises(ValueError, match="eps"):
        lrd.diagnose(factor, diag, eps=-0.1)


def test_reference_backend_agrees():
    factor, diag = covariance(70, 5, batch=(2,), dtype=torch.float32)
    served = lrd.diagnose(factor, diag)
    with lrd.use_backend("reference"):
        plain = lrd.diagnose(factor, diag)
    for a, b in zip(served[2:], plain[2:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_large_factor_is_taken_in_chunks(monkeypatch):
    factor, diag = covariance(100, 4, dtype=torch.float32)
    whole = lrd.extreme_eigenvalues(factor, diag)
    monkeypatch.setattr(eigen, "CHUNK_ELEMENTS", 52)
    chunked = lrd.extreme_eigenvalues(factor, diag)
    torch.testing.assert_close(chunked.smallest, whole.smallest, rtol=1e-6, atol=0)
    torch.testing.assert_close(chunked.largest, whole.largest, rtol=1e-6, atol=0)
