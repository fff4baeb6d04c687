"""The figures of the front page are those of the committed run that it names."""

import json
import re

import pages

README = (pages.ROOT / "README.md").read_text()
RUN = json.loads((pages.ROOT / "benchmarks/results/avx512.json").read_text())
CONTESTANTS = ("lrd", "torch", "compile")


def measured(outputs, rank):
    """Milliseconds and megabytes of each contestant, forward and backward, row-major."""
    batch, _, variables = outputs.replace(",", "").rpartition(" x ")
    case = f"{batch or 1}x{variables}x{rank}"
    (result,) = (r for r in RUN["results"] if r["case"] == case and r["layout"] == "row")
    for name in CONTESTANTS:
        found = result["contestants"][name]
        yield 1e3 * found["forward_backward"]["min"], found["memory"]["forward_backward"]["extra_bytes"] / 1e6


def rows():
    return re.findall(r"^\| ([\d, x]+) \| (\d+) \| (.*) \|$", README, re.MULTILINE)


def shown(milliseconds):
    return f"{milliseconds:.1f}" if milliseconds < 10 else f"{milliseconds:,.0f}"


def test_table_is_that_of_the_run():
    assert len(rows()) == 4
    for outputs, rank, cells in rows():
        assert cells.split(" | ") == [f"{shown(ms)} ms, {mb:.0f} MB" for ms, mb in measured(outputs, rank)]
    day = RUN["machine"]["date"][:10]
    assert (day, RUN["machine"]["cpu"], RUN["machine"]["versions"]["torch"]) == ("2026-11-19", "AMD EPYC", "2.13.0+cpu")
    assert "Two cores of an AMD EPYC with AVX-512, torch 2.13.0+cpu, 19 November 2026" in README


def test_headline_is_that_of_the_run():
    (ours, ours_mb), (theirs, theirs_mb), _ = measured("1,048,576", "8")
    text = " ".join(README.split())
    assert f"takes {ours:.0f} ms**" in text
    assert f"{theirs / ours:.0f} times as fast" in text
    assert f"in {ours_mb:.0f} MB instead of {theirs_mb:.0f} MB" in text
