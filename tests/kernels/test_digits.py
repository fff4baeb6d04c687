"""Functions beside log_prob where float32, or a Cholesky factorisation, would lose their digits."""

import pytest
import torch
from torch.distributions import kl_divergence

import lrd_kernels as lrd
from lrd_kernels import testing
from lrd_kernels.linalg import double_double

Normal = lrd.LowRankMultivariateNormal
SMALLEST = [1e-6, 1e-12, 1e-16, 1e-20, 1e-30, 1e-42]


def relative(actual, wanted):
    return float((actual.double() - wanted).abs().max() / wanted.abs().max())


def one_small_entry(smallest, R=4, S=40, batch=()):
    """A Gaussian one of whose outputs is almost exactly explained by the others, and a value."""
    inputs = testing.make_inputs(batch, S, R, dtype=torch.float32)
    inputs.cov_diag[..., 5] = smallest
    return inputs


def covariance(factor, diag):
    return factor.double() @ factor.double().mT + torch.diag_embed(diag.double())


@pytest.mark.parametrize("smallest", SMALLEST)
@pytest.mark.parametrize("R", [1, 4])
def test_solve_and_the_precision_matrix_are_inverses(R, smallest):
    value, loc, factor, diag = one_small_entry(smallest, R)
    wanted = torch.linalg.inv(covariance(factor, diag))  # well-conditioned: the output has a variance of its own
    assert relative(lrd.solve(value, factor, diag), wanted @ value.double()) < 1e-5
    assert relative(lrd.solve(value, factor, diag, precision="qr"), wanted @ value.double()) < 1e-5
    assert relative(Normal(loc, factor, diag).precision_matrix, wanted) < 1e-5
    L = lrd.capacitance_cholesky(factor.double(), diag.double())[0]
    scaled = factor.double() / diag.double().sqrt()[:, None]
    assert relative(L @ L.mT, torch.eye(R) + scaled.mT @ scaled) < 1e-10


@pytest.mark.parametrize("precision", ["auto", "qr"])
@pytest.mark.parametrize("smallest", [1e-20, 1e-42])
def test_explained_outputs_of_one_column_each(smallest, precision):
    """Zeros in the longest rows: without column pivoting, short rows would lose their digits to them."""
    value, loc, factor, diag = one_small_entry(smallest)
    diag[7] = 1e3 * smallest
    factor[5], factor[7] = torch.tensor([[0.0, 0, 0, 3], [0, 2, 0, 0]])
    leaves = [t.requires_grad_() for t in (value, loc, factor, diag)]
    found = lrd.log_prob(*leaves, precision=precision)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    dense = torch.distributions.MultivariateNormal(wide[1], wide[2] @ wide[2].mT + torch.diag(wide[3]))
    wanted = dense.log_prob(wide[0])
    assert relative(found.detach(), wanted.detach()) < 1e-6
    pairs = zip(torch.autograd.grad(found, leaves), torch.autograd.grad(wanted, wide), strict=True)
    assert max(relative(*pair) for pair in pairs) < 1e-5
    normal = Normal(*(t.detach() for t in leaves[1:]))
    assert relative(normal.precision_matrix, torch.linalg.inv(covariance(*leaves[2:]).detach())) < 1e-5


@pytest.mark.parametrize("smallest", SMALLEST)
def test_solve_has_right_gradients(smallest):
    value, _, factor, diag = one_small_entry(smallest)
    weights = torch.linspace(-1, 1, 40)
    leaves = [t.clone().requires_grad_() for t in (value, factor, diag)]
    found = torch.autograd.grad((lrd.solve(*leaves) * weights).sum(), leaves)
    wide = [t.double().requires_grad_() for t in (value, factor, diag)]
    x = torch.linalg.solve(wide[1] @ wide[1].mT + torch.diag(wide[2]), wide[0])
    wanted = torch.autograd.grad((x * weights).sum(), wide)
    assert max(map(relative, found, wanted)) < 1e-4


