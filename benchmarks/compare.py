"""Compares two documents of the same benchmark, measured on one machine at two commits.

`python -m benchmarks.compare before.json after.json` reads documents of `benchmarks.run` and `benchmarks.scaling` and
prints every measurement that both contain. The exit code is 1 if one became slower or larger by more than the noise.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import commands
from benchmarks.registry import DIRECTIONS

TOLERATED = 0.10  # relative, even if the samples vary less
SPREADS = 3.0  # this many times the spread of the samples counts as noise
TOLERATED_BYTES = 1 << 20


class Figure(NamedTuple):
    """The samples of one time, and the memory measured with it."""

    samples: list[float]
    extra_bytes: int | None

    @property
    def seconds(self) -> float:
        return min(self.samples)

    @property
    def noise(self) -> float:
        """Distance of the median from the least sample, relative to the least."""
        return statistics.median(self.samples) / self.seconds - 1.0


def figures(document: dict) -> Iterator[tuple[str, Figure]]:
    """Every measurement of a document, by name."""
    for point in document.get("points", ()):  # benchmarks.scaling
        for direction in DIRECTIONS:
            if point["status"] == "ok" and direction in point:
                record = point[direction]
                name = f"{point['curve']}, {point['variables']} variables, {direction}"
                yield name, Figure(record["samples"], record["working_bytes"])
    for result in document.get("results", ()):  # benchmarks.run
        for contestant, record in result["contestants"].items():
            for direction in DIRECTIONS:
                if record["status"] == "ok":
                    extra = record.get("memory", {}).get(direction, {}).get("extra_bytes")
                    name = f"{contestant} {result['case']} {result['layout']}, {direction}"
                    yield name, Figure(record[direction]["samples"], extra)


def slower(before: Figure, after: Figure) -> bool:
    allowed = 1.0 + max(TOLERATED, SPREADS * max(before.noise, after.noise))
    return after.seconds > allowed * before.seconds


def larger(before: Figure, after: Figure) -> bool:
    if before.extra_bytes is None or after.extra_bytes is None:
        return False
    return after.extra_bytes > (1 + TOLERATED) * before.extra_bytes + TOLERATED_BYTES


def main(argv: Sequence[str] | None = None) -> int:
    parser = commands.parser("benchmarks.compare", __doc__)
    parser.add_argument("before", type=Path, help="document of the earlier commit")
    parser.add_argument("after", type=Path, help="document of the later commit")
    options = parser.parse_args(argv)
    documents = [json.loads(path.read_text()) for path in (options.before, options.after)]
    for name in ("cpu", "threads", "allocator"):
        values = [document["machine"].get(name) for document in documents]
        if values[0] != values[1]:
            print(f"different {name}: {values[0]} and {values[1]}; the differences below mean nothing")
    before, after = (dict(figures(document)) for document in documents)
    shared = [name for name in before if name in after]
    if not shared:
        print("the two documents have no measurement in common", file=sys.stderr)
        return 2
    worse = 0
    for name in shared:
        a, b = before[name], after[name]
        verdicts = [word for word, is_so in (("SLOWER", slower(a, b)), ("LARGER", larger(a, b))) if is_so]
        worse += bool(verdicts)
        faster = "faster" if slower(b, a) else ""
        sizes = f"{b.extra_bytes - a.extra_bytes:+d} bytes" if None not in (a.extra_bytes, b.extra_bytes) else ""
        print(f"{name:<56}{b.seconds / a.seconds:8.2f}x  {sizes:>20}  {' '.join(verdicts) or faster}")
    print(f"{len(shared)} measurements, {worse} worse")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
