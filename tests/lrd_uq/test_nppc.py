"""NPPC as its authors train it, and networks with a mean that was trained before."""

import pytest
import torch

from lrd_uq import checkpoints, cli
from lrd_uq.bayes import Dropout, Ensemble, Variational, VariationalLayer
from lrd_uq.heads import LowRankHead, gram_schmidt
from lrd_uq.module import JointUncertainty
from lrd_uq.nets import DigitsUNet, SplitNet
from lrd_uq.nppc import NppcObjective, nppc_losses

SMALL = ["--data.init_args.train", "64", "--data.init_args.val", "20", "--data.init_args.test", "12"]
SMALL += ["--data.init_args.steps_per_epoch", "3", "--trainer.max_steps", "6", "--trainer.num_sanity_val_steps", "0"]
SMALL += ["--trainer.enable_progress_bar", "false", "--model.net.init_args.head.init_args.channels", "6"]
SMALL += ["--model.net.init_args.backbone.init_args.channels", "6"]


def fit_mean(folder):
    return cli.main(["fit", "--config", "digits_mean", "--run", str(folder), *SMALL])


@pytest.fixture(scope="module")
def mean_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "mean"
    assert fit_mean(folder) == 0
    return folder


def split_net(mean_run, **options):
    torch.manual_seed(3)
    backbones = DigitsUNet(channels=6, dropout=0.3), DigitsUNet(3, channels=6, dropout=0.3)
    return SplitNet(*backbones, LowRankHead(6, 4, **options), mean_run=str(mean_run))


# --- the losses of the authors ---


def by_steps(factor):
    """Gram and Schmidt's process, column by column, without gradients through earlier directions."""
    columns, directions = [], []
    for r in range(factor.shape[-1]):
        column = factor[..., r]
        for q in directions:
            column = column - q * (column * q).sum(-1, keepdim=True)
        columns.append(column)
        directions.append((column / column.norm(dim=-1, keepdim=True)).detach())
    return torch.stack(columns, -1)


def losses_by_steps(factor, error):
    """Both losses of one batch from orthogonal columns, in the order of the definition."""
    lengths = factor.norm(dim=1)  # [B, R]
    directions = factor / lengths[:, None]
    size = error.norm(dim=1, keepdim=True)
    along = torch.einsum("bsr,bs->br", directions, error / size)
    direction = 1 - along.square().sum(1)
    variance = ((lengths / size).square() - along.detach().square()).square()
    return direction.mean(), variance.mean()