@pytest.mark.parametrize("smallest", SMALLEST)
def test_whitening_keeps_the_distance_and_comes_back(smallest):
    value, loc, factor, diag = one_small_entry(smallest, batch=(2,))
    diag[1, 5], diag[1, 7] = 0.3, smallest  # another explained output in each item
    normal = Normal(loc, factor, diag)
    noise = normal.whiten(value)
    distance = lrd.mahalanobis(value - loc, factor, diag).double()
    assert relative(noise.double().square().sum(-1), distance) < 1e-5
    torch.testing.assert_close(normal.unwhiten(noise), value, rtol=1e-5, atol=1e-5)
    units = torch.eye(40)[:, None].expand(40, 2, 40)
    root = (normal.unwhiten(units) - loc).movedim(0, -1).double()
    assert relative(root @ root.mT, covariance(factor, diag)) < 1e-5


@pytest.mark.parametrize(
    ("dtype", "smallest", "bound"),
    [(torch.float32, d, 1e-5) for d in (1e-4, 1e-8, 1e-10)]
    + [(torch.bfloat16, d, 2**-8) for d in (1e-2, 1e-8)]
    + [(torch.float16, 1e-4, 2**-10)],
)
def test_condition_fills_in_what_the_factor_explains(dtype, smallest, bound):
    generator = torch.Generator().manual_seed(0)
    factor, loc = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((400, 4), (400,)))
    diag = torch.full((400,), smallest).to(dtype)
    latent = torch.randn(4, generator=generator)
    value = (loc.float() + factor.float() @ latent).to(dtype)
    found = Normal(loc, factor, diag).condition(slice(0, 300), value[:300])
    P, D, r = factor.double(), diag.double(), value.double() - loc.double()
    A = torch.cat([P[:300] / D[:300, None].sqrt(), torch.eye(4, dtype=torch.float64)])
    b = torch.cat([r[:300] / D[:300].sqrt(), torch.zeros(4, dtype=torch.float64)])
    z = torch.linalg.lstsq(A, b[:, None], driver="gelsd").solution[:, 0]
    assert relative(found.loc, loc[300:].double() + P[300:] @ z) < bound
    spread = P[300:] @ torch.linalg.inv(A.mT @ A) @ P[300:].mT + torch.diag(D[300:])
    assert relative(covariance(found.cov_factor, found.cov_diag), spread) < 4 * bound


