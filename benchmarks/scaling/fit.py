"""How the curves grow: slopes in the number of variables and in the rank, and what operation counts would give."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from benchmarks.registry import DIRECTIONS
from benchmarks.scaling.runner import directions, total_bytes

LARGE = 1 << 16  # variables from which on the overhead of calls is negligible
LEAST_SECONDS = 1e-3
LEAST_BYTES = 1 << 22  # of parameters, from which on the other memory of a process is negligible


def fits(document: dict) -> dict:
    """Slopes d log(cost) / d log(S) for each curve, d log(cost) / d log(R) for each method and size."""
    points = [p for p in document["points"] if p["status"] == "ok"]
    in_variables, in_rank = {}, {}
    for curve in dict.fromkeys(p["curve"] for p in points):
        own = [p for p in points if p["curve"] == curve]
        in_variables[curve] = slopes(own, "variables")
    families = dict.fromkeys((p["method"], p["layout"], p["variables"]) for p in points if p["rank"])
    for method, layout, S in families:
        own = [p for p in points if (p["method"], p["layout"], p["variables"]) == (method, layout, S) and p["rank"]]
        if S >= LARGE and len(own) > 1:
            in_rank[f"{method} {layout} {S}"] = slopes(own, "rank")
    return {"in_variables": in_variables, "in_rank": in_rank}


def slopes(points: Sequence[dict], against: str) -> dict:
    found = {}
    for direction in DIRECTIONS:
        own = [p for p in points if direction in directions(p)]
        timed = [(p[against], p[direction]["min"]) for p in own if p[direction]["min"] >= LEAST_SECONDS]
        held = [(p[against], total_bytes(p, direction)) for p in own if p["parameter_bytes"] >= LEAST_BYTES]
        found[direction] = {"seconds": slope(timed), "bytes": slope(held)}
    return found


def slope(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Slope of the least-squares line through the logarithms; None for fewer than two points."""
    if len({x for x, _ in pairs}) < 2:
        return None
    xs, ys = [math.log(x) for x, _ in pairs], [math.log(y) for _, y in pairs]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    above = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return round(above / sum((x - mean_x) ** 2 for x in xs), 3)


def table(document: dict) -> str:
    """The slopes of every curve as text, with what operation counts would give."""
    lines = [
        "slopes of log(cost) in log(variables): S R^2 operations and S R entries give 1, a full covariance 2 to 3",
        f"  {'curve':<28}{'time fwd':>10}{'fwd+bwd':>10}{'memory fwd':>12}{'fwd+bwd':>10}",
    ]
    lines += [row(name, found) for name, found in document["fits"]["in_variables"].items()]
    lines += ["slopes in log(rank); S R^2 operations would give 2, S R entries 1", *rank_rows(document)]
    return "\n".join(lines)


def rank_rows(document: dict) -> Iterator[str]:
    for name, found in document["fits"]["in_rank"].items():
        yield row(name, found)


def row(name: str, found: dict) -> str:
    cells = [found[d][what] for what in ("seconds", "bytes") for d in DIRECTIONS]
    texts = ["-" if c is None else f"{c:.2f}" for c in cells]
    return f"  {name:<28}{texts[0]:>10}{texts[1]:>10}{texts[2]:>12}{texts[3]:>10}"
