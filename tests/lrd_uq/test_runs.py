"""The folder of a run: whole checkpoints whatever happens, no code from files, one process, statuses that are true."""

import errno
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import small_runs
from small_runs import same, words

from lrd_uq import checkpoints, cli, runs
from lrd_uq.extra import lightning as L
from lrd_uq.lock import locked

trained, run = small_runs.trained, small_runs.run  # fixtures


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("--data.init_args.steps_per_epoch", "0", "steps_per_epoch must be at least 1; got 0"),
        ("--trainer.limit_train_batches", "0", "trainer.limit_train_batches must be above 0"),
        ("--trainer.max_epochs", "0", "trainer.max_epochs must be above 0"),
        ("--trainer.max_steps", "0", "trainer.max_steps must be above 0"),
        ("--trainer.max_steps", "-1", "trainer.max_steps or trainer.max_epochs must be set"),
        ("--trainer.fast_dev_run", "true", "trainer.fast_dev_run saves no checkpoint"),
        ("--trainer.max_time", "soon", "not a valid duration"),
    ],
)
def test_nothing_trained_is_an_error(setting, value, said, tmp_path, capsys):
    assert cli.main(words(tmp_path, setting, value)) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "last.ckpt").exists()


def test_status_is_0_only_with_the_last_step_on_the_disk(tmp_path, monkeypatch, capsys):
    """Whatever the reason, such as a callback that ends the training or a save that does nothing."""
    with monkeypatch.context() as patch:
        real = checkpoints.save
        patch.setattr(checkpoints, "save", lambda c, path: real(c, path) if c["global_step"] < 6 else None)
        assert cli.main(words(tmp_path)) == 1
    assert "training ended early, after step 6 of 6; the last checkpoint has step 3" in capsys.readouterr().err
    assert cli.main(words(tmp_path)) == 0


def test_time_that_is_up_has_its_own_status_and_the_run_goes_on(tmp_path, capsys, monkeypatch):
    said = "stopped by max_time after step "
    assert cli.main(words(tmp_path, "--trainer.max_time", "00:00:00:00", steps=4)) == 75
    assert said + "0 of 4; no step is saved" in capsys.readouterr().err
    clock = SimpleNamespace(monotonic=itertools.count().__next__)  # a second for each look at it
    monkeypatch.setattr("lightning.pytorch.callbacks.timer.time", clock)
    limit = words(tmp_path, "--trainer.max_time", "00:00:00:03", steps=8)
    steps = []
    for _ in range(8):
        status = cli.main(limit)
        if status != 75:
            break
        steps.append(int(capsys.readouterr().err.partition(said)[2].split()[0]))
    assert status == 0
    assert steps
    assert steps == sorted(set(steps)), "a part of the run trained nothing"
    assert cli.main(limit) == 0  # nothing to do


class Terminate(L.pytorch.Callback):
    """Sends SIGTERM to the process amid the second epoch."""

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 4:
            os.kill(os.getpid(), signal.SIGTERM)


