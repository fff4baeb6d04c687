"""What evaluate, predict, panel and diagnose write: what the files are of, their names, and what they depend on."""

import contextlib
import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from small import CHANGES

import lrd_kernels as lrd
from lrd_uq import cli, diagnosis, predict, provenance, storage
from lrd_uq.bayes import Dropout, Ensemble
from lrd_uq.data import Batch, load_digits
from lrd_uq.data.task import Task
from lrd_uq.heads import LowRankHead
from lrd_uq.nets import wrap

FEW = ["--samples", "4", "--ranks", "[2]"]
OF = {"run", "part", "T", "ranks", "seed", "config_sha256", "checkpoint", "code"}


@pytest.fixture
def run(trained_run, tmp_path):
    return shutil.copytree(trained_run, tmp_path / "run")


def digit(number):
    return Image.fromarray((load_digits().images[number].view(28, 28).numpy() * 255).round().astype(np.uint8))


def evaluations(run):
    return {file.name: json.loads(file.read_text()) for file in run.glob("evaluation-*.json")}


def test_evaluations_say_what_they_are_of(run, capsys):
    """Another part, T, ranks, seed, config or checkpoint gives another file; the same evaluation the same numbers."""
    asked = [FEW, [*FEW, "--part", "val"], ["--samples", "3", "--ranks", "[2]"], ["--samples", "4", "--ranks", "[3]"]]
    asked += [[*FEW, "--seed_everything", "5"], [*FEW, "--data.init_args.test", "6"]]
    for number, words in enumerate(asked, start=1):
        assert cli.main(["evaluate", "--run", str(run), *words]) == 0
        assert len(evaluations(run)) == number
    before = evaluations(run)
    assert cli.main(["evaluate", "--run", str(run), *FEW]) == 0
    after = evaluations(run)
    assert set(after) == set(before)
    for name, document in after.items():
        assert {**document, "facts": None} == {**before[name], "facts": None}
        assert name in capsys.readouterr().out or name in before
        of = document["of"]
        assert set(of) == OF
        assert name.startswith(f"evaluation-{of['part']}-T{of['T']}-seed{of['seed']}-")
        assert of["checkpoint"]["sha256"] == hashlib.sha256((run / "last.ckpt").read_bytes()).hexdigest()
        assert (of["checkpoint"]["file"], of["checkpoint"]["step"]) == ("last.ckpt", 21)
        assert of["code"] == {"version": lrd.__version__, "sources_sha256": provenance.sources_hash()}
        assert document["items"] == {"test": 12, "val": 20}[of["part"]] or document["items"] == 6
    assert len({document["of"]["config_sha256"] for document in after.values()}) == 3  # as it is, seed 5, 6 items

    checkpoint = torch.load(run / "last.ckpt", weights_only=True)
    next(iter(checkpoint["state_dict"].values())).add_(1.0)
    torch.save(checkpoint, run / "last.ckpt")
    with pytest.warns(UserWarning, match="no SHA-256"):
        assert cli.main(["evaluate", "--run", str(run), *FEW]) == 0
    assert len(evaluations(run)) == len(asked) + 1


def test_one_item_gives_no_nan(run, capsys):
    assert cli.main(["evaluate", "--run", str(run), *FEW, "--data.init_args.test", "1"]) == 0
    (document,) = evaluations(run).values()
    assert document["rows"]["joint"]["sd"] is None
    assert document["rows"]["joint"]["reasons"] == {"sd": "one item has no spread"}
    (file,) = run.glob("evaluation-*.json")
    assert not re.search("NaN|Infinity", file.read_text())
    said = capsys.readouterr().out.partition("Wrote ")[0]
    assert "nan" not in said
    assert "| joint " in said


def files_of(folder, **numbers):
    folder.mkdir(exist_ok=True)
    for name, number in numbers.items():
        digit(number).save(folder / name.replace("_", "."))
    return folder


def predicted(run, images, output, *words):
    return cli.main(["predict", "--run", str(run), "--images", str(images), "--output", str(output), *words])


