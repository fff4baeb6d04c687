"""Configs import nothing that the caller has not allowed."""

import sys

import pytest
import yaml
from jsonargparse._common import parsing_settings

from lrd_uq import cli, imports, settings
from lrd_uq.shipped import CONFIGS, shipped_configs

MODULE = """
from pathlib import Path
from lrd_uq.nets import DigitsUNet
from lrd_uq.data.inpainting import DigitInpainting
Path({trap!r}).touch()
class Net(DigitsUNet): pass
class Data(DigitInpainting): pass
"""
NET = "model.net.init_args.backbone"
SMALL = ["--data.init_args.train", "64", "--data.init_args.val", "20", "--data.init_args.test", "12"]
SMALL += ["--data.init_args.steps_per_epoch", "3", "--trainer.max_steps", "9"]
SMALL += ["--trainer.enable_progress_bar", "false", "--trainer.num_sanity_val_steps", "0"]


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    """A package that leaves a trace when it is imported, and a config that names a class in it."""
    trap, folder = tmp_path / "imported", tmp_path / "code" / "foreign"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "nets.py").write_text(MODULE.format(trap=str(trap)))
    monkeypatch.syspath_prepend(folder.parent)
    content = yaml.safe_load((CONFIGS / "digits_dropout.yaml").read_text())
    backbone = content["model"]["net"]["init_args"]["backbone"]
    backbone["class_path"] = "foreign.nets.Net"
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(content))
    yield trap
    for name in [name for name in sys.modules if name.partition(".")[0] == "foreign"]:
        del sys.modules[name]


def words(folder, *more):
    return ["--config", str(folder / "own.yaml"), "--run", str(folder / "run"), *SMALL, *more]


def told(capsys):
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_config_of_a_stranger_imports_nothing(foreign, tmp_path, capsys):
    assert cli.main(["fit", *words(tmp_path)]) == 1
    line = told(capsys)
    assert "the config names foreign.nets.Net, and importing it would run the code of foreign" in line
    assert "--allow-imports foreign, or set LRD_ALLOW_IMPORTS=foreign" in line
    assert not foreign.exists()
    assert not any(name.startswith("foreign") for name in sys.modules)


@pytest.mark.parametrize(
    ("more", "variable"),
    [
        (["--allow-imports", "foreign"], ""),
        (["--allow-imports=other,foreign"], ""),
        ([], "other, foreign"),
        ([f"--{NET}", "foreign.nets.Net"], ""),
        ([f"--{NET}=foreign.nets.Net"], ""),
        ([f"--{NET}={{class_path: foreign.nets.Net}}"], ""),
        (["--data.class_path", "foreign.nets.Data"], ""),
    ],
)
def test_what_the_caller_allows_or_names_is_imported(more, variable, foreign, tmp_path, monkeypatch):
    monkeypatch.setenv(imports.VARIABLE, variable)
    found = settings.configure(words(tmp_path, *more))
    assert type(found.model.net.backbone).__module__ == "foreign.nets"
    assert "allow_imports" not in found.parser.dump(found.config, skip_validation=True)  # a config cannot allow itself


def test_run_of_a_stranger_imports_nothing(foreign, tmp_path, capsys):
    assert cli.main(["fit", *words(tmp_path, "--allow-imports", "foreign")]) == 0
    for name in ("foreign", "foreign.nets"):
        del sys.modules[name]
    foreign.unlink()
    for command in (["evaluate", "--samples", "2", "--ranks", "[2]"], ["diagnose"]):
        capsys.readouterr()
        assert cli.main([*command, "--run", str(tmp_path / "run")]) == 1
        assert "the config names foreign.nets.Net" in told(capsys)
    assert not foreign.exists()
    assert cli.main(["diagnose", "--run", str(tmp_path / "run"), "--allow-imports", "foreign"]) == 0


@pytest.mark.parametrize(
    "name", ["os.system", "lrd_uq.runs.os.system", "lrd_uq.runs.Path", "torch.hub.load", "torch.load", "builtins.eval"]
)
@pytest.mark.parametrize("place", ["model.net", "model.method", NET, "trainer.logger", "trainer.strategy"])
def test_functions_of_other_packages_are_refused(name, place, foreign, tmp_path):
    path = tmp_path / "own.yaml"
    content = yaml.safe_load(path.read_text().replace("foreign.nets.Net", "lrd_uq.nets.DigitsUNet"))
    inner = content
    for key in place.split(".")[:-1]:
        inner = inner[key]
    inner[place.split(".")[-1]] = {"class_path": name, "init_args": {"command": f"touch {foreign}"}}
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ValueError, match=r"^(?!.*\n)"):
        settings.configure(words(tmp_path))
    assert not foreign.exists()


def test_shipped_configs_need_no_other_packages(tmp_path):
    before = {name: dict(value) if isinstance(value, dict) else value for name, value in parsing_settings.items()}
    for name in ("digits_ensemble", "regional_demand"):
        settings.configure(["--config", name, "--run", str(tmp_path)])
    assert parsing_settings == before  # of the process, and so of other programs in it
    named = [path for config in shipped_configs() for path in class_paths(CONFIGS / f"{config}.yaml")]
    assert len(named) > 50
    assert all(path.startswith(imports.ALLOWED) for path in named)


def class_paths(file):
    return imports.CLASS_PATH.findall(file.read_text())


@pytest.mark.parametrize("given", [["--allow-imports"], ["--allow-imports", "my-package"], ["--allow-imports=a,1"]])
def test_packages_must_be_names(given):
    with pytest.raises(ValueError, match="take names of packages, as my_package; got"):
        imports.taken_out(given)


def test_names_in_paths_and_numbers_allow_nothing():
    given = ["--config", "os.system", "--run=os.path", "--data.init_args.folder", "a/os.path", "--model.alpha", "0.5"]
    assert imports.named_by_caller([*given, "--trainer.max_steps", "3"]) == []
    assert imports.named_by_caller(["--x", "torch.hub.load", "--y=os.system", "--z=a.b.C"]) == [
        "torch.hub.load",
        "os.system",
        "a",
    ]
