"""Trainings that are interrupted and resumed, for tests."""

import contextlib

import torch

from lrd_uq import checkpoints, runs
from lrd_uq.extra import lightning as L
from lrd_uq.monitors import CovarianceMonitor, GradientFilter


class Interrupt(L.pytorch.Callback):
    """Ends a training before a step by an error, as a kill would, or after a batch, as max_time does."""

    def __init__(self, killed=-1, stopped=-1):
        self.killed, self.stopped = killed, stopped

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == self.killed:
            raise KeyError("killed")

    def on_train_batch_end(self, trainer, *_):
        if self.stopped >= 0 and trainer.fit_loop.total_batch_idx >= self.stopped:
            trainer.should_stop = True


def run_in_parts(build, make_trainer, data, folder, *interrupts, steps=15, phases=(), **options):
    """The state after a training that each of `interrupts` interrupts once."""
    for number, interrupt in enumerate((*interrupts, Interrupt())):
        torch.manual_seed(99 + number)  # the noise of a new process
        module = build()
        callbacks = [*phases, *runs.callbacks(folder, 0)[1:], GradientFilter(), CovarianceMonitor(), interrupt]
        plugins = [checkpoints.CheckpointFiles()]
        trainer = make_trainer(steps, *callbacks, enable_checkpointing=True, plugins=plugins, **options)
        found = checkpoints.newest(folder)
        with contextlib.suppress(KeyError):
            trainer.fit(module, datamodule=data, ckpt_path=found and found.path)
    assert trainer.global_step == checkpoints.newest(folder).content["global_step"]
    return module.state_dict()


def assert_same(wanted, found):
    for (key, value), other in zip(wanted.items(), found.values(), strict=True):
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, key