@pytest.mark.parametrize("layout", ["row", "rank"])
@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e18])
def test_truncate_finds_small_singular_values(scale, layout):
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(n, 6, generator=generator, dtype=torch.float64))[0] for n in (500, 6))
    values = torch.tensor([1.0, 0.5, 1e-2, 1e-3, 1e-5, 1e-6], dtype=torch.float64)
    factor = testing.in_layout(((left * values) @ right.mT * scale).float(), layout)
    wanted = torch.linalg.svdvals(factor.double())
    for rank in (None, 6, 5, 3):
        kept, _, found = lrd.truncate(factor, torch.ones(500), rank)
        assert float((found / wanted[: len(found)] - 1).abs().max()) < 1e-9
        lengths = kept.double().norm(dim=0)
        assert relative(lengths, wanted[: len(found)]) < 1e-6
        cosines = (kept.double() / lengths).mT @ (kept.double() / lengths)
        assert float((cosines - torch.eye(len(found))).abs().max()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_truncate_does_not_swamp_a_small_diagonal(dtype):
    factor = 1e4 * torch.randn(50, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    factor[:, 2] = 0
    diag = torch.full((50,), 1e-12, dtype=dtype)
    assert relative(lrd.truncate(factor, diag, 2)[1], diag.double()) < 1e-3  # nothing is dropped
    assert torch.equal(lrd.truncate(factor, diag)[1], diag)
    one, folded, _ = lrd.truncate(factor, diag, 1)
    total = factor.double().square().sum(1) - one.double().square().sum(1)
    assert relative(folded, total) < 1e-6


def test_truncate_leaves_its_arguments_as_they_were():
    factor = 1e4 * torch.randn(2, 50, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    diag = torch.full((50,), 1e-12, dtype=torch.float64)
    for given in (diag, diag.expand(2, 50), diag.expand(2, 50).clone()):
        before = given.clone()
        assert bool((lrd.truncate(factor, given, 1)[1] > 1).all())
        assert torch.equal(given, before)


def test_products_with_large_means_and_scales():
    factor = torch.tensor([[1e12, 1.0], [1.0, 1e12], [1e20, 0.0]])
    normal = Normal(torch.zeros(3), factor, torch.ones(3))
    torch.testing.assert_close(normal.correlation(0), torch.tensor([1.0, 2e-12, 1.0]))
    assert normal.stddev[2] == 1e20
    vec = torch.tensor([1e12, -1e12, 0.0])
    wanted = covariance(factor, torch.ones(3)) @ vec.double()
    torch.testing.assert_close(lrd.matvec(vec, factor, torch.ones(3)).double()[:2], wanted[:2], rtol=1e-6, atol=0)
    means = torch.full((5, 3), 1e6 / 3)
    means[0] += 1
    wanted = means.double().var(0).float() + 1e-6
    torch.testing.assert_close(lrd.joint(means, None, torch.full((5, 3), 1e-6)).variance, wanted, rtol=1e-6, atol=0)
    samples = 1e5 + torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    wanted = samples.double().var(0).float() + 0.01
    torch.testing.assert_close(Normal.from_samples(samples, 0.01).variance, wanted, rtol=1e-6, atol=0)


def test_divergence_of_nearly_equal_gaussians():
    zeros, factor = torch.zeros(10000), torch.full((10000, 1), 0.01)
    p, q = Normal(zeros, factor, torch.ones(10000)), Normal(zeros, factor, torch.full((10000,), 1.0001))
    wide = [Normal(*(t.double() for t in (d.loc, d.cov_factor, d.cov_diag))) for d in (p, q)]
    truth = 0.5 * (wide[1].cov_diag.log() - wide[0].cov_diag.log() + 1 / wide[1].cov_diag - 1).sum()
    assert float(kl_divergence(p, q)) == pytest.approx(float(truth), rel=1e-2)  # the factor matters a little
    assert float(kl_divergence(p, q)) == pytest.approx(float(kl_divergence(*wide)), rel=1e-6)


def test_nan_is_refused_where_qr_takes_over():
    factor = torch.tensor([[torch.nan], [1.0]])
    for precision in ("auto", "qr"):
        with pytest.raises(lrd.NotPositiveDefiniteError, match=r"cov_factor\[0, 0\]"):
            lrd.logdet(factor, torch.ones(2), precision=precision)
        assert lrd.entropy(factor, torch.ones(2), precision=precision, on_failure="nan").isnan()


def test_gradient_of_a_raw_diagonal_far_below_its_floor():
    raw = torch.full((3,), -60.0, requires_grad=True)
    lrd.nll_loss(torch.zeros(3), raw, torch.zeros(3, 1), torch.full((3,), 1e-2), eps=1e-6).backward()
    slope = torch.tensor(-60.0).double().exp()
    wanted = slope * 0.5 * (1e6 - 1e-4 * 1e12) / 3
    assert float(raw.grad[0]) == pytest.approx(float(wanted), rel=1e-4, abs=0)


@pytest.mark.parametrize("raw", [-200.0, -80.0])
def test_gradients_are_finite_without_a_floor(raw):
    """The mean is the target: what remains is the log-determinant."""
    mean, factor = torch.zeros(20), torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    leaves = [t.requires_grad_() for t in (torch.full((20,), raw), factor)]
    loss = lrd.nll_loss(mean, *leaves, mean, eps=0.0)
    loss.backward()
    assert loss.isfinite()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)
    assert float(leaves[0].grad.sum()) == pytest.approx(0.5 * (20 - 3) / 20, rel=1e-4)  # trace of I - projection


@pytest.mark.parametrize("function", ["log_prob", "entropy"])
def test_totals_of_masked_outputs_cancel_in_float64(function):
    S, mask = 4000, torch.arange(4000) < 3000
    value, factor = torch.zeros(S), torch.full((S, 1), 1e-3)
    diag = torch.full((S,), 1 / (2 * torch.pi))  # the log-determinant cancels with S log 2 pi
    diag = diag / torch.e if function == "entropy" else diag
    arguments = (value, value, factor, diag) if function == "log_prob" else (factor, diag)
    call = getattr(lrd, function)
    wanted = call(*(t.double() for t in arguments), mask=mask)
    assert abs(wanted) < 1
    for precision in ("auto", "qr"):
        found = call(*arguments, mask=mask, precision=precision)
        assert found.dtype == torch.float32
        assert relative(found, wanted) < 2e-6  # of D, which is rounded


def test_the_capacitance_cholesky_of_a_huge_row_is_valid():
    value = torch.randn(2, 20, 6, generator=torch.Generator().manual_seed(0))
    diag = torch.ones(20)
    diag[2] = 1.8e-39
    L, info = lrd.capacitance_cholesky(value, diag)
    assert not info.any()
    assert not lrd.capacitance_cholesky(value[..., :0], diag)[1].any()
    lengths = (value.double().square() / diag.double()[:, None]).sum(-2) + 1
    torch.testing.assert_close(L.double().square().sum(-1), lengths, rtol=1e-6, atol=0)
    broken = value.clone()
    broken[1, 3, 3] = torch.nan
    assert lrd.capacitance_cholesky(broken, diag)[1].tolist() == [0, 1]


@pytest.mark.parametrize("R", [4, 40])
def test_equal_columns_beyond_the_number_of_outputs(R):
    column = torch.tensor([1.5e5, -8.2e4, -4.5e3, -9.1e4])
    factor, diag = column[:, None].expand(4, R).clone(), torch.tensor([0.7, 0.14, 0.27, 0.8])
    value = torch.tensor([0.5, 2.0, 1.5, -1.7])
    wanted = torch.autograd.functional.jacobian(
        lambda P: lrd.log_prob(value.double(), value.new_zeros(4).double(), P, diag.double()),
        (column.double() * R**0.5)[:, None],
    )  # of one column with the same covariance
    leaf = factor.requires_grad_()
    lrd.log_prob(value, torch.zeros(4), leaf, diag).backward()
    assert relative(leaf.grad, wanted.expand(4, R) / R**0.5) < 1e-5
    rest = Normal(torch.zeros(4), factor.detach(), diag).condition([1, 2], value[1:3])
    narrow = Normal(torch.zeros(4).double(), (column.double() * R**0.5)[:, None], diag.double())
    assert relative(rest.loc, narrow.condition([1, 2], value[1:3].double()).loc) < 1e-5


def test_modes_of_a_factor_of_rank_one():
    factor = torch.linspace(1, 2, 6)[:, None].expand(6, 5).clone()
    modes = Normal(torch.zeros(6), factor, torch.ones(6)).modes()
    torch.testing.assert_close(modes.singular_values, torch.tensor([factor.norm(), 0.0, 0, 0, 0]))
    torch.testing.assert_close(modes.vectors[:, 0].norm(), torch.tensor(1.0))
    assert not modes.vectors[:, 1:].any()


def test_power_iteration_finds_an_eigenvalue_far_below_the_others():
    _, _, factor, diag = one_small_entry(1e-40, R=2, S=8)
    factor[5] = 0
    found = lrd.extreme_eigenvalues(factor, diag, method="power")
    assert found.converged
    torch.testing.assert_close(found.smallest, diag[5].double(), rtol=1e-5, atol=0)
    _, _, factor, diag = one_small_entry(1e-40, R=2, S=8)
    wanted = torch.linalg.eigvalsh(covariance(factor, diag))[0]
    found = lrd.extreme_eigenvalues(factor, diag, method="power", max_iter=5000)
    torch.testing.assert_close(found.smallest, wanted, rtol=1e-5, atol=0)


def test_products_of_double_double():
    A = torch.tensor([[1e16, 1.0, -1e16], [3.0, 1e-20, -3.0]], dtype=torch.float64)
    assert double_double.product(A, torch.ones(3, 2, dtype=torch.float64)).tolist() == [[1.0, 1.0], [1e-20, 1e-20]]
    x = torch.tensor([[1 + 2.0**-30, -(1 + 2.0**-29)]], dtype=torch.float64)
    assert double_double.product(x, torch.tensor([[1 + 2.0**-30], [1.0]], dtype=torch.float64)).item() == 2.0**-60
