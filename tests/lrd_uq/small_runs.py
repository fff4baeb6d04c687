"""A small run: its command line, and fixtures of a trained one."""

import pytest
import torch

from lrd_uq import checkpoints, cli

SMALL = ["--data.init_args.train", "64", "--data.init_args.val", "20", "--data.init_args.test", "12"]
SMALL += ["--data.init_args.steps_per_epoch", "3", "--trainer.log_every_n_steps", "1"]
SMALL += ["--trainer.enable_progress_bar", "false", "--trainer.num_sanity_val_steps", "0"]
SMALL += ["--model.net.init_args.head.init_args.channels", "6"]
SMALL += ["--model.net.init_args.backbone.init_args.channels", "6"]


def words(folder, *more, steps=6):
    steps = ["--trainer.max_steps", str(steps)]
    return ["fit", "--config", "digits_dropout", "--run", str(folder), *SMALL, *steps, *more]


def state(step, size=1000):
    return {"state_dict": {"w": torch.full((size,), float(step))}, "global_step": step}


def two(folder):
    """A run with checkpoints of steps 1 and 2."""
    for step in (1, 2):
        checkpoints.save(state(step), folder / checkpoints.LAST)
    return folder


def same(a, b):
    a, b = (checkpoints.load(path)["state_dict"] for path in (a, b))
    return all(torch.equal(v, b[k]) if isinstance(v, torch.Tensor) else v == b[k] for k, v in a.items())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    assert cli.main(words(folder)) == 0
    return folder


@pytest.fixture
def run(trained, tmp_path):
    """A copy of a trained run, with checkpoints of steps 3 and 6."""
    for file in trained.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path
