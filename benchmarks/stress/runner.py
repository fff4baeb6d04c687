"""Runs cases: of one function in this process, or of all in a process for each instruction set and some functions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import machine
from benchmarks.stress import (
    budgets,
    damaged,
    density,
    diagnostics,
    divergences,
    exact,
    guard,
    joint,
    linear,
    methods,
    refusals,
    truncation,
)
from benchmarks.stress.inputs import Draw
from benchmarks.stress.items import Error

Check = Callable[[Draw], Iterator[Error]]
MODULES = (density, linear, methods, truncation, joint, divergences, diagnostics, refusals, damaged, guard)
CHECKS: dict[str, Check] = {check.__name__: check for module in MODULES for check in module.CHECKS}
# What the quick tests run: all functions that answer nothing wrong.
QUICK = tuple(CHECKS)
# Right answers by the largest eigenvalue of the capacitance matrix, and wrong answers.
BANDS = {"up to 1e10": 1e10, "up to 1e14": 1e14, "beyond": float("inf")}
KEPT = 30  # descriptions of wrong answers that are kept for each function
STEP = 25  # cases between two reports of progress


@dataclass
class Outcome:
    """What the cases of one function gave."""

    counts: Counter[str] = field(default_factory=Counter)  # by BANDS, and "wrong"
    worst: dict[str, dict[str, float]] = field(default_factory=dict)  # largest error by budget and dtype
    failures: list[str] = field(default_factory=list)

    def note(self, error: Error) -> None:
        if error.budget:
            dtype = str(error.dtype).removeprefix("torch.")
            by_dtype = self.worst.setdefault(error.budget, {})
            by_dtype[dtype] = max(by_dtype.get(dtype, 0.0), error.error)

    def add(self, other: Outcome) -> None:
        self.counts.update(other.counts)
        for budget, by_dtype in other.worst.items():
            mine = self.worst.setdefault(budget, {})
            for dtype, error in by_dtype.items():
                mine[dtype] = max(mine.get(dtype, 0.0), error)
        self.failures = [*self.failures, *other.failures][:KEPT]


def attempt(name: str, seed: int, number: int) -> tuple[Outcome, str | None]:
    """One case, and what is wrong with it, if anything."""
    g = Draw(seed, name, number)
    check, outcome, problem = CHECKS[name], Outcome(), None
    try:
        for error in check(g):
            outcome.note(error)
            limit = budgets.allowed(error.budget, error.dtype)
            if problem is None and not error.error <= limit:
                dtype = str(error.dtype).removeprefix("torch.")
                problem = (
                    f"{error.budget or name} off by {error.error:.2g} ({limit:.2g} allowed), {dtype}, {error.what}"
                )
    except Exception as error:
        problem = f"{type(error).__name__}: {str(error)[:200]}"
    band = next(name for name, limit in BANDS.items() if g.size <= limit)
    outcome.counts["wrong" if problem else band] += 1
    if problem:
        problem = f"{name}, number {number}, {g.family.replace('_', ' ')}, capacitance up to {g.size:.1e}: {problem}"
        outcome.failures.append(problem)
    return outcome, problem


def run(name: str, seed: int, numbers: Iterable[int], progress: Callable[[int], None] = lambda _: None) -> Outcome:
    """The cases of one function with these numbers, in this process."""
    exact.precise()
    total, done = Outcome(), 0
    for number in numbers:
        total.add(attempt(name, seed, number)[0])
        done += 1
        if done % STEP == 0:
            progress(STEP)
    progress(done % STEP)
    return total


class Job(NamedTuple):
    """The share of one process: every `step`-th case of some functions."""

    isa: str
    names: list[str]
    first: int
    step: int
    environment: dict[str, str]


def jobs_of(names: Sequence[str], isas: Sequence[str], fence: Path | None) -> list[Job]:
    """Four processes for each instruction set, and two where memory ends or begins at guard pages."""
    fenced = [check.__name__ for check in guard.CHECKS if check.__name__ in names]
    others = [name for name in names if name not in fenced]
    parts = min(4, -(-len(others) // 4))
    jobs = [Job(isa, others[part::parts], at, len(isas), {}) for at, isa in enumerate(isas) for part in range(parts)]
    if fenced:
        preload = {} if fence is None else {"LD_PRELOAD": str(fence)}
        ways = [(isa, where) for isa in isas for where in ("begin", "end")]
        jobs += [Job(isa, fenced, at, len(ways), {**preload, "FENCE": where}) for at, (isa, where) in enumerate(ways)]
    return jobs


def run_all(names: Sequence[str], count: int, seed: int, isas: Sequence[str], processes: int) -> dict[str, Outcome]:
    """All functions under all instruction sets, which share the cases. A process that dies is a wrong answer."""
    outcomes = {name: Outcome() for name in names}
    progress = Progress(count * len(names))

    def work(job: Job) -> None:
        while job.names:  # what a dead process left is given to another
            job = job._replace(names=_process(job, {"seed": seed, "count": count}, outcomes, progress))

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(processes) as pool:
        list(pool.map(work, jobs_of(names, isas, guard.fence(Path(folder)))))
    progress.end()
    return outcomes


def _process(job: Job, options: dict[str, Any], outcomes: dict[str, Outcome], progress: Progress) -> list[str]:
    """Runs one worker; returns the functions that it did not reach."""
    options = {**options, "names": job.names, "first": job.first, "step": job.step}
    command = [sys.executable, "-m", "benchmarks.stress.worker", json.dumps(options)]
    environment = {**os.environ, **job.environment, "LRD_CPU_ISA": job.isa, "OMP_NUM_THREADS": "1"}
    left = list(job.names)
    with subprocess.Popen(
        command, cwd=machine.ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdout is not None
        assert worker.stderr is not None
        for line in worker.stdout:
            message = json.loads(line)
            if "done" in message:
                progress.add(message["done"])
                continue
            name = message.pop("name")
            found = Outcome(Counter(message["counts"]), message["worst"], message["failures"])
            found.failures = [f"{job.isa}: {text}" for text in found.failures]
            with progress.lock:
                outcomes[name].add(found)
                progress.wrong += found.counts["wrong"]
            left.remove(name)
        errors = worker.stderr.read()
    if worker.returncode == 0 or not left:
        return []
    died = f"{job.isa}: {left[0]}: the process ended with {worker.returncode}: {errors[-300:]}"
    with progress.lock:
        outcomes[left[0]].add(Outcome(Counter(wrong=1), {}, [died]))
        progress.wrong += 1
    return left[1:]


def serve(options: dict[str, Any]) -> None:
    """A worker: messages are lines of JSON."""

    def say(message: dict[str, Any]) -> None:
        print(json.dumps(message), flush=True)

    for name in options["names"]:
        numbers = range(options["first"], options["count"], options["step"])
        outcome = run(name, options["seed"], numbers, lambda done: say({"done": done}))
        say({"name": name, **vars(outcome)})


class Progress:
    """Cases done, answers that were wrong, and an estimate of the time that is left."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.wrong = total, 0, 0
        self.start = self.shown = time.monotonic()
        self.lock = threading.Lock()

    def add(self, count: int) -> None:
        with self.lock:
            self.done += count
            now = time.monotonic()
            if now - self.shown < 2 or not self.done:
                return
            self.shown = now
            left = (now - self.start) / self.done * (self.total - self.done)
            text = f"{self.done} of {self.total} cases, {self.wrong} wrong (about {left:.0f} s left)"
            print(
                f"\r{text:<70}" if sys.stderr.isatty() else text,
                end="" if sys.stderr.isatty() else "\n",
                file=sys.stderr,
                flush=True,
            )

    def end(self) -> None:
        if sys.stderr.isatty():
            print(file=sys.stderr)
