"""The figures of a document: memory and time as in the paper, and the ratios to the peers.

`python -m benchmarks.scaling.plot scaling.json [more.json ...]` draws them again, next to the first document. Points of
further documents, from the same machine and commit, are added to its curves.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import commands
from benchmarks.scaling.pipelines import PIPELINES
from benchmarks.scaling.runner import SAME_MACHINE, directions, total_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAPER = json.loads((Path(__file__).parent / "paper.json").read_text())
COLOURS = {8: "#c0392b", 64: "#2166ac", 512: "#1a9850", 4096: "#e08214"}
OTHER_COLOURS = {"diagonal": "#555555", "full triangular": "#762a83", "full naive": "#000000"}
LAYOUT_COLOURS = {"row": "#2166ac", "rank": "#c0392b"}
PEERS = {"torch": "-", "compile": "--", "linear_operator": "-.", "jax": ":"}
TITLES = {
    "torch": "torch's class",
    "compile": "torch.compile",
    "linear_operator": "linear_operator",
    "jax": "JAX",
    "full triangular": "full, triangular",
    "full naive": "full, naive",
}
DIRECTION_TITLES = {"forward": "log-likelihood", "forward_backward": "log-likelihood and gradients"}


def draw(document: dict, output: Path) -> list[Path]:
    """Writes every figure as PNG and SVG next to the document."""
    from matplotlib import rc_context

    with rc_context({"font.size": 9, "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False}):
        figures = {f"{output.stem}_{d}": complexity(document, d) for d in DIRECTION_TITLES}
        if any(p["method"] in PIPELINES for p in document["points"]):
            figures[f"{output.stem}_pipelines"] = pipelines(document)
        if any(p["method"] == "torch" and p["status"] == "ok" for p in document["points"]):
            figures[f"{output.stem}_ratios"] = ratios(document)
        written = []
        for name, figure in figures.items():
            for suffix in (".png", ".svg"):
                written.append(output.with_name(name + suffix))
                figure.savefig(written[-1], dpi=150)
    return written


def complexity(document: dict, direction: str) -> Figure:
    """Memory (left) and time (right) against the number of variables."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    own = next((p["method"] for p in document["points"] if p["method"].startswith("lrd")), "lrd")
    for rank, layout, points in own_curves(document, own):
        colour, style = COLOURS.get(rank, "#888888"), "-" if layout == "row" else "--"
        label = f"rank {rank}" if layout == "row" else None
        line(left, points, lambda p: total_bytes(p, direction), colour, style, label, "o")
        line(right, points, lambda p: p[direction]["min"], colour, style, label, "o")
    for method, colour in OTHER_COLOURS.items():
        points = [p for p in document["points"] if p["method"] == method]
        line(left, points, lambda p: total_bytes(p, direction), colour, "-", TITLES.get(method, method), "s")
        line(right, points, lambda p: p[direction]["min"], colour, "-", TITLES.get(method, method), "s")
    if direction == "forward":
        add_paper(left, "memory_bytes")
        add_paper(right, "seconds")
    for axes, label in ((left, "memory, parameters included (bytes)"), (right, "time (seconds)")):
        axes.set(xscale="log", yscale="log", xlabel="number of variables", ylabel=label)
        add_tasks(axes)
    figure.legend(*left.get_legend_handles_labels(), fontsize=8, loc="outside right upper", frameon=False)
    known = document["machine"]
    figure.suptitle(
        f"{DIRECTION_TITLES[direction]}, float32, lrd-kernels on {known['cpu']}, {known['threads']} threads"
    )
    note = "solid: row-major, dashed: rank-major factor; x: the next point would pass the budget of memory or time"
    if direction == "forward":
        note += f"; thin dotted: {PAPER['label']}, torch's functions"
    figure.supxlabel(note, fontsize=8)
    return figure


def own_curves(document: dict, method: str) -> Iterator[tuple[int, str, list[dict]]]:
    for rank, layout in dict.fromkeys((p["rank"], p["layout"]) for p in document["points"] if p["method"] == method):
        yield (
            rank,
            layout,
            [p for p in document["points"] if (p["method"], p["rank"], p["layout"]) == (method, rank, layout)],
        )


def line(axes: Axes, points: list[dict], value, colour: str, style: str, label: str | None, marker: str) -> None:
    """A curve, with a cross at its last point if a limit ended it."""
    good = [p for p in points if p["status"] == "ok"]
    if not good:
        return
    xs, ys = [p["variables"] for p in good], [value(p) for p in good]
    axes.plot(xs, ys, style, color=colour, label=label, marker=marker, markersize=3, linewidth=1.3)
    if any(p["status"] == "budget" for p in points):
        axes.plot(xs[-1:], ys[-1:], "x", color=colour, markersize=8)


def add_paper(axes: Axes, what: str) -> None:
    for name, values in PAPER[what].items():
        rank = int(name.split()[1]) if name.startswith("lrd") else None
        colour = COLOURS[rank] if rank else OTHER_COLOURS[name]
        xs = [PAPER["first_variables"] << i for i in range(len(values))]
        axes.plot(xs, values, ":", color=colour, linewidth=0.9, alpha=0.8)


