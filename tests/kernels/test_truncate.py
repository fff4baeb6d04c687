"""Truncation with folding: against the singular value decomposition, in both layouts and all dtypes; gradients."""

import math

import pytest
import torch

import lrd_kernels as lrd
from lrd_kernels import testing

BACKENDS = [name for name in ("cpu", "reference") if lrd.backends()[name].available]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def covariance(S=60, R=9, batch=(), dtype=torch.float64, layout="row", seed=0):
    inputs = testing.make_inputs(batch, S, R, dtype=dtype, layout=layout, seed=seed)
    return inputs.cov_factor, inputs.cov_diag


def best(factor, rank):
    """The nearest matrix of that rank to P P^T, and the singular values kept."""
    U, s, _ = torch.linalg.svd(factor.double(), full_matrices=False)
    return (U[..., :rank] * s[..., None, :rank].square()) @ U[..., :rank].mT, s[..., :rank]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["row", "rank", "strided"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("S", "R", "rank"), [(60, 9, 4), (257, 70, 33), (1000, 3, 1), (5, 9, 2), (33, 8, 8), (1, 1, 1)]
)
def test_nearest_low_rank_part_and_the_same_variances(backend, layout, dtype, S, R, rank):
    factor, diag = covariance(S, R, (2,), dtype, layout)
    kept, folded, singular = lrd.truncate(factor, diag, rank, backend=backend)
    wanted, values = best(factor, rank)
    tolerance = TOLERANCE[dtype]
    assert kept.shape == (2, S, min(rank, R))
    assert (kept.dtype, folded.dtype, singular.dtype) == (dtype, dtype, torch.float64)
    assert testing.relative_error(kept.double() @ kept.double().mT, wanted) <= 4 * tolerance
    assert testing.relative_error(singular[..., : values.shape[-1]], values) <= tolerance
    before = diag.double() + factor.double().square().sum(-1)
    after = folded.double() + kept.double().square().sum(-1)
    assert testing.relative_error(after, before) <= tolerance
    assert (folded >= diag).all()
    if backend == "cpu" and kept.shape[-1] > 1 and S > 1:
        assert kept.stride(-1 if layout != "rank" else -2) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_columns_are_orthogonal_and_nothing_is_lost_without_a_rank(backend):
    factor, diag = covariance()
    turned, folded, singular = lrd.truncate(factor, diag, backend=backend)
    torch.testing.assert_close(turned @ turned.mT, factor @ factor.mT)
    torch.testing.assert_close(turned.mT @ turned, torch.diag(singular.square()), atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(folded, diag)
    assert (singular.diff() <= 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_folding_the_diagonal_stays(backend):
    factor, diag = covariance()
    kept, same, _ = lrd.truncate(factor, diag, 3, fold=False, backend=backend)
    assert torch.equal(same, diag)
    torch.testing.assert_close(kept, lrd.truncate(factor, diag, 3, backend=backend)[0])


def test_energy():
    factor, diag = covariance(batch=(3,))
    squares = torch.linalg.svdvals(factor).square()
    shares = squares.cumsum(-1) / squares.sum(-1, keepdim=True)
    for energy in (0.05, 0.5, 0.9, 1.0):
        kept = lrd.truncate(factor, diag, energy=energy)[0].shape[-1]
        assert (shares[:, kept - 1] >= energy - 1e-9).all()
        assert kept == 1 or (shares[:, kept - 2] < energy).any()
    exact = torch.zeros(20, 5, dtype=torch.float64)
    exact[:5] = torch.diag(torch.tensor([2.0, 1.0, 1.0, 0.0, 0.0], dtype=torch.float64))
    assert lrd.truncate(exact, torch.ones(20).double(), energy=1.0)[0].shape[-1] == 3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("rank", "fold"), [(3, True), (3, False), (None, True), (0, True)])
def test_gradients(backend, rank, fold):
    factor, diag = (t.requires_grad_() for t in covariance(12, 5, (2,)))

    def covariance_of(P, D):
        kept, folded, singular = lrd.truncate(P, D, rank, fold=fold, backend=backend)
        return kept @ kept.mT, folded, singular

    assert torch.autograd.gradcheck(covariance_of, (factor, diag))


def test_gradients_of_columns():
    factor, diag = (t.requires_grad_() for t in covariance(12, 4))
    assert torch.autograd.gradcheck(lambda P, D: lrd.truncate(P, D, 2)[0], (factor, diag))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("rank", "fold"), [(2, True), (2, False), (None, True)])
