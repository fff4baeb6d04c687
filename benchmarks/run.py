"""Times `log_prob` of this package and its peers in turn, on the same inputs, after checking that they agree.

Writes one JSON document with every sample, the extra memory and the facts of the machine, and prints it as tables.
`LRD_CPU_ISA` selects the instruction set of the kernels; it is recorded in the document.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from benchmarks import commands, machine, measure, memory, registry, report, roofline
from benchmarks.registry import CASES, DIRECTIONS, QUICK_CASES, Case


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = commands.parser("benchmarks.run", __doc__, "run.json")
    known, names = " ".join(case.name for case in CASES), list(registry.CONTESTANTS)
    parser.add_argument("--quick", action="store_true", help="only the two smallest cases, for one second each")
    parser.add_argument(
        "--cases", nargs="+", type=Case.parse, metavar="BxSxR", help=f"batch, outputs and rank (default: {known})"
    )
    commands.add_layouts(parser)
    parser.add_argument("--contestants", nargs="+", choices=names, default=names, help="what is compared")
    parser.add_argument("--repeats", type=int, default=200, help="maximum number of rounds for a case")
    parser.add_argument("--seconds", type=float, help="time for each case and layout (default: 20; with --quick: 1)")
    parser.add_argument("--no-memory", action="store_true", help="do not measure memory, which takes a process each")
    parser.add_argument("--compare", type=Path, metavar="JSON", help="an earlier document, to print its times as well")
    options = parser.parse_args(argv)
    options.cases = options.cases or list(QUICK_CASES if options.quick else CASES)
    if options.seconds is None:
        options.seconds = 1.0 if options.quick else 20.0
    return options


class Progress:
    """Progress messages on stderr, with an estimate of the remaining time."""

    def __init__(self, guesses: Sequence[float]) -> None:
        """`guesses` are the expected seconds of each unit of work; they are scaled by what finished units took."""
        self.guesses, self.done = list(guesses), 0
        self.start = self.last = time.monotonic()

    def finish_unit(self) -> None:
        self.done, self.last = self.done + 1, time.monotonic()

    def tell(self, what: str) -> None:
        guessed = sum(self.guesses[: self.done])
        scale = (self.last - self.start) / guessed if guessed else 1.0
        this, *later = (scale * guess for guess in self.guesses[self.done :])
        left = max(this - (time.monotonic() - self.last), 0.0) + sum(later)
        rest = f"{left / 60:.0f} min" if left >= 90 else f"{left:.0f} s"
        print(f"[{self.done + 1}/{len(self.guesses)}] {what} (about {rest} left)", file=sys.stderr, flush=True)


def guess_seconds(case: Case, options: argparse.Namespace) -> float:
    """Compilation, timing, and one process to measure the memory of each contestant and direction."""
    processes = len(options.contestants) * len(DIRECTIONS) if case.large and not options.no_memory else 0
    return 15.0 + options.seconds + 4.0 * processes


def run_case(
    case: Case, layout: str, wanted: Sequence[Tensor], options: argparse.Namespace, progress: Progress
) -> dict:
    """Agreement, times and memory of every contestant on one case in one layout."""
    inputs = case.inputs(layout)
    where = f"{case.name} {layout}-major"
    contestants, calls = {}, {}
    for name in options.contestants:
        progress.tell(f"{where}: preparing and checking {name}")
        prepared, contestants[name] = measure.admit(registry.CONTESTANTS[name], inputs, wanted)
        if prepared is None:
            print(f"  {name} {contestants[name]['status']}: {contestants[name]['reason']}", file=sys.stderr)
        else:
            calls |= {(name, direction): getattr(prepared, direction) for direction in DIRECTIONS}
    progress.tell(f"{where}: timing {len(calls) // len(DIRECTIONS)} contestants")
    other_work = machine.OtherWork()
    for (name, direction), timing in measure.interleave(calls, options.repeats, options.seconds).items():
        contestants[name][direction] = timing
    disturbed = other_work.cores()
    if case.large and not options.no_memory:
        for name, direction in calls:
            progress.tell(f"{where}: memory of {name}, {direction}")
            used = memory.in_fresh_process(case, layout, name, direction)
            contestants[name].setdefault("memory", {})[direction] = used
    shape = {"case": case.name, **case._asdict(), "layout": layout}
    return {**shape, "cores_busy_with_other_work": disturbed, "contestants": contestants}


def add_rooflines(document: dict, peaks: roofline.Peaks) -> None:
    """Computed again after every case, with the highest rates measured so far."""
    document["rooflines"] = peaks.as_dict()
    for result in document["results"]:
        own = [report.least(result, "lrd", direction) for direction in DIRECTIONS]
        if None not in own:
            result["roofline"] = roofline.fractions(Case.parse(result["case"]), peaks, *own)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    earlier = json.loads(options.compare.read_text()) if options.compare else None
    document = {
        "machine": machine.facts(),
        "settings": {
            **{name: getattr(options, name) for name in ("quick", "layouts", "contestants", "repeats", "seconds")},
            "cases": [case.name for case in options.cases],
            "memory": not options.no_memory,
        },
        "results": [],
    }
    peaks = roofline.Peaks()
    peaks.measure()
    progress = Progress([guess_seconds(case, options) for case in options.cases for _ in options.layouts])
    for case in options.cases:
        progress.tell(f"{case.name}: the reference in float64")
        wanted = measure.truth(case.inputs("row"))  # the layouts hold the same numbers
        for layout in options.layouts:
            document["results"].append(run_case(case, layout, wanted, options, progress))
            peaks.measure()
            add_rooflines(document, peaks)
            machine.write_json(options.output, document)  # so that an interrupted run keeps its results
            progress.finish_unit()
    print(report.tables(document, earlier))
    print(f"written to {options.output}", file=sys.stderr)
    return verdict(document)


def verdict(document: dict) -> int:
    """Exit code: 1 if a contestant disagrees, or if this package was requested and could not be timed."""
    records = [(name, r) for result in document["results"] for name, r in result["contestants"].items()]
    bad = [name for name, r in records if r["status"] == "disagrees" or (name == "lrd" and r["status"] != "ok")]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