def test_terminated_run_says_143_and_goes_on_exactly(trained, tmp_path, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        own = runs.callbacks
        patch.setattr(runs, "callbacks", lambda *arguments: [Terminate(), *own(*arguments)])
        assert cli.main(words(tmp_path)) == 143
    said = "stopped by SIGTERM after step 5 of 6; the last checkpoint has step 3: the same command goes on from it"
    assert said in capsys.readouterr().err
    assert cli.main(words(tmp_path)) == 0
    assert same(tmp_path / "last.ckpt", trained / "last.ckpt")


# --- a finished run, and other settings ---


def content(folder):
    return {
        file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in folder.iterdir() if file.name != ".lock"
    }


def test_finished_run_is_left_as_it_is(run, capsys):
    before = content(run)
    capsys.readouterr()
    for more in ([], ["--trainer.max_time", "00:00:00:01"], ["--trainer.log_every_n_steps", "2"]):
        assert cli.main(words(run, *more)) == 0
        assert f"{run} is finished: its last step, 6, is trained and saved" in capsys.readouterr().out
        assert content(run) == before
    (run / "last.ckpt").unlink()
    with pytest.warns(UserWarning, match="of step 3 is used instead"):
        assert cli.main(words(run)) == 0
    assert "is finished" not in capsys.readouterr().out
    assert checkpoints.load(run / "last.ckpt")["global_step"] == 6


PHASES = '[{"class_path": "lrd_uq.monitors.GradientFilter"}, {"class_path": "lrd_uq.phases.Phases", "init_args": '
PHASES += '{"phases": [{"start": 0, "rank": 0}, {"start": 0.5}]}}]'
OTHER = {
    "trainer.max_steps": ("9", "a run cannot be made longer or shorter"),
    "trainer.max_epochs": ("5", "a run cannot be made longer or shorter"),
    "trainer.precision": ("bf16-mixed", "trainer.precision was "),
    "trainer.gradient_clip_val": ("0.5", "trainer.gradient_clip_val was 1.0 and is now 0.5"),
    "trainer.gradient_clip_algorithm": ("value", "is now 'value'"),
    "trainer.accumulate_grad_batches": ("2", "trainer.accumulate_grad_batches was 1 and is now 2"),
    "trainer.limit_train_batches": ("2", "trainer.limit_train_batches was None and is now 2"),
    "trainer.callbacks": (PHASES, "trainer.callbacks[1].init_args.phases[1].start was 0.15 and is now 0.5"),
    "seed_everything": ("1", "seed_everything was 0 and is now 1"),
    "model.learning_rate": ("0.1", "model.learning_rate was "),
    "model.method": ("lrd_uq.bayes.Method", "model.method was 'lrd_uq.bayes.Dropout' and is now 'lrd_uq.bayes.Method'"),
    "data.init_args.split_seed": ("1", "data.init_args.split_seed was 0 and is now 1"),
}


@pytest.mark.parametrize("key", OTHER)
def test_other_settings_are_refused_by_name(key, run, capsys):
    value, said = OTHER[key]
    before = content(run)
    for finished in (True, False):
        capsys.readouterr()
        assert cli.main(words(run, f"--{key}={value}")) == 1
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lrd-uq")]
        assert said in line
        assert f"{run} holds a run with other settings: " in line
        assert content(run) == before
        if finished:
            (run / "last.ckpt").write_bytes((run / "previous.ckpt").read_bytes())
            before = content(run)


def test_what_changes_no_weights_may_differ(run, trained):
    (run / "last.ckpt").write_bytes((run / "previous.ckpt").read_bytes())
    more = ["--trainer.val_check_interval=2", "--trainer.limit_val_batches=1", "--trainer.log_every_n_steps=2"]
    more += ["--trainer.enable_model_summary=true", "--trainer.max_time=01:00:00:00"]
    more += ['--trainer.callbacks+={"class_path": "LearningRateMonitor"}']
    assert cli.main(words(run, *more)) == 0
    assert same(run / "last.ckpt", trained / "last.ckpt")


def test_run_of_epochs_is_finished_too(tmp_path, capsys):
    epochs = words(tmp_path, "--trainer.max_epochs", "2", steps=-1)
    assert cli.main(epochs) == 0
    before = content(tmp_path)
    assert cli.main(epochs) == 0
    assert "is finished: its last step, 6," in capsys.readouterr().out
    assert content(tmp_path) == before


# --- one process ---


def hold(folder, ready, release):
    with runs.opened(folder):
        ready.set()
        release.wait()


def test_second_process_is_refused_in_a_line(trained, run, capsys):
    context = multiprocessing.get_context("fork")
    ready, release = context.Event(), context.Event()
    holder = context.Process(target=hold, args=(run, ready, release), daemon=True)
    holder.start()
    assert ready.wait(60)
    before = {file.name: file.read_bytes() for file in run.iterdir()}
    assert cli.main(words(run, steps=9)) == 1
    assert f"{run} is in use by another process ({holder.pid})" in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in run.iterdir()} == before
    assert cli.main(["diagnose", "--run", str(run)]) == 0  # only reads
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    assert cli.main(words(run, steps=6)) == 0


