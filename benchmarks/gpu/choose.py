"""Chooses the block sizes of the Triton kernels and writes them to lrd_kernels/ops/triton/configs_table.py.

Without --time no GPU is needed: for each architecture, it takes the first candidate that compiles without spills in
both layouts. With --time it runs all candidates without spills on the GPU of this machine and takes the fastest for its
architecture; the entries of other architectures are kept.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import compiled
import torch

from benchmarks import commands
from lrd_kernels.ops.triton import configs, configs_table

# (BLOCK_S, BLOCK_R, warps, stages, programs); the one expected to be fastest comes first.
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
# Of the kernels in float32 for one value. BLOCK_S of kernels by rows is the threads of a program, of "finish" the
# slots that are added at a time; BLOCK_R of "again" is the rows of its products in float64.
FAST = {
    "row_sums": {16: [(128, 16, 4, 1, 512)]},
    "tile_sums": {
        32: [(32, 32, 4, 1, 512), (16, 32, 4, 1, 512)],
        64: [(32, 64, 8, 1, 512), (16, 64, 8, 1, 512)],
    },
    "finish": {16: [(16, 16, 4, 1, 0)], 64: [(16, 64, 8, 1, 0)]},
    "row_grads": {16: [(128, 16, 4, 1, 1024)]},
    "tile_grads": {32: [(64, 32, 4, 1, 0), (32, 32, 4, 1, 0)]},
}
AGAIN = {
    16: [(32, 32, 8, 1, 256), (32, 16, 4, 1, 256), (16, 16, 8, 1, 256)],
    32: [(32, 16, 8, 1, 256), (32, 16, 4, 1, 256), (16, 16, 8, 1, 256)],
    64: [(32, 16, 8, 1, 256), (16, 16, 8, 1, 256), (16, 16, 16, 1, 256)],
}
# BLOCK_S, and (BLOCK_R, warps). A rank has the same BLOCK_S in float32 and float64, because a block for which float32
# is not accurate enough is computed again in float64.
BACKWARD_ROWS = {16: [128, 64, 32, 16], 32: [64, 32, 16], 64: [32, 16]}
BACKWARD_TILES = {16: [(16, 4), (16, 8)], 32: [(32, 4), (32, 8), (16, 4), (16, 8)], 64: [(64, 8), (64, 4), (64, 16)]}
BACKWARD_TILES_64 = BACKWARD_TILES | {64: [(64, 8), (32, 8), (32, 4), (32, 2), (16, 4), (16, 2)]}
TENSOR_CORES = (80, 86, 89, 90, 100, 120)  # architectures that multiply in tf32
COMPUTES = ("float32", "float64")
LAYOUTS = ("row", "rank")
# In Triton's interpreter every program runs in Python, so there are few, large ones.
INTERPRETER = {16: (512, 16, 4, 1, 2), 64: (256, 64, 4, 1, 2)}
INTERPRETER_FAST = {
    "row_sums": {16: (512, 16, 4, 1, 2)},
    "tile_sums": {64: (128, 64, 4, 1, 2)},
    "finish": {64: (16, 64, 4, 1, 0)},
    "row_grads": {16: (512, 16, 4, 1, 2)},
    "tile_grads": {32: (256, 32, 4, 1, 2)},
}

Architecture = int | str
Cost = Callable[[str, str, int], float]  # op, compute type, rank -> cost of the current entry of the table


def by_order(op: str, compute: str, rank: int) -> float:
    """The cost without timing: the same for all, so that the first candidate is taken."""
    return 0.0


def by_time(op: str, compute: str, rank: int, *, device: str = "cuda", rows: int = 2**20, repeats: int = 20) -> float:
    """Seconds of all launches that use an entry, in both layouts; the least of several runs each."""
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
    """Whether the launched kernels, or those that `pick` selects, compile without spills with the table's entry."""
    for layout in LAYOUTS:
        try:
            with quiet(), compiled.compiling(architecture) as found:
                compiled.launch(op, compute, layout, rank)
            kernels = [compiled.resources(kernel) for kernel in found[pick]]
        except RuntimeError:  # from the compiler, or too little shared memory
            return False
        if any(k.spills or k.shared > compiled.SHARED_LIMIT[architecture] for k in kernels):
            return False
    return True


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppresses what a failing compiler prints."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def cheapest(offers: Iterable[tuple[float, tuple]], cost: Cost) -> tuple[float, tuple] | None:
    """The cheapest (cost, config). Without timing this is the first one, and no others are compiled."""
    if cost is by_order:
        return next(iter(offers), None)
    return min(offers, default=None)


