"""The folder of a run: whole checkpoints whatever happens, no code from files, one process, statuses that are true."""

import errno
import io
import itertools
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from failing import Failing

from lrd_uq import checkpoints, cli, runs, storage
from lrd_uq.extra import lightning as L
from lrd_uq.lock import locked

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


# --- files run no code ---


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def crafted(kind, trap, good):
    """Bytes of a checkpoint that would make the file `trap` if its pickle were run."""
    content = {**checkpoints.load(good), "extra": Evil(trap)}
    memory = io.BytesIO()
    if kind == "bare":
        return pickle.dumps(content)
    torch.save(content, memory, _use_new_zipfile_serialization=kind != "legacy")
    data = memory.getvalue()
    if kind != "sealed":
        return data
    body = data[:-2] + checkpoints.SEAL.to_bytes(2, "little")
    return body + checkpoints.TAG + checkpoints._digest(io.BytesIO(body), len(body))


@pytest.mark.parametrize("kind", ["plain", "sealed", "legacy", "bare"])
def test_crafted_checkpoint_is_refused_by_every_command_and_runs_nothing(kind, run, tmp_path, capsys):
    trap = tmp_path / "trap"
    data = crafted(kind, trap, run / "last.ckpt")
    if kind != "bare":
        torch.load(io.BytesIO(data), weights_only=False)
        assert trap.exists(), "the trap does not work"
        trap.unlink()
    (run / "last.ckpt").write_bytes(data)
    commands = [["fit", "--config", str(run / "config.yaml")], ["evaluate"], ["panel"], ["diagnose"]]
    commands += [["predict", "--images", str(tmp_path)]]
    for command in commands if kind == "plain" else commands[:2]:
        capsys.readouterr()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert cli.main([*command, "--run", str(run)]) == 1
        (line,) = [said for said in capsys.readouterr().err.splitlines() if said.startswith("lrd-uq")]
        assert "last.ckpt holds more than tensors and plain values" in line
        assert "loading it could run code" in line
        assert not trap.exists()


def test_what_could_not_be_loaded_is_not_saved(tmp_path):
    two(tmp_path)
    with pytest.raises(TypeError, match=r"the state of this run has .*Path"):
        checkpoints.save({**state(3), "callbacks": {"mine": {"path": tmp_path}}}, tmp_path / "last.ckpt")
    assert checkpoints.newest(tmp_path).content["global_step"] == 2


# --- damage ---


def test_checkpoint_is_an_archive_that_torch_reads(tmp_path):
    path = two(tmp_path) / "last.ckpt"
    assert torch.equal(torch.load(path, weights_only=True)["state_dict"]["w"], torch.full((1000,), 2.0))
    assert zipfile.ZipFile(path).comment.startswith(checkpoints.TAG)
    assert checkpoints.load(tmp_path / "previous.ckpt")["global_step"] == 1


def damages(data):
    """Every kind of damage, at places that a seed chooses and at the ends."""
    rng = random.Random(0)
    bits = [*range(16), *(8 * len(data) - 1 - bit for bit in range(8 * (checkpoints.SEAL + 24)))]
    bits += [rng.randrange(8 * len(data)) for _ in range(150)]
    for bit in bits:
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        yield f"bit {bit}", bytes(flipped)
    for length in {0, 1, 21, 22, *range(len(data) - 102, len(data)), *(rng.randrange(len(data)) for _ in range(20))}:
        yield f"cut at {length}", data[:length]
    yield "zeros at the end", data[:-600] + bytes(600)
    yield "longer", data + b"\0"
    yield "another file", b"step,loss\n1,2\n" * 500


def test_every_flipped_bit_and_every_cut_is_named_and_the_one_before_is_used(tmp_path):
    path = two(tmp_path) / "last.ckpt"
    for what, data in damages(path.read_bytes()):
        path.write_bytes(data)
        with pytest.warns(UserWarning, match=r"last\.ckpt is damaged: .*previous\.ckpt of step 1 is used") as told:
            found = checkpoints.newest(tmp_path)
        assert (found.path.name, found.content["global_step"], found.damaged) == ("previous.ckpt", 1, [path]), what
        assert len(told) == 1


def test_checkpoint_without_checksum_is_verified_by_its_records(tmp_path):
    path = tmp_path / "last.ckpt"
    torch.save(state(5), path)
    with pytest.warns(UserWarning, match="no SHA-256 checksum"):
        assert checkpoints.newest(tmp_path).content["global_step"] == 5
    data = bytearray(path.read_bytes())
    data[data.index(torch.tensor(5.0).numpy().tobytes() * 4) + 1000] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"no checkpoint can be used: .*last\.ckpt is damaged.*CRC-32"):
        checkpoints.newest(tmp_path)


def test_wrong_content_is_named(tmp_path):
    for content in ({"w": torch.zeros(2)}, [1], {"state_dict": {}, "global_step": "6"}):
        checkpoints.save(content, tmp_path / "last.ckpt")
        with pytest.raises(ValueError, match="is not a checkpoint of a run"):
            checkpoints.load(tmp_path / "last.ckpt")