def test_columns_pass_no_gradient_through_earlier_directions():
    torch.manual_seed(0)
    weights = torch.randn(3, 50, 5).double()
    found = []
    for process in (by_steps, lambda factor: gram_schmidt(factor, detach_earlier=True), gram_schmidt):
        factor = torch.randn(3, 50, 5, generator=torch.Generator().manual_seed(1)).double().requires_grad_()
        value = process(factor)
        (value * weights).sum().backward()
        found.append((value.detach(), factor.grad))
    for one, other in zip(found[0], found[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)
    assert torch.equal(found[1][0], found[2][0])
    assert not torch.allclose(found[1][1], found[2][1])


def test_losses_and_gradients_are_those_of_the_authors():
    torch.manual_seed(0)
    error, raw = torch.randn(4, 60).double(), torch.randn(4, 60, 3).double()
    gradients = []
    for own in (True, False):
        factor = raw.clone().requires_grad_()
        if own:
            direction, variance = (
                loss.mean() for loss in nppc_losses(gram_schmidt(factor, detach_earlier=True), error)
            )
        else:
            direction, variance = losses_by_steps(by_steps(factor), error)
        gradients.append([*torch.autograd.grad(direction, factor, retain_graph=True), direction.detach()])
        gradients[-1] += [*torch.autograd.grad(variance, factor), variance.detach()]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


def test_first_column_learns_the_first_component():
    """The order of the columns is learnt: each is trained for what the ones before it leave."""
    torch.manual_seed(0)
    spread = torch.tensor([3.0, 1.5, 0.7, 0.1, 0.1, 0.1])
    factor = torch.randn(1, 6, 3, requires_grad=True)
    optimiser = torch.optim.Adam([factor], 0.05)
    for _ in range(800):
        error = spread * torch.randn(64, 6)
        columns = gram_schmidt(factor, detach_earlier=True).expand(64, -1, -1)
        direction, variance = nppc_losses(columns, error)
        optimiser.zero_grad()
        (direction.mean() + variance.mean()).backward()
        optimiser.step()
    directions = torch.nn.functional.normalize(gram_schmidt(factor)[0], dim=0)
    assert (directions[:3].diagonal().abs() > 0.95).all()


def test_weight_of_the_variance_loss_rises():
    objective = NppcObjective(grace=100)
    weights = []
    for objective.step in (0, 50, 75, 100, 1000):
        weights.append(objective.variance_weight)
    assert weights == pytest.approx([1e-6, 1e-6, 0.5, 1.0, 1.0])
    assert NppcObjective(grace=0).variance_weight == 1
    with pytest.raises(ValueError, match="grace"):
        NppcObjective(grace=-1)


def test_step_of_the_training_reaches_the_objective(make_net, make_trainer, data):
    seen = []

    class Watch(NppcObjective):
        def __call__(self, *arguments):
            seen.append(self.step)
            return super().__call__(*arguments)

    make_trainer(4).fit(JointUncertainty(make_net(orthogonal=True), objective=Watch()), datamodule=data)
    assert seen == [0, 1, 2, 3]


# --- a trained and frozen mean ---


def test_mean_of_a_run_is_taken_and_stays(mean_run, make_trainer, data):
    trained = checkpoints.load(mean_run / "last.ckpt")["state_dict"]
    module = JointUncertainty(split_net(mean_run, orthogonal=True), Dropout(), objective=NppcObjective(grace=2))
    before = {name: p.clone() for name, p in module.net.named_parameters()}
    make_trainer(4, gradient_clip_val=None).fit(module, datamodule=data)
    net = module.net
    for name, weight in net.mean_backbone.state_dict().items():
        assert torch.equal(weight, trained[f"net.backbone.{name}"])
    assert torch.equal(net.mean_head.mean_weight, trained["net.head.mean_weight"])
    changed = {name for name, p in net.named_parameters() if not torch.equal(p, before[name])}
    assert {"head.factor_weight", "head.diag_weight", "backbone.down.weight"} <= changed
    assert not any(p.requires_grad for p in (*net.mean_backbone.parameters(), *net.mean_head.parameters()))


def test_frozen_mean_is_predicted_in_evaluation_mode(mean_run):
    net, x = split_net(mean_run).train(), torch.randn(2, 2, 28, 28)
    assert torch.equal(net(x).mean, net(x).mean)  # dropout is off
    assert not torch.equal(net(x).raw_diag, net(x).raw_diag)
    assert not net(x).mean.requires_grad
    draws = [one.mean for one in Dropout().sample_predictions(net, x, 2)]
    assert not torch.equal(*draws)  # but its dropout layers are part of the distribution over the weights


def test_all_members_take_the_mean_and_none_is_made_variational(mean_run, make_trainer, data):
    module = JointUncertainty(split_net(mean_run), Ensemble(2))
    make_trainer(1).fit(module, datamodule=data)
    one, other = (member.mean_backbone.down.weight for member in module.method.members(module.net))
    assert torch.equal(one, other)
    net = Variational().prepare(split_net(mean_run))
    assert isinstance(net.backbone.down, VariationalLayer)
    assert not isinstance(net.mean_backbone.down, VariationalLayer)


def test_shipped_config_needs_the_mean_to_train_and_not_afterwards(mean_run, tmp_path, capsys):
    words = ["fit", "--config", "digits_nppc", "--run", str(tmp_path / "nppc"), *SMALL]
    words += ["--model.net.init_args.mean.init_args.channels", "6", "--model.net.init_args.mean_run"]
    assert cli.main([*words, str(tmp_path / "none")]) == 1
    assert f"{tmp_path / 'none'} is not a trained run: train it first with" in capsys.readouterr().err
    moved = tmp_path / "mean"
    moved.mkdir()
    for file in mean_run.iterdir():
        (moved / file.name).write_bytes(file.read_bytes())
    assert cli.main([*words, str(moved)]) == 0
    for file in moved.iterdir():
        file.unlink()
    run = tmp_path / "nppc"
    (run / "last.ckpt").write_bytes((run / "previous.ckpt").read_bytes())
    assert cli.main([*words, str(moved)]) == 0  # goes on without the folder of the mean
    assert checkpoints.load(run / "last.ckpt")["global_step"] == 6
    assert cli.main(["evaluate", "--run", str(run), "--samples", "2", "--ranks", "[2]"]) == 0


def test_runs_that_do_not_fit_or_are_not_finished_are_refused(mean_run, tmp_path, make_trainer, data):
    other = SplitNet(DigitsUNet(channels=4), DigitsUNet(3, channels=4), LowRankHead(4, 2), mean_run=str(mean_run))
    with pytest.raises(ValueError, match=r"the mean of .*mean does not fit the network of the mean"):
        make_trainer(1).fit(JointUncertainty(other), datamodule=data)
    for name in ("config.yaml", "previous.ckpt"):
        (tmp_path / name).write_bytes((mean_run / name).read_bytes())
    with (
        pytest.raises(ValueError, match=r"is not finished: previous\.ckpt has step 3 of 6"),
        pytest.warns(UserWarning, match="is used instead"),
    ):
        make_trainer(1).fit(JointUncertainty(split_net(tmp_path)), datamodule=data)


# --- ensembles of finished runs ---


@pytest.fixture(scope="module")
def runs_of_methods(mean_run):
    """Finished runs with dropout, SWAG and a deterministic network."""
    folders = []
    for config in ("digits_dropout", "digits_swag", "digits_lowrank"):
        folders.append(mean_run.with_name(config))
        more = ["--model.method.init_args.snapshots", "2"] if config == "digits_swag" else []
        assert cli.main(["fit", "--config", config, "--run", str(folders[-1]), *SMALL, *more]) == 0
    return folders


def test_ensemble_of_runs_spreads_its_draws_over_the_members(runs_of_methods, data):
    random = torch.random.get_rng_state()
    method, net = Ensemble.of_runs(runs_of_methods)
    assert torch.equal(torch.random.get_rng_state(), random)
    x = data.part("test").input[:2]
    draws = list(method.sample_predictions(net, x, 8, seed=5))
    assert len(draws) == 8
    for member, (own, part) in enumerate(method.parts(net)):
        wanted = list(own.sample_predictions(part, x, 3, seed=5 + 1_000_003 * member))
        found = draws[member::3]
        assert len(found) == (3, 3, 2)[member]
        for one, other in zip(found, wanted * 3, strict=False):
            assert torch.equal(one.mean, other.mean)
            assert torch.equal(one.factor, other.factor)
    assert not torch.equal(draws[0].mean, draws[3].mean)  # dropout
    assert not torch.equal(draws[1].mean, draws[4].mean)  # SWAG
    assert torch.equal(draws[2].mean, draws[5].mean)  # deterministic, and as often as the others
    few = list(method.sample_predictions(net, x, 4, seed=5))
    assert all(torch.equal(one.mean, other.mean) for one, other in zip(few, draws, strict=False))


def test_ensemble_of_deterministic_members_predicts_once_each(make_net):
    method = Ensemble(3)
    net = method.prepare(make_net())
    assert len(list(method.sample_predictions(net, torch.zeros(1, 2, 28, 28), 16))) == 3


def test_members_are_trained_with_their_method(make_net, train, data):
    module = JointUncertainty(make_net(), Ensemble(2, Variational()))
    losses = train(module, data, steps=20)
    assert sum(losses[-5:]) < sum(losses[:5])
    assert len(module.method.members(module.net)) == 2
    alone = Variational()
    parts = [alone.kl(part, 0.5) for part in module.net.members]
    torch.testing.assert_close(module.method.kl(module.net, 0.5), parts[0] + parts[1])
    assert module.method.noisy_training
    assert not Ensemble(2).noisy_training


def test_runs_that_cannot_be_members_are_refused(runs_of_methods, mean_run, tmp_path):
    first = runs_of_methods[0]
    with pytest.raises(ValueError, match="size must be at least 2; got 1"):
        Ensemble.of_runs([first])
    with pytest.raises(ValueError, match="every run can be a member once"):
        Ensemble.of_runs([first, str(first)])
    with pytest.raises(FileNotFoundError, match="is not a trained run"):
        Ensemble.of_runs([first, tmp_path])
    (tmp_path / "config.yaml").write_bytes((first / "config.yaml").read_bytes())
    (tmp_path / "last.ckpt").write_bytes((first / "previous.ckpt").read_bytes())
    with pytest.raises(ValueError, match=r"is not finished: last\.ckpt has step 3 of 6"):
        Ensemble.of_runs([first, tmp_path])
