"""The command line: every shipped config, all commands on a run, and error messages."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from PIL import Image
from realdata import colours
from small import FEW, few, text_of

import lrd_kernels as lrd
from lrd_uq import cli, settings, shipped
from lrd_uq.data import load_digits
from lrd_uq.metrics import read_metrics

CONFIGS = shipped.shipped_configs()


def fit(folder, config, *more):
    options = few(config, folder.parent)
    assert cli.main(["fit", "--config", config, "--run", str(folder), *options, *more]) == 0


@pytest.mark.parametrize("config", CONFIGS)
def test_every_shipped_config_fits(config, tmp_path):
    fit(tmp_path / "run", config)
    assert (tmp_path / "run" / "last.ckpt").exists()
    assert read_metrics(tmp_path / "run")["loss"][0] == [0, 1, 2, 3, 4, 5]
    words = ["evaluate", f"--run={tmp_path / 'run'}", "--samples", "3", "--ranks", "[2]"]
    assert cli.main(words) == 0
    (written,) = (tmp_path / "run").glob("evaluation-test-T3-seed*.json")
    assert "rms_z" in next(iter(json.loads(written.read_text())["rows"].values()))


@pytest.mark.parametrize("config", ["natural_inpainting", "natural_colourisation", "moving_layers", "rendered_rooms"])
def test_pictures_of_every_task(config, tmp_path):
    """The panel of a run, and predictions from files."""
    fit(tmp_path / "run", config)
    picture = tmp_path / "panel.png"
    words = ["--items", "[1]", "--samples", "3", "--rank", "4", "--output", str(picture)]
    assert cli.main(["panel", f"--run={tmp_path / 'run'}", *words]) == 0
    assert picture.stat().st_size > 5_000
    files = tmp_path / "files"
    files.mkdir()
    for frame in (1, 2):
        Image.fromarray(colours(frame, 32, 48)).save(files / f"a_img{frame}.png")
    words = ["--images", str(files), "--output", str(tmp_path / "out"), "--samples", "3", "--rank", "4"]
    assert cli.main(["predict", f"--run={tmp_path / 'run'}", *words]) == 0
    assert (tmp_path / "out" / "a_img1.png").stat().st_size > 5_000


@pytest.mark.parametrize("config", ["cell_measurements", "regional_demand"])
def test_panel_of_a_task_without_pictures(config, tmp_path, capsys):
    """The panel draws sums of the outputs; prediction from files is an error."""
    fit(tmp_path / "run", config)
    words = ["--samples", "3", "--items", "[0,4]", "--output", str(tmp_path / "sums.png")]
    assert cli.main(["panel", f"--run={tmp_path / 'run'}", *words]) == 0
    assert (tmp_path / "sums.png").stat().st_size > 10_000
    Image.fromarray(colours(0, 8, 8)).save(tmp_path / "a.png")
    assert cli.main(["predict", f"--run={tmp_path / 'run'}", "--images", str(tmp_path)]) == 1
    assert "cannot predict from files" in capsys.readouterr().err


def test_own_config_starts_from_the_base(tmp_path):
    """A config inherits trainer settings from the base; `callbacks` replaces its callbacks, `callbacks+` adds."""
    own = tmp_path / "own.yaml"
    text = text_of("digits_dropout").partition("trainer:")[0]

    def trainer(*lines):
        own.write_text("\n".join([text, *lines]))
        return settings.configure(["--config", str(own)]).config["trainer"]

    def names(trainer):
        return [callback["class_path"].rpartition(".")[2] for callback in trainer["callbacks"]]

    base = trainer()
    assert (base["gradient_clip_val"], base["max_epochs"]) == (1.0, -1)
    assert names(base) == ["GradientFilter", "CovarianceMonitor", "ScoreMonitor", "Phases"]
    changed = trainer(
        "trainer:", "  gradient_clip_val: 0.5", "  callbacks: [{class_path: lrd_uq.monitors.GradientFilter}]"
    )
    assert (changed["gradient_clip_val"], names(changed)) == (0.5, ["GradientFilter"])
    added = trainer("trainer:", "  callbacks+: [{class_path: LearningRateMonitor}]")
    assert names(added) == [*names(base), "LearningRateMonitor"]


def test_there_is_a_config_for_every_method():
    methods = {name.split("class_path: lrd_uq.bayes.")[1].split()[0] for name in map(text_of, CONFIGS)}
    assert methods == {"Method", "Dropout", "Variational", "Ensemble", "Swag", "Laplace"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "dropout"
    fit(folder, "digits_dropout", "--trainer.max_steps", "21")
    return folder


def test_going_on_with_other_settings_is_refused(run, capsys):
    held = (run / "config.yaml").read_bytes(), (run / "last.ckpt").read_bytes()
    words = ["fit", "--config", "digits_dropout", "--run", str(run), *FEW, "--trainer.max_steps", "21"]
    assert cli.main([*words, "--model.alpha", "0.5"]) == 1
    assert "model.alpha was None and is now 0.5" in capsys.readouterr().err
    assert ((run / "config.yaml").read_bytes(), (run / "last.ckpt").read_bytes()) == held
    assert cli.main(words) == 0  # the same ones go on, with nothing left to do


def test_evaluate_prints_and_writes_scores(run, capsys):
    assert cli.main(["evaluate", f"--run={run}", "--samples", "4", "--ranks", "[2,4]"]) == 0
    said = capsys.readouterr().out
    assert "12 items of the test data" in said
    assert "joint minus expected weights, paired: " in said
    (written,) = run.glob("evaluation-test-T4-*.json")
    document = json.loads(written.read_text())
    assert set(document["rows"]) == {
        *("joint", "diagonal", "mixture", "expected"),
        *("joint 2", "joint 2 unfolded", "joint 4", "joint 4 unfolded"),
    }
    assert f"{document['rows']['joint']['mean']:.1f}" in said


def test_predict_writes_arrays_and_pictures(run, tmp_path):
    images = tmp_path / "images"
    images.mkdir()
    digits = load_digits().images[:2].view(2, 28, 28)
    for name, digit in zip(("first", "second"), digits, strict=True):
        Image.fromarray((digit.numpy() * 255).round().astype(np.uint8)).save(images / f"{name}.png")
    (images / "notes.txt").write_text("not a picture")
    output = tmp_path / "predictions"
    words = ["--images", str(images), "--output", str(output), "--samples", "5", "--rank", "6"]
    assert cli.main(["predict", "--run", str(run), *words]) == 0
    endings = (".npz", ".safetensors", ".png")
    assert {file.name for file in output.iterdir()} == {name + end for name in ("first", "second") for end in endings}
    arrays = np.load(output / "first.npz")
    loaded = lrd.LowRankMultivariateNormal.load(output / "first.safetensors")
    assert arrays["cov_factor"].shape == (784, 6)
    np.testing.assert_allclose(loaded.cov_factor.numpy(), arrays["cov_factor"])
    np.testing.assert_allclose(loaded.mean.numpy(), arrays["mean"])
    assert arrays["mask"].sum() == 560
    assert (arrays["mean"][~arrays["mask"]] == 0).all()
    total = arrays["aleatoric_variance"] + arrays["epistemic_variance"]
    np.testing.assert_allclose(total, loaded.variance.numpy(), rtol=1e-3, atol=1e-5)
    assert (output / "first.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("bad", ["size", "bytes", "none"])
def test_bad_pictures_are_named(run, tmp_path, bad, capsys):
    if bad == "size":
        Image.new("L", (30, 28)).save(tmp_path / "wrong.png")
    elif bad == "bytes":
        (tmp_path / "wrong.png").write_bytes(b"not a picture")
    words = ["--images", str(tmp_path), "--output", str(tmp_path / "out")]
    assert cli.main(["predict", "--run", str(run), *words]) == 1
    wanted = {
        "size": "wrong.png must have 28 x 28 pixels; got 30 x 28",
        "bytes": "wrong.png is not a picture that can be read",
        "none": "has no picture",
    }
    assert wanted[bad] in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_diagnose_speaks_and_draws(run, capsys):
    assert cli.main(["diagnose", "--run", str(run)]) == 0
    said = capsys.readouterr().out
    assert "20 covariances of 560 outputs and rank 8" in said
    assert "condition of Sigma" in said
    assert (run / "condition.png").read_bytes().startswith(b"\x89PNG")


def test_mistakes_are_told_in_a_line(tmp_path, capsys):
    assert cli.main([]) == 2
    assert cli.main(["--help"]) == 0
    assert cli.main(["train"]) == 2
    assert "there is no command 'train'" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        cli.main(["predict", "--help"])
    assert "folder of the files to predict" in capsys.readouterr().out
    assert cli.main(["fit", "--config", "no_such_config"]) == 1
    assert f"there is no config no_such_config; the package has {', '.join(CONFIGS)}" in capsys.readouterr().err
    assert cli.main(["evaluate", "--run", str(tmp_path)]) == 1
    assert "is not a run: it has no config.yaml" in capsys.readouterr().err


def test_finished_run_is_left_as_it_is(run):
    before = (run / "last.ckpt").stat().st_mtime_ns
    weights = torch.load(run / "last.ckpt", weights_only=True)["state_dict"]
    fit(run, "digits_dropout", "--trainer.max_steps", "21")
    again = torch.load(run / "last.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(v, again[k]) for k, v in weights.items() if isinstance(v, torch.Tensor))
    assert (run / "last.ckpt").stat().st_mtime_ns == before


@pytest.mark.slow
def test_killed_and_started_again_ends_with_the_same_weights(tmp_path):
    """After kill -9 and a restart, the final weights are bitwise those of an uninterrupted run."""

    def command(name):
        words = ["-m", "lrd_uq.cli", "fit", "--config", "digits_dropout", "--run", str(tmp_path / name), *FEW]
        return [sys.executable, *words, "--trainer.max_steps", "200", "--data.init_args.steps_per_epoch", "10"]

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command("whole"), env=environment, check=True, capture_output=True)
    victim = subprocess.Popen(command("killed"), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    checkpoint = tmp_path / "killed" / "last.ckpt"
    deadline = time.monotonic() + 120
    while not checkpoint.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.2)  # some epochs further, and amid one
    victim.send_signal(signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL, "it ended before it was killed"
    reached = torch.load(checkpoint, weights_only=True)["global_step"]
    assert 0 < reached < 200
    subprocess.run(command("killed"), env=environment, check=True, capture_output=True)
    whole, resumed = (torch.load(tmp_path / name / "last.ckpt", weights_only=True) for name in ("whole", "killed"))
    assert whole["global_step"] == resumed["global_step"] == 200
    for key, wanted in whole["state_dict"].items():
        got = resumed["state_dict"][key]
        assert torch.equal(wanted, got) if isinstance(wanted, torch.Tensor) else wanted == got, key
    assert set(range(200)) <= set(read_metrics(tmp_path / "killed")["loss"][0])
