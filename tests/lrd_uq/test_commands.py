"""The face of the command line: configs by name, errors in one line, help, and what a training prints."""

import io
import os
import subprocess
import sys
import warnings

import pytest
import torch

from lrd_uq import cli, settings, shipped
from lrd_uq.heads import LowRankHead
from lrd_uq.module import JointUncertainty
from lrd_uq.monitors import CovarianceMonitor, remedy
from lrd_uq.nets import DigitsUNet, SplitNet
from lrd_uq.nppc import NppcObjective
from lrd_uq.phases import Phase, Phases
from lrd_uq.progress import Progress

SMALL = ["--data.init_args.train", "32", "--data.init_args.val", "8", "--data.init_args.test", "6"]
SMALL += ["--data.init_args.steps_per_epoch", "3", "--trainer.num_sanity_val_steps", "0"]
SMALL += ["--model.net.init_args.head.init_args.channels", "4"]
SMALL += ["--model.net.init_args.backbone.init_args.channels", "4"]


def fit(folder, *words, steps=6):
    return cli.main(["fit", *words, "--run", str(folder), *SMALL, "--trainer.max_steps", str(steps)])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    assert fit(folder, "-c", "digits_lowrank") == 0
    return folder


def test_configs_are_found_by_name_however_the_option_is_written():
    path = str(shipped.CONFIGS / "digits_dropout.yaml")
    for words in (["--config", "digits_dropout"], ["--config=digits_dropout"], ["-c", "digits_dropout.yaml"]):
        assert [word.removeprefix("--config=") for word in shipped.with_config_paths(words)][-1] == path
    assert shipped.with_config_paths(["--run", "--config=" + path]) == ["--run", "--config=" + path]
    for words in (["--config=nothing"], ["-c", "nothing"], ["-c=nothing"]):
        with pytest.raises(FileNotFoundError, match="there is no config nothing; the package has "):
            shipped.with_config_paths(words)


