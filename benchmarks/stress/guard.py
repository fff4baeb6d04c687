"""Every function with its tensors against pages that cannot be touched: a read beyond an end ends the process.

Inputs are placed by `guarded`. With the library of `fence` preloaded, so are outputs and temporary tensors: writes
beyond an end and uses of freed memory end the process too.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

import lrd_kernels as lrd
from benchmarks.stress import inputs
from benchmarks.stress.inputs import Draw
from benchmarks.stress.items import Error
from lrd_kernels import testing
from lrd_kernels.testing import Inputs

PAGE = mmap.PAGESIZE
Results = Sequence[Tensor]


def guarded(tensor: Tensor, at_end: bool) -> Tensor:
    """The same numbers and strides in memory that ends right before a page that cannot be touched, or begins right
    after one."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    span = sum((n - 1) * stride for n, stride in sizes) + 1 if tensor.numel() else 0
    length = max(span, 1) * tensor.itemsize
    inner = math.ceil(length / PAGE) * PAGE
    region = mmap.mmap(-1, inner + 2 * PAGE)
    begin = PAGE + inner - length if at_end else PAGE
    made = torch.frombuffer(memoryview(region)[begin : begin + length], dtype=tensor.dtype)
    made.fill_(True if tensor.dtype == torch.bool else torch.nan)
    address = made.data_ptr() - begin
    for page in (address, address + PAGE + inner):
        if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), 0):
            raise OSError(ctypes.get_errno(), "mprotect failed")
    placed = made.as_strided(tensor.shape, tensor.stride())
    if tensor.numel():
        placed.copy_(tensor)
    return placed