def test_run_goes_on_from_the_checkpoint_before_a_damaged_one(run, trained, capsys):
    (run / "last.ckpt").write_bytes((run / "last.ckpt").read_bytes()[:-1000])
    with pytest.warns(UserWarning, match=r"last\.ckpt is damaged.*previous\.ckpt of step 3 is used"):
        assert cli.main(words(run)) == 0
    assert same(run / "last.ckpt", trained / "last.ckpt")
    assert checkpoints.load(run / "previous.ckpt")["global_step"] == 3  # not the damaged one
    assert (run / "last.ckpt.damaged").exists()
    for name in ("last.ckpt", "previous.ckpt"):
        (run / name).write_bytes(b"")
    for command in (words(run), ["evaluate", "--run", str(run)]):
        capsys.readouterr()
        assert cli.main(command) == 1
        assert "no checkpoint can be used: " in capsys.readouterr().err


def test_checkpoint_of_another_network_is_told_in_a_line(run, capsys):
    checkpoints.save(state(1), run / "last.ckpt")
    assert cli.main(["diagnose", "--run", str(run)]) == 1
    assert "last.ckpt does not fit the network of this run" in capsys.readouterr().err


# --- saving ---


def save_for_ever(folder, size, done):
    while True:
        checkpoints.save(state(done.value + 1, size), folder / checkpoints.LAST)
        done.value += 1


def places():
    """Folders on the file system of the temporary files, and on another one."""
    return [None, *([Path("/dev/shm")] if os.access("/dev/shm", os.W_OK) else [])]


@pytest.mark.parametrize("place", places(), ids=str)
def test_killed_saves_lose_nothing(place):
    """SIGKILL at random moments: what a save had finished is there, and no rubbish stays."""
    rng, left, context = random.Random(1), 0, multiprocessing.get_context("fork")
    done = context.Value("q", 0, lock=False)  # the last finished step
    temporary = set(os.listdir(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(dir=place) as name:
        folder = Path(name)
        for attempt in range(10):
            with runs.opened(folder):
                assert not list(folder.glob("*.unfinished"))
            saver = context.Process(target=save_for_ever, args=(folder, 2_000_000, done), daemon=True)
            saver.start()
            while not (folder / "last.ckpt").exists():
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.03))
            enough = done.value + 5
            while attempt % 2 and done.value < enough and not list(folder.glob("*.unfinished")):
                pass  # every second one while a file is written
            os.kill(saver.pid, signal.SIGKILL)
            saver.join()
            left += len(list(folder.glob("*.unfinished")))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # last.ckpt is missing between two renames
                found = checkpoints.newest(folder).content
            assert found["global_step"] in (done.value, done.value + 1)
            assert torch.equal(found["state_dict"]["w"], torch.full((2_000_000,), float(found["global_step"])))
            assert set(os.listdir(folder)) <= {
                ".lock",
                "last.ckpt",
                "previous.ckpt",
                f"last.ckpt.{saver.pid}.unfinished",
            }
        assert left, "no kill hit a save"
        made = set(os.listdir(tempfile.gettempdir())) - temporary - {folder.name}
        assert not [file for file in made if file.startswith("tmp")]  # fsspec's transactions left theirs there


CALLS = [("write", n) for n in range(3)] + [("fsync", 0), ("replace", 0), ("replace", 1), ("open", 0)]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES], ids=errno.errorcode.get)
@pytest.mark.parametrize(("name", "number"), CALLS)
def test_failed_save_leaves_the_last_checkpoint(name, number, code, tmp_path, monkeypatch):
    two(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(storage.os, name, Failing(getattr(os, name), number, code))
        with pytest.raises(OSError, match=r"cannot write .*last\.ckpt: "):
            checkpoints.save(state(3), tmp_path / "last.ckpt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert checkpoints.newest(tmp_path).content["global_step"] == 2
    assert not list(tmp_path.glob("*.unfinished"))
    checkpoints.save(state(4), tmp_path / "last.ckpt")
    assert checkpoints.newest(tmp_path).content["global_step"] == 4


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS], ids=errno.errorcode.get)
def test_disk_that_fails_during_fit_is_an_error_and_keeps_the_checkpoint(code, tmp_path, monkeypatch, capsys):
    """A disk that is full, or permission that is lost, from the second checkpoint on."""
    real, saved = storage._write, []

    def write(path, *arguments, **options):
        saved.append("last.ckpt" in path.name)
        if sum(saved) > 1:
            raise OSError(code, os.strerror(code))
        real(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "_write", write)
        assert cli.main(words(tmp_path, steps=9)) == 1
    (line,) = [said for said in capsys.readouterr().err.splitlines() if said.startswith("lrd-uq")]
    assert f"cannot write {tmp_path}/" in line
    assert os.strerror(code) in line
    assert "Stopped after step 6 of 9; the last checkpoint has step 3: the same command goes on from it" in line
    assert cli.main(words(tmp_path, steps=9)) == 0
    assert checkpoints.load(tmp_path / "last.ckpt")["global_step"] == 9


def test_checkpoints_of_other_callbacks_are_sealed_too(tmp_path, make_net, make_trainer, data):
    from lrd_uq.module import JointUncertainty

    best = L.pytorch.callbacks.ModelCheckpoint(tmp_path, "best-{step}", monitor="val_log_prob", mode="max")
    plugins = [checkpoints.CheckpointFiles()]
    trainer = make_trainer(10, best, plugins=plugins, enable_checkpointing=True)
    trainer.fit(JointUncertainty(make_net()), datamodule=data)
    (kept,) = tmp_path.glob("best-*.ckpt")  # a worse one was removed, and none of them is previous.ckpt
    assert str(kept) == best.best_model_path
    assert checkpoints.load(kept)["callbacks"][best.state_key]["best_model_score"] == best.best_model_score
    assert not (tmp_path / "previous.ckpt").exists()


# --- statuses ---


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
