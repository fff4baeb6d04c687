"""Rows as an aligned Markdown table."""

from __future__ import annotations

from collections.abc import Sequence

from lrd_uq.evaluate.region_sum import calibration
from lrd_uq.evaluate.rows import Row

HEADINGS = ("prediction", "log-likelihood", "sd over images", "RMS z of the sum", "90 % coverage")


def table(rows: Sequence[tuple[str, Row]]) -> list[str]:
    """The lines of a Markdown table of named rows.

    Examples:
        >>> from lrd_uq.evaluate import Row, table
        >>> lines = table([("joint", Row("joint", torch.tensor([3.0, 5.0]), torch.tensor([1.0, -1.0])))])
        >>> print(lines[-1])
        | joint      |            4.0 |            1.4 |             1.00 |          1.00 |
    """
    cells = [HEADINGS]
    for name, row in rows:
        calibrated = (
            ("", "") if row.z is None else (f"{calibration(row.z).rms:.2f}", f"{calibration(row.z).coverage:.2f}")
        )
        cells.append((name, f"{row.mean:.1f}", f"{row.sd:.1f}", *calibrated))
    return markdown(cells)


def summary(row: Row) -> dict[str, float]:
    """The figures of a row, for JSON.

    Examples:
        >>> from lrd_uq.evaluate import Row, summary
        >>> summary(Row("mixture", torch.tensor([3.0, 3.0]), None))
        {'mean': 3.0, 'sd': 0.0}
    """
    found = {"mean": row.mean, "sd": row.sd}
    if row.z is not None:
        found |= {"rms_z": calibration(row.z).rms, "coverage": calibration(row.z).coverage}
    return found


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