SIZES = ["--samples", "5", "--rank", "6"]


def test_prediction_depends_on_its_picture_alone(trained_run, tmp_path):
    """Alone, or in a folder with others before and after it; and with the same content under another name."""
    together = files_of(tmp_path / "together", a_png=0, b_png=1, c_png=2, z_bmp=1)
    alone = files_of(tmp_path / "alone", b_png=1)
    for images in (together, alone):
        assert predicted(trained_run, images, tmp_path / f"{images.name} out", *SIZES) == 0
    wanted = np.load(tmp_path / "together out" / "b.npz")
    for other in (tmp_path / "alone out" / "b.npz", tmp_path / "together out" / "z.npz"):
        found = np.load(other)
        for name in set(wanted) - {"about"}:
            np.testing.assert_allclose(found[name], wanted[name], rtol=1e-5, atol=1e-6)
    different = np.load(tmp_path / "together out" / "a.npz")
    assert abs(different["mean"] - wanted["mean"]).max() > 0.01
    assert predicted(trained_run, alone, tmp_path / "seed", *SIZES, "--seed_everything", "1") == 0
    assert abs(np.load(tmp_path / "seed" / "b.npz")["mean"] - wanted["mean"]).max() > 1e-4


def test_predictions_say_what_they_are_of(trained_run, tmp_path):
    images = files_of(tmp_path / "images", a_png=0)
    assert predicted(trained_run, images, tmp_path / "out", *SIZES) == 0
    assert (
        cli.main(["panel", "--run", str(trained_run), *SIZES, "--items", "[3]", "--output", f"{tmp_path}/p.png"]) == 0
    )
    with safe_open(tmp_path / "out" / "a.safetensors", "pt") as file:
        texts = [file.metadata()["about"]]
    texts += [
        str(np.load(tmp_path / "out" / "a.npz")["about"]),
        Image.open(tmp_path / "out" / "a.png").text["Description"],
    ]
    for text in texts:
        of = json.loads(text)
        assert set(of) == OF - {"part", "ranks"} | {"rank", "input"}
        assert (of["T"], of["rank"], of["input"]) == (5, 6, "a.png")
    of = json.loads(Image.open(tmp_path / "p.png").text["Description"])
    assert (of["part"], of["items"], of["checkpoint"]["step"]) == ("test", [3], 21)


def test_names_that_differ_by_the_ending_alone(trained_run, tmp_path):
    images = files_of(tmp_path / "images", a_png=0, a_bmp=1, b_png=2)
    assert predicted(trained_run, images, tmp_path / "out", *SIZES) == 0
    stems = {file.name.removesuffix(".npz") for file in (tmp_path / "out").glob("*.npz")}
    assert stems == {"a.png", "a.bmp", "b"}
    assert len(list((tmp_path / "out").iterdir())) == 9
    png, bmp = (np.load(tmp_path / "out" / f"a.{ending}.npz")["mean"] for ending in ("png", "bmp"))
    assert abs(png - bmp).max() > 0.01


def test_every_input_has_a_name_of_its_own(tmp_path):
    inputs = [tmp_path / name for name in ("a.png", "a.jpg", "a.png.bmp", "b.c.png")]
    assert list(predict.output_names(inputs).values()) == ["a.png", "a.jpg", "a.png.bmp", "b.c.png"]
    assert list(predict.output_names(inputs[2:]).values()) == ["a.png", "b.c"]
    with pytest.raises(ValueError, match=r"same name: a\.png"):
        predict.output_names([tmp_path / "x" / "a.png", tmp_path / "y" / "a.png"])


