"""Keeps the suite quick: CPU time of every test, the slowest ten at the end, and limits that fail a run.

CPU time counts, not the time on the clock, so a loaded machine makes the tests slower, but not red.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import pytest

TEST_SECONDS = 20.0  # of CPU time, for a test that is not marked `slow`
FOLDER_SECONDS = 240.0  # for the quick tests of one folder: two minutes on two cores
SHOWN = 10

_last = pytest.StashKey[float]()


class Spent(NamedTuple):
    """CPU seconds of one test, with its fixtures and its processes."""

    test: str
    seconds: float
    slow: bool

    @property
    def folder(self) -> str:
        return "/".join(self.test.split("/")[:2])


def over_limit(spent: Iterable[Spent]) -> list[str]:
    """What is wrong, a line each. Tests marked `slow` have no limit."""
    quick = [each for each in spent if not each.slow]
    folders: Counter[str] = Counter()
    for each in quick:
        folders[each.folder] += each.seconds
    return [
        *(
            f"{each.test} took {each.seconds:.1f} s of CPU time; above {TEST_SECONDS:g} s a test is marked slow"
            for each in quick
            if each.seconds > TEST_SECONDS
        ),
        *(
            f"{folder}: the quick tests took {seconds:.0f} s of CPU time, more than {FOLDER_SECONDS:g} s together"
            for folder, seconds in folders.items()
            if seconds > FOLDER_SECONDS
        ),
    ]


def cpu_seconds() -> float:
    """Of this process with all its threads, and of its processes that have ended. Compilers whose results are kept for
    the next run do not count."""
    used = os.times()
    compilers = getattr(sys.modules.get("ptxemu.build"), "compiler_seconds", 0.0)
    return used.user + used.system + used.children_user + used.children_system - compilers


class Budget:
    """The pytest plugin. Workers put the CPU time of each phase into its report; the main process adds it up."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.slow: set[str] = set()

    @property
    def spent(self) -> list[Spent]:
        return [Spent(test, seconds, test in self.slow) for test, seconds in self.seconds.most_common()]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        item.stash[_last] = cpu_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item):
        report = yield
        now = cpu_seconds()
        report.cpu_seconds = now - item.stash[_last]
        item.stash[_last] = now
        return report

    def pytest_runtest_logreport(self, report) -> None:
        self.seconds[report.nodeid] += getattr(report, "cpu_seconds", 0.0)
        if "slow" in report.keywords:
            self.slow.add(report.nodeid)

    def pytest_sessionfinish(self, session) -> None:
        if session.exitstatus == pytest.ExitCode.OK and over_limit(self.spent):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter) -> None:
        terminalreporter.section(f"CPU time: {sum(self.seconds.values()):.0f} s, the slowest {SHOWN} tests")
        for each in self.spent[:SHOWN]:
            terminalreporter.line(f"{each.seconds:7.1f} s  {each.test}")
        for line in over_limit(self.spent):
            terminalreporter.line(line, red=True)
