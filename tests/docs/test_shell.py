"""Every shell command of the pages can be given as printed: targets, modules, configs and options exist.

Commands that are cheap run. Those that train, build or measure for minutes are parsed by the program that they call, up
to the point where the work would begin.
"""

import argparse
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys

import pages
import pytest
from packaging.requirements import Requirement
from setuptools.config.pyprojecttoml import load_file

import lrd_kernels as lrd

# A module that is run a second time, and lightning's own use of jsonargparse.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*LightningCLI's args parameter"),
]
CHEAP = ("python -m lrd_kernels", "python -m lrd_kernels.info")
PROGRAMS = ("make", "python", "pip", "pytest", "lrd-uq")
LRD_UQ = ("configs", "fit", "evaluate", "predict", "panel", "diagnose", "demo")
PROJECT = load_file(pages.ROOT / "pyproject.toml")
TARGETS = set(re.findall(r"^([a-z-]+):.*##", (pages.ROOT / "Makefile").read_text(), re.MULTILINE))


class Parsed(BaseException):
    """The program has accepted its arguments."""


def commands(page):
    """The commands of a page in order, as words; blocks that the page says are not run are left out."""
    for block in pages.blocks(page):
        if block.language == "sh" and not block.not_run:
            for line in block.code.replace("\\\n", " ").splitlines():
                if words := shlex.split(line, comments=True):
                    yield f"{pages.name_of(page)}:{block.line}", words
    for code in pages.inline_code(page):
        words = shlex.split(re.sub(r"\[[^\]]* \.\.\.\]", "", code)) if "'" not in code.replace("'.[", "") else []
        while words and re.fullmatch(r"[A-Z_]+=\S+", words[0]):
            words.pop(0)
        if len(words) > 1 and words[0] in PROGRAMS:
            yield f"{pages.name_of(page)}: {code}", words


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Checks one command, in a folder of its own where earlier `lrd-uq fit` commands have left a run."""
    monkeypatch.chdir(tmp_path)
    parse_args = argparse.ArgumentParser.parse_args

    def stop_after_parsing(parser, *arguments, **options):
        parse_args(parser, *arguments, **options)
        raise Parsed

    def run(words):
        while re.fullmatch(r"[A-Z_]+=\S+", words[0]):
            words = words[1:]
        program, *rest = words
        assert program in PROGRAMS, f"no test knows {program}"
        {"make": make, "pip": pip, "pytest": paths, "lrd-uq": lrd_uq, "python": python}[program](rest)

    def python(rest):
        assert rest[0] == "-m"
        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop_after_parsing)
        monkeypatch.setattr(sys, "argv", rest[1:])
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)  # --device cuda
        try:
            must_parse(lambda: runpy.run_module(rest[1], run_name="__main__"))
        finally:
            monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)

    def lrd_uq(rest):
        from lightning.pytorch.cli import LightningCLI

        from lrd_uq import cli, shipped

        assert rest[0] in LRD_UQ
        if len(rest) == 1:  # `lrd-uq demo` has no required options; the others are named in passing
            return

        def instead(self):
            raise Parsed

        monkeypatch.setattr(LightningCLI, "instantiate_classes", instead)
        must_parse(lambda: cli.main(rest))
        if rest[0] == "fit":
            run = tmp_path / rest[rest.index("--run") + 1]
            run.mkdir(parents=True)
            shutil.copy(shipped.CONFIGS / f"{rest[rest.index('--config') + 1]}.yaml", run / "config.yaml")

    return run


def must_parse(start):
    try:
        start()
    except Parsed:
        return
    raise AssertionError("the program ended before it had accepted its arguments")


def make(rest):
    assert set(rest) <= TARGETS


def paths(rest):
    assert all((pages.ROOT / word).exists() for word in rest if not word.startswith("-") and word != "triton")


def pip(rest):
    from pip._internal.commands import create_command

    assert rest[0] == "install"
    _, wanted = create_command("install").parser.parse_args(rest[1:])
    for name in wanted:
        if name == "." or name.startswith(".["):
            name = "lrd-kernels" + name[1:]
        requirement = Requirement(name)
        if requirement.name == "lrd-kernels":
            assert requirement.extras <= set(PROJECT["project"]["optional-dependencies"])


@pytest.mark.parametrize("page", [page for page in pages.PAGES if list(commands(page))], ids=pages.name_of)
def test_commands_of_the_page_parse(page, check):
    for where, words in commands(page):
        try:
            check(list(words))
        except (Exception, SystemExit) as error:
            raise AssertionError(f"{where}: {shlex.join(words)}") from error


@pytest.mark.parametrize(
    "command",
    [
        *("make no-such-target", "pip install --no-such-option .", "pip install '.[nothing]'", "pytest tests/nowhere"),
        *("python -m lrd_kernels.nothing", "python -m benchmarks.run --no-such-option", "curl x"),
        *("lrd-uq train", "lrd-uq fit --config nothing --run a", "lrd-uq fit --config digits_dropout --run a --x 1"),
    ],
)
def test_wrong_commands_are_found(command, check):
    with pytest.raises((Exception, SystemExit)):
        check(shlex.split(command))


@pytest.mark.parametrize("command", CHEAP)
def test_cheap_commands_run(command, tmp_path):
    words = [sys.executable, *shlex.split(command)[1:]]
    result = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env={**os.environ})
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("lrd-kernels ")


def test_lines_of_the_tour_run(capsys):
    from lrd_kernels.__main__ import LINES, main

    assert main([]) == 0
    tour = capsys.readouterr().out
    assert all(f"  {line}\n" in tour for line in LINES.splitlines())
    assert all(f"  {name} " in tour for name in lrd.backends())
    exec(LINES, {})
    assert capsys.readouterr().out.count("tensor(") == 2


def test_installation_names_everything_the_build_needs():
    text = (pages.ROOT / "README.md").read_text()
    (line,) = re.findall(r"^pip install torch .*$", text, re.MULTILINE)
    named = {Requirement(word).name for word in shlex.split(line)[2:]}
    assert named >= {Requirement(need).name for need in PROJECT["build-system"]["requires"]}
    assert named >= {Requirement(need).name for need in PROJECT["project"]["dependencies"]}


def test_training_page_names_every_config():
    from lrd_uq.shipped import shipped_configs

    text = (pages.ROOT / "docs/training.md").read_text()
    assert [config for config in shipped_configs() if f"`{config}`" not in text] == []
