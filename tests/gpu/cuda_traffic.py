"""What the CUDA kernels move, counted in the emulator, beside the Triton kernels on the same inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from emulated_cuda import Launched, emulated_gpu


@dataclass(frozen=True)
class Pass:
    """Of one launch, per element of P."""

    loaded: float  # bytes from global memory
    stored: float
    sectors_loaded: float  # of 32 bytes
    sectors_stored: float

    @classmethod
    def of(cls, stats, elements: int) -> Pass:
        loads, stores = stats.memory["global", "load"], stats.memory["global", "store"]
        numbers = (stats.bytes_loaded, stats.bytes_stored, loads.sectors, stores.sectors)
        return cls(*(number / elements for number in numbers))


def launches(arguments: tuple) -> tuple[Launched, Launched, torch.Tensor]:
    """The first launches of the forward and the backward pass in float32, and the gradient of the factor."""
    ops = torch.ops.lrd_cuda
    with emulated_gpu(race=False, stats=True) as gpu:
        result, *state = ops.log_prob_fwd(*arguments, 2, None, None, -0.5, -0.5, 0.0)
        first = len(gpu.launches)
        ones = torch.ones_like(result)
        grads = ops.log_prob_bwd(*arguments, 2, *state, ones, -0.5, -0.5, True, True, True, False)
    return gpu.launches[0], gpu.launches[first], grads[0]
