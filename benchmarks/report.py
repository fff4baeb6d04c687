"""Formats the document of `benchmarks.run` as text tables."""

from __future__ import annotations

from benchmarks.machine import summary
from benchmarks.registry import DIRECTIONS, Case

TITLES = {"forward": "forward", "forward_backward": "forward+backward"}


def tables(document: dict, earlier: dict | None = None) -> str:
    """All results of a run. With the document of an earlier run, also compares the times of this package."""
    rates = document["rooflines"]
    read, write, copy, flops = (
        rates[f"{name}_per_second"] / 1e9 for name in ("read_bytes", "write_bytes", "copy_bytes", "flops")
    )
    lines = [
        summary(document["machine"]),
        f"measured in this run: read {read:.1f} GB/s, write {write:.1f} GB/s, copy {copy:.1f} GB/s (read and written), "
        f"float32 matrix product {flops:.0f} GFLOP/s",
        "Times are the least of interleaved repeats, in brackets as a multiple of the time of lrd. Memory is the peak",
        "above what was resident before the call, as a multiple of the bytes of P.",
    ]
    for result in document["results"]:
        lines += ["", *block(result), *beside(result, earlier)]
    return "\n".join([*lines, "", *overview(document)])


def block(result: dict) -> list[str]:
    """One case in one layout, with one line for each contestant."""
    case = Case.parse(result["case"])
    lines = [f"{case.name}, {result['layout']}-major (P: {case.factor_bytes / 1e6:.3g} MB)"]
    if disturbed(result):
        busy = result["cores_busy_with_other_work"]
        lines.append(f"  DISTURBED: {busy:.1f} cores were busy with other work; the times below are unreliable")
    header = "".join(f"{TITLES[direction] + ' ms':>28}" for direction in DIRECTIONS)
    lines.append(f"  {'':<16}{header}{'memory fwd':>12}{'fwd+bwd':>12}")
    for name, record in result["contestants"].items():
        if record["status"] != "ok":
            lines.append(f"  {name:<16}  {record['status']}: {record['reason']}")
            continue
        cells = [f"{time_and_ratio(result, name, direction):>28}" for direction in DIRECTIONS]
        cells += [f"{memory(record, direction, case):>12}" for direction in DIRECTIONS]
        lines.append(f"  {name:<16}{''.join(cells)}")
    roofline = result.get("roofline")
    if roofline and case.large:
        parts = [
            f"{what} {1e3 * roofline[f'{what}_seconds']:.3g} ms, {percent(roofline[f'{what}_fraction'])} reached"
            for what in ("forward", "backward")
        ]
        lines.append(f"  roofline: {'; '.join(parts)}")
    return lines


def overview(document: dict) -> list[str]:
    """One line for each case and layout: forward plus backward relative to this package, and the rooflines."""
    names = [name for name in document["settings"]["contestants"] if name != "lrd"]
    lines = ["forward+backward as a multiple of lrd's, and the fraction of the roofline that lrd reaches"]
    header = "".join(f"{name:>17}" for name in names)
    lines.append(f"  {'case':<14}{'layout':<8}{'lrd ms':>10}{header}{'forward':>10}{'backward':>10}")
    for result in document["results"]:
        own = least(result, "lrd", "forward_backward")
        cells = "".join(f"{times(ratio(result, name, 'forward_backward')):>17}" for name in names)
        roofline = result.get("roofline") if Case.parse(result["case"]).large else None
        reached = [percent(roofline[f"{what}_fraction"]) if roofline else "-" for what in ("forward", "backward")]
        start = f"  {result['case']:<14}{result['layout']:<8}{milliseconds(own):>10}"
        lines.append(f"{start}{cells}{reached[0]:>10}{reached[1]:>10}{'  DISTURBED' if disturbed(result) else ''}")
    return lines


def beside(result: dict, earlier: dict | None) -> list[str]:
    """The times of this package relative to those of an earlier run of the same case."""
    if earlier is None:
        return []
    same = [r for r in earlier["results"] if (r["case"], r["layout"]) == (result["case"], result["layout"])]
    pairs = [(least(result, "lrd", d), least(same[0], "lrd", d) if same else None) for d in DIRECTIONS]
    if any(now is None or then is None for now, then in pairs):
        return ["  earlier run: nothing to compare with"]
    ratios = "; ".join(
        f"{TITLES[d]} {milliseconds(then)} ms, now {now / then:.2f} of it"
        for d, (now, then) in zip(DIRECTIONS, pairs, strict=True)
    )
    return [f"  earlier run, commit {(earlier['machine']['commit'] or 'unknown')[:12]}: {ratios}"]


def disturbed(result: dict) -> bool:
    """Whether other processes used the cores: threads that wait for each other then wait for the scheduler."""
    return (result["cores_busy_with_other_work"] or 0) > 0.1


def least(result: dict, name: str, direction: str) -> float | None:
    timing = result["contestants"].get(name, {}).get(direction)
    return timing["min"] if timing else None


def ratio(result: dict, name: str, direction: str) -> float | None:
    its, own = least(result, name, direction), least(result, "lrd", direction)
    return its / own if its and own else None


def time_and_ratio(result: dict, name: str, direction: str) -> str:
    text = milliseconds(least(result, name, direction))
    return text if name == "lrd" else f"{text} ({times(ratio(result, name, direction))})"


def memory(record: dict, direction: str, case: Case) -> str:
    extra = record.get("memory", {}).get(direction, {}).get("extra_bytes")
    return "-" if extra is None else f"{extra / case.factor_bytes:.3f}"


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.4g}"


def times(factor: float | None) -> str:
    return "-" if factor is None else f"{factor:.2f}x"


def percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.0f} %"