def fence(folder: Path) -> Path | None:
    """Compiles the library to preload into a folder; None without a C compiler."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    made = folder / "fence.so"
    source = Path(__file__).with_name("fence.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(made), str(source)], check=True)
    return made


def _scalar(name: str, options: dict | None = None) -> Callable[[Inputs, Tensor | None], Results]:
    def call(x: Inputs, mask: Tensor | None) -> Results:
        used = {"log_prob": x, "mahalanobis": (x.value, *x[2:])}.get(name, x[2:])
        if name == "nll_loss":
            used = (x.loc, x.cov_diag, x.cov_factor, x.value)
        return testing.value_and_grads(lambda *a: getattr(lrd, name)(*a, mask=mask, **(options or {})), used)

    return call


def _solve(x: Inputs, mask: Tensor | None) -> Results:
    return testing.value_and_grads(lambda *a: lrd.solve(*a).sum(-1), (x.value, *x[2:]))


def _truncate(x: Inputs, mask: Tensor | None) -> Results:
    rank = x.cov_factor.shape[-1] // 2
    kept = testing.value_and_grads(lambda *a: sum(t.double().sum() for t in lrd.truncate(*a, rank)), x[2:])
    return (*kept, *lrd.truncate(*x[2:]), *lrd.truncate(*x[2:], rank, fold=False))


def _joint(x: Inputs, mask: Tensor | None) -> Results:
    """The batch dimension of the case is that of the predictions."""
    means, P, D = x.loc[:, None], x.cov_factor[:, None], x.cov_diag[:, None]
    found = [lrd.joint(means, P, D, rank=rank) for rank in (None, 2)]
    accumulator = lrd.JointAccumulator(2, 1)
    for item in zip(means, P, D, strict=True):
        accumulator.update(*item)
    found.append(accumulator.finalize())
    mixture = lrd.mixture_log_prob(x.value[0], x.loc, x.cov_factor, x.cov_diag)
    return (mixture, *(t for d in found for t in (d.loc, d.cov_factor, d.cov_diag)))


def _methods(x: Inputs, mask: Tensor | None) -> Results:
    d = lrd.LowRankMultivariateNormal(x.loc, x.cov_factor, x.cov_diag)
    S = x.loc.shape[-1]
    condition, marginal = d.condition(slice(0, S // 2), x.value[..., : S // 2]), d.marginal(slice(0, None, 2))
    parts = [t for other in (condition, marginal) for t in (other.loc, other.cov_factor, other.cov_diag)]
    aggregated = d.aggregate(x.value.reshape(-1, S))
    kl = torch.distributions.kl_divergence(d, lrd.LowRankMultivariateNormal(x.value, x.cov_factor, x.cov_diag + 1))
    return (*parts, *aggregated, d.correlation(0), d.whiten(x.value), d.unwhiten(x.value), kl, d.precision_matrix)


def _products(x: Inputs, mask: Tensor | None) -> Results:
    noise = tuple(torch.ones(*x.loc.shape[:-1], n, dtype=x.loc.dtype) for n in reversed(x.cov_factor.shape[-2:]))
    return lrd.matvec(x.value, *x[2:]), lrd.rsample(*x[1:], noise=noise), lrd.capacitance_cholesky(*x[2:], mask=mask)[0]


def _diagnostics(x: Inputs, mask: Tensor | None) -> Results:
    conditions = (*lrd.condition_bounds(*x[2:], mask=mask), lrd.capacitance_condition(*x[2:], mask=mask))
    return (*conditions, lrd.diagnose(*x[2:]).largest_leverage, lrd.extreme_eigenvalues(*x[2:]).smallest)


CALLS: dict[str, Callable[[Inputs, Tensor | None], Results]] = {
    **{name: _scalar(name) for name in ("log_prob", "mahalanobis", "logdet", "entropy", "nll_loss")},
    **{f"log_prob, {p}": _scalar("log_prob", {"precision": p}) for p in ("float32", "qr")},
    **{"solve": _solve, "truncate": _truncate, "joint": _joint, "methods": _methods},
    **{"products": _products, "diagnostics": _diagnostics},
}


def draw(g: Draw) -> tuple[Inputs, Tensor | None]:
    """Well-conditioned inputs of sizes around the widths of vectors and blocks, with a batch of 1 to 3.

    Whole vectors, the last of which may be loaded beyond the end, are as likely as all other sizes together.
    """
    dtype, layout = g.pick(testing.DTYPES), g.pick(testing.LAYOUTS)
    S = g.pick((1, 2, 3, 7, 9, 15, 17, 31, 33, 63, 65, 127, 129, 255, 257, 1023, 1025, 2049))
    S = g.pick((8, 16, 32, 64, 128, 256, 1024)) if g.chance(2) else S
    R = g.pick((1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 35, 65) if S > 200 else (1, 2, 3, 5, 8, 9, 17))
    x = testing.make_inputs((1 + g.index(3),), S, R, dtype=dtype, layout=layout, seed=g.number)
    mask = None
    if g.chance(3):
        mask = torch.rand(S, generator=g.generator) < 0.7
        mask[0] = True
    inputs.note_size(g, x.cov_factor, x.cov_diag)
    return x, mask


def guard_pages(g: Draw) -> Iterator[Error]:
    """The results are those of the same numbers elsewhere."""
    x, mask = draw(g)
    name, at_end = g.pick(tuple(CALLS)), bool(g.index(2))
    S, R = x.cov_factor.shape[-2:]
    if name in ("methods", "diagnostics") and S > 300:
        name = "log_prob"
    g.family = f"{name}, S = {S}, R = {R}, {'end' if at_end else 'begin'}"
    wanted = CALLS[name](x, mask)
    placed = Inputs(*(guarded(t, at_end) for t in x))
    found = CALLS[name](placed, None if mask is None else guarded(mask, at_end))
    # The last bits of torch's own products depend on where its tensors lie.
    pairs = list(zip(found, wanted, strict=True))
    limits = [16 * torch.finfo(b.dtype).eps if b.is_floating_point() else 0.0 for _, b in pairs]
    same = all(
        bool(a.isfinite().all()) and testing.relative_error(a, b) <= limit
        for (a, b), limit in zip(pairs, limits, strict=True)
    )
    yield Error("", x.loc.dtype, 0.0 if same else float("inf"), "other numbers than elsewhere")


CHECKS = (guard_pages,)
