"""metrics.csv of a run: the logger that writes it, and its reader."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lrd_uq.extra import lightning as L
from lrd_uq.storage import append, write_whole

METRICS = "metrics.csv"
rank_zero_only = L.pytorch.utilities.rank_zero_only
FLUSH = 10  # rows that are written together


class FolderLog(L.pytorch.loggers.logger.Logger):
    """A logger that writes into a folder, without subfolders for names and versions."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.folder)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Does nothing: config.yaml has all settings."""


class MetricsLog(FolderLog):
    """Writes metrics.csv. The file of a resumed run is renamed before the first row.

    A failed write leaves whole rows and no others, which lightning's CSVLogger does not.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._rows: list[dict[str, float]] = []  # not yet in the file
        self._names: list[str] | None = None  # columns of the file; None before it is begun

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        assert step is not None
        self._rows.append({**{name: float(value) for name, value in metrics.items()}, "step": step})
        if len(self._rows) >= FLUSH:
            self.save()

    @rank_zero_only
    def save(self) -> None:
        if not self._rows:
            return
        path, known = self.folder / METRICS, self._names or []
        if self._names is None:
            _set_aside(path)
        names = sorted(set(known).union(*self._rows))
        if names == known and path.exists():
            append(path, _lines(names, self._rows))
        else:  # the first rows, or new columns
            earlier = _records(path) if path.exists() else []
            write_whole(path, _lines(names, [*earlier, *self._rows], heading=True))
        self._names, self._rows = names, []

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self.save()


def read_metrics(folder: Path) -> dict[str, tuple[list[float], list[float]]]:
    """Name -> steps and values, over all parts of a resumed run; for a step in two of them, the later one counts."""
    found: dict[str, dict[float, float]] = {}
    for file in (*earlier_parts(folder), folder / METRICS):
        if not file.exists():
            continue
        for number, record in enumerate(_records(file), start=2):
            try:
                step = float(record["step"])
                values = {name: float(text) for name, text in record.items() if name not in ("step", "epoch") and text}
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{file} is damaged in line {number}: {error}") from error
            for name, value in values.items():
                found.setdefault(name, {})[step] = value
    return {name: (sorted(points), [points[step] for step in sorted(points)]) for name, points in found.items()}


def earlier_parts(folder: Path) -> list[Path]:
    """The files of a resumed run before the current one, in the order of their numbers."""
    return sorted((f for f in folder.glob(f"earlier-*-{METRICS}") if f.name.split("-")[1].isdigit()), key=_number)


def _number(part: Path) -> int:
    return int(part.name.split("-")[1])


def _set_aside(path: Path) -> None:
    if path.exists():
        parts = earlier_parts(path.parent)
        path.rename(path.with_name(f"earlier-{_number(parts[-1]) + 1 if parts else 0}-{METRICS}"))


def _lines(names: list[str], rows: list[Any], heading: bool = False) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    if heading:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def _records(path: Path) -> list[dict[str, str]]:
    try:
        return list(csv.DictReader(io.StringIO(_whole_lines(path))))
    except csv.Error as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _whole_lines(path: Path) -> str:
    """The text up to its last whole line: a kill or a full disk can leave a part of one."""
    text = path.read_bytes().decode("utf-8", "replace")
    return text[: text.rfind("\n") + 1]
