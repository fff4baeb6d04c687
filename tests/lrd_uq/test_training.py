"""The training step and its callbacks: phases, monitors, filtered gradients, resuming, several processes."""

import contextlib
import warnings

import pytest
import torch
from interrupted import Interrupt, assert_same, run_in_parts

from lrd_uq import checkpoints, runs
from lrd_uq.bayes import Dropout, Ensemble, Variational
from lrd_uq.data.inpainting import DigitInpainting
from lrd_uq.data.order import ResumableBatchSampler
from lrd_uq.extra import lightning as L
from lrd_uq.heads import DiagonalHead, LowRankHead, MeanHead, Output
from lrd_uq.metrics import MetricsLog, read_metrics
from lrd_uq.module import JointUncertainty, Step
from lrd_uq.monitors import CovarianceMonitor, GradientFilter, health
from lrd_uq.phases import Phase, Phases


class Record(L.pytorch.Callback):
    """Records the settings at each step."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, *_):
        head, factor = module.heads[0], module.latest[0].output.factor
        self.seen.append((factor.shape[-1], module.objective.alpha, head.eps, module.net.backbone.drop_inner.p))


def test_phases_go_from_diagonal_to_low_rank_to_bayesian(make_net, make_trainer, data):
    record = Record()
    phases = Phases(
        [
            Phase(0, rank=0, alpha=0.0625, bayesian=False),
            Phase(3, rank=2),
            Phase(0.6, alpha=0.125, eps=0.0025, bayesian=True, ramp=1),
        ]
    )
    module = JointUncertainty(make_net(dropout=0.3), Dropout())
    make_trainer(10, phases, record).fit(module, datamodule=data)
    assert [seen[0] for seen in record.seen] == [0] * 3 + [2] * 3 + [4] * 4
    assert [seen[1] for seen in record.seen] == [0.0625] * 6 + [0.09375] + [0.125] * 3
    assert [seen[2] for seen in record.seen] == pytest.approx([0.01] * 6 + [0.005] + [0.0025] * 3)
    assert [seen[3] for seen in record.seen] == [0.0] * 6 + [0.3] * 4


@pytest.mark.parametrize("phases", [[], [Phase(2)]])
def test_phases_must_begin_at_the_start(phases):
    with pytest.raises(ValueError, match="must start at 0"):
        Phases(phases)


def test_phases_must_follow_one_another(make_net, make_trainer, data):
    with pytest.raises(ValueError, match=r"of 10 steps they start at \[0, 5, 3\]"):
        make_trainer(10, Phases([Phase(0), Phase(0.5), Phase(3)])).fit(JointUncertainty(make_net()), datamodule=data)


def test_diagonal_of_nan_in_a_phase_of_rank_0_is_filtered(make_net, make_trainer, data):
    filtered, module = GradientFilter(), JointUncertainty(make_net())
    trainer = make_trainer(4, Phases([Phase(0, rank=0)]), filtered)

    def spoil(net, inputs, output):
        spoilt = module.training and trainer.global_step == 1
        return output._replace(raw_diag=output.raw_diag * torch.nan) if spoilt else None

    module.net.register_forward_hook(spoil)
    trainer.fit(module, datamodule=data)
    assert (trainer.global_step, filtered.filtered) == (4, 1)


def test_step_with_bad_gradients_is_dropped_and_counted(make_net, make_trainer, data):
    class Spoil(L.pytorch.Callback):
        def on_after_backward(self, trainer, module):
            if trainer.global_step in (2, 3):
                module.net.head.factor_weight.grad[0, 0] = torch.nan

    filtered = GradientFilter()
    module = JointUncertainty(make_net())
    trainer = make_trainer(6, Spoil(), filtered)
    trainer.fit(module, datamodule=data)
    assert filtered.filtered == 2
    assert float(trainer.callback_metrics["filtered_steps"]) == 2
    assert all(p.isfinite().all() for p in module.parameters())
    again = GradientFilter()
    again.load_state_dict(filtered.state_dict())
    assert again.filtered == 2


def test_monitors_are_in_the_log(make_net, make_trainer, data, tmp_path):
    trainer = make_trainer(4, CovarianceMonitor(every=2), logger=MetricsLog(tmp_path))
    trainer.fit(JointUncertainty(make_net()), datamodule=data)
    logged = read_metrics(tmp_path)
    for name in (
        "condition_upper",
        "capacitance_condition",
        "share_at_floor",
        "low_rank_trace",
        "largest_singular_value",
    ):
        steps, values = logged[name]
        assert len(steps) >= 2
        assert all(value >= 0 for value in values)


def test_health_is_what_it_says():
    head = LowRankHead(3, 2, eps=0.25)
    factor = torch.zeros(1, 4, 2)
    factor[0, 0, 0], factor[0, 1, 1] = 3.0, 2.0
    raw = torch.tensor([[-50.0, -50.0, 0.0, 0.0]])  # two at the floor of 0.25, two of 1.25
    mask = torch.tensor([[True, True, True, False]])
    found = health(Step(head, Output(torch.zeros(1, 4), raw, factor), torch.tensor([[1.0, 0, 0, 99.0]]), mask))
    assert float(found["low_rank_trace"]) == pytest.approx(13)
    assert float(found["trace_ratio"]) == pytest.approx(13)
    assert float(found["largest_singular_value"]) == pytest.approx(3)
    assert float(found["share_at_floor"]) == pytest.approx(2 / 3)
    assert float(found["capacitance_condition"]) == pytest.approx((1 + 9 / 0.25) / (1 + 4 / 0.25))
    assert float(found["condition_upper"]) == pytest.approx((9 + 1.25) / 0.25)


def test_exploding_factor_is_told_in_plain_words_once(make_net, make_trainer, data):
    net = make_net(initial_factor=30.0)
    with pytest.warns(
        UserWarning, match=r"step 1: the low-rank part runs away: its trace is .* Raise factor_penalty"
    ) as told:
        make_trainer(3, CovarianceMonitor(every=1)).fit(JointUncertainty(net, learning_rate=1e-6), datamodule=data)
    (warning,) = [warning for warning in told if "runs away" in str(warning.message)]
    assert "lrd_uq" in warning.filename  # those who silence lightning's warnings still see it


def test_healthy_training_is_not_warned_of(make_net, make_trainer, data):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(runs away|condition number).*")
        make_trainer(10, CovarianceMonitor(every=1)).fit(JointUncertainty(make_net()), datamodule=data)


@pytest.mark.parametrize("head", [MeanHead, DiagonalHead], ids=lambda head: head.__name__)
def test_baselines_train_with_the_same_callbacks(head, make_net, make_trainer, data):
    trainer = make_trainer(5, CovarianceMonitor(every=1), GradientFilter(), Phases([Phase(0, rank=0), Phase(2)]))
    trainer.fit(JointUncertainty(make_net(head=head(8))), datamodule=data)
    assert trainer.callback_metrics["val_log_prob"].isfinite()
    assert trainer.callback_metrics["val_rmse"] > 0


@pytest.mark.parametrize("steps", [1, 2, 3, 10, 20])
def test_short_runs_have_a_schedule_too(steps, make_net, make_trainer, data):
    trainer = make_trainer(steps)
    trainer.fit(JointUncertainty(make_net()), datamodule=data)
    assert trainer.global_step == steps


def test_nothing_of_a_step_outlives_it(make_net, make_trainer, data):
    module = JointUncertainty(make_net())
    make_trainer(2).fit(module, datamodule=data)
    assert module.latest == []


def test_epochs_train_on_different_batches_and_noise(make_net, make_trainer, data):
    class Watch(L.pytorch.Callback):
        seen = ()
        seeds = ()

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            self.seen = (*self.seen, float(batch.target.sum()))
            self.seeds = (*self.seeds, torch.initial_seed())

    watch = Watch()
    make_trainer(16, watch).fit(JointUncertainty(make_net()), datamodule=data)  # of 5 steps an epoch
    order = ResumableBatchSampler(128, 16, 16, 0)
    wanted = [float(data.part("train").target[batch].sum()) for batch in order]
    assert list(watch.seen) == wanted
    assert len(set(watch.seen)) == len(set(watch.seeds)) == 16


METHODS = {"dropout": Dropout, "variational": Variational, "ensemble": lambda: Ensemble(2)}
SCHEDULES = {
    "every epoch": {},
    "within epochs": {"val_check_interval": 2},
    "every third epoch": {"check_val_every_n_epoch": 3},
    "across epochs": {"val_check_interval": 3, "check_val_every_n_epoch": None},
    "never": {"limit_val_batches": 0},
    "sanity check": {"num_sanity_val_steps": 2},
}


@pytest.mark.parametrize("name", METHODS)
def test_killed_and_resumed_is_as_never_stopped(name, make_net, make_trainer, data, tmp_path):
    def build():
        return JointUncertainty(make_net(dropout=0.3 if name == "dropout" else 0.0), METHODS[name]())

    phases = [Phases([Phase(0, rank=0), Phase(7, rank=4)])]
    whole = run_in_parts(build, make_trainer, data, tmp_path / "whole", phases=phases)
    parts = run_in_parts(build, make_trainer, data, tmp_path / "parts", Interrupt(12), phases=phases)
    assert_same(whole, parts)


@pytest.fixture(scope="module")
def uninterrupted():
    """Weights of uninterrupted runs, by the options that change them."""
    return {}


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_weights_do_not_depend_on_validation_or_interruptions(
    schedule, batches, make_net, make_trainer, data, tmp_path, uninterrupted
):
    """Kills, and stops in the middle of an epoch of five batches, with `batches` per step."""

    def build():
        return JointUncertainty(make_net(dropout=0.3), Dropout())

    options = {"accumulate_grad_batches": batches}
    if batches not in uninterrupted:
        uninterrupted[batches] = run_in_parts(build, make_trainer, data, tmp_path / "whole", steps=8, **options)
    interrupts = [Interrupt(killed=4), Interrupt(stopped=7), Interrupt(stopped=9), Interrupt(killed=7)]
    more = {**options, **SCHEDULES[schedule]}
    parts = run_in_parts(build, make_trainer, data, tmp_path / "parts", *interrupts, steps=8, **more)
    assert_same(uninterrupted[batches], parts)


@pytest.mark.slow
def test_resumed_run_with_worker_processes_and_a_limit_of_epochs(make_net, make_trainer, tmp_path):
    """Worker processes are given batches ahead, and max_epochs makes lightning load the data before the checkpoint."""
    data = DigitInpainting(train=64, val=20, test=12, batch_size=16, steps_per_epoch=3)
    data.workers = 2
    options = {"max_epochs": 4, "steps": -1}

    def build():
        return JointUncertainty(make_net(dropout=0.3), Dropout())

    whole = run_in_parts(build, make_trainer, data, tmp_path / "whole", **options)
    parts = run_in_parts(
        build, make_trainer, data, tmp_path / "parts", Interrupt(killed=4), Interrupt(stopped=6), **options
    )
    assert_same(whole, parts)


def test_log_of_a_resumed_run_has_the_right_steps(make_net, make_trainer, data, tmp_path):
    def build():
        return JointUncertainty(make_net(), Dropout())

    for interrupt in (Interrupt(killed=7), Interrupt(stopped=7), Interrupt()):
        run = [*runs.callbacks(tmp_path, 0)[1:], interrupt]
        found = checkpoints.newest(tmp_path)
        settings = {"enable_checkpointing": True, "plugins": [checkpoints.CheckpointFiles()]}
        trainer = make_trainer(12, *run, logger=[MetricsLog(tmp_path)], val_check_interval=2, **settings)
        with contextlib.suppress(KeyError):
            trainer.fit(build(), datamodule=data, ckpt_path=found and found.path)
    assert read_metrics(tmp_path)["loss"][0] == [*range(12)]
