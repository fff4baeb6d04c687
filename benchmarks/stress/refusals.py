"""Invalid numbers: each must raise the right error, or give NaN without gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import lrd_kernels as lrd
from benchmarks.stress import inputs
from benchmarks.stress.inputs import Draw
from benchmarks.stress.items import Error
from lrd_kernels.testing import Inputs


def break_diag(x: Inputs, g: Draw) -> type[Exception]:
    """a diagonal entry zero, negative or not finite"""
    x.cov_diag[..., g.index(x.cov_diag.shape[-1])] = g.pick((0.0, -1.0, -1e-38, torch.nan, torch.inf, -torch.inf))
    return lrd.NotPositiveDefiniteError


def break_factor(x: Inputs, g: Draw) -> type[Exception]:
    """an entry of the factor not finite"""
    S, R = x.cov_factor.shape[-2:]
    x.cov_factor[..., g.index(S), g.index(R)] = g.pick((torch.nan, torch.inf, -torch.inf))
    return lrd.NotPositiveDefiniteError


def break_value(x: Inputs, g: Draw) -> type[Exception]:
    """an entry of the value not finite"""
    x.value[..., g.index(x.value.shape[-1])] = g.pick((torch.nan, torch.inf))
    return ValueError


BREAKS = (break_diag, break_factor, break_value)
CALLS: dict[str, Callable[..., Tensor]] = {
    "log_prob": lrd.log_prob,
    "mahalanobis": lambda y, mu, P, D, **o: lrd.mahalanobis(y, P, D, **o),
    "logdet": lambda y, mu, P, D, **o: lrd.logdet(P, D, **o),
    "entropy": lambda y, mu, P, D, **o: lrd.entropy(P, D, **o),
    "solve": lambda y, mu, P, D, **o: lrd.solve(y, P, D, **o),
}


def refusals(g: Draw) -> Iterator[Error]:
    S, R = g.sizes()
    x = inputs.covariances(g, S=S, R=max(R, 1))
    x = Inputs(*(t.clone() for t in x))
    name, change = g.pick(tuple(CALLS)), g.pick(BREAKS)
    if name in ("logdet", "entropy") and change is break_value:
        change = break_diag
    g.family, wanted = change.__name__, change(x, g)
    call, dtype = CALLS[name], x.cov_diag.dtype
    try:
        got: object = call(*x)
    except wanted as error:
        got = error
    except Exception as error:
        yield Error("", dtype, float("inf"), f"{name}: {type(error).__name__} {error} instead of {wanted.__name__}")
        return
    if not isinstance(got, Exception):
        yield Error("", dtype, float("inf"), f"{name}: {got} instead of {wanted.__name__}")
        return
    leaves = [t.detach().requires_grad_() for t in x]
    quiet = call(*leaves, on_failure="nan")
    if not bool(quiet.isnan().all()):
        yield Error("", dtype, float("inf"), f'{name}: on_failure="nan" gave {quiet}')
    if name != "solve":  # scalars promise zero gradients
        grads = torch.autograd.grad(quiet.sum(), leaves, allow_unused=True)
        clean = all(grad is None or not grad.any() for grad in grads)
        yield Error("", dtype, 0.0 if clean else float("inf"), f'{name}: on_failure="nan" gave a gradient')


CHECKS = (refusals,)
