"""The demo's report: report.md and results.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from lrd_uq import plots
from lrd_uq.evaluate import Difference, Evaluation, Row, key_of, paired, summary, table, verdict


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
    "scaled LR+D, MC dropout, expected weights": ("low_rank_dropout_scaled", "expected"),
    "scaled LR+D, MC dropout, joint, all columns": ("low_rank_dropout_scaled", "joint"),
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


def rows_of(scored: Mapping[str, Scored]) -> dict[str, Row]:
    """All rows of the report, including the truncated joint Gaussians."""
    rows = {name: scored[network].evaluation.rows[key] for name, (network, key) in ROWS.items()}
    for key, row in scored["low_rank_dropout"].evaluation.rows.items():
        if key.startswith("joint "):
            columns, _, unfolded = key.removeprefix("joint ").partition(" ")
            rows[f"LR+D, MC dropout, joint, {columns} columns, {'not ' * bool(unfolded)}folded"] = row
    return rows


def differences(rows: Mapping[str, Row]) -> dict[str, Difference]:
    """Claim -> difference in log-likelihood, paired over the test digits."""
    return {f"{a} above {b}": paired(rows[a].log_probs, rows[b].log_probs) for a, b in CLAIMS}


def draw_sweep(path: Path, evaluation: Evaluation, ranks: Sequence[int]) -> None:
    rows = evaluation.rows
    ranks = [rank for rank in ranks if key_of(rank, True) in rows]
    kinds = {"dropped variance folded into D": True, "dropped variance lost": False}
    means = {name: [rows[key_of(rank, folded)].mean for rank in ranks] for name, folded in kinds.items()}
    sds = {name: [rows[key_of(rank, folded)].sd for rank in ranks] for name, folded in kinds.items()}
    levels = {"all columns": rows["joint"].mean, "expected weights": rows["expected"].mean}
    plots.sweep(path, ranks, means, sds, levels)


def write(
    output: Path, scored: Mapping[str, Scored], facts: Mapping[str, Any], settings: Mapping[str, Any]
) -> list[str]:
    """Writes report.md and results.json, and returns the lines that the demo prints."""
    rows = rows_of(scored)
    claims = differences(rows)
    lines = [
        f"Log-likelihood of {settings['images']} test digits, nats over 560 hidden pixels (higher is better):",
        "",
        *table(list(rows.items())),
        "",
        *(f"- {verdict(claim, difference)}" for claim, difference in claims.items()),
        "",
        "RMSE of the mean: "
        + ", ".join(f"{name.replace('_', ' ')} {s.evaluation.rmse:.4f}" for name, s in scored.items())
        + ".",
    ]
    report = [
        "# MNIST inpainting: diagonal, low-rank, and joint uncertainty",
        "",
        "Rows 10 to 17 of a digit are visible, the other 20 are predicted as one Gaussian of 560 pixels. 1,000 training"
        " digits, 400 validation digits on which settings were chosen, and test digits that are only scored.",
        "",
        *lines,
        "",
        "z is the error of the sum over the hidden pixels, divided by the standard deviation that the Gaussian predicts"
        " for that sum: its root mean square should be 1, and 90 % of the digits should lie within the central 90 %"
        ' interval. "Variances alone" is the same Gaussian without its correlations. The joint Gaussian has the mean'
        " and covariance of the mixture: the difference between their scores is the cost of using a single Gaussian.",
        "",
        "![Input, truth, prediction, variances and modes](panel.png)",
        "",
        "Orange pixels are hidden from the network; white pixels in the other pictures were visible, so they are not"
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
        "## How it was made",
        "",
        *(f"- {name}: {fact}" for name, fact in facts.items()),
        *(
            f"- {name.replace('_', ' ')}: trained {s.training_seconds:.0f} s, scored {s.evaluation_seconds:.0f} s;"
            f" validation {s.validation:.1f} nats with expected weights, {s.filtered_steps} steps filtered"
            for name, s in scored.items()
        ),
        "",
    ]
    (output / "report.md").write_text("\n".join(report), encoding="utf-8")
    document = {
        "facts": dict(facts),
        "settings": dict(settings),
        "rows": {name: summary(row) for name, row in rows.items()},
        "claims": {
            claim: {**difference._asdict(), "holds": difference.mean > 0} for claim, difference in claims.items()
        },
        "rmse": {name: s.evaluation.rmse for name, s in scored.items()},
        "validation": {name: s.validation for name, s in scored.items()},
    }
    (output / "results.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return lines
