"""Scores a Gaussian that is read from files in blocks, and measures time and memory: the log-density, and with a second
pass its gradients, each written to a file of its own.

The files are made first, of random numbers, unless the folder has them. Memory is the largest resident memory of the
process, which includes the interpreter and torch.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import lrd_kernels as lrd
from benchmarks import commands

NAMES = ("value", "loc", "cov_factor", "cov_diag")


class Files:
    """Blocks of rows of four files of float32 numbers."""

    def __init__(self, folder: Path, outputs: int, rank: int, rows: int) -> None:
        self.folder, self.outputs, self.rank, self.rows = folder, outputs, rank, rows

    def shape(self, name: str, rows: int) -> tuple[int, ...]:
        return (rows, self.rank) if name == "cov_factor" else (rows,)

    def __iter__(self) -> Iterator[list[Tensor]]:
        opened = [(self.folder / f"{name}.f32").open("rb") for name in NAMES]
        try:
            for begin in range(0, self.outputs, self.rows):
                shapes = [self.shape(name, min(self.rows, self.outputs - begin)) for name in NAMES]
                yield [
                    torch.from_numpy(np.fromfile(file, np.float32, int(np.prod(shape))).reshape(shape))
                    for file, shape in zip(opened, shapes, strict=True)
                ]
        finally:
            for file in opened:
                file.close()

    def make(self) -> None:
        """Writes the files, unless they are there."""
        wanted = {name: 4 * int(np.prod(self.shape(name, self.outputs))) for name in NAMES}
        files = {name: self.folder / f"{name}.f32" for name in NAMES}
        if all(files[name].exists() and files[name].stat().st_size == size for name, size in wanted.items()):
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        random = np.random.default_rng(0)
        for name in NAMES:
            with files[name].open("wb") as file:
                for begin in range(0, self.outputs, self.rows):
                    numbers = random.standard_normal(self.shape(name, min(self.rows, self.outputs - begin)), np.float32)
                    (0.2 + np.abs(numbers) if name == "cov_diag" else numbers).tofile(file)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = commands.parser("benchmarks.out_of_core", __doc__, "out_of_core.json")
    parser.add_argument("--folder", type=Path, required=True, help="folder of the files, 4 (R + 3) bytes per output")
    parser.add_argument("--outputs", type=int, default=10**8, help="number of outputs S")
    parser.add_argument("--rank", type=int, default=8, help="number of columns R")
    parser.add_argument("--rows", type=int, default=2**20, help="rows of a block")
    options = parser.parse_args(arguments)
    options.folder = Path(options.folder)
    files = Files(options.folder, options.outputs, options.rank, options.rows)
    files.make()
    document = commands.begin(options)
    document["sizes"]["folder"] = options.folder.name
    begin = time.perf_counter()
    value = float(lrd.streaming.log_prob(files))
    forward = time.perf_counter() - begin
    with (options.folder / "gradients.f32").open("wb") as file:
        for block in lrd.streaming.gradients(files):
            block.cov_factor.numpy().tofile(file)
    both = time.perf_counter() - begin - forward
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    size = sum((options.folder / f"{name}.f32").stat().st_size for name in NAMES)
    document["results"] = {
        "log_prob": value,
        "bytes of the files": size,
        "seconds of the log-density": round(forward, 2),
        "seconds of the gradients, with the first pass": round(both, 2),
        "largest resident memory in bytes": memory,
    }
    for name, result in document["results"].items():
        print(f"{name}: {result:,}")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(document, indent=1, default=str) + "\n")
    print(f"Wrote {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
