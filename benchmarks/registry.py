"""The cases that are measured, and the contestants: every implementation of the same log-probability."""

from __future__ import annotations

import importlib.util
import os
import shutil
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import lrd_kernels as lrd
from lrd_kernels import testing
from lrd_kernels.testing import Inputs

LAYOUTS = ("row", "rank")
DIRECTIONS = ("forward", "forward_backward")
DIFFERENTIATED = ("loc", "cov_factor", "cov_diag")
FLOAT_BYTES = 4
LOG_2PI = 1.8378770664093453


class Case(NamedTuple):
    """B Gaussians over S outputs with factors of rank R, in float32."""

    B: int
    S: int
    R: int

    @classmethod
    def parse(cls, text: str) -> Case:
        sizes = text.split("x")
        if len(sizes) != 3 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
            raise ValueError(f"a case is written BATCHxSxR, such as 8x65536x8; got {text!r}")
        return cls(*map(int, sizes))

    @property
    def name(self) -> str:
        return f"{self.B}x{self.S}x{self.R}"

    @property
    def vector_bytes(self) -> int:
        return FLOAT_BYTES * self.B * self.S

    @property
    def factor_bytes(self) -> int:
        return self.vector_bytes * self.R

    @property
    def large(self) -> bool:
        """Whether it is large enough for resident memory and memory bandwidth to be meaningful."""
        return self.factor_bytes >= 1 << 20

    def inputs(self, layout: str) -> Inputs:
        return testing.make_inputs((self.B,), self.S, self.R, dtype=torch.float32, layout=layout)


CASES = tuple(map(Case.parse, ("1x256x8", "8x65536x8", "1x1048576x8", "1x262144x64", "1x65536x576")))
QUICK_CASES = CASES[:2]


class Prepared(NamedTuple):
    """A contestant that holds its inputs and has compiled everything. The calls take no arguments."""

    forward: Callable[[], Any] | None  # log p [B]
    forward_backward: Callable[[], Any] | None  # log p [B], and the gradients of its sum: [B, S], [B, S, R], [B, S]
    tensors: Callable[[Any], tuple[Tensor, ...]]  # the result of `forward_backward` as torch tensors


class Contestant:
    """One way to compute log p. A subclass defines `log_prob`, or `prepare` if it does not work on tensors."""

    name: str
    tolerance = 1e-3  # relative to the largest entry: enough for float32 arithmetic, too little for a wrong formula

    def available(self) -> str | None:
        """None if it can run here, otherwise the reason why not."""
        return None

    def log_prob(self, value: Tensor, loc: Tensor, cov_factor: Tensor, cov_diag: Tensor) -> Tensor:
        raise NotImplementedError

    def prepare(self, inputs: Inputs) -> Prepared:
        return self.prepare_function(self.log_prob, inputs)

    def prepare_function(self, log_prob: Callable[..., Tensor], inputs: Inputs) -> Prepared:
        value = inputs.value
        leaves = [getattr(inputs, name).detach().requires_grad_() for name in DIFFERENTIATED]

        def forward() -> Tensor:
            with torch.no_grad():
                return log_prob(*inputs)

        def forward_backward() -> tuple[Tensor, ...]:
            result = log_prob(value, *leaves)
            return result.detach(), *torch.autograd.grad(result.sum(), leaves)

        return Prepared(forward, forward_backward, lambda result: result)


class Lrd(Contestant):
    name = "lrd"
    tolerance = 1e-5

    def available(self):
        status = lrd.backends()["cpu"]
        return None if status.available else status.detail

    def log_prob(self, value, loc, cov_factor, cov_diag):
        return lrd.log_prob(value, loc, cov_factor, cov_diag)


class Torch(Contestant):
    """torch's class, without argument checks: they take time and cannot be compiled into a graph."""

    name = "torch"

    def log_prob(self, value, loc, cov_factor, cov_diag):
        gaussian = torch.distributions.LowRankMultivariateNormal(loc, cov_factor, cov_diag, validate_args=False)
        return gaussian.log_prob(value)


