"""Core without torch: each instruction set this machine has, on NumPy arrays."""

import numpy as np
import pytest

core = pytest.importorskip("_core_testing", reason="built with -DLRD_TESTING=ON (make build)")

ISAS = core.available_isas()


def problem(S, R, N, dtype, layout, seed=0):
    rng = np.random.default_rng(seed)
    factor = rng.standard_normal((S, R)).astype(dtype)
    factor = np.asfortranarray(factor) if layout == "rank" else factor
    diag = (0.1 + rng.random(S)).astype(dtype)
    return factor, diag, rng.standard_normal((N, S)).astype(dtype)


def test_baseline_is_always_there():
    assert ISAS[-1] == "baseline"
    with pytest.raises(ValueError, match="no instruction set named"):
        core.gram("sse9", "float32", False, *problem(3, 1, 1, np.float32, "row"), 3)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("layout", ["row", "rank"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("float32", [False, True])
def test_gram(isa, layout, dtype, float32):
    for S, R, N in [(1, 1, 1), (7, 3, 0), (33, 8, 1), (700, 17, 2), (130, 65, 18), (60, 100, 35), (50, 0, 3)]:
        factor, diag, value = problem(S, R, N, dtype, layout)
        gram, u, quad, log_diag = core.gram(isa, dtype, float32, factor, diag, value, 999)
        P, D, r = factor.astype(float), diag.astype(float), value.astype(float)
        tolerance = 2e-5 if float32 and dtype == "float32" else 1e-12
        np.testing.assert_allclose(gram, np.tril(P.T @ (P / D[:, None])), rtol=tolerance, atol=tolerance * S)
        np.testing.assert_allclose(u, (r / D) @ P, rtol=tolerance, atol=tolerance * S)
        np.testing.assert_allclose(quad, (r**2 / D).sum(-1), rtol=1e-12, atol=0)
        np.testing.assert_allclose(log_diag, np.log(D).sum(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("isa", ISAS)
def test_the_log_of_the_diagonal_over_the_whole_range(isa):
    diag = np.array([5e-324, 1e-310, 2.2250738585072014e-308, 1e-300, 1.0, 1.7976931348623157e308, 3.0, 1e300])
    empty, value = np.zeros((8, 0)), np.zeros((0, 8))
    *_, log_diag = core.gram(isa, "float64", False, empty, diag, value, 8)
    np.testing.assert_allclose(log_diag, np.log(diag).sum(), rtol=1e-14)
    for bad in (0.0, -1.0, np.nan, np.inf):
        *_, log_diag = core.gram(isa, "float64", False, empty[:3], np.array([1.0, bad, 1.0]), value[:, :3], 8)
        assert np.isnan(log_diag)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("R", [0, 1, 2, 9, 15, 16, 17, 33, 64, 150, 301])
def test_cholesky(isa, R):
    rng = np.random.default_rng(R)
    x = rng.standard_normal((R + 5, R))
    gram = x.T @ x
    chol, chol_inv, growth = core.cholesky(isa, gram)
    assert np.isfinite(growth)
    np.testing.assert_allclose(chol, np.linalg.cholesky(np.eye(R) + gram), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(chol_inv @ chol, np.eye(R), rtol=0, atol=1e-11)


@pytest.mark.parametrize("isa", ISAS)
def test_cholesky_beyond_the_reach_of_float64(isa):
    """Equal columns over D of 1e-20: I + G rounds to a singular matrix, yet its pivots are known to be at least 1."""
    gram = np.full((3, 3), 1e20)
    chol, _, growth = core.cholesky(isa, gram)
    assert np.isfinite(growth)
    assert (np.diag(chol) >= 1).all()
    assert np.isinf(core.cholesky(isa, gram * np.nan)[2])
    assert np.isinf(core.cholesky(isa, gram * 1e300)[2])
