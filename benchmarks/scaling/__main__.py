"""Measures and plots memory and time of a log-likelihood against the number of variables, for this package and peers.

Every point is measured in a fresh process: first the peak of its memory, then its times. The methods of one size are
measured one after another. A curve ends where its next point would exceed the memory or time limit; the figure marks
this. The document is written after every point, and the same command continues an interrupted run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

import torch

from benchmarks import commands, machine
from benchmarks.scaling import fit, methods, plot, runner
from benchmarks.scaling.methods import RANKS, WITHOUT_RANK, Curve
from benchmarks.scaling.pipelines import PIPELINES


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = commands.parser("benchmarks.scaling", __doc__, "scaling.json")
    parser.add_argument("--quick", action="store_true", help="lrd and torch up to 2^18 variables at ranks 8 and 64")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the computation runs")
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS), help="ranks of the factor")
    commands.add_layouts(parser)
    parser.add_argument("--methods", nargs="+", help="methods and peers to measure (default: all that are installed)")
    parser.add_argument("--first", type=int, default=8, help="log2 of the smallest number of variables")
    parser.add_argument("--last", type=int, default=26, help="log2 of the largest number of variables")
    parser.add_argument("--step", type=int, default=2, help="step of log2 from one number of variables to the next")
    parser.add_argument("--seconds", type=float, default=1.0, help="timing of one point")
    parser.add_argument("--point-seconds", type=float, default=120.0, help="limit for all work on one point")
    parser.add_argument("--memory", type=float, help="limit for one point in GiB (default: 0.7 of the memory)")
    parser.add_argument("--restart", action="store_true", help="discard an earlier document instead of continuing it")
    parser.add_argument("--no-figures", action="store_true", help="only write the document; needs no matplotlib")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU")
    if options.quick:
        options.ranks, options.layouts, options.last, options.step = [8, 64], ["row"], 18, 5
        options.seconds, options.methods = 0.3, options.methods or ["lrd", "torch", "diagonal"]
    known = methods.names(options.device)
    options.methods = options.methods or known
    if unknown := set(options.methods) - set(known):
        parser.error(f"unknown method {', '.join(sorted(unknown))}; choose from {', '.join(known)}")
    if options.memory is None:
        options.memory = 0.7 * total_memory(options.device) / runner.GIB
    return options


def total_memory(device: str) -> float:
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    return machine.memory_bytes()


def curves(options: argparse.Namespace) -> list[Curve]:
    found = []
    for method in options.methods:
        if method in WITHOUT_RANK:
            found.append(Curve(method))
        elif method in PIPELINES:
            wanted = [layout for layout in PIPELINES[method].layouts if layout in options.layouts]
            found += [Curve(method, PIPELINES[method].rank, layout) for layout in wanted]
        else:
            found += [Curve(method, rank, layout) for rank in options.ranks for layout in options.layouts]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    settings = {name: getattr(options, name) for name in runner.SETTINGS}
    try:
        document = runner.begin(options.output, settings, options.restart)
    except runner.AnotherRun as error:
        print(f"{error}; --restart discards it, --output writes to another file", file=sys.stderr)
        return 2
    sizes = [1 << power for power in range(options.first, options.last + 1, options.step)]
    print(machine.summary(document["machine"]), file=sys.stderr)
    runner.run(document, curves(options), sizes, options)
    document["fits"] = fit.fits(document)
    machine.write_json(options.output, document)
    print(fit.table(document))
    figures = [] if options.no_figures else plot.draw(json.loads(options.output.read_text()), options.output)
    for path in (*figures, options.output):
        print(f"written to {path}", file=sys.stderr)
    wrong = [point for point in document["points"] if point["status"] == "disagrees"]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
