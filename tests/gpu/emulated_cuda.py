"""The CUDA ops on CPU tensors: the library's own objects over an emulated GPU, their PTX run by ptxemu.

The launchers, the plans and the arguments are those of a GPU; a launch goes to the emulator instead of a driver.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from ptxemu import Kernel, cuda
from ptxemu.arguments import MemoryRange
from ptxemu.results import BufferTraffic, Result
from torch.utils._python_dispatch import TorchDispatchMode

import lrd_kernels  # noqa: F401  (defines the ops)

LIBRARY = Path(__file__).with_name("libemulated_cuda.so")
SMALLEST_SHARED = 65536  # bytes that a block may have on sm_75, the least of all GPUs served
LARGEST_SHARED = 232448  # on sm_90


def why_not() -> str | None:
    """Why the CUDA ops cannot be emulated here."""
    if cuda.find_nvcc() is None:
        return "nvcc is not installed: the CUDA kernels are neither built nor tested"
    return None if LIBRARY.exists() else "the CUDA kernels are not built: make build"


class _Memory(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("bytes", ctypes.c_int64), ("writable", ctypes.c_bool))


_Words = ctypes.POINTER(ctypes.c_uint)
_Hook = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, _Words, _Words, ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint64
)


@functools.cache
def library() -> ctypes.CDLL:
    """The ops, registered for CPU tensors."""
    return ctypes.CDLL(str(LIBRARY))


def find_cuobjdump() -> str:
    """That of the CUDA toolkit, or the one that Triton brings."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    triton = Path(torch.__file__).parents[1] / "triton/backends/nvidia/bin"
    for folder in (None, f"{home}/bin", str(triton)):
        if tool := shutil.which("cuobjdump", path=folder):
            return tool
    raise FileNotFoundError("cuobjdump, of the CUDA toolkit or of Triton")


@functools.cache
def sources() -> tuple[str, ...]:
    """The PTX in the library, from which the machine code of every GPU is assembled: one text per source file."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([find_cuobjdump(), "-xptx", "all", LIBRARY], cwd=folder, check=True, capture_output=True)
        return tuple(path.read_text() for path in sorted(Path(folder).iterdir()))


_ENTRY = re.compile(r"^\.visible \.entry (\w+)\(", re.MULTILINE)


@functools.cache
def split(text: str) -> dict[str, tuple[int, int]]:
    """Name -> where a kernel begins and ends in the PTX of a file."""
    found = {}
    for match in _ENTRY.finditer(text):
        depth = 0
        for brace in re.finditer(r"[{}]", text[match.end() :]):
            depth += 1 if brace[0] == "{" else -1
            if depth == 0:
                found[match[1]] = (match.start(), match.end() + brace.end())
                break
    return found


def ptx_of(name: str, texts: Sequence[str] = ()) -> str:
    """The PTX of one kernel, in other texts or in the library: its file without the others."""
    for text in (*texts, *sources()):
        if name in split(text):
            kept, end = "", 0
            for other, (first, last) in split(text).items():
                kept += text[end : last if other == name else first]
                end = last
            return kept + text[end:]
    raise KeyError(name)


@functools.cache
def kernel(name: str, race: bool, stats: bool, texts: tuple[str, ...] = ()) -> Kernel:
    return Kernel(ptx_of(name, texts), name, race=race, stats=stats)


@dataclass(frozen=True)
class Launched:
    """A launch as it happened."""

    name: str
    grid: int
    block: int
    shared: int
    result: Result

    def traffic(self, tensor: torch.Tensor) -> BufferTraffic:
        """What it moved of a tensor's memory."""
        return self.result.stats.buffers[hex(tensor.untyped_storage().data_ptr())]


class Emulation:
    """The launches, and what went wrong."""

    def __init__(self) -> None:
        self.launches: list[Launched] = []
        self.failure: BaseException | None = None

    def of(self, part: str) -> list[Launched]:
        """Launches of a kernel with this in its name."""
        return [launch for launch in self.launches if part in launch.name]


class _PerOp(TorchDispatchMode):
    """Forgets the memory of one op before the next, and raises what happened inside."""

    def __init__(self, emulation: Emulation):
        super().__init__()
        self.emulation = emulation

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not str(func).startswith("lrd_cuda."):
            return func(*args, **(kwargs or {}))
        library().lrd_forget_memory()
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError:
            if self.emulation.failure is not None:
                raise self.emulation.failure from None
            raise


@contextlib.contextmanager
def emulated_gpu(
    *,
    race: bool = True,
    stats: bool = False,
    order: str | int = "forward",
    shared_limit: int = SMALLEST_SHARED,
    float64_ratio: int = 32,
    texts: tuple[str, ...] = (),
) -> Iterator[Emulation]:
    """Inside, torch.ops.lrd_cuda runs on CPU tensors, on a GPU whose float32 is `float64_ratio` times as fast as its
    float64. Kernels in `texts`, of PTX, take the place of the library's."""
    emulation = Emulation()

    def launch(name, grid, block, arguments, shared):
        try:
            chosen = kernel(name.decode(), race, stats, texts)
            sizes = [param.size for param in chosen.params]
            values = [ctypes.string_at(arguments[i], size) for i, size in enumerate(sizes)]
            result = chosen.launch(
                tuple(grid[:3]), tuple(block[:3]), values, shared=shared, order=order, memory=_known_memory()
            )
            emulation.launches.append(Launched(name.decode(), grid[0], block[0], shared, result))
        except BaseException as error:  # nothing may pass through the C++ code between here and the caller
            emulation.failure = error
            return 1
        return 0

    hook = _Hook(launch)
    library().lrd_emulate(hook, shared_limit, float64_ratio)
    try:
        with _PerOp(emulation):
            yield emulation
    finally:
        library().lrd_emulate(_Hook(0), 0, 0)


def _known_memory() -> list[MemoryRange]:
    pieces = (_Memory * 64)()
    library().lrd_known_memory.restype = ctypes.c_int64
    count = library().lrd_known_memory(pieces, ctypes.c_int64(64))
    assert count <= 64
    return [MemoryRange(p.base, p.bytes, p.writable, [hex(p.base)]) for p in pieces[:count]]
