"""Methods of the distribution beyond torch's, against dense float64."""

import math
import random

import pytest
import torch

import lrd_kernels as lrd
from lrd_kernels import testing


@pytest.fixture(params=[(), (2,)], ids=str)
def model(request):
    _, loc, factor, diag = testing.make_inputs(request.param, 20, 4)
    return lrd.LowRankMultivariateNormal(loc, factor, diag)


INDICES = [slice(3, 9), [0, 5, 19], torch.tensor([7, 2]), torch.arange(20) % 3 == 0, 4]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_marginal(model, index):
    rows = torch.arange(20)[[index] if isinstance(index, int) else index].reshape(-1)
    part = model.marginal(index)
    torch.testing.assert_close(part.mean, model.mean[..., rows])
    torch.testing.assert_close(part.covariance_matrix, model.covariance_matrix[..., rows[:, None], rows])


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_condition(model, index):
    rows = torch.arange(20)[[index] if isinstance(index, int) else index].reshape(-1)
    rest = torch.tensor([i for i in range(20) if i not in rows])
    value = torch.randn(len(rows), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    dense = model.covariance_matrix
    cross, seen = dense[..., rest[:, None], rows], dense[..., rows[:, None], rows]
    gain = cross @ torch.linalg.inv(seen)
    found = model.condition(index, value)
    torch.testing.assert_close(
        found.mean, model.mean[..., rest] + (gain @ (value - model.mean[..., rows])[..., None])[..., 0]
    )
    torch.testing.assert_close(found.covariance_matrix, dense[..., rest[:, None], rest] - gain @ cross.mT)
    joint = value.new_zeros(*model.batch_shape, 20)
    joint[..., rows] = value
    chain = found.log_prob(joint[..., rest]) + model.marginal(index).log_prob(value)
    torch.testing.assert_close(chain, model.log_prob(joint))


@pytest.mark.parametrize("shared", [True, False])
def test_condition_on_measurements(model, shared):
    rows, generator = [7, 2, 11], torch.Generator().manual_seed(0)
    value = torch.randn(4, *(1 for _ in model.batch_shape), 3, generator=generator, dtype=torch.float64)
    noise = 0.3 if shared else 0.1 + torch.rand(3, generator=generator, dtype=torch.float64)
    dense = model.covariance_matrix
    gain = dense[..., rows] @ torch.linalg.inv(dense[..., rows, :][..., rows] + noise * torch.eye(3).double())
    found = model.condition(rows, value, noise)
    assert found.batch_shape == torch.broadcast_shapes(value.shape[:-1], model.batch_shape)
    assert found.cov_factor.shape[-1] == model.cov_factor.shape[-1]
    mean = model.mean + (gain @ (value - model.mean[..., rows])[..., None])[..., 0]
    torch.testing.assert_close(found.mean, mean)
    wanted = (dense - gain @ dense[..., rows, :]).expand_as(found.covariance_matrix)
    torch.testing.assert_close(found.covariance_matrix, wanted)


def test_measurements_are_between_exact_and_worthless(model):
    value = torch.randn(3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact, rest = model.condition([3, 4, 5], value), [i for i in range(20) if i not in (3, 4, 5)]
    sharp, blunt = (model.condition([3, 4, 5], value, noise) for noise in (1e-13, 1e13))
    torch.testing.assert_close(sharp.marginal(rest).covariance_matrix, exact.covariance_matrix)
    torch.testing.assert_close(sharp.mean[..., 3:6], value.expand_as(sharp.mean[..., 3:6]))
    assert float((sharp.variance[..., 3:6] / 1e-13 - 1).abs().max()) < 1e-9
    torch.testing.assert_close(blunt.covariance_matrix, model.covariance_matrix)
    torch.testing.assert_close(blunt.mean, model.mean)


def test_gradient_of_conditioning_on_measurements():
    inputs = [torch.randn(*shape, dtype=torch.float64) for shape in ((5,), (5, 2), (2,))]
    positive = [0.5 + torch.rand(n, dtype=torch.float64) for n in (5, 2)]

    def parameters(loc, factor, value, diag, noise):
        found = lrd.LowRankMultivariateNormal(loc, factor, diag).condition([3, 1], value, noise)
        return found.loc, found.covariance_matrix

    assert torch.autograd.gradcheck(parameters, [t.requires_grad_() for t in (*inputs, *positive)])


def test_log_prob_of_a_part(model):
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(*model.batch_shape, 20, generator=generator, dtype=torch.float64)
    mask = torch.rand(20, generator=generator) < 0.6
    whole = model.log_prob(value)
    found = model.log_prob(torch.where(mask, value, torch.nan), mask=mask)
    torch.testing.assert_close(found, model.marginal(mask).log_prob(value[..., mask]))
    assert torch.equal(model.log_prob(value), whole)  # the masked factorisation is not kept for it
    with lrd.patch_torch():
        torchs = torch.distributions.LowRankMultivariateNormal(model.loc, model.cov_factor, model.cov_diag)
        assert torch.equal(torchs.log_prob(torch.where(mask, value, torch.nan), mask=mask), found)


def test_condition_refuses(model):
    for noise in (0.0, -1.0, torch.nan, torch.inf, torch.tensor([1.0, 0.0])):
        with pytest.raises(ValueError, match="noise must be a positive"):
            model.condition([1, 2], torch.zeros(2).double(), noise)
    with pytest.raises(ValueError, match=r"noise must be a number, or have shape \[..., 2\]"):
        model.condition([1, 2], torch.zeros(2).double(), torch.ones(3))
    with pytest.raises(ValueError, match="twice"):
        model.condition([1, 1], torch.zeros(2).double())
    with pytest.raises(ValueError, match=r"value must have shape \[..., 2\]"):
        model.condition([1, 2], torch.zeros(3).double())
    with pytest.raises(ValueError, match="bool index"):
        model.marginal(torch.ones(5, dtype=torch.bool))


def test_aggregate(model, monkeypatch):
    monkeypatch.setattr("lrd_kernels.linalg.products.CHUNK_ELEMENTS", 50)
    weights = torch.randn(3, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = model.aggregate(weights)
    torch.testing.assert_close(found.mean, (weights @ model.mean[..., None])[..., 0])
    torch.testing.assert_close(found.covariance, weights @ model.covariance_matrix @ weights.mT)
    torch.testing.assert_close(found.stddev.square(), found.variance)
    assert (found.correlation.diagonal(dim1=-2, dim2=-1) - 1).abs().max() < 1e-12
    mean, covariance = found
    assert mean.shape == (*model.batch_shape, 3)
    assert covariance.shape == (*model.batch_shape, 3, 3)


def test_aggregate_regions(model):
    labels = torch.arange(20) % 4 - 1  # -1 belongs to no region
    weights = torch.stack([(labels == k).double() for k in range(3)])
    torch.testing.assert_close(model.aggregate(labels).covariance, model.aggregate(weights).covariance)
    torch.testing.assert_close(model.aggregate(labels, reduction="mean").mean, model.aggregate(weights / 5).mean)
    with pytest.raises(ValueError, match="reduction"):
        model.aggregate(labels, reduction="max")
    with pytest.raises(ValueError, match="weights must be"):
        model.aggregate(weights[:, :5])


def test_correlation(model):
    dense = model.covariance_matrix
    scale = dense.diagonal(dim1=-2, dim2=-1).sqrt()
    wanted = dense / (scale[..., :, None] * scale[..., None, :])
    for index in (0, 7, -1):
        torch.testing.assert_close(model.correlation(index), wanted[..., index, :])


def test_modes(model):
    vectors, singular = model.modes(3)
    assert vectors.shape == (*model.batch_shape, 20, 3)
    torch.testing.assert_close(vectors.mT @ vectors, torch.eye(3).double().expand(*model.batch_shape, 3, 3))
    torch.testing.assert_close(singular, torch.linalg.svdvals(model.cov_factor)[..., :3])
    everything = model.modes()
    rebuilt = (everything.vectors * everything.singular_values[..., None, :].square()) @ everything.vectors.mT
    torch.testing.assert_close(rebuilt, model.cov_factor @ model.cov_factor.mT)


def test_whiten_and_back(model, monkeypatch):
    monkeypatch.setattr("lrd_kernels.linalg.products.CHUNK_ELEMENTS", 50)  # several chunks
    value = torch.randn(5, *model.batch_shape, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noise = model.whiten(value)
    torch.testing.assert_close(model.unwhiten(noise), value)
    torch.testing.assert_close(
        noise.square().sum(-1), lrd.mahalanobis(value - model.mean, model.cov_factor, model.cov_diag)
    )
    units = torch.eye(20).double().reshape(20, *(1,) * len(model.batch_shape), 20)
    root = (model.unwhiten(units.expand(20, *model.batch_shape, 20)) - model.mean).movedim(0, -1)
    torch.testing.assert_close(root @ root.mT, model.covariance_matrix)


def test_whitening_has_gradients_for_what_it_says(model):
    value = torch.zeros(20, dtype=torch.float64, requires_grad=True)
    model.unwhiten(model.whiten(value)).sum().backward()
    torch.testing.assert_close(value.grad, torch.full_like(value, float(model.batch_shape.numel())))
    trained = model.cov_factor.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="no gradients with respect to the covariance"):
        lrd.LowRankMultivariateNormal(model.loc, trained, model.cov_diag).whiten(value)


def test_quantile(model):
    torch.testing.assert_close(model.quantile(0.5), model.mean)
    low, high = model.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    torch.testing.assert_close(high - model.mean, model.mean - low)
    torch.testing.assert_close(high - model.mean, 1.959963984540054 * model.stddev)
    with pytest.raises(ValueError, match="between 0 and 1"):
        model.quantile(1.5)


def test_energy_score_is_proper():
    _, loc, factor, diag = testing.make_inputs((), 20, 4)
    truth = lrd.LowRankMultivariateNormal(loc, factor, diag)
    generator = torch.Generator().manual_seed(0)
    values = truth.sample((400,), generator=generator)
    scores = [
        lrd.LowRankMultivariateNormal(loc + shift, scale * factor, diag)
        .energy_score(values[:, None].expand(400, 1, 20), 200, generator=generator)
        .mean()
        for shift, scale in ((0.0, 1.0), (0.7, 1.0), (0.0, 3.0))
    ]
    assert scores[0] < min(scores[1:])


def test_from_samples():
    samples = torch.randn(6, 2, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = lrd.LowRankMultivariateNormal.from_samples(samples, diag=0.1)
    for item in range(2):
        wanted = samples[:, item].T.cov() + 0.1 * torch.eye(20).double()
        torch.testing.assert_close(model.covariance_matrix[item], wanted)
    small = lrd.LowRankMultivariateNormal.from_samples(samples, diag=0.1, rank=2)
    assert small.cov_factor.shape[-1] == 2
    torch.testing.assert_close(small.variance, model.variance)
    with pytest.raises(ValueError, match="at least 2"):
        lrd.LowRankMultivariateNormal.from_samples(samples[:1], diag=0.1)


def test_from_swag():
    mean = torch.randn(20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    deviations = torch.randn(5, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model = lrd.LowRankMultivariateNormal.from_swag(mean, mean.square() + 0.3, deviations)
    wanted = 0.15 * torch.eye(20).double() + deviations.T @ deviations / (2 * 4)
    torch.testing.assert_close(model.covariance_matrix, wanted)


def test_to_save_and_load(model, tmp_path):
    narrow = model.to(torch.float32)
    assert narrow.loc.dtype == narrow.cov_factor.dtype == torch.float32
    pytest.importorskip("safetensors")
    model.save(tmp_path / "model.safetensors")
    again = lrd.LowRankMultivariateNormal.load(tmp_path / "model.safetensors")
    for name in ("loc", "cov_factor", "cov_diag"):
        assert torch.equal(getattr(again, name), getattr(model, name))


def test_gradients():
    value, *parameters = testing.make_inputs((), 8, 3)
    leaves = [t.requires_grad_() for t in parameters]

    def moments(*p):
        model = lrd.LowRankMultivariateNormal(*p)
        rest = model.condition([1, 4], value[[1, 4]])
        summed = model.aggregate(torch.arange(8) % 2)
        return rest.mean, rest.variance, summed.mean, summed.covariance, model.correlation(2), model.quantile(0.9)

    assert torch.autograd.gradcheck(moments, leaves)


def test_subclasses_keep_their_class_to_themselves():
    joint = lrd.joint(*(t[:, None] for t in testing.make_inputs((3,), 20, 4)[1:]))
    assert type(joint.marginal(slice(5))) is lrd.LowRankMultivariateNormal
    assert type(joint.epistemic.marginal(slice(5))) is lrd.SemidefiniteNormal
    assert math.isfinite(float(joint.marginal(slice(5)).entropy()))


def test_antithetic_samples(model):
    draws = model.sample((6,), generator=torch.Generator().manual_seed(0), antithetic=True)
    torch.testing.assert_close(draws[:3] + draws[3:], (2 * model.mean).expand_as(draws[:3]))
    with pytest.raises(ValueError, match="even number"):
        model.sample((5,), antithetic=True)
    with pytest.raises(ValueError, match="even number"):
        model.sample(antithetic=True)


def test_common_noise_and_masks(model):
    noise = tuple(
        torch.randn(3, *model.batch_shape, size, generator=torch.Generator().manual_seed(size)).double()
        for size in (4, 20)
    )
    draws = model.sample((3,), noise=noise)
    wanted = model.mean + (model.cov_factor @ noise[0][..., None])[..., 0] + model.cov_diag.sqrt() * noise[1]
    torch.testing.assert_close(draws, wanted)
    mask = torch.arange(20) < 8
    some = model.sample((3,), noise=noise, mask=mask)
    assert torch.equal(some[..., :8], draws[..., :8])
    assert torch.equal(some[..., 8:], model.mean[..., 8:].expand(some[..., 8:].shape))
    with pytest.raises(ValueError, match="noise must have shape"):
        model.sample((2,), noise=noise)


@pytest.mark.parametrize("index", [[1, 1], torch.tensor([3, 0, 3]), [-1, 7]], ids=str)
def test_an_output_has_one_place_in_a_marginal(index):
    model = lrd.LowRankMultivariateNormal(*testing.make_inputs((), 8, 2)[1:])
    with pytest.raises(ValueError, match="twice"):
        model.marginal(index)


def test_positions_of_any_integer_type():
    model = lrd.LowRankMultivariateNormal(*testing.make_inputs((), 8, 2)[1:])
    for index in (torch.tensor([1, 0, 7], dtype=torch.uint8), [1, 0, 7], torch.tensor([1, 0, 7], dtype=torch.int16)):
        assert torch.equal(model.marginal(index).loc, model.loc[[1, 0, 7]])
    with pytest.raises(TypeError, match="integer positions or a bool mask"):
        model.marginal(torch.tensor([0.0, 1.0]))


def test_kl_of_any_broadcast_is_that_of_dense_gaussians():
    """Batches of p and q, of their factors and of their diagonals, each with dimensions of its own."""
    choose = random.Random(0).choice
    batches = [(), (1,), (3,), (2, 1), (2, 3), (1, 3)]
    for seed in range(60):
        p, q = (
            lrd.LowRankMultivariateNormal(
                *(testing.make_inputs(choose(batches), 5, 3, seed=2 * seed + i)[field] for field in (1, 2, 3))
            )
            for i in range(2)
        )
        dense = [torch.distributions.MultivariateNormal(d.loc, d.covariance_matrix) for d in (p, q)]
        wanted = torch.distributions.kl_divergence(*dense)
        for first, second in ((p, q), (dense[0], q), (p, dense[1])):
            torch.testing.assert_close(torch.distributions.kl_divergence(first, second), wanted)
