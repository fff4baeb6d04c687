"""TensorBoard and W&B by an option, with pictures of the modes; neither weights nor random numbers change."""

import shutil
import sys
import types

import numpy as np
import pytest
import torch

from lrd_uq import boards, checkpoints, cli
from lrd_uq.bayes import Dropout, Ensemble, Laplace, Swag
from lrd_uq.boards import ModePictures
from lrd_uq.data.task import Task
from lrd_uq.extra import lightning as L
from lrd_uq.heads import DiagonalHead, LowRankHead, MeanHead
from lrd_uq.metrics import read_metrics
from lrd_uq.module import JointUncertainty
from lrd_uq.nets import wrap
from lrd_uq.phases import Phase, Phases

SMALL = ["--data.init_args.train", "32", "--data.init_args.val", "8", "--data.init_args.test", "6"]
SMALL += ["--data.init_args.steps_per_epoch", "4", "--trainer.num_sanity_val_steps", "0", "--trainer.max_steps", "8"]
SMALL += ["--trainer.log_every_n_steps", "1", "--model.net.init_args.head.init_args.channels", "4"]
SMALL += ["--model.net.init_args.backbone.init_args.channels", "4"]


def fit(folder, *words):
    return cli.main(["fit", "-c", "digits_dropout", "--run", str(folder), *SMALL, *words])


def events(folder):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator").EventAccumulator
    found = accumulator(str(folder / "tensorboard"), {"images": 0, "scalars": 0})
    return found.Reload()


def weights(folder):
    return checkpoints.newest(folder).content["state_dict"]


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    folder = tmp_path_factory.mktemp("board") / "shown"
    assert fit(folder, "--log", "tensorboard") == 0
    return folder


def test_tensorboard_has_the_metrics_and_pictures(shown):
    found, metrics = events(shown), read_metrics(shown)
    assert set(metrics) <= set(found.Tags()["scalars"])
    for name in ("loss", "val_log_prob", "val_rmse"):
        scalars = found.Scalars(name)
        assert [scalar.step for scalar in scalars] == metrics[name][0]
        assert [scalar.value for scalar in scalars] == pytest.approx(metrics[name][1])
    assert [picture.step for picture in found.Images("modes")] == metrics["val_log_prob"][0] == [3, 7]
    assert min(picture.height for picture in found.Images("modes")) > 500  # two items of three rows


def test_weights_are_those_without_a_board_and_a_run_may_get_one_later(shown, tmp_path):
    assert fit(tmp_path / "run", "--trainer.max_time", "00:00:00:00") == 75
    assert fit(tmp_path / "run", "--log", "[tensorboard]") == 0
    ours, plain = weights(shown), weights(tmp_path / "run")
    assert all(torch.equal(value, plain[name]) for name, value in ours.items() if torch.is_tensor(value))
    assert cli.main(["evaluate", "--run", str(shown), "--samples", "2", "--ranks", "[2]"]) == 0


def test_steps_trained_again_are_shown_once(shown, tmp_path):
    """As after a kill in the second epoch."""
    run = tmp_path / "run"
    shutil.copytree(shown, run)
    shutil.move(run / "previous.ckpt", run / "last.ckpt")
    assert fit(run, "--log", "tensorboard") == 0
    found = events(run)
    assert len(list((run / "tensorboard").iterdir())) == 2
    assert [scalar.step for scalar in found.Scalars("loss")] == list(range(8))
    assert [picture.step for picture in found.Images("modes")] == [3, 7]


class Shown(L.pytorch.loggers.logger.Logger):
    """Keeps the pictures."""

    name = version = "shown"

    def __init__(self):
        super().__init__()
        self.pictures = {}

    def log_metrics(self, *_, **__):
        pass

    def log_hyperparams(self, *_, **__):
        pass

    def log_image(self, key, images, step):
        self.pictures[step] = images[0]


@pytest.mark.parametrize(
    ("head", "method"),
    [
        (LowRankHead(8, 4), Dropout()),
        (LowRankHead(8, 4), Ensemble(2, Swag(snapshots=2, columns=2))),
        (LowRankHead(8, 4), Laplace()),
        (DiagonalHead(8), Dropout()),
        (MeanHead(8), None),
    ],
)
def test_pictures_of_every_method_at_every_phase(head, method, make_net, make_trainer, data):
    """The first epoch has a phase of rank 0; SWAG and Laplace learn the distribution late in training."""
    data.steps_per_epoch, logger = 4, Shown()
    phases = [Phases([Phase(0, rank=0), Phase(4)])] if isinstance(head, LowRankHead) else []
    trainer = make_trainer(24, *phases, ModePictures(items=1, times=3, samples=3), logger=logger)
    trainer.fit(JointUncertainty(make_net(0.2, head), method), datamodule=data)
    assert list(logger.pictures) == [7, 15, 23]
    for picture in logger.pictures.values():
        assert picture.dtype == np.uint8
        assert picture.shape[2] == 3
        assert picture.std() > 5  # not blank


def test_outputs_that_are_not_pictures(make_trainer):
    pairs = [(torch.randn(3), torch.randn(4)) for _ in range(40)]
    net, logger = wrap(torch.nn.Linear(3, 5), LowRankHead(5, 2, outputs=4)), Shown()
    task = Task.of_datasets(pairs, pairs[:9], pairs[:3], batch_size=8)
    make_trainer(5, ModePictures(), logger=logger).fit(JointUncertainty(net), datamodule=task)
    assert list(logger.pictures) == [4]


def test_predictions_that_are_not_finite_have_no_picture(make_net, make_trainer, data):
    module, logger = JointUncertainty(make_net()), Shown()
    with torch.no_grad():
        module.net.head.mean_bias.fill_(torch.nan)
    with pytest.warns(
        UserWarning, match="step 5: no picture of the modes: cov_diag\\[0, 0\\] must be positive and finite"
    ):
        make_trainer(5, ModePictures(), logger=logger).fit(module, datamodule=data)
    assert logger.pictures == {}


def test_board_that_is_not_installed_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert fit(tmp_path / "run", "--log", "[tensorboard,wandb]") == 1
    assert "fit: --log wandb needs the package wandb, pip install wandb: " in capsys.readouterr().err
    assert fit(tmp_path / "run", "--log", "papers") == 1
    assert "log" in capsys.readouterr().err


def test_resumed_run_has_one_run_of_wandb(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", types.ModuleType("wandb"))
    monkeypatch.setattr(L.pytorch.loggers, "WandbLogger", lambda **settings: settings)
    first, again = (boards.loggers(["wandb", "wandb"], tmp_path, {"seed_everything": 3}) for _ in range(2))
    assert first == again
    (made,) = first
    assert len(made["id"]) == 12
    assert made["config"] == {"seed_everything": 3}
    assert made["name"] == tmp_path.name
