"""Settings of heads, objectives and phases: each does what it says, or is refused."""

import pytest
import torch
from interrupted import Interrupt, assert_same, run_in_parts

from lrd_uq import settings, shipped
from lrd_uq.bayes import Dropout, Ensemble, Method, Swag, Variational
from lrd_uq.heads import DiagonalHead, LowRankHead, MeanHead, rotated
from lrd_uq.module import JointUncertainty
from lrd_uq.monitors import health, health_of
from lrd_uq.nets import DigitsUNet, wrap
from lrd_uq.nppc import NppcObjective
from lrd_uq.objectives import Objective
from lrd_uq.phases import Phase, Phases, settings_of

HEAD = "--model.net.init_args.head.init_args."


# --- rank ---


@pytest.mark.parametrize("config", shipped.shipped_configs())
def test_rank_asked_for_is_the_rank_trained(config):
    text = (shipped.CONFIGS / f"{config}.yaml").read_text()
    if "LowRankHead" not in text:
        pytest.skip("no low-rank head")
    cli = settings.configure(["--config", config, HEAD + "rank", "16"])
    chosen = cli.config["trainer"]["callbacks"]
    found = [callback["init_args"]["phases"] for callback in chosen if callback["class_path"].endswith("Phases")]
    own = settings_of(cli.model)
    assert own.rank == cli.model.heads[0].rank_in_use == 16
    for phases in found:
        assert Phases([Phase(**vars(phase)) for phase in phases]).at(999, 1000, own).rank == 16


def test_phase_without_a_rank_has_all_columns_of_the_head():
    own, phases = Phase(0, 12, 0.125, 0.01, True), Phases([Phase(0, rank=0), Phase(3), Phase(5, rank=2), Phase(7)])
    assert [phases.at(step, 10, own).rank for step in range(10)] == [0] * 3 + [12] * 2 + [2] * 2 + [12] * 3


@pytest.mark.parametrize(
    ("phases", "head", "method", "said"),
    [
        ([Phase(rank=5)], LowRankHead(8, 4), Dropout(), "has rank 5, but the head has 4 columns"),
        ([Phase(rank=1)], DiagonalHead(8), Dropout(), "has rank 1, but the head has 0 columns"),
        ([Phase(eps=0.1)], MeanHead(8), Dropout(), "a MeanHead has no diagonal"),
        ([Phase(bayesian=False)], LowRankHead(8, 4), Method(), "Method does not sample the weights"),
        (
            [Phase(), Phase(2, alpha=0.125, ramp=3)],
            LowRankHead(8, 4),
            Dropout(),
            "to the values that were there before",
        ),
    ],
)
def test_phases_that_a_model_cannot_follow_are_refused(phases, head, method, said, make_net, make_trainer, data):
    module = JointUncertainty(make_net(dropout=0.1, head=head), method)
    with pytest.raises(ValueError, match=said):
        make_trainer(4, Phases(phases)).fit(module, datamodule=data)


@pytest.mark.parametrize(
    "wrong", [{"rank": -1}, {"alpha": -0.1}, {"eps": float("nan")}, {"start": -1}, {"ramp": -2}, {"ramp": 5}]
)
def test_phases_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Phase(**wrong)


# --- phases depend on the step alone ---


def test_resuming_within_a_ramp_is_exact(make_net, make_trainer, data, tmp_path):
    def build():
        return JointUncertainty(make_net())

    def phases():
        return [Phases([Phase(0, rank=0), Phase(3, alpha=0.5, eps=1e-4, ramp=10)])]

    whole = run_in_parts(build, make_trainer, data, tmp_path / "whole", phases=phases(), steps=15)
    parts = run_in_parts(build, make_trainer, data, tmp_path / "parts", Interrupt(8), phases=phases(), steps=15)
    assert whole["net.head._extra_state"]["eps"] == 1e-4
    assert_same(whole, parts)