def sleep(ready):
    ready.set()
    time.sleep(60)


def test_worker_that_outlives_its_parent_does_not_keep_the_lock(tmp_path):
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    with locked(tmp_path):
        worker = context.Process(target=sleep, args=(ready,), daemon=True)
        worker.start()
        assert ready.wait(60)
    with locked(tmp_path), pytest.raises(ValueError, match="in use"), locked(tmp_path):
        pass
    worker.kill()
    worker.join()


def test_folder_without_locks_is_warned_of(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.warns(UserWarning, match="has no locks"), locked(tmp_path):
        pass


# --- real disks ---

FULL = """
import os, sys, warnings
from lrd_uq import checkpoints, cli
from lrd_uq.metrics import read_metrics
warnings.simplefilter("ignore")
from pathlib import Path
disk, words = Path(sys.argv[1]), sys.argv[2:]
seen = set()
for free in range(0, 400, int(os.environ["KILOBYTES"])):
    run, filler = disk / "run", disk / "filler"
    os.system(f"rm -rf {disk}/*")
    filler.write_bytes(bytes(4096))
    run.mkdir()
    room = os.statvfs(disk)
    filler.write_bytes(bytes(4096 + max(room.f_bavail * room.f_frsize - free * 1024, 0)))
    status = cli.main([*words, "--run", str(run)])
    found = checkpoints.newest(run)
    step = 0 if found is None else found.content["global_step"]
    read_metrics(run)
    assert (status == 0) == (step == 9), (free, status, step)
    assert status in (0, 1)
    assert not list(run.glob("*.unfinished"))
    seen.add((status, step))
    if status == 0 and not list(run.glob("evaluation*")):
        room = os.statvfs(disk)
        with filler.open("ab") as more:
            more.write(bytes(room.f_bavail * room.f_frsize))
        assert cli.main(["evaluate", "--run", str(run), "--samples", "2", "--ranks", "[2]"]) == 1
        assert not list(run.glob("evaluation*"))
    filler.unlink()
    assert cli.main([*words, "--run", str(run)]) == 0  # there is room again
    assert checkpoints.newest(run).content["global_step"] == 9
    print(free, status, step, flush=True)
assert {(1, 0), (0, 9)} < seen, seen
print("held", sorted(seen))
"""


@pytest.mark.slow
def test_full_disk_at_every_write_of_a_run(tmp_path):
    """On a small tmpfs in a namespace of its own, with more and more room."""
    command = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=2m none "$0" && exec "$@"', str(tmp_path)]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no private mount namespace here")
    options = [word for word in words("x", steps=9) if word not in ("--run", "x")]
    environment = {**os.environ, "KILOBYTES": "12"}
    done = subprocess.run(
        [*command, sys.executable, "-c", FULL, str(tmp_path), *options], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "held" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_terminated_process_ends_with_143(tmp_path):
    """SIGTERM to the real process, and to its pipeline; the next fit goes on."""
    command = [sys.executable, "-m", "lrd_uq.cli", *words(tmp_path, steps=400)]
    victim = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "last.ckpt").exists():
        time.sleep(0.01)
    second = subprocess.run(command, capture_output=True, text=True, check=False)
    assert victim.poll() is None, "the run was too short for the test"
    assert second.returncode == 1
    assert "is in use by another process" in second.stderr
    victim.terminate()
    said = victim.communicate()[1]
    assert victim.returncode == 143
    assert "stopped by SIGTERM after step" in said
    assert 0 < checkpoints.newest(tmp_path).content["global_step"] < 400
