"""Errors of this package and of torch's class against extended precision, for ill-conditioned capacitance matrices.

All inputs are float32; torch's class is also given the same numbers in float64. The error of log p is relative. The
error of the gradients is the largest deviation relative to the largest entry, for the worst of the gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import commands, machine
from benchmarks.registry import CONTESTANTS
from lrd_kernels import testing
from lrd_kernels.testing import Inputs

FAMILIES = {
    "condition": (1e2, 1e4, 1e6, 1e8, 1e10, 1e12),
    "diagonal": (1e0, 1e2, 1e4, 1e6, 1e8, 1e10),
    "pixels": (1e4, 1e6, 1e8, 1e10),
}
SIZES = ((20000, 5), (20000, 64), (8000, 200))  # S, R
# name -> (log p, dtype of its inputs)
METHODS: dict[str, tuple[Callable[..., Tensor], torch.dtype]] = {
    "lrd": (CONTESTANTS["lrd"].log_prob, torch.float32),
    "torch float32": (CONTESTANTS["torch"].log_prob, torch.float32),
    "torch float64": (CONTESTANTS["torch"].log_prob, torch.float64),
}


def errors(method: str, inputs: Inputs, wanted: Sequence[np.ndarray]) -> dict[str, Any]:
    """Error of log p and of the worst gradient, or the exception that was raised."""
    log_prob, dtype = METHODS[method]
    try:
        actual = testing.value_and_grads(log_prob, [t.to(dtype) for t in inputs])
    except Exception as error:  # torch raises when its Cholesky factorisation fails
        return {"fails": f"{type(error).__name__}: {str(error).strip()[:200]}"}
    found = [deviation(a, w) for a, w in zip(actual, wanted, strict=True)]
    gradients = dict(zip(Inputs._fields, found[1:], strict=True))
    worst = max(gradients, key=lambda name: np.nan_to_num(gradients[name], nan=np.inf))
    return {"log_prob": found[0], "worst_gradient": gradients[worst], "worst_gradient_of": worst}


def deviation(actual: Tensor, wanted: np.ndarray) -> float:
    """Largest deviation relative to the largest entry, in extended precision."""
    difference = actual.double().numpy().astype(np.longdouble) - wanted
    return float(np.abs(difference).max() / np.abs(wanted).max())


def measure(sizes: Sequence[tuple[int, int]], families: Sequence[str]) -> list[dict]:
    points = [(f, h, S, R) for S, R in sizes for f in families for h in FAMILIES[f]]
    results = []
    for done, (family, hardness, S, R) in enumerate(points, 1):
        print(f"[{done}/{len(points)}] {family} {hardness:.0e}, S={S}, R={R}", file=sys.stderr, flush=True)
        inputs = testing.hard_inputs(family, hardness, S, R)
        wanted = testing.extended_log_prob(inputs)
        methods = {method: errors(method, inputs, wanted) for method in METHODS}
        results.append({"family": family, "hardness": hardness, "S": S, "R": R, "methods": methods})
    return results


def table(document: dict) -> str:
    lines = [
        machine.summary(document["machine"]),
        f"log p: relative error; gradient: of the worst one, over its largest entry. Extended precision has "
        f"{document['extended_bits']} bits.",
    ]
    head = "".join(f"{method:>24}" for method in METHODS)
    columns = "".join(f"{'log p':>14}{'gradient':>10}" for _ in METHODS)
    size = None
    for result in document["results"]:
        if size != (size := (result["S"], result["R"])):
            lines += ["", f"{f'S={size[0]}, R={size[1]}':<22}{head}", f"{'':<22}{columns}"]
        cells = "".join(cell(result["methods"][method]) for method in METHODS)
        lines.append(f"{result['family']:<12}{result['hardness']:<10.0e}{cells}")
    return "\n".join(lines)


def cell(found: dict) -> str:
    if "fails" in found:
        return f"{'fails':>14}{'fails':>10}"
    return f"{found['log_prob']:>14.1e}{found['worst_gradient']:>10.1e}"


def size(text: str) -> tuple[int, int]:
    S, R = map(int, text.split("x"))
    return S, R


def main(argv: Sequence[str] | None = None) -> int:
    parser = commands.parser("benchmarks.accuracy", __doc__, "accuracy.json")
    known = " ".join(f"{S}x{R}" for S, R in SIZES)
    parser.add_argument(
        "--sizes", nargs="+", type=size, default=SIZES, metavar="SxR", help=f"outputs and rank (default: {known})"
    )
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="kinds of inputs")
    options = parser.parse_args(argv)
    if reason := CONTESTANTS["lrd"].available():
        print(reason, file=sys.stderr)
        return 1
    document = {
        "machine": machine.facts(),
        "extended_bits": np.finfo(np.longdouble).nmant + 1,
        "results": measure(options.sizes, options.families),
    }
    machine.write_json(options.output, document)
    print(table(document))
    print(f"written to {options.output}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
