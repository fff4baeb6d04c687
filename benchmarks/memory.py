"""Memory of one call beyond what the process held before it, as the kernel or torch's GPU allocator reports it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Sequence
from pathlib import Path

import torch

import lrd_kernels as lrd
from benchmarks import fresh
from benchmarks.registry import CONTESTANTS, Case

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
CALLS = 3


def in_fresh_process(case: Case, layout: str, contestant: str, direction: str) -> dict:
    """The result of `extra_bytes` in a fresh process, or the reason for its failure."""
    try:
        return fresh.call(extra_bytes, case, layout, contestant, direction)
    except fresh.Failed as error:
        return {"reason": str(error)}


def extra_bytes(case: Sequence[int], layout: str, contestant: str, direction: str) -> dict:
    """Peak resident memory during a call beyond that before it: the median of a few calls, and each of them.

    The results of the call count, its inputs do not. An uncounted first call compiles what is compiled, starts the
    threads and touches the code, none of which grows with the case.
    """
    prepared = CONTESTANTS[contestant].prepare(Case(*case).inputs(layout))
    call = getattr(prepared, direction)
    call()
    calls = []
    for _ in range(CALLS):
        with Usage() as usage:
            call()
        calls.append(usage.peak)
    return {"extra_bytes": sorted(calls)[CALLS // 2], "calls": calls}


class Usage:
    """The peak inside a `with` block and what is still held at its end, in bytes beyond what was held before it.

    On the CPU this is the resident memory of the process, on a GPU the memory of torch's allocator.
    """

    held = peak = 0

    def __init__(self, device: str = "cpu") -> None:
        self.on_gpu = device != "cpu"

    def __enter__(self) -> Usage:
        release()
        if self.on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        else:
            CLEAR_REFS.write_text("5")  # resets the high-water mark to what is resident now
        self._before = self._held()
        return self

    def __exit__(self, *_: object) -> None:
        self.peak = max(self._peak() - self._before, 0)
        gc.collect()
        self.held = max(self._held() - self._before, 0)

    def _held(self) -> int:
        return torch.cuda.memory_allocated() if self.on_gpu else resident("VmRSS")

    def _peak(self) -> int:
        return torch.cuda.max_memory_allocated() if self.on_gpu else resident("VmHWM")


def release() -> None:
    """Returns freed memory to the system, so that a call cannot reuse what an earlier one left with an allocator."""
    gc.collect()
    lrd.release_memory()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # only glibc has it
        libc.malloc_trim(0)


def resident(field: str) -> int:
    """Resident memory in bytes: "VmRSS" now, "VmHWM" at its peak."""
    lines = STATUS.read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{field}:")).split()[1])