def test_second_derivatives(backend, rank, fold):
    factor, diag = (t.requires_grad_() for t in covariance(7, 4, (2,)))

    def columns_of(P, D):
        return lrd.truncate(P, D, rank, fold=fold, backend=backend)

    assert torch.autograd.gradgradcheck(columns_of, (factor, diag))


def test_second_derivatives_of_dependent_columns():
    """Eigenvalues of zero are equal, and are dropped together. The result depends on the covariance alone."""
    seed, diag = covariance(9, 3)
    mixing = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def loss(P, mixing):
        kept, folded, _ = lrd.truncate(P @ mixing, diag, 2)
        return (kept @ kept.mT).square().sum() + folded.log().sum()

    P, seconds = seed.requires_grad_(), []
    for given in (mixing, torch.linalg.cholesky(mixing @ mixing.mT)):  # five columns, or three
        (grad,) = torch.autograd.grad(loss(P, given), P, create_graph=True)
        seconds += torch.autograd.grad(grad.square().sum(), P)
    assert seconds[0].isfinite().all()
    torch.testing.assert_close(*seconds, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_transforms(backend):
    factor, diag = covariance(12, 4, (3,))

    def loss(P, D):
        kept, folded, singular = lrd.truncate(P, D, 2, backend=backend)
        return (kept @ kept.mT).square().sum() + folded.log().sum() + singular.sum()

    wanted = [torch.func.grad(loss, argnums=(0, 1))(factor[i], diag[i]) for i in range(3)]
    mapped = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)))(factor, diag)
    shared = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), (None, 0))(factor[0], diag)
    for which in (0, 1):
        torch.testing.assert_close(mapped[which], torch.stack([w[which] for w in wanted]))
    torch.testing.assert_close(shared[0][0], wanted[0][0])
    last = torch.func.vmap(lambda P, D: lrd.truncate(P, D, 2, backend=backend), (2, 1), 1)(
        factor.movedim(0, 2), diag.mT
    )
    for part, own in zip(last, lrd.truncate(factor, diag, 2, backend=backend), strict=True):
        torch.testing.assert_close(part.movedim(1, 0), own)
    second = torch.func.jacrev(torch.func.jacrev(loss))(factor[0], diag[0])
    wanted = torch.autograd.functional.hessian(lambda P: loss(P, diag[0]), factor[0])
    torch.testing.assert_close(second, wanted)


@pytest.mark.parametrize("layout", ["row", "rank"])
def test_gradient_has_the_layout_of_the_factor(layout):
    factor, diag = covariance(50, 6, (2,), torch.float32, layout)
    kept, folded, _ = lrd.truncate(factor.requires_grad_(), diag, 3)
    (kept.square().sum() + folded.log().sum()).backward()
    assert factor.grad.stride() == factor.stride()


def test_gradients_stay_finite_for_equal_singular_values():
    factor = torch.zeros(10, 4, dtype=torch.float64)
    factor[:4] = torch.eye(4, dtype=torch.float64)
    factor.requires_grad_()
    diag = torch.ones(10, dtype=torch.float64, requires_grad=True)
    for rank in (2, 4):
        kept, folded, singular = lrd.truncate(factor, diag, rank)
        loss = (kept @ kept.mT).square().sum() + folded.log().sum() + singular.sum()
        gradients = torch.autograd.grad(loss, (factor, diag))
        assert all(g.isfinite().all() for g in gradients)
    zero = torch.zeros(10, 4, dtype=torch.float64, requires_grad=True)
    kept, folded, singular = lrd.truncate(zero, diag, 2)
    assert all(g.isfinite().all() for g in torch.autograd.grad(kept.sum() + singular.sum(), zero))


