"""Chooses the block sizes of the kernels, and rewrites lrd_kernels/triton/configs_table.py.

`python tests/gpu/choose.py` needs no GPU: for each architecture the first candidate that compiles without spills, in
both layouts. `python tests/gpu/choose.py --time` runs those that do on the GPU that is there, and takes the fastest for
its architecture; the entries of the others stay.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import compiled
import torch

from lrd_kernels.triton import configs, configs_table

# (BLOCK_S, BLOCK_R, warps, stages, programs), the one that should be fastest first.
GRAM = {
    16: [(128, 16, 4, 2, 1024), (64, 16, 4, 2, 1024), (32, 16, 4, 1, 1024), (64, 16, 8, 1, 1024), (16, 16, 4, 1, 1024)],
    32: [(64, 32, 8, 2, 512), (64, 32, 8, 1, 512), (32, 32, 8, 1, 512), (32, 32, 4, 1, 512), (16, 32, 8, 1, 512)],
    64: [(32, 64, 8, 2, 256), (32, 64, 8, 1, 256), (16, 64, 8, 2, 256), (16, 64, 8, 1, 256), (16, 64, 16, 1, 256)],
}
PROJECT = {
    16: [(64, 16, 4, 1, 0), (32, 16, 4, 1, 0), (64, 16, 8, 1, 0)],
    64: [(64, 64, 8, 1, 0), (32, 64, 8, 1, 0), (32, 64, 16, 1, 0), (16, 64, 8, 1, 0), (16, 64, 4, 1, 0)],
    128: [(32, 128, 8, 1, 0), (16, 128, 8, 1, 0), (16, 128, 16, 1, 0)],
}
# Blocks of rows, and (BLOCK_R, warps). In float32 and float64 a rank has one BLOCK_S: where float32 is not enough, a
# block is done again in float64.
BACKWARD_ROWS = {16: [128, 64, 32, 16], 32: [64, 32, 16], 64: [32, 16]}
BACKWARD_TILES = {16: [(16, 4), (16, 8)], 32: [(32, 4), (32, 8), (16, 4), (16, 8)], 64: [(64, 8), (64, 4), (64, 16)]}
BACKWARD_TILES_64 = BACKWARD_TILES | {64: [(64, 8), (32, 8), (32, 4), (32, 2), (16, 4), (16, 2)]}
TENSOR_CORES = (80, 86, 89, 90, 100, 120)  # that multiply tf32
COMPUTES = ("float32", "float64")
LAYOUTS = ("row", "rank")
# In Triton's interpreter every program costs Python's time: few, and large.
INTERPRETER = {16: (512, 16, 4, 1, 2), 64: (256, 64, 4, 1, 2)}

Architecture = int | str
Cost = Callable[[str, str, int], float]  # of an op in a compute type at a rank, by the entry that the table has now


def by_order(op: str, compute: str, rank: int) -> float:
    """The cost where nothing is timed: all alike, and the first candidate is taken."""
    return 0.0


def by_time(op: str, compute: str, rank: int, *, device: str = "cuda", rows: int = 2**20, repeats: int = 20) -> float:
    """Seconds of all that an entry serves, in both layouts, the least of some runs each."""
    total = 0.0
    for layout in LAYOUTS:
        call = compiled.prepare(op, compute, layout, rank, rows=max(8 * rows // rank, 64), device=device)
        least = math.inf
        for _ in range(repeats + 1):  # the first one compiles
            start = time.perf_counter()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            least = min(least, time.perf_counter() - start)
        total += least
    return total


def enter(architecture: Architecture, op: str, compute: str, rank: int, config: tuple) -> None:
    for layout in LAYOUTS:
        configs_table.TABLE[op, compiled.name_of(architecture), compute, layout] = {rank: config}


def fits(architecture: Architecture, op: str, compute: str, rank: int, pick: slice = slice(None)) -> bool:
    """Whether the table's entry compiles, of the kernels launched those picked, without spills."""
    for layout in LAYOUTS:
        try:
            with quiet(), compiled.compiling(architecture) as found:
                compiled.launch(op, compute, layout, rank)
            kernels = [compiled.resources(kernel) for kernel in found[pick]]
        except RuntimeError:  # of the compiler, or for want of shared memory
            return False
        if any(k.spills or k.shared > compiled.SHARED_LIMIT[architecture] for k in kernels):
            return False
    return True


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what a failing compiler prints."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def cheapest(offers: Iterable[tuple[float, tuple]], cost: Cost) -> tuple[float, tuple] | None:
    """Of (cost, config); where nothing is timed the first, and no others are made."""
    if cost is by_order:
        return next(iter(offers), None)
    return min(offers, default=None)


def candidates(
    architecture: Architecture, op: str, compute: str, rank: int, configs: Iterable[tuple], cost: Cost
) -> Iterator[tuple[float, tuple]]:
    """Those that fit, with their cost."""
    for config in configs:
        enter(architecture, op, compute, rank, config)
        if fits(architecture, op, compute, rank):
            yield cost(op, compute, rank), config


