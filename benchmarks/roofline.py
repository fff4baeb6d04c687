"""Lower bounds on the time of a case, from bandwidths and arithmetic rates measured in the same run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from benchmarks.measure import time_calls
from benchmarks.registry import Case


@dataclass
class Peaks:
    """Best rates seen so far, in bytes and floating-point operations per second."""

    read_bytes: float = 0.0
    write_bytes: float = 0.0
    copy_bytes: float = 0.0  # bytes read plus bytes written; reported, but not used in a roofline
    flops: float = 0.0

    def measure(self, elements: int = 1 << 26, size: int = 2048, repeats: int = 6) -> None:
        """Measures the rates again and keeps the higher values: other load on the machine can only lower them."""
        source, target = torch.ones(elements), torch.ones(elements)  # 256 MiB each: far beyond the caches
        bytes_ = source.nbytes
        # Which of torch's reductions is fastest depends on the machine.
        for reduction in (source.sum, source.max, lambda: torch.dot(source, source)):
            self.read_bytes = max(self.read_bytes, bytes_ / best_time(reduction, repeats))
        self.write_bytes = max(self.write_bytes, bytes_ / best_time(lambda: target.fill_(2.0), repeats))
        self.copy_bytes = max(self.copy_bytes, 2 * bytes_ / best_time(lambda: target.copy_(source), repeats))
        a, b, out = torch.ones(size, size), torch.ones(size, size), torch.empty(size, size)
        self.flops = max(self.flops, 2 * size**3 / best_time(lambda: torch.mm(a, b, out=out), repeats))

    def as_dict(self) -> dict[str, float]:
        return {f"{name}_per_second": rate for name, rate in asdict(self).items()}


def best_time(call: Callable[[], object], repeats: int) -> float:
    return min(time_calls(call, 1) for _ in range(repeats))


def forward_seconds(case: Case, peaks: Peaks) -> float:
    """P, value, loc and diag are read once; half of the symmetric Gram matrix is computed."""
    bytes_read = case.factor_bytes + 3 * case.vector_bytes
    return max(bytes_read / peaks.read_bytes, case.B * case.S * case.R**2 / peaks.flops)


def backward_seconds(case: Case, peaks: Peaks) -> float:
    """The same is read again, the gradients of P, diag and loc are written; one product of P and an R x R matrix."""
    bytes_read = case.factor_bytes + 3 * case.vector_bytes
    bytes_written = case.factor_bytes + 2 * case.vector_bytes
    moved = bytes_read / peaks.read_bytes + bytes_written / peaks.write_bytes
    return max(moved, 2 * case.B * case.S * case.R**2 / peaks.flops)


def fractions(case: Case, peaks: Peaks, forward: float, forward_backward: float) -> dict[str, float | None]:
    """Fraction of the roofline that was reached. The backward time is that of both passes minus the forward time."""
    backward = forward_backward - forward
    return {
        "forward_seconds": forward_seconds(case, peaks),
        "backward_seconds": backward_seconds(case, peaks),
        "forward_fraction": forward_seconds(case, peaks) / forward,
        "backward_fraction": backward_seconds(case, peaks) / backward if backward > 0 else None,
    }
