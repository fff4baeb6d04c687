"""Log-density and gradients of large hard inputs in extended precision, which take seconds each: kept as data.

`python tests/kernels/hard_truth.py` makes the file again. Of the gradients it holds some rows: those of the largest
entries, those of the smallest diagonal, and others between. The slow tests compare every row with a fresh computation.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lrd_kernels import testing

FILE = Path(__file__).parent / "data" / "hard_truth.npz"
FAMILIES = [
    *(("condition", hardness) for hardness in (1e2, 1e4, 1e6, 1e8, 1e10, 1e12)),
    *(("diagonal", hardness) for hardness in (1e0, 1e3, 1e6, 1e10)),
    *(("pixels", hardness) for hardness in (1e4, 1e10)),
]
KEPT_SIZES = [(6500, 200), (300, 400)]  # (S, R)
GRADIENTS = ("value", "loc", "cov_factor", "cov_diag")


class Truth(NamedTuple):
    """Some rows of a right answer."""

    log_prob: np.ndarray  # []
    rows: np.ndarray  # [n] indices below S
    gradients: dict[str, np.ndarray]  # their rows, [n] or [n, R]
    largest: dict[str, float]  # largest entry of each whole gradient


def digest(inputs: testing.Inputs) -> str:
    """Of the numbers, whose last bits may depend on the machine's linear algebra."""
    return hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in inputs)).hexdigest()


def compute(inputs: testing.Inputs) -> Truth:
    log_prob, *gradients = testing.extended_log_prob(inputs)
    S = len(inputs.loc)
    peaks = [np.unravel_index(np.abs(g).argmax(), g.shape)[0] for g in gradients]
    chosen = {*peaks, *inputs.cov_diag.numpy().argsort()[:4], *np.linspace(0, S - 1, 9, dtype=int)}
    rows = np.array(sorted(map(int, chosen)), dtype=np.int32)
    kept = {name: g[rows] for name, g in zip(GRADIENTS, gradients, strict=True)}
    largest = {name: float(np.abs(g).max()) for name, g in zip(GRADIENTS, gradients, strict=True)}
    return Truth(log_prob, rows, kept, largest)


@functools.cache
def _stored() -> dict[str, np.ndarray]:
    with np.load(FILE) as file:
        return dict(file)


def load(name: str, inputs: testing.Inputs) -> Truth:
    """From the file, or computed where it was made from other inputs."""
    stored = _stored()
    if str(stored[f"{name}/digest"]) != digest(inputs):
        return compute(inputs)
    return Truth(
        stored[f"{name}/log_prob"],
        stored[f"{name}/rows"],
        {field: stored[f"{name}/{field}"] for field in GRADIENTS},
        dict(zip(GRADIENTS, stored[f"{name}/largest"], strict=True)),
    )


def name_of(family: str, hardness: float, S: int, R: int) -> str:
    return f"{family}-{hardness:g}-{S}x{R}"


def main() -> None:
    made: dict[str, np.ndarray] = {}
    for family, hardness in FAMILIES:
        for S, R in KEPT_SIZES:
            inputs = testing.hard_inputs(family, hardness, S, R)
            name, truth = name_of(family, hardness, S, R), compute(inputs)
            made[f"{name}/digest"] = np.array(digest(inputs))
            made[f"{name}/log_prob"] = truth.log_prob.astype(np.float64)
            made[f"{name}/rows"] = truth.rows
            made[f"{name}/largest"] = np.array([truth.largest[field] for field in GRADIENTS])
            for field in GRADIENTS:  # errors of 1e-4 are looked for: float32 is enough for the large one
                dtype = np.float32 if field == "cov_factor" else np.float64
                made[f"{name}/{field}"] = truth.gradients[field].astype(dtype)
            print(name)
    FILE.parent.mkdir(exist_ok=True)
    np.savez_compressed(FILE, **made)


if __name__ == "__main__":
    main()
