"""metrics.csv: parts, cuts and failed writes."""

import errno
import os

import pytest
from failing import Failing

from lrd_uq import metrics, storage


def log_of(folder, rows, first=0):
    log = metrics.MetricsLog(folder)
    for step in range(first, first + rows):
        log.log_metrics({"loss": step / 4, **({"late, odd": 1.0} if step % 7 == 5 else {})}, step)
    log.finalize("success")


def test_log_cut_anywhere_is_read_to_its_last_whole_line(tmp_path):
    log_of(tmp_path, 25)
    path = tmp_path / metrics.METRICS
    whole, text = metrics.read_metrics(tmp_path), path.read_bytes()
    assert whole["loss"] == ([float(s) for s in range(25)], [s / 4 for s in range(25)])
    assert whole["late, odd"][0] == [5, 12, 19]
    for length in range(len(text)):
        path.write_bytes(text[:length])
        steps, values = metrics.read_metrics(tmp_path).get("loss", ([], []))
        lines = max(text[:length].count(b"\n") - 1, 0)
        assert (steps, values) == ([*range(lines)], [s / 4 for s in range(lines)])
    path.write_bytes(text.replace(b"\n", b"\nx,", 3))
    with pytest.raises(ValueError, match=r"metrics\.csv is damaged in line 2"):
        metrics.read_metrics(tmp_path)


@pytest.mark.parametrize("mark", ["\r", "\0", '"', '\r"\n', "9" * 200_000])
def test_marks_of_damage_are_named_or_read(mark, tmp_path):
    """A carriage return, a zero, a quotation mark or a huge field, anywhere."""
    log_of(tmp_path, 6)
    path = tmp_path / metrics.METRICS
    text = path.read_text()
    for place in range(len(text)):
        path.write_text(text[:place] + mark + text[place:], newline="")
        said = ""
        try:
            metrics.read_metrics(tmp_path)
        except ValueError as error:
            said = str(error)
        assert not said or str(path) in said


def test_parts_are_read_in_the_order_of_their_numbers(tmp_path):
    for part in range(13):  # each overwrites step 0 and adds one of its own
        log = metrics.MetricsLog(tmp_path)
        log.log_metrics({"loss": float(part)}, 0)
        log.log_metrics({"loss": 1.0}, part + 1)
        log.save()
        if part == 5:
            (tmp_path / f"earlier-3-{metrics.METRICS}").unlink()  # its number is not given again
    assert [file.name.split("-")[1] for file in metrics.earlier_parts(tmp_path)] == [*"012456789", "10", "11"]
    steps, values = metrics.read_metrics(tmp_path)["loss"]
    assert values[0] == 12
    assert steps == [0, 1, 2, 3, *range(5, 14)]


@pytest.mark.parametrize("fresh", [True, False])
def test_failed_write_of_the_log_leaves_whole_lines_and_loses_none(fresh, tmp_path, monkeypatch):
    log = metrics.MetricsLog(tmp_path)
    log.log_metrics({"loss": 0.0}, 0)
    log.save()
    log.log_metrics({"loss": 1.0, **({"new": 2.0} if fresh else {})}, 1)
    with monkeypatch.context() as patch:
        patch.setattr(storage.os, "write", Failing(os.write, 0, errno.ENOSPC))
        with pytest.raises(OSError, match=r"cannot write .*metrics\.csv: No space left"):
            log.save()
    assert metrics.read_metrics(tmp_path) == {"loss": ([0], [0])}
    log.finalize("failed")
    found = metrics.read_metrics(tmp_path)
    assert found["loss"] == ([0, 1], [0, 1])
    assert found.get("new") == (([1], [2]) if fresh else None)
