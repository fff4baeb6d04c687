"""The report of a run, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import machine
from benchmarks.stress import damaged, inputs, refusals
from benchmarks.stress.budgets import BUDGETS
from benchmarks.stress.runner import BANDS, Outcome

DTYPES = ("float32", "float64", "bfloat16", "float16")


def report(outcomes: dict[str, Outcome], seed: int, isas: Sequence[str]) -> str:
    cases = sum(sum(o.counts.values()) for o in outcomes.values())
    wrong = sum(o.counts["wrong"] for o in outcomes.values())
    lines = ["# Stress", "", f"`make stress`: {cases} calls, seed {seed}, {wrong} answered wrong.", ""]
    lines += [f"Instruction sets: {', '.join(isas)}. Budgets: `docs/safety.md`.", ""]
    lines += ["```", machine.summary(machine.facts()), "```", ""]
    lines += ["Right answers are counted by the largest eigenvalue of the capacitance.", ""]
    lines += [*_row("function", *BANDS, "wrong"), "|---|" + "---|" * (len(BANDS) + 1)]
    for name, outcome in outcomes.items():
        lines += _row(f"`{name}`", *(outcome.counts[band] for band in BANDS), outcome.counts["wrong"])
    lines += ["", "The largest errors, by the dtype of the result.", ""]
    lines += [*_row("result", *DTYPES, "relative to"), "|---|" + "---|" * (len(DTYPES) + 1)]
    worst = Outcome()
    for outcome in outcomes.values():
        worst.add(outcome)
    for budget, found in BUDGETS.items():
        if budget in worst.worst:
            cells = [f"{worst.worst[budget][d]:.1e}" if d in worst.worst[budget] else "" for d in DTYPES]
            lines += _row(budget, *cells, found.relative_to)
    lines += ["", "The families of inputs.", "", "| family | |", "|---|---|"]
    for family in (*inputs.FAMILIES, *refusals.BREAKS, *damaged.DAMAGES):
        lines += _row(family.__name__.replace("_", " "), (family.__doc__ or "").strip())
    failures = [failure for outcome in outcomes.values() for failure in outcome.failures]
    if failures:
        lines += ["", "Wrong answers (some of each function):", "", *(f"- {failure}" for failure in failures)]
    return "\n".join(lines) + "\n"


def _row(*cells: object) -> list[str]:
    return ["| " + " | ".join(map(str, cells)) + " |"]
