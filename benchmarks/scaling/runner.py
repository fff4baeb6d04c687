"""Measures the points of the curves, each in a fresh process, and saves the document after every point."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import fresh, machine
from benchmarks.registry import DIRECTIONS
from benchmarks.run import Progress
from benchmarks.scaling import methods
from benchmarks.scaling.methods import Curve
from benchmarks.scaling.pipelines import PIPELINES
from benchmarks.scaling.point import measure_point

SCHEMA = 1
# Settings that must stay the same within a document. More sizes, methods and ranks may be added to it.
SETTINGS = ("device", "seconds", "point_seconds", "memory")
SAME_MACHINE = ("cpu", "usable_cores", "threads", "instruction_set", "versions", "allocator", "environment", "commit")
TOLERANCE = 1e-3  # relative difference of log-likelihoods in float32
CALLS = 8  # minimum number of calls for a point
OTHER_WORK = "cores_busy_with_other_work"
MOST_OTHER_WORK = 0.1  # cores; above it a time is unreliable
# Initial guesses for the estimate of the remaining time.
PROCESS_SECONDS, BYTES_PER_SECOND, PRODUCTS_PER_SECOND = 6.0, 2e9, 5e10
GIB = 1 << 30


class AnotherRun(Exception):
    """The existing document was made with other settings, on another machine or at another commit."""


def begin(path: Path, settings: dict, restart: bool) -> dict:
    """The existing document if it can be continued, otherwise a new one."""
    document = {"schema": SCHEMA, "machine": machine.facts(), "settings": settings, "points": []}
    if restart or not path.exists():
        return document
    earlier = json.loads(path.read_text())
    for name in SETTINGS:
        if earlier.get("settings", {}).get(name) != settings[name]:
            raise AnotherRun(f"{path} was made with another {name}")
    for name in SAME_MACHINE:
        if earlier["machine"].get(name) != json.loads(json.dumps(document["machine"][name])):
            raise AnotherRun(f"{path} was made with another {name}")
    return earlier


def run(document: dict, curves: Sequence[Curve], sizes: Sequence[int], options: argparse.Namespace) -> None:
    """Measures all missing points by increasing size, and for each size one method after another; then measures those
    again that were disturbed by other work."""
    done = {(point["curve"], point["variables"]) for point in document["points"]}
    ended = {p["curve"] for p in document["points"] if p["status"] != "ok"}
    curves = sorted(curves, key=lambda c: (c.rank or 0, c.layout))
    waiting = [(c, S) for S in sizes for c in curves if (c.name, S) not in done and c.name not in ended]
    progress = Progress([guess_seconds(c, S, options) for c, S in waiting])
    for i, (curve, S) in enumerate(waiting):
        if curve.name not in ended:
            progress.tell(f"{curve.name}, {S} variables")
            point = {"curve": curve.name, **curve._asdict(), "variables": S, **measure(curve, S, document, options)}
            document["points"].append(point)
            if point["status"] != "ok":
                ended.add(curve.name)
                print(f"  {curve.name} ends before {S} variables: {point['reason']}", file=sys.stderr)
                for j in range(i + 1, len(waiting)):
                    if waiting[j][0] == curve:
                        progress.guesses[j] = 0.0
            machine.write_json(options.output, document)
        progress.finish_unit()
    repeat_disturbed(document, options)


def repeat_disturbed(document: dict, options: argparse.Namespace) -> None:
    """Measures points again that other processes disturbed, and keeps the less disturbed of both measurements."""
    disturbed = [p for p in document["points"] if (p.get(OTHER_WORK) or 0.0) > MOST_OTHER_WORK]
    progress = Progress([guess_seconds(Curve.parse(p["curve"]), p["variables"], options) for p in disturbed])
    for point in disturbed:
        progress.tell(f"{point['curve']}, {point['variables']} variables, again because the machine was busy")
        curve = Curve.parse(point["curve"])
        again = measure(curve, point["variables"], document, options)
        if again["status"] == "ok" and (again[OTHER_WORK] or 0.0) < point[OTHER_WORK]:
            point.update(again)
            machine.write_json(options.output, document)
        progress.finish_unit()


def measure(curve: Curve, S: int, document: dict, options: argparse.Namespace) -> dict:
    """The record of one point, or the reason why there is none."""
    if reason := methods.unavailable(curve.method):
        return {"status": "skipped", "reason": reason}
    if reason := over_budget(curve, S, document, options):
        return {"status": "budget", "reason": reason}
    arguments = (curve, S, options.device, options.seconds)
    try:
        record = fresh.call(measure_point, *arguments, timeout=options.point_seconds)
    except subprocess.TimeoutExpired:
        return {"status": "budget", "reason": f"took more than {options.point_seconds:.0f} s"}
    except fresh.Failed as error:
        return {"status": "budget" if error.out_of_memory else "failed", "reason": str(error)}
    if reason := disagreement(curve, S, record["log_prob"], document):
        return {"status": "disagrees", "reason": reason, **record}
    return {"status": "ok", **record}


def over_budget(curve: Curve, S: int, document: dict, options: argparse.Namespace) -> str | None:
    """Why a point would exceed a limit, judged by the size of its parameters and by the last point of the curve, scaled
    with the numbers of parameters and products; None if it would not."""
    limit = options.memory * GIB
    least = 4 * curve.parameters(S)
    last = max(points_of(document, curve), key=lambda p: p["variables"], default=None)
    growth = curve.parameters(S) / curve.parameters(last["variables"]) if last else 1.0
    most = max(total_bytes(last, directions(last)[-1]) * growth if last else 0.0, least)
    if most > limit:
        return f"needs about {most / GIB:.0f} GiB of memory; the limit is {options.memory:.0f}"
    if last:
        growth = curve.products(S) / curve.products(last["variables"])
        seconds = CALLS * last[directions(last)[-1]]["min"] * growth
        if seconds > options.point_seconds:
            return f"would take about {seconds:.0f} s; the limit is {options.point_seconds:.0f}"
    return None


def disagreement(curve: Curve, S: int, log_prob: float, document: dict) -> str | None:
    """How log p differs from that of the first method with the same parameters; None if it agrees."""
    if curve.rank is None or curve.method in PIPELINES:  # the optimizer changes the weights with every call
        return None
    for point in document["points"]:
        if point["status"] == "ok" and (point["rank"], point["layout"], point["variables"]) == (*curve[1:], S):
            off = abs(log_prob - point["log_prob"]) / max(abs(point["log_prob"]), 1.0)
            if not off <= TOLERANCE:
                return f"log p is {log_prob:.7g}, that of {point['method']} {point['log_prob']:.7g}"
            return None
    return None


def points_of(document: dict, curve: Curve) -> Iterator[dict]:
    return (p for p in document["points"] if p["curve"] == curve.name and p["status"] == "ok")


def directions(point: dict) -> list[str]:
    """The directions that were measured; a pipeline has only one."""
    return [direction for direction in DIRECTIONS if direction in point]


def total_bytes(point: dict, direction: str) -> float:
    """Bytes of parameters and working memory."""
    return point["parameter_bytes"] + point[direction]["working_bytes"]


def guess_seconds(curve: Curve, S: int, options: argparse.Namespace) -> float:
    """Starting the process, timing, and further calls; 0 for a point that exceeds a limit."""
    size = 4 * curve.parameters(S)
    calls = CALLS * (size / BYTES_PER_SECOND + curve.products(S) / PRODUCTS_PER_SECOND)
    if size > options.memory * GIB or calls > options.point_seconds:
        return 0.0
    process = PROCESS_SECONDS * (4 if curve.method == "compile" else 1)
    return min(process + options.seconds + calls, options.point_seconds)
