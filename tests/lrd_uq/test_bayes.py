"""Bayesian methods: short trainings, draws, expected weights and joint Gaussians."""

import copy
import math

import pytest
import torch
from torch import nn

import lrd_kernels as lrd
from lrd_uq.bayes import (
    Dropout,
    Ensemble,
    EnsembleNet,
    Method,
    NoExpectedWeights,
    Variational,
    VariationalLayer,
    predict_joint,
    to_variational,
)
from lrd_uq.bayes.ensemble import reinitialised
from lrd_uq.evaluate import evaluate
from lrd_uq.heads import DiagonalHead, LowRankHead
from lrd_uq.module import JointUncertainty
from lrd_uq.nets import wrap

METHODS = {"none": Method, "dropout": Dropout, "variational": Variational, "ensemble": lambda: Ensemble(3)}
RANDOM = ("dropout", "variational", "ensemble")


@pytest.fixture(params=METHODS)
def method(request):
    return METHODS[request.param]()


@pytest.fixture(params=RANDOM)
def random_method(request):
    return METHODS[request.param]()


def prepared(method, make_net):
    return method.prepare(make_net(dropout=0.3 if isinstance(method, Dropout) else 0.0))


def test_short_training_learns(method, make_net, make_trainer, data):
    net = make_net(dropout=0.1 if isinstance(method, Dropout) else 0.0)
    module = JointUncertainty(net, method, learning_rate=5e-3)
    before = evaluate(method, module.net, data.part("test"), 4)
    make_trainer(60).fit(module, datamodule=data)
    after = evaluate(method, module.net, data.part("test"), 4)
    key = "single" if type(method) is Method else "joint"
    assert after.rows[key].mean > before.rows[key].mean + 100  # nats of 560 pixels; a constant gains far less
    assert after.rmse < 0.9 * before.rmse
    batch = data.part("test")
    mask = module.heads[0].flat(batch.mask)
    joint = predict_joint(method, module.net, batch.input, 4, 8, mask=mask)
    assert joint.sample((3,)).shape == (3, 16, 784)
    assert (
        lrd.log_prob(batch.target.flatten(1), joint.loc, joint.cov_factor, joint.cov_diag, mask=mask).isfinite().all()
    )
    assert (joint.aleatoric.variance <= joint.variance + 1e-5).all()


def test_draws_differ_and_leave_the_network_alone(random_method, make_net):
    net = prepared(random_method, make_net)
    net.train()
    state = copy.deepcopy(net.state_dict())
    modes = [module.training for module in net.modules()]
    x = torch.rand(2, 2, 28, 28)
    means = torch.stack([p.mean for p in random_method.sample_predictions(net, x, 3)])
    assert means.shape == (3, 2, 784)
    assert (means.std(0) > 0).float().mean() > 0.9
    assert not means.requires_grad
    assert [module.training for module in net.modules()] == modes
    assert all(torch.equal(net.state_dict()[k], v) for k, v in state.items() if isinstance(v, torch.Tensor))


def test_deterministic_network_gives_one_prediction(make_net):
    assert len(list(Method().sample_predictions(make_net(), torch.rand(2, 2, 28, 28), 64))) == 1


@pytest.mark.parametrize("name", ["none", "dropout", "variational"])
def test_expected_weights_are_not_random(name, make_net):
    method = METHODS[name]()
    net = prepared(method, make_net)
    x = torch.rand(2, 2, 28, 28)
    first, second = method.expected(net)(x, None), method.expected(net)(x, None)
    assert torch.equal(first.mean, second.mean)


def test_expected_weights_lie_amid_the_draws(make_net):
    method = Variational(initial_std=1e-3)
    net = method.prepare(make_net())
    x = torch.rand(2, 2, 28, 28)
    mean = torch.stack([p.mean for p in method.sample_predictions(net, x, 200)]).mean(0)
    spread = torch.stack([p.mean for p in method.sample_predictions(net, x, 50)]).std(0)
    assert ((method.expected(net)(x, None).mean - mean).abs() < 0.5 * spread).float().mean() > 0.95


def test_ensemble_says_why_it_has_no_expected_weights(make_net):
    with pytest.raises(NoExpectedWeights, match="no expected weights: its members lie in different minima"):
        Ensemble(3).expected(Ensemble(3).prepare(make_net()))


@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_streamed_joint_is_that_of_all_predictions(chunk, make_net):
    method, net, x = Dropout(), make_net(dropout=0.3), torch.rand(2, 2, 28, 28)
    mask = torch.rand(2, 784) > 0.3
    streamed = predict_joint(method, net, x, 7, 64, mask=mask, chunk=chunk)  # 7 x 5 columns: nothing is dropped
    draws = list(method.sample_predictions(net, x, 7, mask=mask, chunk=chunk))
    means, factors, diags = map(torch.stack, zip(*draws, strict=True))
    exact = lrd.joint(means, factors, diags)
    torch.testing.assert_close(streamed.mean, exact.mean)
    torch.testing.assert_close(streamed.covariance_matrix, exact.covariance_matrix, rtol=1e-4, atol=1e-5)
    assert len(means) == 7


def test_chunks_draw_a_mask_for_every_pass(make_net):
    draws = Dropout().sample_predictions(make_net(dropout=0.3), torch.rand(1, 2, 28, 28), 4, chunk=4)
    means = torch.stack([p.mean for p in draws])
    assert len(means.unique(dim=0)) == 4


def test_dropout_without_dropout_layers_is_refused(make_net):
    with pytest.raises(ValueError, match="no dropout layer with a rate above 0"):
        next(Dropout().sample_predictions(make_net(), torch.rand(1, 2, 28, 28), 2))


