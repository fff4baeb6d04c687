"""Variants: split networks, orthogonal columns, NPPC, ranks, SWAG and Laplace, each with a short training."""

import pytest
import torch

import lrd_kernels as lrd
from lrd_uq.bayes import Dropout, Laplace, Method, Swag, Variational, VariationalLayer, predict_joint
from lrd_uq.bayes.laplace import curvature
from lrd_uq.evaluate import evaluate, unexplained_error
from lrd_uq.heads import LowRankHead, gram_schmidt
from lrd_uq.module import JointUncertainty
from lrd_uq.nets import DigitsUNet, MonaiUNet, NodeNet, SplitNet, wrap
from lrd_uq.nppc import NppcObjective, nppc_losses
from lrd_uq.objectives import Objective


def test_gram_schmidt_is_the_process():
    factor = torch.randn(3, 50, 6)
    columns = []
    for r in range(6):  # as it is written in books
        column = factor[..., r].double()
        for done in columns:
            direction = done / done.norm(dim=-1, keepdim=True)
            column = column - (direction * column).sum(-1, keepdim=True) * direction
        columns.append(column)
    wanted = torch.stack(columns, -1)
    found = gram_schmidt(factor)
    assert torch.allclose(found.double(), wanted, atol=1e-5)
    assert torch.allclose(gram_schmidt(found), found, atol=1e-5)
    assert found.mT.is_contiguous()  # rank-major, as the kernels read it


def test_gram_schmidt_of_dependent_columns_has_finite_gradients():
    factor = torch.randn(1, 20, 3)
    factor = torch.cat([factor, factor[..., :1], torch.zeros(1, 20, 1)], -1).requires_grad_()
    found = gram_schmidt(factor)
    assert found[..., 3:].abs().max() < 1e-4
    found.square().sum().backward()
    assert factor.grad.isfinite().all()


def test_gram_schmidt_keeps_a_bad_item_to_itself():
    factor = torch.randn(3, 20, 4)
    factor[1, 5, 2] = torch.nan
    found = gram_schmidt(factor)
    assert found[1].isnan().any()
    assert torch.equal(found[::2], gram_schmidt(factor[::2]))


def test_orthogonal_head_is_orthogonal_over_what_exists():
    head = LowRankHead(5, 3, orthogonal=True)
    mask = torch.rand(2, 40) < 0.5
    gaussian = head.gaussian(head(torch.randn(2, 5, 40)), mask)
    gram = gaussian.factor.mT @ gaussian.factor
    assert (gram - torch.diag_embed(gram.diagonal(dim1=1, dim2=2))).abs().max() < 1e-5 * gram.max()
    assert (gaussian.factor[~mask] == 0).all()


def test_nppc_losses_by_hand():
    factor = torch.zeros(1, 4, 2)
    factor[0, 0, 0], factor[0, 1, 1] = 2.0, 1.0
    error = torch.tensor([[3.0, 1.0, 2.0, 0.0]])  # |e|^2 = 14, of which 9 and 1 lie along the columns
    direction, variance = nppc_losses(factor, error)
    assert float(direction) == pytest.approx(4 / 14)
    assert float(variance) == pytest.approx(((4 - 9) ** 2 + (1 - 1) ** 2) / 2 / 14**2)


def test_nppc_keeps_the_likelihood_from_mean_and_factor():
    head = LowRankHead(5, 3, orthogonal=True, initial_factor=1.0)
    features, target = torch.randn(2, 5, 40), torch.randn(2, 40)

    def gradients(objective):
        head.zero_grad()
        objective(head, head(features), target).total.backward()
        return {name: None if p.grad is None else p.grad.clone() for name, p in head.named_parameters()}

    one, other = gradients(NppcObjective(alpha=0.1)), gradients(NppcObjective(alpha=0.7))
    assert torch.equal(one["factor_weight"], other["factor_weight"])
    assert torch.equal(one["mean_weight"], other["mean_weight"])
    assert torch.allclose(7 * one["diag_weight"], other["diag_weight"], rtol=1e-4, atol=1e-7)
    with pytest.raises(ValueError, match="orthogonal=True"):
        NppcObjective()(LowRankHead(5, 3), head(features), target)


