"""Rows as an aligned Markdown table, and as figures for JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lrd_uq.data.loading import named
from lrd_uq.evaluate.region_sum import calibration
from lrd_uq.evaluate.rows import Evaluation, Row

HEADINGS = ("prediction", "log-likelihood", "sd over images", "RMS z of the sum", "90 % coverage")


def table(rows: Sequence[tuple[str, Row]]) -> list[str]:
    """The lines of a Markdown table of named rows.

    Examples:
        >>> from lrd_uq.evaluate import Row, table
        >>> lines = table([("joint", Row("joint", torch.tensor([3.0, 5.0]), torch.tensor([1.0, -1.0])))])
        >>> print(lines[-1])
        | joint      |            4.0 |            1.4 |             1.00 |          1.00 |
    """
    cells: list[Sequence[str]] = [HEADINGS]
    for name, row in rows:
        calibrated = ("", "") if row.z is None else tuple(_cell(figure, 2) for figure in calibration(row.z))
        cells.append((name, _cell(row.mean, 1), _cell(row.sd, 1), *calibrated))
    return markdown(cells)


def _cell(figure: float, digits: int) -> str:
    return f"{figure:.{digits}f}" if math.isfinite(figure) else "-"


def summary(row: Row) -> dict[str, Any]:
    """The figures of a row, for JSON. A figure that is not a number is None, with the reason under "reasons".

    If items have no log-likelihood, "failed" has their positions, and "others" the figures of the other items.

    Examples:
        >>> from lrd_uq.evaluate import Row, summary
        >>> summary(Row("mixture", torch.tensor([3.0, 3.0]), None))
        {'items': 2, 'mean': 3.0, 'sd': 0.0}
        >>> summary(Row("mixture", torch.tensor([3.0]), None))["reasons"]
        {'sd': 'one item has no spread'}
    """
    N, failed = len(row.log_probs), row.failed
    found: dict[str, Any] = {"items": N, "mean": row.mean, "sd": row.sd}
    if row.z is not None:
        found |= {"rms_z": calibration(row.z).rms, "coverage": calibration(row.z).coverage}
    reasons = {}
    for key in [key for key, figure in found.items() if not math.isfinite(figure)]:
        found[key] = None
        one = key == "sd" and N == 1 and not failed
        reasons[key] = "one item has no spread" if one else _reason(row, key)
    if reasons:
        found["reasons"] = reasons
    if failed:
        found["failed"] = failed
        good = row.log_probs.isfinite()
        if bool(good.any()):
            parts = (None if part is None else part[good] for part in (row.log_probs, row.z, row.items))
            found["others"] = summary(Row(row.key, *parts))  # type: ignore[arg-type]
    return found


def figures(found: Evaluation) -> dict[str, Any]:
    """The figures of an evaluation, for JSON. A figure that is not a number is None, with the reason under "reasons".

    Examples:
        >>> from lrd_uq.bayes import Method
        >>> from lrd_uq.evaluate import evaluate, figures
        >>> from lrd_uq.heads import DiagonalHead
        >>> from lrd_uq.nets import wrap
        >>> net, pairs = wrap(torch.nn.Conv2d(1, 4, 1), DiagonalHead(4)), [(torch.ones(1, 2, 2),) * 2] * 5
        >>> list(figures(evaluate(Method(), net, pairs)))
        ['items', 'rmse', 'mae', 'unexplained', 'rows']
    """
    scores = found.scores
    values = {"rmse": found.rmse, "mae": found.mae, "unexplained": found.unexplained}
    sources = {"rmse": scores.squared_error, "mae": scores.absolute_error, "unexplained": scores.unexplained}
    reasons = {}
    for name, values_of_items in sources.items():
        if not math.isfinite(values[name]):
            bad = scores.items[~values_of_items.isfinite()].tolist()
            reasons[name] = (
                f"it is not a finite number for {len(bad)} of {len(scores.items)} items: {named(bad)}"
                if bad
                else "the items have no outputs"
            )
    document: dict[str, Any] = {"items": len(scores.items)}
    document |= {name: None if name in reasons else value for name, value in values.items()}
    document |= {"reasons": reasons} if reasons else {}
    document |= {"no_expected": found.no_expected} if found.no_expected else {}
    return {**document, "rows": {key: summary(row) for key, row in found.rows.items()}}


def _reason(row: Row, key: str) -> str:
    of_sum = key not in ("mean", "sd") and row.z is not None
    what, values = ("standardised sum", row.z) if of_sum else ("log-likelihood", row.log_probs)
    assert values is not None
    bad = row.not_finite(values)
    return f"the {what} of {len(bad)} of {len(values)} items is not a finite number: {named(bad)}"


def failures(rows: Sequence[tuple[str, Row]]) -> list[str]:
    """A line for each row with items whose log-likelihood is not finite: how many, which, and the mean of the others.

    Examples:
        >>> from lrd_uq.evaluate import Row, failures
        >>> failures([("joint", Row("joint", torch.tensor([3.0, torch.nan, 5.0]), None))])
        ['joint: the log-likelihood of 1 of 3 items is not a finite number: 1; mean of the others 4.0']
    """
    lines = []
    for name, row in rows:
        if row.failed:
            others = summary(row).get("others", {}).get("mean")
            rest = "" if others is None else f"; mean of the others {others:.1f}"
            lines.append(f"{name}: {_reason(row, 'mean')}{rest}")
    return lines


def markdown(cells: Sequence[Sequence[str]]) -> list[str]:
    """An aligned table: the first row is the heading, the first column is left-aligned, the others right-aligned.

    Examples:
        >>> from lrd_uq.evaluate import markdown
        >>> print(*markdown([("name", "nats"), ("joint", "4.0")]), sep="\\n")
        | name  | nats |
        |-------|-----:|
        | joint |  4.0 |
    """
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = ["| " + " | ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) + " |" for row in cells]
    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return [lines[0], rule, *lines[1:]]