def pairs(architecture: Architecture, rank: int, cost: Cost) -> Iterator[tuple[float, tuple[tuple, tuple]]]:
    """Of the backward pass in float32 and in float64, with one BLOCK_S; the cost is that of float32."""
    op = "log_prob_bwd"

    def narrow(block_s: int) -> Iterator[tuple[float, tuple]]:
        for tile in BACKWARD_TILES[rank]:
            config = (block_s, *tile, 1, 0)
            enter(architecture, op, "float32", rank, config)
            if fits(architecture, op, "float32", rank, slice(0, 1)):  # without the launch in float64
                yield cost(op, "float32", rank), config

    def wide(block_s: int) -> Iterator[tuple[float, tuple]]:
        for tile in BACKWARD_TILES_64[rank]:
            config = (block_s, *tile, 1, 0)
            enter(architecture, op, "float64", rank, config)
            # The second one launches both.
            if fits(architecture, op, "float64", rank) and fits(architecture, op, "float32", rank):
                yield cost(op, "float64", rank), config

    for block_s in BACKWARD_ROWS[rank]:
        enter(architecture, op, "float64", rank, (block_s, 16, 8, 1, 0))  # a stand-in
        of_float32 = cheapest(narrow(block_s), cost)
        if of_float32 is None:
            continue
        enter(architecture, op, "float32", rank, of_float32[1])
        of_float64 = cheapest(wide(block_s), cost)
        if of_float64 is not None:
            yield of_float32[0], (of_float32[1], of_float64[1])


def choose(architecture: Architecture, cost: Cost = by_order) -> dict[tuple[str, str], dict[int, tuple]]:
    """(op, compute) -> rank -> config. A rank without one is left to tiles of the rank below."""
    table: dict = {}
    singles = [
        (op, compute, ranks) for op, ranks in (("gram", GRAM), ("project_fold", PROJECT)) for compute in COMPUTES
    ]
    if architecture in TENSOR_CORES:
        ranks = [rank for rank in GRAM if rank > configs.TENSOR_CORES_ABOVE]
        backward = {r: [(s, *tile, 1, 0) for s in BACKWARD_ROWS[r] for tile in BACKWARD_TILES[r]] for r in ranks}
        singles += [("gram", "tf32x3", {r: GRAM[r] for r in ranks}), ("log_prob_bwd", "tf32x3", backward)]
    for op, compute, ranks in singles:
        for rank, possible in ranks.items():
            found = cheapest(candidates(architecture, op, compute, rank, possible, cost), cost)
            if found:
                table.setdefault((op, compute), {})[rank] = found[1]
    for rank in BACKWARD_ROWS:
        pair = cheapest(pairs(architecture, rank, cost), cost)
        if pair:
            for compute, config in zip(COMPUTES, pair[1], strict=True):
                table.setdefault(("log_prob_bwd", compute), {})[rank] = config
    return table


TEXT = '''"""(op, architecture, compute type) -> rank -> (BLOCK_S, BLOCK_R, warps, stages, programs).

A rank stands for all up to it from the one before; larger ranks are done in tiles of the last BLOCK_R. "any" serves
the architectures that have no entry. Written by tests/gpu/choose.py.
"""

TIMED: list[str] = {timed!r}  # architectures whose entries were timed on a GPU; the others compile without spills

CHOICES = {{
{lines}}}

TABLE = {{(*key, layout): ranks for key, ranks in CHOICES.items() for layout in ("row", "rank")}}
'''


def write(path: Path, choices: dict, timed: list[str]) -> None:
    lines = "".join(f"    {key!r}: {ranks!r},\n" for key, ranks in sorted(choices.items()))
    path.write_text(TEXT.format(lines=lines, timed=sorted(timed)).replace("'", '"'))


def main(argv: list[str] | None = None, cost: Cost = by_time) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time", action="store_true", help="by what is fastest on the GPU of this machine")
    parser.add_argument("--output", type=Path, default=Path(configs_table.__file__))
    options = parser.parse_args(argv)
    if options.time:
        if not torch.cuda.is_available():
            parser.error("--time needs a GPU, and torch finds none here")
        name = configs.architecture(torch.device("cuda"))
        architectures = [a for a in (*compiled.NVIDIA, *compiled.AMD) if compiled.name_of(a) == name]
        if not architectures:
            parser.error(f"{name} is not among {compiled.NVIDIA} and {compiled.AMD}")
        choices, timed = dict(configs_table.CHOICES), sorted({*configs_table.TIMED, name})
    else:
        architectures, timed, cost = [*compiled.NVIDIA, *compiled.AMD], [], by_order
        choices = {
            (op, "interpreter", c): INTERPRETER for op in ("gram", "log_prob_bwd", "project_fold") for c in COMPUTES
        }
    for architecture in architectures:
        for (op, compute), ranks in choose(architecture, cost).items():
            choices[op, compiled.name_of(architecture), compute] = ranks
            print(op, architecture, compute, ranks, flush=True)
    for (op, name, compute), ranks in list(choices.items()):
        if name == "sm_80" and compute != "tf32x3":
            choices[op, "any", compute] = ranks
    write(options.output, choices, timed)


if __name__ == "__main__":
    sys.exit(main())
