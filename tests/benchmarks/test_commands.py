"""The command lines: results go to reports/ by default, and every option is explained."""

import argparse

import pytest

from benchmarks import accumulator, accuracy, commands, compare, joint, run, stability, training, truncation
from benchmarks.scaling import __main__ as scaling
from benchmarks.scaling import plot
from benchmarks.stress import __main__ as stress

WRITING = [accumulator, accuracy, joint, run, scaling, stability, stress, training, truncation]


@pytest.fixture
def parser_of(monkeypatch):
    """The parser that the `main` of a module makes."""

    class Parsing(Exception):
        pass

    def parse_args(parser, argv=None):
        raise Parsing(parser)

    def catch(module):
        with pytest.raises(Parsing) as caught:
            module.main([])
        return caught.value.args[0]

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    return catch


@pytest.mark.parametrize("module", WRITING, ids=lambda module: module.__name__)
def test_results_go_to_reports(module, parser_of):
    assert commands.REPORTS.relative_to(commands.machine.ROOT).parts == ("reports", "benchmarks")
    assert parser_of(module).get_default("output").parent == commands.REPORTS


@pytest.mark.parametrize("module", [*WRITING, compare, plot], ids=lambda module: module.__name__)
def test_every_option_is_explained(module, parser_of):
    parser = parser_of(module)
    assert parser.prog == f"python -m {module.__name__.removesuffix('.__main__')}"
    assert all(action.help for action in parser._actions)
    assert parser.description == module.__doc__


def test_help_shows_defaults():
    parser = commands.parser("benchmarks.example", "An example.", "example.json")
    commands.add_repeats(parser, 3)
    commands.add_layouts(parser)
    parser.add_argument("--seed", type=int, default=0, help="seed")
    parser.add_argument("--quick", action="store_true", help="quick")
    text = " ".join(parser.format_help().split())
    assert "(default: reports/benchmarks/example.json)" in text
    assert "(default: 3)" in text
    assert "(default: row rank)" in text
    assert "seed (default: 0)" in text
    assert text.endswith("--quick quick")