def test_training_again_starts_from_the_settings_of_the_model(make_net, make_trainer, data):
    seen = []

    class Watch(Phases):
        def on_train_batch_start(self, trainer, module, *arguments):
            super().on_train_batch_start(trainer, module, *arguments)
            seen.append((module.objective.alpha, module.heads[0].eps, module.heads[0].rank_in_use))

    module = JointUncertainty(make_net())
    for _ in range(2):
        make_trainer(4, Watch([Phase(0, rank=0), Phase(1, rank=2, alpha=1, eps=0.1, ramp=4)])).fit(module, data)
    assert seen[:4] == seen[4:]


# --- objective ---


def test_weights_beside_an_objective_that_ignores_them_are_refused(make_net):
    net = make_net(orthogonal=True)
    for wrong in ({"alpha": 0.125}, {"factor_penalty": 0.0}, {"alpha": 1.0, "factor_penalty": 1.0}):
        with pytest.raises(ValueError, match=f"NppcObjective ignores {' and '.join(wrong)}"):
            JointUncertainty(net, objective=NppcObjective(), **wrong)
    assert JointUncertainty(net).objective.alpha == 0.125
    assert JointUncertainty(net, alpha=0.0).objective.alpha == 0.0


@pytest.mark.parametrize("wrong", [-1.0, float("inf"), float("nan")])
def test_weights_out_of_range_are_refused(wrong, make_net):
    for name in ("alpha", "factor_penalty", "learning_rate", "weight_decay", "warmup"):
        with pytest.raises(ValueError, match=name):
            JointUncertainty(make_net(), **{name: wrong})
    with pytest.raises(ValueError, match="beta"):
        NppcObjective(beta=wrong)


def test_warmup_beyond_the_steps_is_refused_by_name(make_net):
    with pytest.raises(ValueError, match=r"warmup must be .* from 0 to below 1; got 1.5"):
        JointUncertainty(make_net(), warmup=1.5)
    with pytest.raises(ValueError, match=r"warmup must be .* from 0 to below 0.6, at which SWAG"):
        JointUncertainty(make_net(), Swag(start=0.6), warmup=0.7)


def test_weight_of_the_divergence_follows_alpha_unless_given(make_net):
    for given, wanted in ((None, 0.5), (0.25, 0.25), (0.0, 0.0)):
        method = Variational(kl_weight=given)
        net = method.prepare(make_net())
        one = Variational(kl_weight=1.0).kl(net, 0.5)
        torch.testing.assert_close(method.kl(net, 0.5), wanted * one)


def test_divergence_is_logged_with_alpha_of_the_step(make_net, make_trainer, data):
    seen = []

    class Weight(Variational):
        def kl(self, net, alpha):
            seen.append(alpha)
            return super().kl(net, alpha)

    phases = Phases([Phase(alpha=0.0625), Phase(2, alpha=0.125)])
    make_trainer(4, phases).fit(JointUncertainty(make_net(), Weight()), datamodule=data)
    assert seen == [0.0625] * 2 + [0.125] * 2


def test_clipping_by_0_is_off_and_below_0_is_refused(make_net, make_trainer, data):
    trained = []
    for value in (None, 0, 0.0):
        module = JointUncertainty(make_net())
        make_trainer(3, gradient_clip_val=value).fit(module, datamodule=data)
        trained.append(module.net.head.mean_weight)
    assert torch.equal(trained[0], trained[1])
    assert torch.equal(trained[0], trained[2])
    assert not torch.equal(trained[0], make_net().head.mean_weight)
    with pytest.raises(ValueError, match="gradient_clip_val must be 0 or above"):
        make_trainer(3, gradient_clip_val=-1.0).fit(JointUncertainty(make_net()), datamodule=data)


# --- the floor, and the singular value decomposition ---


@pytest.mark.parametrize("build", [DiagonalHead, LowRankHead])
def test_floor_of_the_standard_deviation(build):
    head = build(4, eps_std=0.01, initial_raw=-1e4)
    gaussian = head.gaussian(head(torch.zeros(1, 4, 3)))
    assert torch.allclose(gaussian.diag, torch.tensor(1e-4))
    assert build(4).eps == build(4, eps=0.01).eps == 0.01
    with pytest.raises(ValueError, match="eps or eps_std, not both"):
        build(4, eps=0.01, eps_std=0.1)
    with pytest.raises(ValueError, match="eps_std must be a finite number"):
        build(4, eps_std=-0.1)


