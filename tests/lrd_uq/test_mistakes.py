"""Settings that cannot be meant are refused: by name, in one line, before anything is trained or written."""

import math
import re

import pytest
from small import SHORT, SMALL, few

from lrd_uq import bayes, cli, heads, messages, monitors, nets
from lrd_uq.data import depth, flow, inpainting, natural, pictures, series, table
from lrd_uq.module import JointUncertainty
from lrd_uq.runs import opened

NAN = math.nan
HEAD, BACKBONE = "--model.net.init_args.head.init_args.", "--model.net.init_args.backbone.init_args."
MISFIT = "the network does not fit the data, whose items have an input of "


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (heads.LowRankHead, {"channels": 0, "outputs": -1, "rank": 0, "initial_raw": NAN, "initial_factor": math.inf}),
        (nets.DigitsUNet, {"in_channels": 0, "channels": 0, "dropout": NAN}),
        (nets.NodeNet, {"in_channels": 0, "channels": -1, "hidden": 0, "dropout": 1.5}),
        (nets.MonaiUNet, {"dims": 7, "channels": 0, "in_channels": 0, "options": {"no_such_option": 1}}),
        (bayes.Variational, {"prior_std": 0.0, "initial_std": -1.0, "kl_weight": NAN}),
        (bayes.Swag, {"rate": 0.0, "start": 0.0, "snapshots": 1}),
        (bayes.Laplace, {"prior_std": -1.0, "temperature": 0.0}),
        (bayes.Ensemble, {"size": 1}),
        (monitors.CovarianceMonitor, {"every": 0, "most_trace": NAN, "most_condition": -1.0}),
        (inpainting.DigitInpainting, {"visible": (0, 28)}),
        (natural.NaturalPictures, {"size": (0, 8), "train": -1, "val": 0, "test": 0}),
        (flow.MovingLayers, {"unit": 0.0, "layers": 0, "size": (-1, 8), "test": 0}),
        (depth.RenderedRooms, {"size": (3, 0), "val": -1}),
        (series.RegionalDemand, {"regions": 0, "history": -1, "horizon": 0, "train": 0, "test": -1}),
        (table.CellMeasurements, {"train": 1.0}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_numbers_out_of_range_are_named(make, wrong):
    needed = {heads.LowRankHead: {"channels": 4}, nets.NodeNet: {"in_channels": 3, "channels": 4}}
    needed[nets.MonaiUNet] = {"name": "UNet", "in_channels": 1, "channels": 4}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=rf"^[^\n]*\b{name}\b"):
            make(**{**needed.get(make, {}), name: value})


def test_learning_rate_of_zero_trains_nothing(make_net):
    with pytest.raises(ValueError, match="learning_rate must be a finite number above 0; got 0"):
        JointUncertainty(make_net(), learning_rate=0.0)


def test_parts_without_samples_are_named():
    with pytest.raises(ValueError, match=r"train 0\.999 leaves a part without samples: \[568, 0, 1\]"):
        table.CellMeasurements(train=0.999).setup()


def test_box_that_hides_nothing_is_refused():
    question = pictures.Inpainting((0, 0, 0.01, 0.01))
    with pytest.raises(ValueError, match=r"hides no pixel of 24 x 16"):
        natural.NaturalPictures(question, size=(16, 24)).part("train", [0])


OPTIONS = [
    ("digits_dropout", HEAD + "channels=7", MISFIT + "[2, 28, 28] and a target of [1, 28, 28]: "),
    ("digits_dropout", BACKBONE + "in_channels=3", MISFIT),
    ("digits_dropout", HEAD + "outputs=2", MISFIT),
    ("digits_dropout", HEAD + "features_last=true", MISFIT),
    ("regional_demand", "--data.init_args.horizon=11", MISFIT + "[12, 50] and a target of [12, 11]"),
    ("natural_inpainting", "--data.init_args.size=[30,31]", MISFIT),
    ("digits_lowrank", "--model.method=lrd_uq.bayes.Dropout", "has no dropout layer with a rate above 0"),
    ("digits_dropout", "--seed_everything=false", "seed_everything must be a number"),
    ("digits_dropout", "--trainer.gradient_clip_val=-1", "gradient_clip_val must be 0 or above"),
    ("digits_dropout", "--trainer.gradient_clip_val=x", '"trainer.gradient_clip_val": Expected a '),
    ("digits_dropout", "--trainer.max_steps=-5", "`max_steps` must be a non-negative integer or -1"),
    ("digits_dropout", "--trainer.accumulate_grad_batches=0", "trainer.accumulate_grad_batches must be above 0"),
    ("digits_dropout", "--trainer.val_check_interval=0", "trainer.val_check_interval must be above 0"),
    ("digits_dropout", "--trainer.check_val_every_n_epoch=0", "trainer.check_val_every_n_epoch must be above 0"),
    ("digits_dropout", "--trainer.log_every_n_steps=-1", "trainer.log_every_n_steps must be 0 or above"),
    ("digits_dropout", "--trainer.min_steps=9", "trainer.min_steps must be at most max_steps, 6"),
    ("digits_dropout", "--trainer.use_distributed_sampler=true", "trainer.use_distributed_sampler must be false"),
    ("digits_dropout", "--trainer.devices=-2", "trainer: `devices` selected with"),
    ("digits_dropout", "--data.init_args.visible=[5,5]", "visible must be two rows from 0 to 28"),
    ("digits_dropout", "--data.init_args.batch_size=0", "batch_size must be from 1 to the number of training items"),
    ("digits_dropout", "--data.init_args.folder=/nowhere", "is in /nowhere"),
    ("digits_swag", "--model.warmup=0.7", "warmup must be a fraction of the steps, from 0 to below 0.6"),
    ("digits_swag", "--model.method.init_args.snapshots=1", "snapshots and columns at least 2; got 0.6, 1, 20"),
]