def add_tasks(axes: Axes) -> None:
    """The paper's four data sets."""
    bottom, top = axes.get_ylim()
    for i, (name, S) in enumerate(PAPER["tasks"].items()):
        axes.axvline(S, color="#bbbbbb", linewidth=0.7, zorder=0)
        height = bottom * (top / bottom) ** (0.02 + 0.055 * i)
        axes.annotate(f" {name}", (S, height), fontsize=7, color="#666666")
    axes.set_ylim(bottom, top)


def pipelines(document: dict) -> Figure:
    """Working memory and time of whole pipelines: this package solid, plain torch dashed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for method in PIPELINES:
        style = "-" if method.endswith("lrd") else "--"
        for layout in PIPELINES[method].layouts:
            colour = "#1a9850" if method.startswith("training") else LAYOUT_COLOURS[layout]
            points = [p for p in document["points"] if (p["method"], p["layout"]) == (method, layout)]
            label = method if method.startswith("training") else f"{method}, {layout}-major"
            line(left, points, lambda p: p[directions(p)[-1]]["working_bytes"], colour, style, label, "o")
            line(right, points, lambda p: p[directions(p)[-1]]["min"], colour, style, label, "o")
    for axes, label in ((left, "working memory (bytes)"), (right, "time (seconds)")):
        axes.set(xscale="log", yscale="log", xlabel="number of variables", ylabel=label)
        axes.legend(fontsize=8, frameon=False)
    figure.suptitle(
        "joint: 64 predictions of rank 8 to a joint Gaussian of rank 64, log p, entropy, 16 samples, 8 modes\n"
        "training step: a U-Net with a head of rank 8, one picture",
        fontsize=10,
    )
    return figure


def ratios(document: dict) -> Figure:
    """Time and memory of the peers relative to this package, for each rank."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    ranks = sorted({p["rank"] for p in document["points"] if p["rank"]})
    figure = Figure(figsize=(2.9 * len(ranks) + 1, 6), layout="constrained")
    grid = figure.subplots(2, len(ranks), sharex=True, squeeze=False)
    direction = "forward_backward"
    for column, rank in enumerate(ranks):
        for axes, value in ((grid[0, column], _seconds), (grid[1, column], _working)):
            for peer, style in PEERS.items():
                for layout, colour in LAYOUT_COLOURS.items():
                    xs, ys = ratio(document, peer, rank, layout, lambda p: value(p, direction))  # noqa: B023
                    if xs:
                        label = f"{TITLES[peer]}, {layout}-major"
                        axes.plot(xs, ys, style, color=colour, marker="o", markersize=2.5, linewidth=1.2, label=label)
            axes.axhline(1, color="#888888", linewidth=0.8)
            axes.set(xscale="log", yscale="log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}x"))
            axes.yaxis.set_minor_formatter(NullFormatter())
        grid[0, column].set_title(f"rank {rank}")
        grid[1, column].set_xlabel("number of variables")
    grid[0, 0].set_ylabel("time / time of lrd-kernels")
    grid[1, 0].set_ylabel("working memory / that of lrd-kernels")
    handles = {
        label: handle for axes in grid.flat for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.suptitle("log-likelihood and gradients: the peers beside lrd-kernels\n(above 1, lrd-kernels is better)")
    return figure


def _seconds(point: dict, direction: str) -> float:
    return point[direction]["min"]


def _working(point: dict, direction: str) -> float | None:
    """None for small parameters, where pages that any process touches would dominate."""
    return point[direction]["working_bytes"] if point["parameter_bytes"] >= 1 << 20 else None


def ratio(document: dict, peer: str, rank: int, layout: str, value) -> tuple[list[int], list[float]]:
    def of(method: str) -> dict[int, float]:
        points = (p for p in document["points"] if p["status"] == "ok" and p["method"] == method)
        chosen = (p for p in points if (p["rank"], p["layout"]) == (rank, layout))
        return {p["variables"]: v for p in chosen if (v := value(p))}

    its, own = of(peer), of("lrd")
    xs = sorted(its.keys() & own.keys())
    return xs, [its[x] / own[x] for x in xs]


def joined(documents: Sequence[dict]) -> dict:
    """The first document with the points of the others. A curve that another document continues has not ended."""
    first, *others = documents
    points = {(p["curve"], p["variables"]): p for p in first["points"]}
    for other in others:
        for name in SAME_MACHINE:
            if other["machine"].get(name) != first["machine"].get(name):
                raise ValueError(f"the documents were made with another {name}")
        points |= {(p["curve"], p["variables"]): p for p in other["points"]}
    ordered = sorted(points.values(), key=lambda p: p["variables"])
    last = {p["curve"]: p["variables"] for p in ordered if p["status"] == "ok"}
    went_on = [p for p in ordered if p["status"] != "budget" or p["variables"] >= last.get(p["curve"], 0)]
    return {**first, "points": went_on}


def main(argv: Sequence[str] | None = None) -> int:
    parser = commands.parser("benchmarks.scaling.plot", __doc__)
    parser.add_argument("documents", nargs="+", type=Path, help="documents of one machine and commit")
    options = parser.parse_args(argv)
    document = joined([json.loads(path.read_text()) for path in options.documents])
    for picture in draw(document, options.documents[0]):
        print(f"written to {picture}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
