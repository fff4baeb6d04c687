"""What the ops of both GPU backends should give, in float64."""

from __future__ import annotations

import torch

from lrd_kernels import reference, testing
from lrd_kernels.linalg.stack import Stack
from lrd_kernels.testing import relative_error

# Rounding of a result, and of sums in float32 that were certified.
ROUNDING = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}

# T, S, R, vectors, dtype, layout
STACKS = [(3, 67, 5, 4, torch.float32, "row"), (2, 130, 8, 3, torch.float32, "rank")]
SLOW_STACKS = [
    (9, 70, 8, 9, torch.float32, "row"),
    (2, 33, 4, 5, torch.float64, "rank"),
    (2, 50, 8, 2, torch.bfloat16, "row"),
]


def wanted(factor, diag, value, loc, mask, eps):
    """log p without its constant, and gradients for factor, diagonal and mean; a factor may serve several Gaussians."""
    leaves = [t.double().requires_grad_() for t in (factor, diag)]
    mean = None if loc is None else loc.double().requires_grad_()
    P = leaves[0].repeat_interleave(len(diag) // max(len(factor), 1), 0)[:, None]
    present = None if mask is None else mask[:, None]
    scored = None if value is None else value.double()
    result = reference.terms(scored, mean, P, leaves[1][:, None], mask=present, eps=eps, maha=-0.5, logdet=-0.5)
    grads = torch.autograd.grad(result.sum(), leaves + ([] if mean is None else [mean]))
    return result.detach(), *grads


class StackCase:
    """Two stacks of columns, a diagonal and a basis of six, with the columns themselves as `exact`."""

    def __init__(self, T, S, R, V, dtype, layout):
        inputs = testing.make_inputs((T, 2), S, R, dtype=dtype, layout=layout)
        vectors = 3 + torch.randn(V, 2, S, generator=torch.Generator().manual_seed(2)).to(dtype)
        self.stack = Stack((2, S), inputs.cov_factor, vectors, 0.5, 2.0, centre=True)._inputs()
        self.exact = Stack((2, S), inputs.cov_factor.double(), vectors.double(), 0.5, 2.0, centre=True).dense()
        K = self.exact.shape[-1]
        self.basis = torch.linalg.qr(torch.randn(2, K, K).double()).Q[..., :6].contiguous()
        self.diag, self.dtype = inputs.cov_diag[0], dtype

    def check_gram(self, gram, tolerance):
        assert relative_error(gram, self.exact.mT @ self.exact) <= tolerance

    def check_projection(self, projected, folded):
        assert relative_error(projected.double(), self.exact @ self.basis) <= ROUNDING[self.dtype]
        variance = self.diag.double() + self.exact.square().sum(-1)
        kept = projected.double().square().sum(-1)
        assert relative_error(folded.double() + kept, variance) <= ROUNDING[self.dtype]
