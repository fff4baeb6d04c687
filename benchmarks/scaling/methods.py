"""The methods that are measured, and their parameters, which are created without temporary memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import lrd_kernels as lrd
from benchmarks.registry import CONTESTANTS, Contestant, Prepared
from benchmarks.scaling.pipelines import PIPELINES
from lrd_kernels.testing import Inputs

RANKS = (8, 64, 512, 4096)
LOW_RANK = tuple(CONTESTANTS)  # the first one is this package
GPU_BACKENDS = ("triton", "cuda")
WITHOUT_RANK = ("diagonal", "full triangular", "full naive")


class Curve(NamedTuple):
    """One line of the figure."""

    method: str
    rank: int | None = None  # None for methods without a rank
    layout: str = "row"

    @property
    def name(self) -> str:
        return self.method if self.rank is None else f"{self.method} {self.rank} {self.layout}"

    @classmethod
    def parse(cls, name: str) -> Curve:
        if name in WITHOUT_RANK:
            return cls(name)
        method, rank, layout = name.rsplit(" ", 2)
        return cls(method, int(rank), layout)

    def parameters(self, S: int) -> int:
        """The number of entries of value, mean and covariance."""
        if self.method in PIPELINES:
            return PIPELINES[self.method].parameters(S)
        if self.rank is not None:
            return S * (self.rank + 3)
        return 3 * S if self.method == "diagonal" else S * S + 2 * S

    def products(self, S: int) -> float:
        """Approximate number of multiplications of a log-likelihood and its gradients."""
        if self.method in PIPELINES:
            return PIPELINES[self.method].products(S)
        if self.rank is not None:
            return 3.0 * S * self.rank**2 + self.rank**3
        return {"diagonal": 3.0 * S, "full triangular": 3.0 * S**2, "full naive": 2.0 * S**3}[self.method]


def names(device: str) -> list[str]:
    """The methods for a device. On a GPU, each available backend of this package is a method."""
    if device == "cpu":
        return [*LOW_RANK, *WITHOUT_RANK, *PIPELINES]
    own = [f"lrd {backend}" for backend in GPU_BACKENDS if lrd.backends()[backend].available]
    return [*own, "torch", "compile", "linear_operator", *WITHOUT_RANK]


def unavailable(method: str) -> str | None:
    """The reason why a method cannot run here, or None."""
    if method in PIPELINES:
        return PIPELINES[method].unavailable()
    return CONTESTANTS[method].available() if method in CONTESTANTS else None


def prepare(curve: Curve, S: int, device: str) -> Callable[[], Prepared]:
    """Creates the parameters and returns a function that prepares the calls, so that memory can be measured between."""
    if curve.method in PIPELINES:
        return PIPELINES[curve.method].prepare(S, curve.layout)
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    value, loc = normal(1, S), normal(1, S)
    if curve.rank is not None:
        diag = torch.rand(1, S, generator=generator, device=device).add_(0.2)
        R = curve.rank
        factor = (normal(1, S, R) if curve.layout == "row" else normal(1, R, S).mT).mul_(R**-0.5)
        inputs = Inputs(value, loc, factor, diag)
        return lambda: contestant(curve.method).prepare(inputs)
    make = {"diagonal": _diagonal, "full triangular": _triangular, "full naive": _naive}[curve.method]
    log_prob, parameter = make(S, device)

    def ready() -> Prepared:
        leaves = [loc.requires_grad_(), parameter.requires_grad_()]

        def forward() -> Tensor:
            with torch.no_grad():
                return log_prob(value, *leaves)

        def forward_backward() -> tuple[Tensor, ...]:
            result = log_prob(value, *leaves)
            return result.detach(), *torch.autograd.grad(result.sum(), leaves)

        return Prepared(forward, forward_backward, lambda result: result)

    return ready


class _Backend(Contestant):
    """This package with one of its GPU backends."""

    tolerance = 1e-5

    def __init__(self, backend: str) -> None:
        self.name, self.backend = f"lrd {backend}", backend

    def log_prob(self, value: Tensor, loc: Tensor, cov_factor: Tensor, cov_diag: Tensor) -> Tensor:
        return lrd.log_prob(value, loc, cov_factor, cov_diag, backend=self.backend, on_failure="nan")


def contestant(method: str) -> Contestant:
    return _Backend(method.removeprefix("lrd ")) if method.startswith("lrd ") else CONTESTANTS[method]


def _diagonal(S: int, device: str) -> tuple[Callable[..., Tensor], Tensor]:
    def log_prob(value: Tensor, loc: Tensor, variance: Tensor) -> Tensor:
        return torch.distributions.Normal(loc, variance.sqrt(), validate_args=False).log_prob(value).sum(-1)

    generator = torch.Generator(device).manual_seed(1)
    return log_prob, torch.rand(1, S, generator=generator, device=device).add_(0.2)


def _triangular(S: int, device: str) -> tuple[Callable[..., Tensor], Tensor]:
    def log_prob(value: Tensor, loc: Tensor, tril: Tensor) -> Tensor:
        return torch.distributions.MultivariateNormal(loc, scale_tril=tril, validate_args=False).log_prob(value)

    return log_prob, _full(S, device).tril_()


def _naive(S: int, device: str) -> tuple[Callable[..., Tensor], Tensor]:
    def log_prob(value: Tensor, loc: Tensor, covariance: Tensor) -> Tensor:
        model = torch.distributions.MultivariateNormal(loc, covariance_matrix=covariance, validate_args=False)
        return model.log_prob(value)

    return log_prob, _full(S, device)


def _full(S: int, device: str) -> Tensor:
    """A symmetric covariance with eigenvalues near 1 and 2: [1, S, S]."""
    matrix = torch.full((1, S, S), 1.0 / S, device=device)
    matrix.diagonal(dim1=-2, dim2=-1).add_(1.0)
    return matrix
