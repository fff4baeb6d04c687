"""What a measurement depends on: the machine, the versions, the allocator and the commit; and writing of results."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

import lrd_kernels as lrd
from lrd_kernels.info import cpu_model

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "numpy", "linear_operator", "jax", "jaxlib")
# Environment variables that change times.
ENVIRONMENT = (
    *("LRD_CPU_ISA", "LRD_POISON_SCRATCH"),
    *("LD_PRELOAD", "MALLOC_CONF", "GLIBC_TUNABLES", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_"),
    *("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS", "MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY"),
    *("KMP_BLOCKTIME", "KMP_AFFINITY", "THP_MEM_ALLOC_ENABLE", "XLA_FLAGS"),
)


def facts() -> dict:
    """The conditions of a run, ready for JSON. Unknown values are None."""
    kernels = lrd.backends()["cpu"]
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "memory_bytes": memory_bytes(),
        "caches": caches(),
        "kernels": kernels.detail,
        "instruction_set": kernels.detail.rpartition("instruction set ")[2] if kernels.available else None,
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "versions": {
            "python": platform.python_version(),
            "lrd-kernels": lrd.__version__,
            **{name: version(name) for name in PACKAGES},
        },
        "system": platform.platform(),
        "allocator": allocator(),
        "transparent_huge_pages": huge_pages(),
        **sources(),
    }


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def caches() -> dict[str, str]:
    """Size of each cache of the first core, such as "L2 Unified": "1024K"."""
    levels = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"))
    found = [[(read(str(level / name)) or "").strip() for name in ("level", "type", "size")] for level in levels]
    return {f"L{level} {kind}": size for level, kind, size in found if size}


class OtherWork:
    """The number of cores that were busy with other processes, on average since this object was created.

    Other load on the machine disturbs all times. Time that a hypervisor gives to other guests counts as well.
    """

    def __init__(self) -> None:
        self.start, self.ticks, self.own = time.monotonic(), busy_ticks(), time.process_time()

    def cores(self) -> float | None:
        elapsed, now = time.monotonic() - self.start, busy_ticks()
        if now is None or self.ticks is None or elapsed == 0:
            return None
        busy = (now - self.ticks) / os.sysconf("SC_CLK_TCK")
        return round(max(busy - (time.process_time() - self.own), 0.0) / elapsed, 2)


def busy_ticks() -> int | None:
    """Clock ticks of all cores together, without idle time and waiting for I/O."""
    words = (read("/proc/stat") or "").partition("\n")[0].split()[1:9]
    return sum(int(word) for i, word in enumerate(words) if i not in (3, 4)) if words else None


def allocator() -> str:
    preloaded = os.environ.get("LD_PRELOAD")
    if preloaded:
        return f"LD_PRELOAD={preloaded}"
    return f"malloc of {' '.join(platform.libc_ver()) or 'the C library'}"


def huge_pages() -> str | None:
    """The active mode, which the kernel marks with brackets."""
    text = read("/sys/kernel/mm/transparent_hugepage/enabled")
    return text.partition("[")[2].partition("]")[0] if text else None


def sources() -> dict:
    """The commit, and whether tracked files differ from it."""
    commit, changes = git("rev-parse", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def read(path: str) -> str | None:
    try:
        return Path(path).read_text()
    except OSError:
        return None


def summary(known: dict) -> str:
    """The most important facts in three lines."""
    versions = ", ".join(f"{name} {v}" for name, v in known["versions"].items() if v)
    commit = (known["commit"] or "unknown")[:12] + (" with changes" if known["dirty"] else "")
    return "\n".join(
        [
            f"{known['cpu']}, {known['threads']} threads on {known['usable_cores']} cores; {known['kernels']}",
            f"{versions}; {known['allocator']}; transparent huge pages: {known['transparent_huge_pages']}",
            f"{known['date']}, commit {commit}",
        ]
    )


def write_json(path: Path, document: dict) -> None:
    """Writes the file atomically, with null for NaN and infinity, and each list of numbers on one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    text = json.dumps(finite(document), indent=1, allow_nan=False)
    unfinished.write_text(re.sub(r"\[[^\[\]{}]*\]", lambda found: " ".join(found.group().split()), text) + "\n")
    unfinished.replace(path)


def finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: finite(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
