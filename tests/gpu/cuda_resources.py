"""What the CUDA kernels take of each architecture: the library's PTX assembled, what ptxas reports read back."""

from __future__ import annotations

import functools
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

import emulated_cuda
from ptxemu import build, cuda

ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)


@dataclass(frozen=True)
class Resources:
    """Of one kernel; shared memory is that of fixed size, launches ask for more."""

    registers: int
    spills: int  # bytes that a thread stores and loads for want of registers
    stack: int
    shared: int


_REPORT = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers([^\n]*)",
    re.DOTALL,
)


def parse(report: str) -> dict[str, Resources]:
    """Mangled name -> resources, of what ptxas -v prints."""
    found = {}
    for name, stack, stored, loaded, registers, rest in _REPORT.findall(report):
        shared = re.search(r"(\d+) bytes smem", rest)
        found[name] = Resources(int(registers), int(stored) + int(loaded), int(stack), int(shared[1]) if shared else 0)
    return found


def assemble(architecture: int) -> dict[str, Resources]:
    """Every kernel of the library."""
    found = {}
    for text in emulated_cuda.sources():
        key = [*cuda.toolkit_key(), f"sm_{architecture}", text]
        found |= parse(build.kept_text(key, functools.partial(_assemble, architecture, text)))
    return found


def _assemble(architecture: int, text: str) -> str:
    """What ptxas reports of a PTX text."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernels.ptx"
        source.write_text(text)
        command = [cuda.find_nvcc(), f"-arch=sm_{architecture}", "-cubin", "-Xptxas", "-v", source, "-o"]
        done = build.run_compiler([*command, source.with_suffix(".cubin")])
        done.check_returncode()
        return done.stdout + done.stderr


_TYPES = {"f": "float32", "d": "float64", "6__half": "float16", "13__nv_bfloat16": "bfloat16"}


def readable(mangled: str) -> tuple[str, str]:
    """(kernel, what it is made for) of a mangled name: ("gram", "float32 in float64, width 16")."""
    kernel, rest = re.match(r"_ZN3lrd4cuda\d+(\w+?)_kernel(.*)E", mangled).groups()
    match = re.match(
        r"I(f|d|6__half|13__nv_bfloat16)(?P<computed>[fd])?(?:Li(?P<width>\d+)E)?(?:Lb(?P<vector>[01])E)?"
        r"(?P<sums>f|d|NS0_4PairE)?EE?",
        rest,
    )
    if not match:
        return kernel, ""
    text = _TYPES[match[1]] + (f" in {_TYPES[match['computed']]}" if match["computed"] else "")
    if match["width"]:
        text += f", width {match['width']}"
    if match["sums"]:
        text += f", sums in {_TYPES.get(match['sums'], 'pairs')}"
    return kernel, text + (", aligned rows" if match["vector"] == "1" else "")