@pytest.mark.parametrize("kind", ["same", "dotted", "file", "link", "linked folder"])
def test_predict_never_overwrites_what_it_reads(kind, trained_run, tmp_path, capsys):
    images = files_of(tmp_path / "images", a_png=0, b_png=1)
    output, message = images, "output must be another folder than images"
    if kind == "dotted":
        output = images / ".." / "images"
    elif kind == "file":
        output, message = images / "a.png", "output must be a folder; .*a.png is a file"
    elif kind == "link":  # an input lies where an output would be written
        output, message = tmp_path / "out", "a.png would be written over a file that is read"
        output.mkdir()
        (images / "a.png").rename(output / "a.png")
        (images / "a.png").symlink_to(output / "a.png")
    elif kind == "linked folder":
        output = tmp_path / "out"
        output.symlink_to(images)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*.png")}
    assert predicted(trained_run, images, output, *SIZES) == 1
    assert re.search(message, (said := capsys.readouterr().err))
    assert len(said.splitlines()) == 1
    assert {file: file.read_bytes() for file in tmp_path.rglob("*.png")} == before
    assert not list(tmp_path.rglob("*.npz"))


def test_a_link_among_the_outputs_is_replaced(trained_run, tmp_path):
    """The file that it points to, which may be an input, stays as it is."""
    images = files_of(tmp_path / "images", a_png=0)
    before = (images / "a.png").read_bytes()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a.png").symlink_to(images / "a.png")
    assert predicted(trained_run, images, tmp_path / "out", *SIZES) == 0
    assert (images / "a.png").read_bytes() == before
    assert not (tmp_path / "out" / "a.png").is_symlink()


def test_files_are_read_as_they_are_needed(trained_run, tmp_path, capsys):
    """A file that cannot be read is named; the ones before it are predicted."""
    images = files_of(tmp_path / "images", a_png=0, c_png=1)
    (images / "b.png").write_bytes(b"not a picture")
    assert predicted(trained_run, images, tmp_path / "out", *SIZES) == 1
    said = capsys.readouterr()
    assert "b.png" in said.err
    assert "a.npz" in said.out
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"a.npz", "a.safetensors", "a.png"}


def said_by_diagnose(run, capsys):
    assert cli.main(["diagnose", "--run", str(run)]) == 0
    return capsys.readouterr().out


def test_diagnose_is_in_evaluation_mode_and_repeatable(run, capsys):
    first = said_by_diagnose(run, capsys)
    torch.manual_seed(5)
    assert said_by_diagnose(run, capsys) == first
    assert json.loads(Image.open(run / "condition.png").text["Description"])["checkpoint"]["step"] == 21


def small_net(dropout=0.5):
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(1, 6, 3, padding=1), torch.nn.Dropout2d(dropout)
    return wrap(torch.nn.Sequential(*layers), LowRankHead(6, 2, initial_factor=1.0))


def test_diagnosis_is_that_of_the_expected_weights():
    """Whatever the mode of the network and the size of a batch; outputs that do not exist are left out."""
    net, x = small_net().train(), torch.randn(9, 1, 4, 5)
    mask = torch.ones(9, 1, 4, 5, dtype=torch.bool)
    mask[:, :, :, 3:] = False
    gaussian = net.eval().gaussian(x)
    keep = mask[0].flatten()
    wanted = str(lrd.diagnose(gaussian.factor[:, keep], gaussian.diag[:, keep], eps=net.head.eps)).splitlines()
    net.train()
    batch = Batch(x, torch.zeros_like(x), mask)
    assert "\n".join(diagnosis.diagnose(Dropout(), net, batch)).splitlines() == wanted
    assert net.training
    pairs = [batch._replace(input=x[i : i + 1], target=x[i : i + 1], mask=mask[i : i + 1]) for i in range(9)]
    one_by_one = "\n".join(diagnosis.diagnose(Dropout(), net, iter(pairs)))
    assert one_by_one.splitlines() == wanted


