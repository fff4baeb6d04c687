"""Redraws the memory/time curves of a log-likelihood on this machine, beside the peers.

Every point has a process of its own, which tells the peak of its memory, then its times. The methods of one size run
one after another. A curve ends where its next point would pass the budget of memory or of time, and the figure says so.
The document is written after every point: the same command goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import machine
from benchmarks.registry import LAYOUTS
from benchmarks.scaling import fit, methods, plot, runner
from benchmarks.scaling.methods import RANKS, WITHOUT_RANK, Curve
from benchmarks.scaling.pipelines import PIPELINES

OUTPUT = machine.ROOT / "reports" / "benchmarks" / "scaling.json"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="lrd and torch to 2^18 variables at ranks 8 and 64")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS), help="(default: %(default)s)")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="of P in memory")
    parser.add_argument("--methods", nargs="+", help="(default: all that are installed)")
    parser.add_argument("--first", type=int, default=8, help="power of 2 of the fewest variables (default: 8)")
    parser.add_argument("--last", type=int, default=26, help="power of 2 of the most variables (default: 26)")
    parser.add_argument("--step", type=int, default=2, help="from one power to the next (default: 2)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of timing for a point (default: 1)")
    parser.add_argument("--point-seconds", type=float, default=120.0, help="most for a point in all (default: 120)")
    parser.add_argument("--memory", type=float, help="most for a point, in GiB (default: 0.7 of the machine's)")
    parser.add_argument("--restart", action="store_true", help="forget an earlier document instead of going on with it")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="(default: reports/benchmarks/scaling.json)")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU here")
    if options.quick:
        options.ranks, options.layouts, options.last, options.step = [8, 64], ["row"], 18, 5
        options.seconds, options.methods = 0.3, options.methods or ["lrd", "torch", "diagonal"]
    known = methods.names(options.device)
    options.methods = options.methods or known
    if unknown := set(options.methods) - set(known):
        parser.error(f"no method {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if options.memory is None:
        options.memory = 0.7 * total_memory(options.device) / runner.GIB
    return options


def total_memory(device: str) -> float:
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    return machine.facts()["memory_bytes"]


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
        print(f"{error}; --restart forgets it, --output writes elsewhere", file=sys.stderr)
        return 2
    sizes = [1 << power for power in range(options.first, options.last + 1, options.step)]
    print(machine.summary(document["machine"]), file=sys.stderr)
    runner.run(document, curves(options), sizes, options)
    document["fits"] = fit.fits(document)
    machine.write_json(options.output, document)
    print(fit.table(document))
    for picture in plot.draw(json.loads(options.output.read_text()), options.output):
        print(f"written: {picture}", file=sys.stderr)
    print(f"written: {options.output}", file=sys.stderr)
    wrong = [point for point in document["points"] if point["status"] == "disagrees"]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