def candidates(
    architecture: Architecture, op: str, compute: str, rank: int, configs: Iterable[tuple], cost: Cost
) -> Iterator[tuple[float, tuple]]:
    """The configs that fit, with their costs."""
    for config in configs:
        enter(architecture, op, compute, rank, config)
        if fits(architecture, op, compute, rank):
            yield cost(op, compute, rank), config


def pairs(architecture: Architecture, rank: int, cost: Cost) -> Iterator[tuple[float, tuple[tuple, tuple]]]:
    """Configs of the backward pass in float32 and float64 with the same BLOCK_S, and the cost of float32."""
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
        enter(architecture, op, "float64", rank, (block_s, 16, 8, 1, 0))  # a placeholder
        of_float32 = cheapest(narrow(block_s), cost)
        if of_float32 is None:
            continue
        enter(architecture, op, "float32", rank, of_float32[1])
        of_float64 = cheapest(wide(block_s), cost)
        if of_float64 is not None:
            yield of_float32[0], (of_float32[1], of_float64[1])


def choose(architecture: Architecture, cost: Cost = by_order) -> dict[tuple[str, str], dict[int, tuple]]:
    """(op, compute) -> rank -> config. A rank that is missing is computed in tiles of the rank below."""
    table: dict = {}
    singles = [
        (op, compute, ranks) for op, ranks in (("gram", GRAM), ("project_fold", PROJECT)) for compute in COMPUTES
    ]
    singles += [(op, "float32", ranks) for op, ranks in FAST.items()] + [("again", "float64", AGAIN)]
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
the architectures that have no entry. Written by `python -m benchmarks.gpu.choose`.
"""

TIMED: list[str] = {timed!r}  # architectures whose entries were timed on a GPU; the others compile without spills

CHOICES = {{
{lines}}}

TABLE = {{(*key, layout): ranks for key, ranks in CHOICES.items() for layout in ("row", "rank")}}
'''


def all_rows() -> dict:
    """The table with the rows that "any" stands for: a new choice for "any" must not change them."""
    rows = dict(configs_table.CHOICES)
    for op, compute in {(op, compute) for op, _, compute in rows}:
        for architecture in (*compiled.NVIDIA, *compiled.AMD):
            if (op, "any", compute) in rows:
                rows.setdefault((op, compiled.name_of(architecture), compute), rows[op, "any", compute])
    return rows


def without_repeats(choices: dict) -> dict:
    """The rows that differ from that of "any"."""
    return {
        (op, name, compute): ranks
        for (op, name, compute), ranks in choices.items()
        if name == "any" or ranks != choices.get((op, "any", compute))
    }


def write(path: Path, choices: dict, timed: list[str]) -> None:
    lines = "".join(f"    {key!r}: {ranks!r},\n" for key, ranks in sorted(choices.items()))
    path.write_text(TEXT.format(lines=lines, timed=sorted(timed)).replace("'", '"'))


def main(argv: list[str] | None = None, cost: Cost = by_time) -> None:
    parser = commands.parser("benchmarks.gpu.choose", __doc__)
    parser.add_argument("--time", action="store_true", help="choose by the times on the GPU of this machine")
    table = Path(configs_table.__file__)
    parser.add_argument("--output", type=Path, default=table, help="file to write the block sizes to")
    options = parser.parse_args(argv)
    if options.time:
        if not torch.cuda.is_available():
            parser.error("--time needs a GPU, and torch finds none")
        name = configs.architecture(torch.device("cuda"))
        architectures = [a for a in (*compiled.NVIDIA, *compiled.AMD) if compiled.name_of(a) == name]
        if not architectures:
            parser.error(f"{name} is not among {compiled.NVIDIA} and {compiled.AMD}")
        choices, timed = all_rows(), sorted({*configs_table.TIMED, name})
    else:
        architectures, timed, cost = [*compiled.NVIDIA, *compiled.AMD], [], by_order
        choices = {
            (op, "interpreter", c): INTERPRETER for op in ("gram", "log_prob_bwd", "project_fold") for c in COMPUTES
        }
        choices["again", "interpreter", "float64"] = {64: (256, 256, 4, 1, 2)}
        choices |= {(op, "interpreter", "float32"): INTERPRETER_FAST[op] for op in FAST}
    for architecture in architectures:
        for (op, compute), ranks in choose(architecture, cost).items():
            choices[op, compiled.name_of(architecture), compute] = ranks
            print(op, architecture, compute, ranks, flush=True)
    for (op, name, compute), ranks in list(choices.items()):
        if name == "sm_80" and compute != "tf32x3":
            choices[op, "any", compute] = ranks
    write(options.output, without_repeats(choices), timed)


if __name__ == "__main__":
    sys.exit(main())