@pytest.mark.parametrize("name", ["dropout", "variational"])
def test_randomness_of_training_can_be_turned_off(name, make_net):
    method = METHODS[name]()
    net = prepared(method, make_net).train()
    x = torch.rand(2, 2, 28, 28)
    method.activate(net, False)
    method.activate(net, False)  # twice is once
    assert torch.equal(net(x).mean, net(x).mean)
    assert method.kl(net, 1.0) is None
    method.activate(net, True)
    assert not torch.equal(net(x).mean, net(x).mean)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 5, 3, stride=2, padding=1),
        nn.ConvTranspose2d(3, 5, 2, stride=2, bias=False),
        nn.Conv3d(3, 5, 3, padding=1, padding_mode="circular"),
        nn.Linear(6, 5),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_local_reparameterisation_has_the_moments_of_drawn_weights(layer):
    torch.manual_seed(0)
    variational = VariationalLayer(layer, 0.1, 0.2).train()
    x = torch.randn(1, 3, *(6,) * (3 if isinstance(layer, nn.Conv3d) else 2))
    moments = []
    for noise in ("activations", "weights"):
        variational.noise = noise
        with torch.no_grad():
            outs = torch.stack([variational(x) for _ in range(2000)])
        moments.append((outs.mean(0), outs.std(0)))
    (mean, std), (other_mean, other_std) = moments
    error = std / math.sqrt(2000)
    assert ((mean - other_mean).abs() < 6 * error).all()
    torch.testing.assert_close(std, other_std, rtol=0.15, atol=1e-3)
    with torch.no_grad():
        torch.testing.assert_close(mean, layer(x), rtol=0, atol=float(6 * error.max()))


def test_kl_is_that_of_the_gaussians():
    layer = VariationalLayer(nn.Linear(6, 5), 0.3, 0.2)
    q = torch.distributions.Normal(layer.mean, layer.std)
    prior = torch.distributions.Normal(torch.zeros(5, 6), 0.3)
    torch.testing.assert_close(layer.kl(), torch.distributions.kl_divergence(q, prior).sum())


def test_conversion_reaches_every_layer_and_keeps_the_function(make_net):
    net = make_net().eval()
    x = torch.rand(2, 2, 28, 28)
    wanted = net(x).mean
    before = sum(isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)) for m in net.modules())
    to_variational(net.backbone)
    assert sum(isinstance(m, VariationalLayer) for m in net.modules()) == before == 6
    torch.testing.assert_close(net(x).mean, wanted)
    assert to_variational(net.backbone) is net.backbone  # again: nothing is wrapped twice
    assert sum(isinstance(m, VariationalLayer) for m in net.modules()) == before


def test_kl_enters_the_loss_per_item_and_output(make_net, make_trainer, data):
    losses = []
    for weight in (0.0, 1.0):
        module = JointUncertainty(make_net(), Variational(kl_weight=weight))
        trainer = make_trainer(1)
        trainer.fit(module, datamodule=data)
        losses.append({k: float(v) for k, v in trainer.callback_metrics.items()})
    assert losses[1]["loss"] - losses[0]["loss"] == pytest.approx(losses[1]["kl"] / (128 * 560), rel=1e-3)


def test_members_begin_apart_and_stay_apart(make_net, make_trainer, data):
    module = JointUncertainty(make_net(), Ensemble(2))
    first, second = module.method.members(module.net)
    assert not torch.equal(first.backbone.down.weight, second.backbone.down.weight)
    assert float(second.head.factor_weight.detach().abs().max()) <= 0.1 / math.sqrt(
        8
    )  # the head's own scale, not its layers'
    alone = JointUncertainty(copy.deepcopy(first))
    make_trainer(3).fit(module, datamodule=data)
    make_trainer(3).fit(alone, datamodule=data)
    for ours, theirs in zip(first.parameters(), alone.net.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_layers_that_cannot_be_redrawn_are_named(make_net):
    net = make_net()
    net.backbone.extra = nn.Parameter(torch.randn(3))
    with pytest.raises(ValueError, match=r"backbone\.extra has no reset_parameters"):
        reinitialised(net)


def test_networks_trained_apart_make_an_ensemble(make_net):
    net = EnsembleNet([make_net(), reinitialised(make_net())])
    assert len(list(Ensemble(2).sample_predictions(net, torch.rand(1, 2, 28, 28), 64))) == 2


def test_many_predictions_of_a_large_picture_fit_in_little_memory():
    """T = 64, S = 196608, R = 8: all factors would take 403 MB; streamed, only a few columns are kept."""
    method = Dropout()
    net = wrap(nn.Sequential(nn.Conv2d(1, 4, 1), nn.Dropout2d(0.5)), LowRankHead(4, 8, 3))
    x = torch.rand(1, 1, 256, 256)
    alive = [predictions_alive(method, net, x, 64)]
    joint = predict_joint(method, net, x, 64, 8, parts=False)
    assert joint.cov_factor.shape == (1, 196608, 8)
    assert alive[0] <= 2


def predictions_alive(method, net, x, T):
    """The largest number of predictions alive at the same time."""
    import weakref

    references, most = [], 0
    for prediction in method.sample_predictions(net, x, T):
        references.append(weakref.ref(prediction.factor))
        most = max(most, sum(reference() is not None for reference in references))
    return most


def test_diagonal_networks_have_joints_too(make_net):
    net = make_net(dropout=0.3, head=DiagonalHead(8))
    joint = predict_joint(Dropout(), net, torch.rand(2, 2, 28, 28), 5, 8)
    assert joint.cov_factor.shape == (2, 784, 4)  # epistemic ones
