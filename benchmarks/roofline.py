"""The least time that the hardware allows a case, from bandwidths and a peak measured in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from benchmarks.registry import Case


@dataclass
class Peaks:
    """Best rates seen so far, in bytes and floating-point operations per second."""

    read_bytes: float = 0.0
    write_bytes: float = 0.0
    copy_bytes: float = 0.0  # counts what is read and what is written; told, but in no roofline
    flops: float = 0.0

    def measure(self, elements: int = 1 << 26, size: int = 2048, repeats: int = 6) -> None:
        """Raises the rates to what this moment offers. A neighbour's load can only lower them."""
        source, target = torch.ones(elements), torch.ones(elements)  # 256 MiB each: far beyond the caches
        bytes_ = source.nbytes
        # Which of torch's reductions streams best differs from machine to machine.
        for reduction in (source.sum, source.max, lambda: torch.dot(source, source)):
            self.read_bytes = max(self.read_bytes, bytes_ / best_time(reduction, repeats))
        self.write_bytes = max(self.write_bytes, bytes_ / best_time(lambda: target.fill_(2.0), repeats))
        self.copy_bytes = max(self.copy_bytes, 2 * bytes_ / best_time(lambda: target.copy_(source), repeats))
        a, b, out = torch.ones(size, size), torch.ones(size, size), torch.empty(size, size)
        self.flops = max(self.flops, 2 * size**3 / best_time(lambda: torch.mm(a, b, out=out), repeats))

    def as_dict(self) -> dict[str, float]:
        return {f"{name}_per_second": rate for name, rate in asdict(self).items()}


def best_time(call: Callable[[], object], repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def forward_seconds(case: Case, peaks: Peaks) -> float:
    """P and the vectors value, loc and diag read once; the Gram matrix, of which half is enough."""
    bytes_read = case.factor_bytes + 3 * case.vector_bytes
    return max(bytes_read / peaks.read_bytes, case.B * case.S * case.R**2 / peaks.flops)


def backward_seconds(case: Case, peaks: Peaks) -> float:
    """The same read once more, the gradients of P, diag and loc written; one full product of P and an R x R matrix."""
    bytes_read = case.factor_bytes + 3 * case.vector_bytes
    bytes_written = case.factor_bytes + 2 * case.vector_bytes
    moved = bytes_read / peaks.read_bytes + bytes_written / peaks.write_bytes
    return max(moved, 2 * case.B * case.S * case.R**2 / peaks.flops)


def fractions(case: Case, peaks: Peaks, forward: float, forward_backward: float) -> dict[str, float | None]:
    """How much of the roofline was reached, 1 being all. The backward pass is what it adds to the forward one."""
    backward = forward_backward - forward
    return {
        "forward_seconds": forward_seconds(case, peaks),
        "backward_seconds": backward_seconds(case, peaks),
        "forward_fraction": forward_seconds(case, peaks) / forward,
        "backward_fraction": backward_seconds(case, peaks) / backward if backward > 0 else None,
    }
