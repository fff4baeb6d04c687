"""Errors of the compiled kernels beside those of the CPU's, against extended precision."""

from __future__ import annotations

from unittest import mock

import numpy as np
import torch
from ptxemu.triton_driver import emulated_gpu
from torch import Tensor

from lrd_kernels import testing
from lrd_kernels._policy import OP_PRECISIONS
from lrd_kernels.ops import registry, triton
from lrd_kernels.ops.triton import configs

# family of inputs, hardness, rank
CASES = (
    ("diagonal", 1.0, 8),
    ("diagonal", 1.0, 32),
    ("diagonal", 1.0, 64),
    ("diagonal", 1e6, 16),
    ("condition", 1e8, 16),
    ("pixels", 1e6, 16),
)
ROWS = 700


def errors(ops, inputs: testing.Inputs, precision: str) -> tuple[float, float]:
    """Of log p, and the largest of its gradients for mean, factor and diagonal, each by its own largest entry."""
    value, loc, factor, diag = inputs
    arguments = (factor[None], diag[None], value[None, None], loc[None, None], None, None)
    index = OP_PRECISIONS[precision]
    per_output = -0.5 * float(np.log(2 * np.pi))
    result, *state = ops["log_prob_fwd"](*arguments, index, None, None, -0.5, -0.5, per_output)
    needs = (True, True, True, False)
    grads = ops["log_prob_bwd"](*arguments, index, *state, torch.ones_like(result), -0.5, -0.5, *needs)
    log_p, _, of_loc, of_factor, of_diag = map(_tensor, testing.extended_log_prob(inputs))
    right = (of_factor, of_diag, of_loc)
    return (
        testing.relative_error(result.flatten(), log_p.flatten()),
        max(testing.relative_error(g.reshape(t.shape), t) for g, t in zip(grads, right, strict=True)),
    )


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.asarray(array, dtype=np.float64))


def emulated(inputs: testing.Inputs, precision: str, capability: int = 80) -> tuple[float, float]:
    with emulated_gpu(capability), mock.patch.object(configs, "architecture", return_value=f"sm_{capability}"):
        return errors(triton.OPS, inputs, precision)


def on_cpu(inputs: testing.Inputs, precision: str) -> tuple[float, float]:
    return errors(registry.OPS["cpu"]._asdict(), inputs, precision)
