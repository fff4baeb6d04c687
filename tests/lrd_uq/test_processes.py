"""Several processes: the result of one to rounding, sharded or not, and shares that make up the whole."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from processes import together
from torch.distributed.tensor import DTensor

from lrd_uq import checkpoints, cli, runs
from lrd_uq.bayes import Ensemble, Variational
from lrd_uq.data.order import ResumableBatchSampler, shared_batches
from lrd_uq.extra import lightning as L
from lrd_uq.metrics import MetricsLog, read_metrics
from lrd_uq.module import JointUncertainty
from lrd_uq.monitors import CovarianceMonitor, GradientFilter
from lrd_uq.phases import Phase, Phases

CLIP = 0.05  # far below the norm of the gradients, which is above 1: every step is clipped


class Spoil(L.pytorch.Callback):
    """Makes a gradient infinite on the last process, in one step."""

    def on_before_optimizer_step(self, trainer, module, optimizer):
        if trainer.global_step == 2 and trainer.global_rank == trainer.world_size - 1:
            gradient = module.net.backbone.first.weight.grad
            (gradient.to_local() if isinstance(gradient, DTensor) else gradient).fill_(torch.inf)


def train(folder, module, data, make_trainer, *callbacks, steps=6, **options):
    folder.mkdir(exist_ok=True)
    phases = Phases([Phase(0, rank=0), Phase(3, rank=4)])  # the factor has no gradients in the first three steps
    kept = runs.callbacks(folder, 0)[1:]
    watch = [phases, *callbacks, GradientFilter(), CovarianceMonitor(every=1), *kept]
    options = {"gradient_clip_val": CLIP, "logger": MetricsLog(folder), "use_distributed_sampler": False, **options}
    trainer = make_trainer(steps, *watch, plugins=[checkpoints.CheckpointFiles()], enable_checkpointing=True, **options)
    found = checkpoints.newest(folder)
    trainer.fit(module, datamodule=data, ckpt_path=found and found.path, weights_only=True)
    return trainer


def weights(folder):
    return {k: v for k, v in checkpoints.load(folder / "last.ckpt")["state_dict"].items() if torch.is_tensor(v)}


def assert_same_run(one, two, tolerance=2e-6):
    a, b = weights(one), weights(two)
    assert a.keys() == b.keys()
    for key in a:
        torch.testing.assert_close(b[key], a[key], rtol=0, atol=tolerance, msg=lambda text, key=key: f"{key}: {text}")
    a, b = read_metrics(one), read_metrics(two)
    assert a.keys() == b.keys()
    for key in a:
        assert b[key][0] == a[key][0], key
        assert b[key][1] == pytest.approx(a[key][1], rel=1e-4, abs=1e-5), key


METHODS = {"plain": lambda: None, "ensemble": lambda: Ensemble(2)}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("method", METHODS)
def test_two_processes_are_as_one(strategy, method, make_net, make_trainer, data, tmp_path):
    def run(folder, **options):
        torch.manual_seed(0)
        return train(tmp_path / folder, JointUncertainty(make_net(), METHODS[method]()), data, make_trainer, **options)

    def run_two(rank):
        trainer = run("two", strategy=strategy, devices=2)
        assert all(isinstance(p, DTensor) == (strategy == "fsdp2") for p in trainer.lightning_module.parameters())

    run("one")
    together(run_two)
    assert_same_run(tmp_path / "one", tmp_path / "two")


def test_bad_gradient_of_one_shard_drops_the_step_on_all(make_net, make_trainer, data, tmp_path):
    def run(folder, **options):
        trainer = train(tmp_path / folder, JointUncertainty(make_net()), data, make_trainer, Spoil(), **options)
        assert float(trainer.callback_metrics["filtered_steps"]) == 1

    run("one")
    together(lambda rank: run("two", strategy="fsdp2", devices=2))
    assert_same_run(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_go_on_from_their_checkpoint(strategy, make_net, make_trainer, data, tmp_path):
    def run(folder, steps=10):
        options = {"strategy": strategy, "devices": 2, "steps": steps, "logger": False}
        train(tmp_path / folder, JointUncertainty(make_net(dropout=0.2)), data, make_trainer, **options)

    def interrupted(rank):
        class Stop(L.pytorch.Callback):
            def on_train_batch_start(self, trainer, *_):
                if trainer.global_step == 7:  # amid the second epoch of five steps
                    raise KeyError("killed")

        with pytest.raises(KeyError, match="killed"):
            train(
                *(tmp_path / "parts", JointUncertainty(make_net(dropout=0.2)), data, make_trainer, Stop()),
                **{"strategy": strategy, "devices": 2, "steps": 10, "logger": False},
            )

    together(lambda rank: run("whole"))
    together(interrupted)
    assert checkpoints.load(tmp_path / "parts" / "last.ckpt")["global_step"] == 5
    together(lambda rank: run("parts"))
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(value, parts[key]) for key, value in whole.items())


@pytest.mark.parametrize("method", [Variational(), Ensemble(2, Variational())], ids=["alone", "members"])
def test_methods_that_need_all_weights_are_refused_by_fsdp2(method, make_net, make_trainer, data, tmp_path):
    def run(rank):
        module = JointUncertainty(make_net(), method)
        name = type(method).__name__
        with pytest.raises(ValueError, match=f"{name} needs all weights in one process: use the strategy ddp"):
            train(tmp_path / "run", module, data, make_trainer, strategy="fsdp2", devices=2)

    together(run)


def test_shares_are_equal_or_refused():
    with pytest.raises(ValueError, match="batch_size must be a multiple of the number of processes, 3; got 32"):
        ResumableBatchSampler(100, 32, None, 0, process=0, processes=3)
    whole = list(ResumableBatchSampler(100, 32, 4, 0))
    halves = [list(ResumableBatchSampler(100, 32, 4, 0, process=i, processes=2)) for i in range(2)]
    for batch, first, second in zip(whole, *halves, strict=True):
        assert len(first) == len(second) == 16
        assert sorted(batch) == sorted([*first, *second])


@pytest.mark.parametrize(("items", "processes"), [(101, 1), (101, 2), (3, 3), (7, 4)])
def test_validation_items_are_shared_without_repeats(items, processes):
    trainers = [SimpleNamespace(global_rank=rank, world_size=processes) for rank in range(processes)]
    shares = [[i for batch in shared_batches(items, 20, trainer) for i in batch] for trainer in trainers]
    assert sorted(i for share in shares for i in share) == list(range(items))
    assert all(shares)
    with pytest.raises(ValueError, match=f"each of {items + 1} processes needs an item"):
        shared_batches(items, 20, SimpleNamespace(global_rank=0, world_size=items + 1))


SMALL = ["--data.init_args.train", "64", "--data.init_args.val", "21", "--data.init_args.test", "13"]
SMALL += ["--data.init_args.steps_per_epoch", "3", "--trainer.max_steps", "6", "--trainer.num_sanity_val_steps", "0"]
SMALL += ["--model.net.init_args.head.init_args.channels", "6", "--trainer.log_every_n_steps", "1"]
SMALL += ["--model.net.init_args.backbone.init_args.channels", "6"]
BOTH = ["--trainer.strategy", "ddp", "--trainer.devices", "2"]


def command(*words):
    assert cli.main(list(words)) == 0


def table(folder, capsys):
    (file,) = folder.glob("evaluation*.json")
    found = json.loads(file.read_text())
    file.unlink()
    return found["rows"], [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]


def test_shipped_recipe_on_two_processes_and_its_table(tmp_path, capfd):
    """The run starts with a phase of rank 0. Dropout has noise of its own in each process, but not in evaluation."""
    run = f"--run={tmp_path / 'run'}"
    together(lambda rank: command("fit", "--config=digits_dropout", run, *SMALL, *BOTH))
    assert read_metrics(tmp_path / "run")["loss"][0] == [0, 1, 2, 3, 4, 5]
    assert checkpoints.load(tmp_path / "run" / "last.ckpt")["global_step"] == 6
    capfd.readouterr()
    score = ["evaluate", run, "--samples", "3", "--ranks", "[4]"]
    together(lambda rank: command(*score))  # as the config of the run says
    two, printed_by_two = table(tmp_path / "run", capfd)
    command(*score, "--trainer.strategy", "auto", "--trainer.devices", "1")
    one, printed_by_one = table(tmp_path / "run", capfd)
    assert printed_by_two == printed_by_one
    assert two.keys() == one.keys()
    for key, wanted in one.items():
        assert two[key] == pytest.approx(wanted, rel=1e-5), key


@pytest.mark.slow
def test_killed_processes_go_on_to_the_same_weights(tmp_path):
    """Started as a user would, with lightning's own launcher; all processes are killed at once."""

    def words(name):
        more = ["--trainer.max_steps", "60", "--data.init_args.steps_per_epoch", "5"]
        program = [sys.executable, "-m", "lrd_uq.cli", "fit", "-c", "digits_dropout", "--run", str(tmp_path / name)]
        return [*program, *SMALL, *BOTH, *more]

    quiet = {"env": {**os.environ, "OMP_NUM_THREADS": "1"}, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(words("whole"), check=True, **quiet)
    victim = subprocess.Popen(words("killed"), start_new_session=True, **quiet)
    deadline = time.monotonic() + 120
    while not (tmp_path / "killed" / "previous.ckpt").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    os.killpg(victim.pid, signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL, "it ended before it was killed"
    assert 5 <= checkpoints.newest(tmp_path / "killed").content["global_step"] < 60
    subprocess.run(words("killed"), check=True, **quiet)
    whole, resumed = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert all(torch.equal(value, resumed[key]) for key, value in whole.items())
