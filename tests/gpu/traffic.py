"""What the compiled kernels move: bytes and 32-byte sectors of P and of its gradient, counted in the emulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from ptxemu.triton_driver import emulated_gpu

from lrd_kernels import testing
from lrd_kernels.ops import triton
from lrd_kernels.ops.triton import configs


@dataclass(frozen=True)
class Traffic:
    """Of one forward and one backward pass, as multiples of the bytes of P."""

    read_forward: float
    read_backward: float
    written: float
    excess_forward: float  # bytes of the sectors requested, over the bytes needed: 1 where all is coalesced
    excess_backward: float
    all_bytes: float  # everything that both passes load and store in global memory


def arguments_of(S: int, R: int, layout: str, dtype: torch.dtype = torch.float32) -> tuple:
    """For the ops: a value at its mean."""
    inputs = testing.make_inputs((1,), S, R, dtype=dtype, layout=layout)
    value = inputs.loc[:, None]
    return inputs.cov_factor * 0.1, inputs.cov_diag + 10, value, value, None, None


def launches(arguments: tuple, capability: int = 80) -> tuple[Any, Any]:
    """Forward and backward pass in float32."""
    with emulated_gpu(capability, stats=True) as gpu, mock.patch.object(configs, "architecture", return_value="sm_80"):
        result, *state = triton.OPS["log_prob_fwd"](*arguments, 2, None, None, -0.5, -0.5, 0.0)
        ones = torch.ones_like(result)
        triton.OPS["log_prob_bwd"](*arguments, 2, *state, ones, -0.5, -0.5, True, True, True, False)
    R = arguments[0].shape[-1]
    sums = "row_sums" if R <= 16 else "tile_sums" if R <= 64 else "gram_fwd"
    return gpu.last(f"_{sums}_kernel"), gpu.last(
        f"_{'row_grads' if R <= 16 else 'tile_grads' if R <= 32 else 'log_prob_bwd'}_kernel"
    )


def count(S: int, R: int, layout: str, dtype: torch.dtype = torch.float32, capability: int = 80) -> Traffic:
    arguments = arguments_of(S, R, layout, dtype)
    P = arguments[0]
    forward, backward = launches(arguments, capability)
    size = P.numel() * P.element_size()
    return Traffic(
        forward.buffer("factor").bytes_read / size,
        backward.buffer("factor").bytes_read / size,
        backward.buffer("grad_factor").bytes_written / size,
        excess(forward),
        excess(backward),
        sum(x.stats.bytes_loaded + x.stats.bytes_stored for x in (forward, backward)) / size,
    )


def excess(launch) -> float:
    """Bytes of the 32-byte sectors that all its loads of global memory ask for, over the bytes that they need."""
    loads = launch.stats.memory["global", "load"]
    return 32 * loads.sectors / loads.bytes