class Compiled(Torch):
    """The same under torch.compile with inductor, compiled for the exact shapes and strides."""

    name = "compile"

    def available(self):
        compilers = [os.environ.get("CXX"), "g++", "clang++"]
        return None if any(c and shutil.which(c) for c in compilers) else "torch.compile finds no C++ compiler"

    def prepare(self, inputs):
        torch.compiler.reset()  # otherwise the sizes of the next case become symbolic
        prepared = self.prepare_function(torch.compile(self.log_prob, fullgraph=True, dynamic=False), inputs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # from torch's own code
            prepared.forward()
            prepared.forward_backward()
        return prepared


class LinearOperator(Contestant):
    """linear_operator, which applies the Woodbury identity to this sum of operators."""

    name = "linear_operator"

    def available(self):
        return missing("linear_operator")

    def log_prob(self, value, loc, cov_factor, cov_diag):
        from linear_operator.operators import DiagLinearOperator, LowRankRootLinearOperator

        covariance = LowRankRootLinearOperator(cov_factor) + DiagLinearOperator(cov_diag)
        maha, logdet = covariance.inv_quad_logdet((value - loc).unsqueeze(-1), logdet=True)
        return -0.5 * (maha + logdet + cov_diag.shape[-1] * LOG_2PI)


class Jax(Contestant):
    """The Woodbury formulas in JAX, compiled by XLA for the exact shapes.

    XLA chooses its own strides, so a rank-major factor and its gradient are passed as [B, R, S] arrays.
    """

    name = "jax"

    def available(self):
        return missing("jax")

    def prepare(self, inputs):
        import jax
        import jax.numpy as jnp
        import numpy as np
        from jax.scipy.linalg import cho_solve

        jax.config.update("jax_platforms", "cpu")
        rank_major = not inputs.cov_factor.is_contiguous()

        def log_prob(value, loc, factor, diag):
            P = jnp.swapaxes(factor, -1, -2) if rank_major else factor  # [B, S, R]
            r = value - loc
            scaled = P / diag[..., None]
            capacitance = jnp.eye(P.shape[-1], dtype=P.dtype) + jnp.einsum("bsr,bsq->brq", P, scaled)
            chol = jnp.linalg.cholesky(capacitance)
            u = jnp.einsum("bsr,bs->br", scaled, r)
            maha = (r * r / diag).sum(-1) - (u * cho_solve((chol, True), u[..., None])[..., 0]).sum(-1)
            logdet = 2 * jnp.log(jnp.diagonal(chol, axis1=-2, axis2=-1)).sum(-1) + jnp.log(diag).sum(-1)
            return -0.5 * (maha + logdet + diag.shape[-1] * LOG_2PI)

        def total(*arguments):
            result = log_prob(*arguments)
            return result.sum(), result

        factor = inputs.cov_factor.mT if rank_major else inputs.cov_factor
        arrays = [jnp.asarray(t.numpy()) for t in (inputs.value, inputs.loc, factor, inputs.cov_diag)]
        forward = jax.jit(log_prob).lower(*arrays).compile()
        gradients = jax.jit(jax.value_and_grad(total, argnums=(1, 2, 3), has_aux=True)).lower(*arrays).compile()

        def tensors(result):
            (_, value), grads = result
            loc, P, diag = (torch.tensor(np.asarray(g)) for g in grads)
            return torch.tensor(np.asarray(value)), loc, P.mT if rank_major else P, diag

        return Prepared(
            lambda: jax.block_until_ready(forward(*arrays)),
            lambda: jax.block_until_ready(gradients(*arrays)),
            tensors,
        )


def missing(package: str) -> str | None:
    return None if importlib.util.find_spec(package) else f"{package} is not installed"


# The first one is this package; ratios are relative to it.
CONTESTANTS: dict[str, Contestant] = {c.name: c for c in (Lrd(), Torch(), Compiled(), LinearOperator(), Jax())}