def test_configs_are_listed_with_a_line_each(capsys):
    assert cli.main(["configs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == shipped.shipped_configs()
    assert all(len(line.split()) > 3 for line in lines)
    assert cli.main(["configs", "digits"]) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("evaluate --samples 0", "samples must be at least 1; got 0"),
        ("evaluate --ranks [8,0]", "ranks must be at least 1; got [8, 0]"),
        ("predict --images . --rank 0", "rank must be at least 1; got 0"),
        ("panel --items [2,6]", "there is no item 6: the test data has 6, from 0 to 5"),
        ("panel --items [-1]", "there is no item -1"),
        ("diagnose --part tests", "part must be one of train, val, test; got 'tests'"),
        ("evaluate --sample 3", "unrecognized arguments: --sample"),
    ],
)
def test_mistakes_about_a_run_are_one_line(run, words, said, capsys):
    command, *options = words.split()
    assert cli.main([command, f"--run={run}", *options]) == 1
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith(f"lrd-uq {command}: ")
    assert said in line
    assert captured.out == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("fit", "required: model.net. A config sets them: --config NAME"),
        ("fit -c digits_lowrank --trainer.max_steps -1", "trainer.max_steps or trainer.max_epochs must be set"),
        ("fit -c digits_lowrank --trainer.max_steps many", '"trainer.max_steps": Expected a'),
        ("fit -c digits_lowrank --trainer.steps 3", "unrecognized arguments: --trainer.steps 3"),
        ("evaluate", "--run is missing: the folder of a run"),
        ("evaluate --samples 3 --run", "--run is missing"),
        ("panel", "--run is missing"),
    ],
)
def test_mistakes_without_a_run_are_one_line(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(words.split()) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_help_of_fit_is_quick_and_that_of_the_parser(monkeypatch, capsys):
    script = (
        "import sys\nfrom lrd_uq import cli\nassert cli.main(['fit', '--help']) == 0\nassert 'torch' not in sys.modules"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert shown.startswith("usage: lrd-uq fit [--config CONFIG]")
    assert "--trainer.max_steps" in shown
    # In a process of its own: Python shares equal unions, so that the first one made decides how all are shown.
    script = "from lrd_uq import settings\nprint(settings.fit_help(), end='')"
    environment = {**os.environ, "COLUMNS": settings.HELP_WIDTH}
    command = [sys.executable, "-c", script]
    anew = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    assert shown == anew, "python -m lrd_uq.settings writes it anew"
    monkeypatch.setattr(shipped, "versions", lambda: "others")
    with pytest.raises(SystemExit, match="0"):
        cli.main(["fit", "-h"])
    assert capsys.readouterr().out.startswith("usage: lrd-uq fit ")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_one_bar_for_the_whole_training_and_nothing_else(tmp_path, monkeypatch, capsys):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with warnings.catch_warnings(record=True) as told:
        assert fit(tmp_path / "run", "--config=digits_lowrank") == 0
    assert [str(warning.message) for warning in told if warning.category is UserWarning] == []
    last = terminal.getvalue().replace("\n", "\r").rstrip("\r").rpartition("\r")[2]
    assert last.startswith("6 of 6 steps |")
    assert "left, training " in last
    assert last.rstrip().endswith(" nats")
    for word in ("Epoch", "Tip", "GPU available", "litlogger", "Validation"):
        assert word not in terminal.getvalue() + capsys.readouterr().out


def test_lines_where_there_is_no_terminal(make_net, make_trainer, data, capsys):
    data.steps_per_epoch = 2
    progress = Progress(lines=4, name="small")
    trainer = make_trainer(20, progress, enable_progress_bar=True)
    trainer.fit(JointUncertainty(make_net()), datamodule=data)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == [f"  small: step {n} of 20" for n in (6, 10, 16, 20)]
    assert all(" nats, validation " in line for line in lines)
    assert [line.endswith(" s left") for line in lines] == [True, True, True, False]


def test_lines_on_a_terminal_without_columns(make_net, make_trainer, data, monkeypatch, capsys):
    terminal = Terminal()
    terminal.fileno = lambda: 2
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((0, 0)))
    make_trainer(5, Progress(), enable_progress_bar=True).fit(JointUncertainty(make_net()), datamodule=data)
    assert capsys.readouterr().out.splitlines()[-1].startswith("step 5 of 5, training ")
    assert " of 5 steps |" not in terminal.getvalue()


def test_nats_of_the_bar_are_those_of_the_log(make_net, make_trainer, data, capsys):
    trainer = make_trainer(5, Progress(lines=1), enable_progress_bar=True)
    module = JointUncertainty(make_net())
    trainer.fit(module, datamodule=data)
    said = capsys.readouterr().out
    assert f"training {-560 * float(trainer.callback_metrics['low_rank']):.1f} nats" in said  # 560 hidden pixels
    assert f"validation {float(trainer.callback_metrics['val_log_prob']):.1f} nats" in said


def advice(make_trainer, module, *callbacks):
    return remedy(make_trainer(3, *callbacks), module)


def test_advice_fits_the_config_in_use(make_net, make_trainer):
    diagonal_first = Phases([Phase(0, rank=0), Phase(0.15)])
    plain = advice(make_trainer, JointUncertainty(make_net(), factor_penalty=0.02, learning_rate=1e-3))
    assert plain.startswith("Raise factor_penalty above 0.02, or start with a phase of rank 0")
    assert plain.endswith("lower learning_rate below 0.001")
    phased = advice(make_trainer, JointUncertainty(make_net(), factor_penalty=0.0), diagonal_first)
    assert phased.startswith("Set factor_penalty above 0, for example to 0.01, or make the phase of rank 0 longer, or")
    nppc = advice(make_trainer, JointUncertainty(make_net(orthogonal=True), objective=NppcObjective()), diagonal_first)
    assert "factor_penalty" not in nppc  # NPPC has none
    assert nppc.startswith("Predict the mean by a network of its own (lrd_uq.nets.SplitNet), or make")
    split = SplitNet(DigitsUNet(2, 4), DigitsUNet(3, 4), LowRankHead(4, 2, orthogonal=True))
    assert "SplitNet" not in advice(make_trainer, JointUncertainty(split, objective=NppcObjective()))


def test_advice_is_in_the_warning(make_net, make_trainer, data):
    module = JointUncertainty(make_net(initial_factor=30.0), learning_rate=1e-6)
    with pytest.warns(
        UserWarning, match=r"runs away: .* Raise factor_penalty above 0\.01, or make the phase of rank 0"
    ):
        # the phase of rank 0 has no factor: the next one starts with a huge one
        make_trainer(4, CovarianceMonitor(every=1), Phases([Phase(0, rank=0), Phase(2, rank=4)])).fit(
            module, datamodule=data
        )
    assert torch.isfinite(module.net.head.factor_weight).all()
