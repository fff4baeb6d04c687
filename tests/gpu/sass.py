"""Clocks per row that each pipe of a GPU needs for a CUDA kernel, counted in its machine code, beside those of DRAM.

A kernel is assembled and disassembled for each architecture, and the instructions of its loops are counted by pipe. A
loop is what lies between a branch backwards and its target. What a kernel does once for a block is not counted.

Assumptions, and so what the model leaves out:
* every instruction of a loop is issued, by all lanes of all warps that come to the loop;
* pipes are always full: latency, occupancy, dependences and register banks cost nothing;
* `CARDS` has the lanes per clock and multiprocessor. Integer multiplications, comparisons and selections of floats are
  integer instructions. Conversions from and to 64 bits take the float64 lanes where these are few (2), and elsewhere
  the 16 lanes of the special functions, as 32-bit conversions do;
* an access to memory takes as many wavefronts as accesses of its kind and width take on average in the emulator: passes
  of shared memory, and 128 bytes of sectors of global memory;
* DRAM gives its full rated bandwidth, and the caches serve whatever is requested twice.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from ptxemu import build, cuda


@dataclass(frozen=True)
class Card:
    name: str
    gigabytes: float  # per second
    multiprocessors: int
    gigahertz: float
    fp32: int  # lanes per clock and multiprocessor, as the next ones
    fp64: int
    integer: int

    def dram(self, row_bytes: float) -> float:
        """Clocks of the memory for a row of each multiprocessor."""
        return row_bytes * self.multiprocessors * self.gigahertz / self.gigabytes

    def clocks(self, counts: Counter[str]) -> dict[str, float]:
        """Pipe -> clocks, of instructions of single threads, and of wavefronts."""
        slow = "fp64" if self.fp64 == 2 else "special"
        each = {
            "issue": counts["issue"] / 128,
            "fp32": counts["fp32"] / self.fp32,
            "fp64": counts["fp64"] / self.fp64,
            "integer": counts["integer"] / self.integer,
            "special": counts["special"] / 16,
            "memory": counts["wavefronts"] / 32,
        }
        each[slow] += counts["convert64"] / (2 if slow == "fp64" else 16)
        return each


CARDS = {
    75: Card("Quadro RTX 8000", 672, 72, 1.77, 64, 2, 64),
    80: Card("A100 40 GB", 1555, 108, 1.41, 64, 32, 64),
    89: Card("RTX 4090", 1008, 128, 2.52, 128, 2, 64),
    90: Card("H100 SXM", 3350, 132, 1.83, 128, 64, 64),
    120: Card("RTX 5090", 1792, 170, 2.41, 128, 2, 128),
}


@dataclass(frozen=True)
class Instruction:
    address: int
    name: str  # with its modifiers
    target: str | None  # of a branch


# Of an instruction without its modifiers, the first that matches; what matches none takes an issue slot alone.
_PIPES = (
    (r"F2F|F2I|I2F|FRND|I2FP|F2FP", "special"),
    (r"MUFU", "special"),
    (r"D(FMA|ADD|MUL|SETP|MNMX|MMA)", "fp64"),
    (r"F(FMA|ADD|MUL)", "fp32"),
    (r"(LDS|STS|SHFL|LDG|STG)$", "memory"),
    (r"U[A-Z]|R2UR|S2|CS2R|LDC|BRA|BSYNC|BSSY|BREAK|EXIT|NOP|BAR|WARPSYNC|DEPBAR|ERRBAR|CALL|RET|MEMBAR|BMOV", None),
    (r"", "integer"),
)


def pipe_of(name: str) -> str | None:
    operation = name.split(".")[0]
    pipe = next(pipe for pattern, pipe in _PIPES if re.match(pattern, operation))
    return "convert64" if pipe == "special" and re.search(r"\.[FUS]64", name) else pipe


def bytes_of(name: str) -> int:
    """What a lane moves with an access to memory."""
    return 16 if ".128" in name else 8 if ".64" in name else 2 if "16" in name else 1 if "8" in name else 4


def find_nvdisasm() -> str | None:
    """That of the CUDA toolkit, or the one that Triton brings."""
    triton = Path(torch.__file__).parents[1] / "triton/backends/nvidia/bin"
    return shutil.which("nvdisasm") or shutil.which("nvdisasm", path=str(triton))


def disassemble(ptx: str, architecture: int) -> str:
    """The machine code of a PTX text with one kernel."""
    key = ["sass", *cuda.toolkit_key(), f"sm_{architecture}", ptx]
    return build.kept_text(key, functools.partial(_disassemble, ptx, architecture))


def _disassemble(ptx: str, architecture: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        build.run_compiler(
            [cuda.find_nvcc(), f"-arch=sm_{architecture}", "-cubin", source, "-o", cubin]
        ).check_returncode()
        return subprocess.run([find_nvdisasm(), "-c", cubin], check=True, capture_output=True, text=True).stdout


def parse(text: str) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions, and the addresses of labels."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    waiting: list[str] = []
    for line in text.partition(".text.")[2].splitlines():
        if match := re.match(r"^(\.L\S*):", line):
            waiting.append(match[1])
        elif match := re.search(r"/\*([0-9a-f]{4,})\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)", line):
            address = int(match[1], 16)
            labels |= dict.fromkeys(waiting, address)
            waiting.clear()
            target = re.search(r"`\((\.L\S+?)\)", match[3]) if match[2].startswith("BRA") else None
            instructions.append(Instruction(address, match[2], target[1] if target else None))
    return instructions, labels


def find_loops(instructions: Sequence[Instruction], labels: dict[str, int]) -> list[tuple[int, int]]:
    """First and last address of each, by their beginnings, outer ones first."""
    found: dict[int, int] = {}
    for i in instructions:
        start = labels.get(i.target, i.address) if i.target else i.address
        if start < i.address:  # a branch to itself is the end of the kernel
            found[start] = max(found.get(start, 0), i.address)
    return sorted(found.items(), key=lambda loop: (loop[0], -loop[1]))


def count_outside(text: str) -> Counter[str]:
    """The same of what a kernel does outside of its loops."""
    instructions, labels = parse(text)
    loops = find_loops(instructions, labels)
    counts: Counter[str] = Counter()
    for i in instructions:
        if not any(first <= i.address <= last for first, last in loops) and not i.name.startswith("NOP"):
            _add(counts, i, 1.0)
    return counts


def count(text: str, turns: Sequence[float]) -> Counter[str]:
    """Pipe -> instructions of a thread, and kind and bytes of an access -> how many, in one turn of the main loop, the
    largest of a kernel. `turns` are those of the loops inside it, for one turn of the loop around each, in the order of
    their beginnings."""
    instructions, labels = parse(text)
    loops = find_loops(instructions, labels)
    sizes = [sum(first <= i.address <= last for i in instructions) for first, last in loops]
    main = loops[sizes.index(max(sizes))]
    inner = [loop for loop in loops if main[0] <= loop[0] and loop[1] <= main[1] and loop != main]
    if len(inner) != len(turns):
        raise ValueError(f"the main loop has {len(inner)} loops inside it, not {len(turns)}")
    counts: Counter[str] = Counter()
    for i in instructions:
        if main[0] <= i.address <= main[1]:
            weight = 1.0
            for (first, last), times in zip(inner, turns, strict=True):
                weight *= times if first <= i.address <= last else 1.0
            _add(counts, i, weight)
    return counts


def _add(counts: Counter[str], i: Instruction, weight: float) -> None:
    counts["issue"] += weight
    if pipe := pipe_of(i.name):
        counts[pipe] += weight
    if pipe == "memory":
        counts[f"{i.name.split('.')[0]} {bytes_of(i.name)}"] += weight
