"""Chooses the table's entries by what compiles without spills, and rewrites lrd_kernels/triton/configs_table.py.

`python tests/gpu/choose.py` needs no GPU: the first candidate without spills, in both layouts, for each architecture.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import compiled

from lrd_kernels.triton import configs_table

# (BLOCK_S, BLOCK_R, warps, stages, programs), the one that should be fastest first.
GRAM = {
    16: [(128, 16, 4, 2, 1024), (64, 16, 4, 2, 1024), (32, 16, 4, 1, 1024), (64, 16, 8, 1, 1024), (16, 16, 4, 1, 1024)],
    32: [(64, 32, 8, 2, 512), (64, 32, 8, 1, 512), (32, 32, 8, 1, 512), (32, 32, 4, 1, 512), (16, 32, 8, 1, 512)],
    64: [(32, 64, 8, 2, 256), (32, 64, 8, 1, 256), (16, 64, 8, 2, 256), (16, 64, 8, 1, 256), (16, 64, 16, 1, 256)],
}
# Both compute types have one BLOCK_S: where float32 is not enough, a block is done again in float64.
BACKWARD = {
    16: [128, 64, 32, 16],
    32: [64, 32, 16],
    64: [32, 16],
}
BACKWARD_TILES = {16: [(16, 4), (16, 8)], 32: [(32, 4), (32, 8), (16, 4), (16, 8)], 64: [(64, 8), (64, 4), (64, 16)]}
BACKWARD_TILES_64 = BACKWARD_TILES | {64: [(64, 8), (32, 8), (32, 4), (32, 2), (16, 4), (16, 2)]}
PROJECT = {
    16: [(64, 16, 4, 1, 0), (32, 16, 4, 1, 0), (64, 16, 8, 1, 0)],
    64: [(64, 64, 8, 1, 0), (32, 64, 8, 1, 0), (32, 64, 16, 1, 0), (16, 64, 8, 1, 0), (16, 64, 4, 1, 0)],
    128: [(32, 128, 8, 1, 0), (16, 128, 8, 1, 0), (16, 128, 16, 1, 0)],
}
COMPUTES = ("float32", "float64")
LAYOUTS = ("row", "rank")


def spills(architecture, op: str, compute: str, rank: int, config: tuple, pick: slice) -> bool:
    """Whether any of the kernels picked from those launched does, or cannot be compiled."""
    name = compiled.name_of(architecture)
    for layout in LAYOUTS:
        configs_table.TABLE[op, name, compute, layout] = {rank: (*config, "ieee")}
        try:
            with quiet(), compiled.compiling(architecture) as found:
                compiled.launch(op, compute, layout, rank)
            kernels = [compiled.resources(kernel) for kernel in found[pick]]
        except RuntimeError:  # of the compiler, or for want of shared memory
            return True
        if any(k.spills or k.shared > compiled.SHARED_LIMIT[architecture] for k in kernels):
            return True
    return False


@contextlib.contextmanager
def quiet():
    """Without what a failing compiler prints."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def first(candidates, fits):
    return next((candidate for candidate in candidates if fits(candidate)), None)


def choose(architecture) -> dict:
    """(op, compute) -> rank -> config. A rank without one is left to tiles of the rank below."""
    table: dict = {}
    for op, ranks in (("gram", GRAM), ("project_fold", PROJECT)):
        for compute in COMPUTES:
            for rank, candidates in ranks.items():
                every = slice(None)
                config = first(candidates, lambda c: not spills(architecture, op, compute, rank, c, every))  # noqa: B023
                if config:
                    table.setdefault((op, compute), {})[rank] = (*config, "ieee")
    for rank, rows in BACKWARD.items():
        for block_s in rows:

            def config(tile):
                return (block_s, *tile, 1, 0)  # noqa: B023

            def fits(tile, compute, pick):
                return not spills(architecture, "log_prob_bwd", compute, rank, config(tile), pick)  # noqa: B023

            name = compiled.name_of(architecture)
            for layout in LAYOUTS:  # a stand-in, for the other launch's blocks
                configs_table.TABLE["log_prob_bwd", name, "float64", layout] = {rank: (block_s, 16, 8, 1, 0, "ieee")}
            narrow = first(BACKWARD_TILES[rank], lambda t: fits(t, "float32", slice(0, 1)))
            if narrow is None:
                continue
            wide = None
            for tile in BACKWARD_TILES_64[rank]:
                if not fits(tile, "float64", slice(None)):
                    continue
                if not fits(narrow, "float32", slice(None)):  # which launches both
                    continue
                wide = tile
                break
            if wide:
                for compute, tile in (("float32", narrow), ("float64", wide)):
                    table.setdefault(("log_prob_bwd", compute), {})[rank] = (*config(tile), "ieee")
                break
    return table


HEADER = '''"""(op, architecture, compute type) -> rank -> (BLOCK_S, BLOCK_R, warps, stages, programs, input precision).

A rank stands for all up to it from the one before; larger ranks are done in tiles of the last BLOCK_R. "any" serves
the architectures that have no entry. Written by tests/gpu/choose.py, by what compiles without spills, not by timing.
"""

CHOICES = {
'''
# In Triton's interpreter every program costs Python's time: few, and large.
FOOTER = """    ("gram", "interpreter", "float32"): {16: (512, 16, 4, 1, 2, "ieee"), 64: (256, 64, 4, 1, 2, "ieee")},
    ("gram", "interpreter", "float64"): {16: (512, 16, 4, 1, 2, "ieee"), 64: (256, 64, 4, 1, 2, "ieee")},
    ("log_prob_bwd", "interpreter", "float32"): {16: (512, 16, 4, 1, 0, "ieee"), 64: (256, 64, 4, 1, 0, "ieee")},
    ("log_prob_bwd", "interpreter", "float64"): {16: (512, 16, 4, 1, 0, "ieee"), 64: (256, 64, 4, 1, 0, "ieee")},
    ("project_fold", "interpreter", "float32"): {16: (512, 16, 4, 1, 0, "ieee"), 64: (256, 64, 4, 1, 0, "ieee")},
    ("project_fold", "interpreter", "float64"): {16: (512, 16, 4, 1, 0, "ieee"), 64: (256, 64, 4, 1, 0, "ieee")},
}

TABLE = {(*key, layout): ranks for key, ranks in CHOICES.items() for layout in ("row", "rank")}
"""


def main() -> None:
    chosen = {}
    for architecture in (*compiled.NVIDIA, *compiled.AMD):
        name = compiled.name_of(architecture)
        for (op, compute), ranks in choose(architecture).items():
            chosen[op, name, compute] = ranks
            print(op, name, compute, ranks, flush=True)
    for (op, name, compute), ranks in list(chosen.items()):
        if name == "sm_80":
            chosen[op, "any", compute] = ranks
    lines = [f"    {key!r}: {ranks!r},\n".replace("'", '"') for key, ranks in sorted(chosen.items())]
    Path(configs_table.__file__).write_text(HEADER + "".join(lines) + FOOTER)


if __name__ == "__main__":
    sys.exit(main())
