"""Peak memory of one call above what was there before it: measured by the kernel, in a process of its own.

`python -m benchmarks.memory CASE LAYOUT CONTESTANT DIRECTION` prints one JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
from pathlib import Path

import lrd_kernels as lrd
from benchmarks.machine import ROOT
from benchmarks.registry import CONTESTANTS, DIRECTIONS, LAYOUTS, Case

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
CALLS = 3


def in_fresh_process(case: Case, layout: str, contestant: str, direction: str) -> dict:
    """What `extra_bytes` gives there, or the reason why it gave nothing."""
    try:
        return fresh("benchmarks.memory", case.name, layout, contestant, direction)
    except RuntimeError as error:
        return {"reason": str(error)}


def fresh(module: str, *arguments: object) -> dict:
    """The JSON object that a module's command line ends with, in a process of its own."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"ended with {done.returncode}"]
        raise RuntimeError(last[0][:500])
    return json.loads(done.stdout.splitlines()[-1])


def extra_bytes(case: Case, layout: str, contestant: str, direction: str) -> dict:
    """Most resident memory during a call beyond that before it: the median of a few calls, and each of them.

    The results of the call count, its inputs do not. A first call, not counted, compiles what is compiled, starts the
    threads and touches the code, none of which grows with the case.
    """
    prepared = CONTESTANTS[contestant].prepare(case.inputs(layout))
    call = getattr(prepared, direction)
    call()
    calls = []
    for _ in range(CALLS):
        with Peak() as peak:
            call()
        calls.append(peak.extra_bytes)
    return {"extra_bytes": sorted(calls)[CALLS // 2], "calls": calls}


class Peak:
    """Most resident memory inside the `with` beyond that before it."""

    extra_bytes = 0

    def __enter__(self) -> Peak:
        release()
        self._before = resident("VmRSS")
        CLEAR_REFS.write_text("5")  # sets the high-water mark back to what is resident now
        return self

    def __exit__(self, *_: object) -> None:
        self.extra_bytes = max(resident("VmHWM") - self._before, 0)


def release() -> None:
    """Gives freed memory back, so that a call cannot hide in what an earlier one left to the allocator, or to lrd."""
    gc.collect()
    lrd.release_memory()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc's
        libc.malloc_trim(0)


def resident(field: str) -> int:
    """VmRSS, resident now, or VmHWM, the most so far: in bytes."""
    lines = STATUS.read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{field}:")).split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("case", type=Case.parse)
    parser.add_argument("layout", choices=LAYOUTS)
    parser.add_argument("contestant", choices=CONTESTANTS)
    parser.add_argument("direction", choices=DIRECTIONS)
    arguments = parser.parse_args()
    print(json.dumps(extra_bytes(**vars(arguments))))


if __name__ == "__main__":
    main()
