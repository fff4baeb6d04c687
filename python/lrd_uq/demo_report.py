"""The demo's report: report.md and results.json."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from lrd_uq import plots
from lrd_uq.evaluate import (
    Evaluation,
    Row,
    SeedDifference,
    calibration,
    failures,
    key_of,
    markdown,
    over_seeds,
    summary,
)
from lrd_uq.storage import write_json, write_whole


class Scored(Protocol):
    @property
    def evaluation(self) -> Evaluation: ...
    @property
    def validation(self) -> float: ...
    @property
    def training_seconds(self) -> float: ...
    @property
    def evaluation_seconds(self) -> float: ...
    @property
    def filtered_steps(self) -> int: ...


Runs = Mapping[str, Sequence[Scored]]  # network -> one for each seed
Rows = dict[str, list[Row]]  # name in the table -> one for each seed

# Name in the table -> network and key of its row.
ROWS = {
    "D": ("diagonal", "single"),
    "LR+D": ("low_rank", "single"),
    "LR+D, its variances alone": ("low_rank", "diagonal"),
    "D, MC dropout (variances alone)": ("diagonal_dropout", "diagonal"),
    "D, MC dropout, joint": ("diagonal_dropout", "joint"),
    "D, MC dropout, mixture": ("diagonal_dropout", "mixture"),
    "LR+D, MC dropout, expected weights": ("low_rank_dropout", "expected"),
    "LR+D, MC dropout, joint, all columns": ("low_rank_dropout", "joint"),
    "LR+D, MC dropout, joint, its variances alone": ("low_rank_dropout", "diagonal"),
    "LR+D, MC dropout, mixture (exact)": ("low_rank_dropout", "mixture"),
}

# Expected ordering: the first of each pair should score above the second.
CLAIMS = (
    ("LR+D", "D"),
    ("D, MC dropout (variances alone)", "D"),
    ("LR+D, MC dropout, expected weights", "D, MC dropout (variances alone)"),
    ("LR+D, MC dropout, expected weights", "LR+D"),
    ("LR+D, MC dropout, joint, all columns", "LR+D, MC dropout, expected weights"),
    ("LR+D, MC dropout, joint, all columns", "LR+D, MC dropout, joint, its variances alone"),
    ("LR+D, MC dropout, mixture (exact)", "LR+D, MC dropout, joint, all columns"),
)
HEADINGS = (*("prediction", "log-likelihood", "sd over seeds", "sd over images", "RMS z of the sum", "90 % coverage"),)
CLAIM_HEADINGS = (*("A above B", "seeds", "A minus B", "95 % over seeds", "95 % over images", "images that gain"),)


def rows_of(scored: Runs) -> Rows:
    """All rows of the report, including the truncated joint Gaussians."""
    rows = {name: [run.evaluation.rows[key] for run in scored[network]] for name, (network, key) in ROWS.items()}
    runs = scored["low_rank_dropout"]
    for key in runs[0].evaluation.rows:
        if key.startswith("joint "):
            columns, _, unfolded = key.removeprefix("joint ").partition(" ")
            name = f"LR+D, MC dropout, joint, {columns} columns, {'not ' * bool(unfolded)}folded"
            rows[name] = [run.evaluation.rows[key] for run in runs]
    return rows


def differences(rows: Rows) -> dict[tuple[str, str], SeedDifference]:
    """Both sides of a claim -> their difference in log-likelihood."""
    return {(a, b): over_seeds(*([row.log_probs for row in rows[name]] for name in (a, b))) for a, b in CLAIMS}


def table(rows: Rows) -> list[str]:
    """The lines of a Markdown table: means over the seeds, and the spread of the log-likelihood over seeds."""
    cells: list[Sequence[str]] = [HEADINGS]
    for name, seeds in rows.items():
        means = [row.mean for row in seeds]
        spread = f"{math.sqrt(statistics.variance(means)):.1f}" if len(means) > 1 else "-"
        calibrated = [calibration(row.z) for row in seeds if row.z is not None]
        figures = [f"{statistics.fmean(figure):.2f}" for figure in zip(*calibrated, strict=True)] or ["", ""]
        over_images = f"{statistics.fmean(row.sd for row in seeds):.1f}"
        cells.append((name, f"{statistics.fmean(means):.1f}", spread, over_images, *figures))
    return markdown(cells)


def claims_table(claims: Mapping[tuple[str, str], SeedDifference]) -> list[str]:
    """The lines of a Markdown table that says in how many seeds A scores above B, and by how much."""
    cells: list[Sequence[str]] = [CLAIM_HEADINGS]
    for (a, b), found in claims.items():
        holds = f"{found.in_favour} of {len(found.per_seed)}"
        intervals = (f"{i[0]:+.1f} to {i[1]:+.1f}" if i else "-" for i in (found.over_seeds, found.over_items))
        cells.append((f"{a} above {b}", holds, f"{found.mean:+.1f}", *intervals, f"{found.share_gaining:.0%}"))
    return markdown(cells)


def said(claims: Mapping[tuple[str, str], SeedDifference]) -> list[str]:
    """Sentences about the claims: which hold in all seeds, and which do not."""
    seeds = len(next(iter(claims.values())).per_seed)
    if seeds == 1:
        return ["One seed says nothing of others: the table shows the spread over images alone."]
    whole = sum(found.in_favour == seeds for found in claims.values())
    lines = [f"{whole} of {len(claims)} orderings hold in all {seeds} seeds."]
    for (a, b), found in claims.items():
        if found.in_favour < seeds:
            where = f"only in {found.in_favour} of {seeds} seeds" if found.in_favour else "IN NO SEED"
            lines.append(f"{a} is above {b} {where}.")
    unsure = [f"{a} above {b}" for (a, b), f in claims.items() if f.over_seeds is None or f.over_seeds[0] <= 0]
    if unsure:
        lines.append(f"The interval over seeds does not exclude a difference of 0 for: {'; '.join(unsure)}.")
    return lines


def draw_sweep(path: Path, evaluations: Sequence[Evaluation], ranks: Sequence[int]) -> None:
    """Draws the log-likelihood against the number of kept columns, a thin line for each seed."""
    ranks = [rank for rank in ranks if key_of(rank, True) in evaluations[0].rows]
    kinds = {"dropped variance folded into D": True, "dropped variance lost": False}
    found = {
        name: [[one.rows[key_of(rank, folded)] for rank in ranks] for one in evaluations]
        for name, folded in kinds.items()
    }
    means = {name: [[row.mean for row in seed] for seed in seeds] for name, seeds in found.items()}
    sds = {name: [[row.sd for row in seed] for seed in seeds] for name, seeds in found.items()}
    keys = {"all columns": "joint", "expected weights": "expected"}
    levels = {name: statistics.fmean(one.rows[key].mean for one in evaluations) for name, key in keys.items()}
    plots.sweep(path, ranks, means, sds, levels)


def write(output: Path, scored: Runs, facts: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """Writes report.md and results.json, and returns the lines that the demo prints."""
    rows = rows_of(scored)
    claims = differences(rows)
    broken = [line for name, seeds in rows.items() for line in failures([(name, row) for row in seeds])]
    errors = {name: [run.evaluation.rmse for run in seeds] for name, seeds in scored.items()}
    lines = [
        f"Log-likelihood of {settings['images']} test digits, nats over 560 hidden pixels (higher is better), mean over"
        f" {settings['seeds']} seeds, which share training and test digits:",
        "",
        *table(rows),
        *broken,
        "",
        "Differences in nats, paired over seeds and digits, and in how many seeds they are positive:",
        "",
        *claims_table(claims),
        "",
        *(f"- {sentence}" for sentence in said(claims)),
        "",
        "RMSE of the mean: "
        + ", ".join(f"{name.replace('_', ' ')} {statistics.fmean(found):.4f}" for name, found in errors.items())
        + ".",
    ]
    report = [
        "# MNIST inpainting: diagonal, low-rank, and joint uncertainty",
        "",
        "Rows 10 to 17 of a digit are visible, the other 20 are predicted as one Gaussian of 560 pixels. 1,000 training"
        " digits, 400 validation digits on which settings were chosen, and test digits that are only scored. Every"
        " network was trained once for each seed.",
        "",
        *lines,
        "",
        "z is the error of the sum over the hidden pixels, divided by the standard deviation that the Gaussian predicts"
        " for that sum: its root mean square should be 1, and 90 % of the digits should lie within the central 90 %"
        ' interval. "Variances alone" is the same Gaussian without its correlations. The joint Gaussian has the mean'
        " and covariance of the mixture: the difference between their scores is the cost of using a single Gaussian.",
        "",
        "The two intervals answer different questions. That over seeds (Student's t of the means of each seed) is about"
        " other seeds and these digits, that over images (bootstrap of the differences averaged over the seeds) about"
        " other digits and these seeds. With few seeds the first one is wide.",
        "",
        "![Input, truth, prediction, variances and modes](panel.png)",
        "",
        f"Test digits with the predictions of seed {settings['seed']}. Orange pixels are hidden from the network; white"
        " pixels in the other pictures were visible, so they are not"
        " predicted. For each digit, the first row shows the modes of the joint covariance, the second those of its"
        " aleatoric part (the uncertainty of each prediction), the third those of its epistemic part (the differences"
        " between predictions). Along a mode, red pixels gain ink while blue ones lose it, or the reverse."
        " Each mode has its own colour scale; the number above it is its share of the variance of that part.",
        "",
        "![Training curves](curves.png)",
        "",
        "![Condition numbers](condition.png)",
        "",
        "![Kept columns](sweep.png)",
        "",
        "A thin line for each seed, a thick one for their mean.",
        "",
        "## How it was made",
        "",
        *(f"- {name}: {fact}" for name, fact in facts.items()),
        *(
            f"- {name.replace('_', ' ')}, seed {settings['seed'] + number}: trained {run.training_seconds:.0f} s,"
            f" scored {run.evaluation_seconds:.0f} s; validation {run.validation:.1f} nats with expected weights,"
            f" {run.filtered_steps} steps filtered"
            for name, seeds in scored.items()
            for number, run in enumerate(seeds)
        ),
        "",
    ]
    write_whole(output / "report.md", "\n".join(report).encode())
    document: dict[str, Any] = {
        "facts": dict(facts),
        "settings": dict(settings),
        "rows": {name: [summary(row) for row in seeds] for name, seeds in rows.items()},
        "claims": {f"{a} above {b}": found._asdict() for (a, b), found in claims.items()},
        "rmse": errors,
        "validation": {name: [run.validation for run in seeds] for name, seeds in scored.items()},
    }
    write_json(output / "results.json", _finite(document))
    return lines


def _finite(value: Any) -> Any:
    """A document for JSON, with None for numbers that are not finite."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