def test_chunked_backward(monkeypatch):
    from lrd_kernels.linalg import products, stack

    factor, diag = covariance(37, 5, (2,))

    def gradients():
        leaves = [factor.detach().requires_grad_(), diag.detach().requires_grad_()]
        kept, folded, _ = lrd.truncate(*leaves, 2)
        return torch.autograd.grad((kept @ kept.mT).square().sum() + folded.log().sum(), leaves)

    whole = gradients()
    monkeypatch.setattr(stack, "BACKWARD_OPS", ())  # as on backends without these ops
    monkeypatch.setattr(products, "CHUNK_ELEMENTS", 40)
    for a, b in zip(gradients(), whole, strict=True):
        torch.testing.assert_close(a, b)


def test_batches_broadcast_and_may_be_empty():
    factor, _ = covariance(20, 4, (3, 1))
    _, diag = covariance(20, 4, (2,))
    kept, folded, singular = lrd.truncate(factor, diag, 2)
    assert kept.shape == (3, 2, 20, 2)
    assert folded.shape == (3, 2, 20)
    assert singular.shape == (3, 2, 2)
    one = lrd.truncate(factor[1, 0], diag[1], 2)
    torch.testing.assert_close(kept[1, 1], one[0])
    torch.testing.assert_close(folded[1, 1], one[1])
    assert lrd.truncate(torch.zeros(0, 5, 3), torch.ones(0, 5), 2)[0].shape == (0, 5, 2)
    assert lrd.truncate(torch.zeros(5, 0), torch.ones(5))[0].shape == (5, 0)


def test_bad_numbers_spoil_their_item_alone():
    factor, diag = covariance(20, 4, (3,))
    factor[1, 5, 2] = math.nan
    kept, folded, singular = lrd.truncate(factor, diag, 2)
    assert kept.isnan().flatten(1).any(1).tolist() == [False, True, False]
    assert singular.isnan().any(1).tolist() == [False, True, False]
    torch.testing.assert_close(kept[2], lrd.truncate(factor[2], diag[2], 2)[0])
    assert folded[[0, 2]].isfinite().all()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rank": -1}, ValueError, "rank must not be negative; got -1"),
        ({"rank": 2.0}, TypeError, "rank must be an int or None; got float"),
        ({"rank": 2, "energy": 0.5}, ValueError, "rank and energy must not both be given"),
        ({"energy": 0.0}, ValueError, "energy must be above 0 and at most 1; got 0.0"),
        ({"energy": 1.5}, ValueError, "energy must be above 0 and at most 1; got 1.5"),
    ],
)
def test_wrong_arguments(options, error, message):
    with pytest.raises(error, match=message):
        lrd.truncate(*covariance(), **options)


def test_distribution_method():
    loc = torch.randn(4, 60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    factor, diag = covariance(batch=(4,))
    full = lrd.LowRankMultivariateNormal(loc, factor, diag)
    small = full.truncate(3)
    assert isinstance(small, lrd.LowRankMultivariateNormal)
    assert small.cov_factor.shape == (4, 60, 3)
    torch.testing.assert_close(small.variance, full.variance)
    assert torch.equal(small.mean, full.mean)
    assert full.truncate(energy=0.5).cov_factor.shape[-1] < 9


@pytest.mark.alone
def test_same_bits_for_any_number_of_threads():
    factor, diag = covariance(5000, 40, dtype=torch.float32)
    basis = torch.linalg.qr(torch.ones(40, 40).double().tril()).Q[:, :12].contiguous()
    inputs = (factor[None, None], None, 1.0, 1.0, False, diag[None], basis[None], True, False)
    results = []
    for threads in (1, 2, 3, 8):
        torch.set_num_threads(threads)
        results.append(torch.ops.lrd.project_fold_fwd(*inputs))
    assert all(torch.equal(a, b) for r in results[1:] for a, b in zip(r, results[0], strict=True))