def test_diagnosis_names_items_and_takes_every_member():
    net, x = small_net(), torch.randn(6, 1, 4, 5)
    x[4] = torch.nan
    mask = torch.rand(6, 1, 4, 5) > 0.3  # another one for every item
    mask[2] = False
    method = Ensemble(2)
    lines = "\n".join(diagnosis.diagnose(method, method.prepare(net), (x, torch.zeros_like(x), mask))).splitlines()
    assert lines[0].startswith("10 covariances of ")  # of two members; an item has no outputs
    assert any(re.search("an invalid covariance +1: 4$", line) for line in lines)
    assert any(re.search("no outputs, left out +1: 2$", line) for line in lines)
    with pytest.raises(ValueError, match="no covariances"):
        diagnosis.diagnose(Dropout(), net, [])


def test_commands_hold_one_batch_of_items(trained_run, monkeypatch, capsys):
    """`evaluate`, `diagnose` and `predict` never ask for all items of the data."""

    def refuse(self, *_):
        raise AssertionError("all items at once")

    monkeypatch.setattr(Task, "part", refuse)
    copy = shutil.copytree(trained_run, trained_run.parent / "copy", dirs_exist_ok=True)
    assert cli.main(["evaluate", "--run", str(copy), *FEW]) == 0
    assert cli.main(["diagnose", "--run", str(copy)]) == 0


@contextlib.contextmanager
def files_of_at_most(size):
    """Writes beyond this size fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [0, 300, 9000])
@pytest.mark.parametrize("command", ["evaluate", "predict", "panel", "diagnose"])
def test_full_disk_leaves_no_half_of_a_result(command, size, run, tmp_path, capsys):
    """What was there before is there after it; the error is one line that names the file."""
    words = {"panel": ["--items", "[0]", *SIZES], "evaluate": FEW, "predict": SIZES, "diagnose": []}[command]
    if command in ("panel", "predict"):
        words = [*words, "--output", str(tmp_path / ("out" if command == "predict" else "panel.png"))]
    if command == "predict":
        words += ["--images", str(files_of(tmp_path / "images", a_png=0))]
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    capsys.readouterr()
    with files_of_at_most(size):
        status = cli.main([command, "--run", str(run), *words])
    said = capsys.readouterr().err
    after = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    if command == "evaluate" and size == 9000:
        assert status == 0  # it is smaller
        return
    assert status == 1
    (line,) = said.splitlines()
    assert re.match(rf"lrd-uq {command}: .*cannot write /.*: File too large", line)
    assert not [file for file in after if "unfinished" in file.name]
    assert {file: content for file, content in after.items() if file in before} == before
    assert all(len(content) <= size for file, content in after.items() if file not in before)
    for file in set(after) - set(before):
        assert file.suffix == ".npz"  # whole: those that came before it
        np.load(file)["about"]


@pytest.mark.parametrize("size", [0, 100, 2000, 4000, 50_000])
def test_full_disk_while_training_keeps_what_is_there(size, run, trained_run, tmp_path, capsys):
    """Settings, log and checkpoint, from which the same command goes on."""
    (run / "last.ckpt").write_bytes((run / "previous.ckpt").read_bytes())
    words = [word for name, value in CHANGES.items() for word in (f"--{name}", str(value))]
    words = ["fit", "--config", "digits_dropout", "--run", str(run), *words]
    with files_of_at_most(size):
        assert cli.main(words) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert re.match(r"lrd-uq fit: .*cannot write /.*: File too large", line)
    assert not list(run.glob("*unfinished*"))
    assert cli.main(words) == 0
    whole, found = (torch.load(folder / "last.ckpt", weights_only=True)["state_dict"] for folder in (trained_run, run))
    assert all(torch.equal(found[key], value) for key, value in whole.items() if torch.is_tensor(value))


def test_files_of_killed_processes_are_removed_and_those_of_living_ones_kept(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    names = [
        f"last.ckpt.{dead.pid}.unfinished",
        f".unfinished.{dead.pid}.condition.png",
        "a.99999999999999999999.unfinished",
    ]
    kept = [f"a.json.{os.getppid()}.unfinished", f".unfinished.{os.getppid()}.b.png", "unfinished.txt", "my.unfinished"]
    for name in (*names, *kept):
        (tmp_path / name).touch()
    storage.remove_unfinished(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted(kept)