@pytest.mark.parametrize("config", ["celeba_inpainting", "celeba_colourisation", "flying_chairs", "nyu_depth"])
def test_presets_of_the_papers_data_have_its_floor_and_no_penalty(config):
    cli = settings.configure(["--config", config])
    assert cli.model.heads[0].eps == pytest.approx(1e-4)
    assert cli.model.objective.factor_penalty == 0


@pytest.mark.parametrize("parametrisation", ["plain", "scaled"])
@pytest.mark.parametrize("masked", [False, True])
def test_svd_in_training_changes_neither_likelihood_nor_gradients(parametrisation, masked):
    torch.manual_seed(0)
    features, target = torch.randn(2, 5, 30).double(), torch.randn(2, 30).double()
    mask = torch.rand(2, 30) < 0.7 if masked else None
    found = []
    for svd in (False, True):
        torch.manual_seed(1)
        head = LowRankHead(5, 4, parametrisation=parametrisation, initial_factor=1.0, svd=svd).double()
        losses = Objective()(head, head(features), target, mask)
        losses.total.backward()
        found.append((losses.total, *(p.grad for p in head.parameters())))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    factor = head.settle(head(features), mask).factor
    gram = factor.mT @ factor if mask is None else (factor * mask[..., None]).mT @ (factor * mask[..., None])
    lengths = gram.diagonal(dim1=1, dim2=2)
    assert (gram - torch.diag_embed(lengths)).abs().max() < 1e-10 * gram.max()
    assert (lengths[:, :-1] >= lengths[:, 1:]).all()
    assert torch.equal(head.eval().settle(head(features), mask).factor, head(features).factor)  # training only


def test_svd_of_equal_columns_and_bad_items():
    factor = torch.randn(3, 20, 2)
    factor = torch.cat([factor, factor], -1)
    factor[1, 4, 0] = torch.nan
    factor.requires_grad_()
    found = rotated(factor)
    found[::2].square().sum().backward()
    assert factor.grad[::2].isfinite().all()
    assert found[1].isnan().any()
    assert not found[::2].isnan().any()
    with pytest.raises(ValueError, match="orthogonal and svd exclude one another"):
        LowRankHead(4, 2, orthogonal=True, svd=True)


def test_svd_trains(make_net, train, data):
    losses = train(JointUncertainty(make_net(svd=True)), data)
    assert sum(losses[-5:]) < sum(losses[:5])


# --- ensembles ---


def test_validation_and_monitors_speak_of_all_members(make_net, make_trainer, data):
    module = JointUncertainty(make_net(), Ensemble(3))
    batch = data.part("val")
    gaussian, _, mask = module.predict_gaussian(batch)
    members = [member.gaussian(batch.input, mask) for member in module.method.members(module.net)]
    assert torch.allclose(gaussian.mean, torch.stack([one.mean for one in members]).mean(0), atol=1e-6)
    wanted = sum(one.distribution().variance for one in members) / 3
    wanted = wanted + torch.stack([one.mean for one in members]).var(0)
    torch.testing.assert_close(gaussian.distribution().variance, wanted, rtol=1e-4, atol=1e-6)

    seen = []

    class Watch(Phases):
        def on_train_batch_end(self, trainer, module, *_):
            each, all_ = [health(step) for step in module.latest], health_of(module.latest, trainer.strategy)
            seen.append(len(each))
            for name in ("trace_ratio", "condition_upper"):
                assert all_[name] == max(one[name] for one in each).float()
            assert all_["share_at_floor"] == torch.stack([one["share_at_floor"] for one in each]).mean()

    make_trainer(2, Watch([Phase()])).fit(module, datamodule=data)
    assert seen == [3, 3]


def test_head_of_a_wrapped_network_keeps_its_own_settings():
    net = wrap(DigitsUNet(channels=8), LowRankHead(8, 4, eps_std=0.1))
    net.head.eps, net.head.rank_in_use = 1.0, 0
    own = settings_of(JointUncertainty(net))
    assert (own.rank, own.eps) == (4, pytest.approx(0.01))
