"""Training that goes wrong says so, once, with the reason and what to try; a sound one says nothing."""

import warnings

import pytest
import torch

from lrd_uq.extra import lightning as L
from lrd_uq.module import JointUncertainty
from lrd_uq.monitors import GradientFilter, ScoreMonitor


class Spoil(L.pytorch.Callback):
    """Makes the gradients of some steps NaN."""

    def __init__(self, spoils):
        self.spoils = spoils

    def on_after_backward(self, trainer, module):
        if self.spoils(trainer.global_step):
            module.net.head.mean_weight.grad[0, 0] = torch.nan


def told(run, start):
    """The warnings of a run that begin so."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run()
    return [str(one.message) for one in seen if start in str(one.message)]


@pytest.mark.parametrize(
    ("steps", "spoils", "said"),
    [
        (30, lambda step: step % 3 > 0, "step 19: 13 of the last 20 steps were skipped"),
        (40, lambda step: step > 15, "step 26: 11 of the last 20 steps were skipped"),
        (5, lambda step: step < 3, "step 5: 3 of the last 5 steps were skipped"),
        (30, lambda step: step % 2, None),
        (30, lambda step: step == 4, None),
    ],
)
def test_skipped_steps_are_told_when_they_are_most(steps, spoils, said, make_net, make_trainer, data):
    module = JointUncertainty(make_net(), learning_rate=2e-3)
    trainer = make_trainer(steps, Spoil(spoils), GradientFilter())
    found = told(lambda: trainer.fit(module, datamodule=data), "were skipped")
    assert len(found) == (said is not None)
    if said:
        assert said in found[0]
        assert "lower learning_rate below 0.002, or raise eps" in found[0]


@pytest.mark.parametrize("rate", [1e-3, 1e5])
def test_diverging_training_is_told_once(rate, make_net, make_trainer, data):
    module = JointUncertainty(make_net(), learning_rate=rate)
    trainer = make_trainer(15, ScoreMonitor(), GradientFilter())
    found = told(lambda: trainer.fit(module, datamodule=data), "training diverges")
    assert len(found) == (rate > 1)
    if found:
        assert "Lower learning_rate below 100000" in found[0]
        assert "nats per output" in found[0]


def test_best_score_goes_on_with_the_run():
    before, after = ScoreMonitor(), ScoreMonitor()
    before.best, before._outputs = 0.7, 560.0
    after.load_state_dict(before.state_dict())
    assert (after.best, after._outputs) == (0.7, 560.0)
    filter_ = GradientFilter()
    filter_._recent = [True, False]
    again = GradientFilter()
    again.load_state_dict(filter_.state_dict())
    assert again._recent == [True, False]