def test_split_networks_are_trained_apart():
    net = split_net().eval()
    x, target = torch.randn(2, 2, 28, 28), torch.randn(2, 1, 28, 28)
    output = net(x)
    Objective(separate_mean=True)(net.head, output, net.head.flat(target)).low_rank.backward()
    assert all(p.grad is None or not p.grad.any() for p in net.mean_backbone.parameters())
    assert net.head.factor_weight.grad.any()
    before = net(x).mean
    with torch.no_grad():
        net.backbone.down.weight.mul_(2)  # the covariance has no say in the mean
    assert torch.equal(net(x).mean, before)
    before = net(x).raw_diag
    with torch.no_grad():
        net.mean_head.mean_bias.add_(1)  # but sees it
    assert not torch.equal(net(x).raw_diag, before)


def split_net(**options):
    torch.manual_seed(0)
    backbones = DigitsUNet(channels=8, dropout=0.1), DigitsUNet(3, channels=8, dropout=0.1)
    return SplitNet(*backbones, LowRankHead(8, 4, **options))


def test_split_network_of_nodes():
    net = SplitNet(NodeNet(6, 5), NodeNet(6 + 2, 5), LowRankHead(5, 3, 2, features_last=True))
    assert net(torch.randn(4, 7, 6)).factor.shape == (4, 14, 3)
    assert net(torch.randn(4, 6)).factor.shape == (4, 2, 3)


def test_both_backbones_of_a_split_network_become_variational():
    net = Variational().prepare(split_net())
    for backbone in (net.mean_backbone, net.backbone):
        assert isinstance(backbone.down, VariationalLayer)


