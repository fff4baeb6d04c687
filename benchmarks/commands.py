"""The command lines of the benchmarks: one kind of parser, and the options that several of them share.

Results go to reports/benchmarks, which git ignores. benchmarks/results holds the committed results of real runs; only
`--output` writes there.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.registry import LAYOUTS

REPORTS = machine.ROOT / "reports" / "benchmarks"


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of the description, and appends the default value to the help of each option."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        has_default = not any(action.default is empty for empty in (None, False, argparse.SUPPRESS))
        if not has_default or "(default: " in text:
            return text
        return f"{text} (default: {as_text(action.default)})"


def as_text(default: Any) -> str:
    """A default value as a user would type it."""
    if isinstance(default, Path) and default.is_relative_to(machine.ROOT):
        return str(default.relative_to(machine.ROOT))
    return " ".join(map(str, default)) if isinstance(default, (list, tuple)) else str(default)


def parser(module: str, description: str | None, output: str | None = None) -> argparse.ArgumentParser:
    """A parser for `python -m <module>`; `output` is the file or folder below reports/benchmarks that it writes."""
    made = argparse.ArgumentParser(prog=f"python -m {module}", description=description, formatter_class=HelpFormatter)
    if output is not None:
        kind = "file" if Path(output).suffix else "folder"
        made.add_argument("--output", type=Path, default=REPORTS / output, help=f"{kind} to write the results to")
    return made


def add_repeats(to: argparse.ArgumentParser, default: int) -> None:
    to.add_argument("--repeats", type=int, default=default, help="number of timed calls; the fastest one counts")


def add_layouts(to: argparse.ArgumentParser) -> None:
    layouts = "memory layouts of the factor P: row-major, rank-major or both"
    to.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help=layouts)


def begin(options: argparse.Namespace) -> dict:
    """A new document with the facts of the machine, which are also printed, and all options as its sizes."""
    document = {
        "machine": machine.facts(),
        "sizes": {name: value for name, value in vars(options).items() if name != "output"},
        "results": {},
    }
    print(machine.summary(document["machine"]))
    return document