@pytest.mark.parametrize(("config", "option", "said"), OPTIONS, ids=[option for _, option, _ in OPTIONS])
def test_mistake_is_one_line_and_writes_nothing(config, option, said, tmp_path, capsys):
    words = [*SHORT, *SMALL] if config == "natural_inpainting" else few(config, tmp_path)
    assert cli.main(["fit", "--config", config, "--run", str(tmp_path / "run"), *words, option]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lrd-uq fit: ")
    assert said in line
    assert len(line) < 400
    assert not list((tmp_path / "run").glob("*.ckpt"))


def test_run_that_is_a_file(tmp_path, capsys):
    (tmp_path / "run").write_text("")
    with pytest.raises(NotADirectoryError, match=r"a run is a folder; .*run is a file"), opened(tmp_path / "run"):
        pass
    for command in ("evaluate", "predict", "panel", "diagnose"):
        assert cli.main([command, f"--run={tmp_path / 'run'}", "--images", "x"]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert "is not a run: it has no config.yaml" in line


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: text[:100] + "\0" + text[100:], "control characters are not allowed"),
        (lambda text: text[: text.index("data:\n")], "the config has no data"),
        (lambda text: text.replace("model:", "model", 1), "could not find expected ':'"),
        (lambda text: "vm", "Unexpected config"),
    ],
)
def test_damaged_config_is_named(damage, said, trained_run, tmp_path, capsys):
    text = (trained_run / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(damage(text))
    assert cli.main(["diagnose", "--run", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert f"{tmp_path}/config.yaml cannot be read: " in line or said == "the config has no data"


def test_config_of_other_bytes_is_named(trained_run, tmp_path, capsys):
    (tmp_path / "config.yaml").write_bytes(b"\xff" + (trained_run / "config.yaml").read_bytes())
    assert cli.main(["diagnose", "--run", str(tmp_path)]) == 1
    assert f"{tmp_path}/config.yaml cannot be read: 'utf-8' codec" in capsys.readouterr().err


def test_ranks_of_a_sweep_are_at_least_1(make_net, data):
    from lrd_uq.evaluate import evaluate

    with pytest.raises(ValueError, match=r"ranks\[1\] must be at least 1; got -2"):
        evaluate(bayes.Method(), make_net(), data.part("test", [0]), ranks=[2, -2])


def test_errors_of_the_parser_are_one_line():
    union = f"{messages.UNION}\nSubtypes: [<class 'a.B'>, <class 'NoneType'>]\nErrors:\n"
    given = "\nGiven value type: <class 'str'>\nGiven value: x"
    assert messages.one_line(f"{union}  - it is wrong\n  - Expected a <class 'NoneType'>{given}") == "it is wrong"
    assert messages.one_line(f"Parser key \"k\": {union}  - Expected a <class 'float'>{given}") == (
        '"k": Expected a float; got x'
    )
    assert messages.one_line("no\n  union") == "no union"


def test_item_that_cannot_be_read_does_not_hide_the_others(tmp_path, capsys):
    """The first item that can be read is the one that the network has to fit."""
    words = few("celeba_inpainting", tmp_path)
    broken = tmp_path / "data" / "CelebA-HQ-img" / "0.jpg"
    broken.write_bytes(b"no picture")
    words = ["fit", "--config", "celeba_inpainting", "--run", str(tmp_path / "run"), *words]
    assert cli.main(words) == 1
    assert "0.jpg is not a picture" in capsys.readouterr().err
    with pytest.warns(UserWarning, match=r"skipped: .*0\.jpg"):
        assert cli.main([*words, "--data.init_args.on_broken=skip", BACKBONE + "in_channels=3"]) == 1
    assert re.search(MISFIT.replace("(", r"\("), capsys.readouterr().err)