VARIANTS = {
    "split": lambda make: JointUncertainty(split_net(), Dropout()),
    "orthogonal": lambda make: JointUncertainty(make(dropout=0.1, orthogonal=True), Dropout()),
    "nppc": lambda make: JointUncertainty(split_net(orthogonal=True), Dropout(), objective=NppcObjective()),
    "rank 64": lambda make: JointUncertainty(make(dropout=0.1, head=LowRankHead(8, 64)), Dropout()),
    "rank 16 split": lambda make: JointUncertainty(
        SplitNet(DigitsUNet(channels=8, dropout=0.1), DigitsUNet(3, channels=8), LowRankHead(8, 16)), Dropout()
    ),
    "swag": lambda make: JointUncertainty(make(), Swag(start=0.5, snapshots=8, columns=5)),
    "laplace": lambda make: JointUncertainty(make(), Laplace()),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_short_training_ends_in_a_joint_gaussian(name, make_net, train, data):
    torch.manual_seed(0)
    module = VARIANTS[name](make_net)
    losses = train(module, data)
    assert sum(losses[-5:]) < sum(losses[:5])
    batch = data.part("test")
    found = evaluate(module.method, module.net, batch, 6)
    assert found.rows["joint"].log_probs.isfinite().all()
    assert found.rows["expected"].log_probs.isfinite().all()
    assert 0 < found.unexplained < 1
    mask = module.heads[0].flat(batch.mask)
    joint = predict_joint(module.method, module.net, batch.input, 6, 8, mask=mask)
    assert joint.sample((2,)).isfinite().all()
    assert float(joint.epistemic.variance.sum()) > 0


@pytest.mark.parametrize("method", [Swag(start=0.5, snapshots=4, columns=3), Laplace()], ids=["swag", "laplace"])
def test_state_is_saved_with_the_weights(method, make_net, make_trainer, data):
    module = JointUncertainty(make_net(), method)
    x = data.part("test").input
    with pytest.raises(ValueError, match="train to the end first"):
        next(iter(method.sample_predictions(module.net, x, 1)))
    make_trainer(8).fit(module, datamodule=data)
    again = JointUncertainty(make_net(), method)
    again.load_state_dict(module.state_dict())
    draws = [[p.mean for p in method.sample_predictions(net, x, 3)] for net in (module.net, again.net)]
    for one, other in zip(*draws, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(draws[0][0], draws[0][1])


@pytest.mark.parametrize(("steps", "start", "snapshots"), [(6, 0.6, 2), (7, 0.5, 3), (1000, 0.61, 40), (10, 0.3, 7)])
def test_swag_takes_as_many_snapshots_as_it_is_asked_for(steps, start, snapshots, make_net):
    """Also where the last part of the training begins between two steps."""
    method = Swag(start, snapshots, columns=2)
    net = method.prepare(make_net())
    net.snapshot = lambda: net.count.add_(1)
    for step in range(1, steps + 1):
        method.after_step(net, step, steps)
    assert int(net.count) == snapshots


def test_swag_moments_are_those_of_the_snapshots(make_net, make_trainer, data):
    taken = []
    method = Swag(start=0.5, snapshots=5, columns=3)
    module = JointUncertainty(make_net(), method)
    snapshot = module.net.snapshot
    module.net.snapshot = lambda: (taken.append(module.net.weights()), snapshot())
    make_trainer(20).fit(module, datamodule=data)
    weights = torch.stack(taken)
    assert len(weights) == 5
    assert torch.allclose(module.net.mean, weights.mean(0), atol=1e-6)
    assert torch.allclose(module.net.square, weights.square().mean(0), atol=1e-6)
    source = torch.Generator().manual_seed(0)
    draws = torch.stack([module.net.draw(source) for _ in range(400)])
    assert torch.allclose(draws.mean(0), module.net.mean, atol=5 * float(draws.std(0).max()) / 20)
    assert module.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.2 * module.learning_rate)


def test_swag_refuses_running_statistics():
    net = wrap(torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.BatchNorm2d(4)), LowRankHead(4, 2))
    with pytest.raises(ValueError, match="batch normalisation"):
        Swag().prepare(net)


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_laplace_precision_is_that_of_dense_matrices(outputs, masked):
    torch.manual_seed(0)
    from lrd_uq.data.batch import Batch

    net = wrap(torch.nn.Conv2d(2, 3, 3, padding=1), LowRankHead(3, 2, outputs, initial_factor=1.0)).double()
    x, target = torch.randn(2, 2, 4, 5).double(), torch.randn(2, outputs, 4, 5).double()
    mask = torch.rand(2, outputs, 4, 5) < 0.6 if masked else None
    found = curvature(net, Batch(x, target, mask))
    names = ("head.mean_weight", "head.mean_bias")
    parameters = {name: dict(net.named_parameters())[name] for name in names}
    wanted = torch.zeros_like(found)
    for i in range(2):

        def mean(weights, i=i):
            return torch.func.functional_call(net, weights, (x[i : i + 1],)).mean[0]

        by_name = torch.func.jacrev(mean)(parameters)
        weight, bias = (by_name[name] for name in names)
        jacobian = torch.cat([weight, bias[..., None]], -1).flatten(1).detach()  # [S, outputs (C + 1)]
        covariance = net.gaussian(x[i : i + 1]).distribution().covariance_matrix[0].detach()
        exists = torch.ones(len(jacobian), dtype=torch.bool) if mask is None else mask[i].flatten()
        wanted += jacobian[exists].T @ torch.linalg.solve(covariance[exists][:, exists], jacobian[exists])
    assert torch.allclose(found, wanted, rtol=1e-8, atol=1e-10)


def test_deterministic_networks_have_no_hooks(make_net, make_trainer, data):
    module = JointUncertainty(make_net(), Method())
    make_trainer(2).fit(module, datamodule=data)
    assert isinstance(module.net.head, LowRankHead)


def test_dropout_of_whole_channels():
    net = MonaiUNet("UNet", 1, 4, options={"dropout": 0.5}, drop_channels=True)
    layers = [module for module in net.modules() if isinstance(module, torch.nn.modules.dropout._DropoutNd)]
    assert layers
    assert all(isinstance(layer, torch.nn.Dropout2d) and layer.p == 0.5 for layer in layers)
    assert not any(
        isinstance(m, torch.nn.Dropout2d) for m in MonaiUNet("UNet", 1, 4, options={"dropout": 0.5}).modules()
    )


def test_unexplained_error():
    factor = torch.eye(4)[None, :, :2] * torch.tensor([5.0, 0.1])
    error = torch.tensor([[3.0, 0.0, 4.0, 0.0]])
    assert float(unexplained_error(factor, error)) == pytest.approx(0.8)
    assert float(unexplained_error(factor[..., :0], error)) == 1.0
    assert lrd.LowRankMultivariateNormal(error, factor, torch.ones(1, 4)).log_prob(error).isfinite()
