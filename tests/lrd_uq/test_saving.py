"""Checkpoints that no kill, full disk, damage or stranger can turn into a loss."""

import errno
import io
import multiprocessing
import os
import pickle
import random
import signal
import tempfile
import time
import warnings
import zipfile
from pathlib import Path

import pytest
import small_runs
import torch
from failing import Failing
from small_runs import same, state, two, words

from lrd_uq import checkpoints, cli, runs, storage
from lrd_uq.extra import lightning as L

trained, run = small_runs.trained, small_runs.run  # fixtures

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
