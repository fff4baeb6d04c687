"""One Gaussian whose outputs are divided among the processes of a `torch.distributed` group.

Every process holds the rows of some outputs: its tiles of a large image, for example. It passes them in the shapes of
the functions of the same names in `lrd_kernels`, with its own number of outputs as S, which may be 0. R, the batch
dimensions and the dtype must be the same on all processes. Each process reads its rows once, and one all-reduce of
`R (R + 1) / 2 + R + 3` numbers joins them, whatever the number of outputs.

All processes of the group must call the same functions in the same order. Results that belong to the whole, such as
log p, are the same on all of them, and their gradients are those for the own rows; results with one entry per output
are those of the own outputs. Use the result once: a loss that is the same on all processes needs no further reduction.

The examples are those of a group with one process.

Invalid numbers on one process raise an error on all. If a process dies, the others get an error of the backend of the
group, at the latest after its timeout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lrd_kernels import _validate, sampling
from lrd_kernels._policy import LOG_2PI, PRECISIONS
from lrd_kernels.autograd.forward import Terms
from lrd_kernels.autograd.members import Members, SumOfAll
from lrd_kernels.autograd.split import SplitSolve, SplitTerms
from lrd_kernels.diagnostics import sortable, weyl_bounds
from lrd_kernels.functional import Options, floor_of
from lrd_kernels.joint import columns_of
from lrd_kernels.linalg import capacitance, products
from lrd_kernels.linalg.stack import Stack
from lrd_kernels.ops import dispatch
from lrd_kernels.ops.views import BatchViews, is_rank_major

__all__ = [
    "Shard",
    "condition_bounds",
    "entropy",
    "joint",
    "log_prob",
    "logdet",
    "mahalanobis",
    "matvec",
    "nll_loss",
    "rsample",
    "solve",
    "truncate",
]


class Shard(NamedTuple):
    """The rows of a Gaussian that belong to this process, the result of `joint`.

    Attributes:
        loc: [..., S]
        cov_factor: [..., S, R]
        cov_diag: [..., S]

    Examples:
        >>> list(lrd.distributed.Shard._fields)
        ['loc', 'cov_factor', 'cov_diag']
    """

    loc: Tensor
    cov_factor: Tensor
    cov_diag: Tensor


def log_prob(
    value: Tensor,
    loc: Tensor,
    cov_factor: Tensor,
    cov_diag: Tensor,
    *,
    mask: Tensor | None = None,
    precision: str = "auto",
    on_failure: str = "raise",
    backend: str | None = None,
    group: Any = None,
) -> Tensor:
    """Log-density of a value whose outputs are divided among processes: shape [...], the same on all of them.

    Args:
        value: the rows of this process, as those of loc, cov_factor and cov_diag; see `lrd.log_prob`.
        mask: the rows of this process.
        precision: "auto" computes products in float64, and uses QR for covariances that are too ill-conditioned for a
            Cholesky factorisation; then there are values, but no gradients. The others are as in `lrd.log_prob`.
        on_failure: "raise" raises on every process if one has invalid numbers; "nan" gives NaN for those batch items.
        backend: a name from `lrd.backends()`, or None for the best one. There is no reference for divided outputs.
        group: a group of `torch.distributed`; None for all processes.

    Raises:
        RuntimeError: if `torch.distributed` is not initialised, or if a covariance is too ill-conditioned for
            gradients.

    Other errors are those of `lrd.log_prob`.

    Examples:
        >>> loc, P, D = torch.zeros(3), torch.tensor([[1.0], [1.0], [0.0]]), torch.ones(3)
        >>> lrd.distributed.log_prob(torch.zeros(3), loc, P, D)
        tensor(-3.3061)
    """
    options = Options(mask, precision, on_failure, backend)
    vectors = {"value": value, "loc": loc}
    return _terms(vectors, cov_factor, cov_diag, options, group, maha=-0.5, logdet=-0.5, per_output=-0.5 * LOG_2PI)[0]


def mahalanobis(
    diff: Tensor,
    cov_factor: Tensor,
    cov_diag: Tensor,
    *,
    mask: Tensor | None = None,
    precision: str = "auto",
    on_failure: str = "raise",
    backend: str | None = None,
    group: Any = None,
) -> Tensor:
    """The squared Mahalanobis distance of `diff` [..., S]: shape [...], the same on all processes. See `log_prob`.

    Examples:
        >>> lrd.distributed.mahalanobis(torch.ones(3), torch.tensor([[1.0], [1.0], [0.0]]), torch.ones(3))
        tensor(1.6667)
    """
    options = Options(mask, precision, on_failure, backend)
    return _terms({"diff": diff}, cov_factor, cov_diag, options, group, maha=1.0, logdet=0.0)[0]


def logdet(
    cov_factor: Tensor,
    cov_diag: Tensor,
    *,
    mask: Tensor | None = None,
    precision: str = "auto",
    on_failure: str = "raise",
    backend: str | None = None,
    group: Any = None,
) -> Tensor:
    """The log-determinant of the whole covariance: shape [...], the same on all processes. See `log_prob`.

    Examples:
        >>> lrd.distributed.logdet(torch.tensor([[1.0], [1.0], [0.0]]), torch.ones(3))
        tensor(1.0986)
    """
    options = Options(mask, precision, on_failure, backend)
    return _terms({}, cov_factor, cov_diag, options, group, maha=0.0, logdet=1.0)[0]


def entropy(
    cov_factor: Tensor,
    cov_diag: Tensor,
    *,
    mask: Tensor | None = None,
    precision: str = "auto",
    on_failure: str = "raise",
    backend: str | None = None,
    group: Any = None,
) -> Tensor:
    """The differential entropy of the whole in nats: shape [...], the same on all processes. See `log_prob`.

    Examples:
        >>> lrd.distributed.entropy(torch.tensor([[1.0], [1.0], [0.0]]), torch.ones(3))
        tensor(4.8061)
    """
    options = Options(mask, precision, on_failure, backend)
    return _terms({}, cov_factor, cov_diag, options, group, maha=0.0, logdet=0.5, per_output=0.5 * (1 + LOG_2PI))[0]


def nll_loss(
    mean: Tensor,
    raw_diag: Tensor,
    cov_factor: Tensor,
    target: Tensor,
    *,
    eps: float = 0.01,
    eps_std: float | None = None,
    mask: Tensor | None = None,
    reduction: str = "mean",
    precision: str = "auto",
    on_failure: str = "raise",
    backend: str | None = None,
    group: Any = None,
) -> Tensor:
    """The training loss of `lrd.nll_loss` for a target whose outputs are divided among processes, such as an image of
    which every process predicts a tile.

    The loss is per (unmasked) output of the whole, and the same on all processes. Each gets the gradients for its own
    rows. Parameters that the processes share need the sum of their gradients over the group.

    Examples:
        >>> mean, raw_diag, columns = torch.zeros(8, 100), torch.zeros(8, 100), torch.ones(8, 4, 100)
        >>> lrd.distributed.nll_loss(mean, raw_diag, columns.mT, torch.zeros(8, 100), eps=0.01)
        tensor(0.9538)
    """
    _validate.option("reduction", reduction, _validate.REDUCTIONS)
    options = Options(mask, precision, on_failure, backend, floor_of(eps, eps_std))
    vectors = {"target": target, "mean": mean}
    result, outputs = _terms(
        vectors, cov_factor, raw_diag, options, group, maha=0.5, logdet=0.5, per_output=0.5 * LOG_2PI
    )
    result = result / outputs.clamp(min=1).to(result.dtype)
    if reduction == "none":
        return result
    return result.mean() if reduction == "mean" else result.sum()


def solve(
    rhs: Tensor,
    cov_factor: Tensor,
    cov_diag: Tensor,
    *,
    on_failure: str = "raise",
    backend: str | None = None,
    group: Any = None,
) -> Tensor:
    """The own rows of `Sigma^-1 rhs`, for vectors whose outputs are divided like those of the covariance: [..., S].

    Its backward pass takes one all-reduce, too, in which all processes must take part. See `log_prob`.

    Examples:
        >>> lrd.distributed.solve(torch.ones(3), torch.tensor([[1.0], [1.0], [0.0]]), torch.ones(3))
        tensor([0.3333, 0.3333, 1.0000])
    """
    _validate.gaussian(cov_factor, cov_diag, rhs=rhs)
    _validate.option("on_failure", on_failure, _validate.ON_FAILURE)
    terms = Terms(1.0, 0.0, backend=dispatch.choose(backend, cov_factor.device))
    members = Members(group)
    wide = torch.float64 if rhs.dtype == torch.float64 else torch.float32
    result = SplitSolve.apply(*(t.to(wide) for t in (rhs, cov_factor, cov_diag)), terms, members.join).to(rhs.dtype)
    if on_failure == "raise":
        # A number that is invalid anywhere makes all rows of its batch item NaN: their sum shows it everywhere.
        _check_all(members.sum(result.detach().double().sum()), cov_factor, cov_diag, None, None, rhs=rhs)
    return result


def matvec(vec: Tensor, cov_factor: Tensor, cov_diag: Tensor, *, group: Any = None) -> Tensor:
    """The own rows of `Sigma vec`, for vectors whose outputs are divided like those of the covariance: [..., S].

    Examples:
        >>> lrd.distributed.matvec(torch.ones(3), torch.tensor([[1.0], [1.0], [0.0]]), torch.ones(3))
        tensor([3., 3., 1.])
    """
    _validate.gaussian(cov_factor, cov_diag, vec=vec)
    views = BatchViews(cov_factor, cov_diag, None, (vec,))
    P = views.factor(cov_factor)
    along = SumOfAll.apply(products.project(P, views.rows(vec)), Members(group).sum)
    return (cov_diag.double() * vec + views.from_rows(products.lift(P, along))).to(vec.dtype)


def rsample(
    loc: Tensor,
    cov_factor: Tensor,
    cov_diag: Tensor,
    sample_shape: Sequence[int] = (),
    *,
    generator: torch.Generator | None = None,
    mask: Tensor | None = None,
    group: Any = None,
) -> Tensor:
    """The own rows of reparameterised samples of the whole: `[*sample_shape, ..., S]`.

    The noise of the columns, which all outputs share, is that of the first process of the group. The noise of the
    outputs is each process's own: their generators must have different seeds.

    Examples:
        >>> lrd.distributed.rsample(torch.zeros(100), torch.ones(100, 4), torch.ones(100), (7,)).shape
        torch.Size([7, 100])
    """
    _validate.gaussian(cov_factor, cov_diag, loc=loc)
    batch = torch.broadcast_shapes(loc.shape[:-1], cov_factor.shape[:-2], cov_diag.shape[:-1])
    of_columns, of_outputs = (
        torch.randn(*sample_shape, *batch, size, dtype=loc.dtype, device=loc.device, generator=generator)
        for size in (cov_factor.shape[-1], cov_factor.shape[-2])
    )
    noise = Members(group).first(of_columns), of_outputs
    return sampling.rsample(loc, cov_factor, cov_diag, sample_shape, noise=noise, mask=mask)


@torch.no_grad()
def truncate(
    cov_factor: Tensor,
    cov_diag: Tensor,
    rank: int | None = None,
    *,
    fold: bool = True,
    backend: str | None = None,
    group: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The own rows of the best low-rank part with fewer columns, as `lrd.truncate`: factor, diagonal, singular values.

    The columns come from the Gram matrix of the whole: singular values below about 1e-7 of the largest are rounding.
    There are no gradients: tensors that require them are refused.

    Raises:
        ValueError: if a tensor requires gradients, or as `lrd.truncate`.

    Examples:
        >>> factor, diag, values = lrd.distributed.truncate(torch.ones(100, 4), torch.ones(100), 1)
        >>> factor.shape, values
        (torch.Size([100, 1]), tensor([20.0000], dtype=torch.float64))
    """
    _validate.gaussian(cov_factor, cov_diag)
    _refuse_gradients(cov_factor=cov_factor, cov_diag=cov_diag)
    R = cov_factor.shape[-1]
    kept = R if rank is None else min(_validate.rank(rank), R)
    shape = torch.broadcast_shapes(cov_factor.shape[:-2], cov_diag.shape[:-1])
    factor, diag = cov_factor.expand(*shape, *cov_factor.shape[-2:]), cov_diag.expand(*shape, cov_diag.shape[-1])
    members, columns = Members(group), Stack.of(diag, factor[None], None)
    values, basis = members.eigenvectors(columns.gram(backend=backend))
    basis = basis[..., :kept].contiguous()
    projected, folded = columns.project_fold(
        diag, basis, fold and kept < R, rank_major=is_rank_major(factor), backend=backend
    )
    return projected, folded, values[..., :kept].clamp(min=0).sqrt()


@torch.no_grad()
def joint(
    means: Tensor,
    cov_factors: Tensor | None,
    cov_diags: Tensor | None,
    *,
    rank: int | None = None,
    group: Any = None,
) -> Shard:
    """The own rows of the joint Gaussian of T predictions, as `lrd.joint`: mean, factor and diagonal.

    With a rank, the leading columns are those of the whole. Without, nothing is communicated. There are no gradients:
    tensors that require them are refused. Score the result with `log_prob` of this module.

    Raises:
        ValueError: if a tensor requires gradients, or as `lrd.joint`.

    Examples:
        >>> means, P, D = torch.randn(16, 100), torch.randn(16, 100, 3), torch.ones(16, 100)
        >>> lrd.distributed.joint(means, P, D, rank=8).cov_factor.shape
        torch.Size([100, 8])
    """
    _refuse_gradients(means=means, cov_factors=cov_factors, cov_diags=cov_diags)
    mean, diag, columns = columns_of(means, cov_factors, cov_diags)
    if rank is None:
        return Shard(mean, columns.dense(), diag)
    basis = Members(group).eigenvectors(columns.gram())[1][..., : _validate.rank(rank)].contiguous()
    fold = basis.shape[-1] < columns.columns
    return Shard(mean, *columns.project_fold(diag, basis, fold, rank_major=columns.rank_major))


@torch.no_grad()
def condition_bounds(
    cov_factor: Tensor, cov_diag: Tensor, *, mask: Tensor | None = None, group: Any = None
) -> tuple[Tensor, Tensor]:
    """Bounds on the condition number of the whole covariance, as `lrd.condition_bounds`: [...] on all processes.

    Examples:
        >>> lower, upper = lrd.distributed.condition_bounds(torch.ones(3, 1), torch.ones(3))
        >>> lower, upper
        (tensor(4., dtype=torch.float64), tensor(4., dtype=torch.float64))
    """
    _validate.gaussian(cov_factor, cov_diag, mask)
    members, R, S = Members(group), cov_factor.shape[-1], cov_diag.shape[-1]
    gram = members.sum(capacitance.gram(cov_factor, None, mask))
    spectrum = capacitance.eigenvectors(gram)[0].clamp(min=0).flip(-1)
    ascending, descending = (sortable(cov_diag, mask, absent) for absent in (torch.inf, -torch.inf))
    # Of each process its R + 1 smallest entries and its largest one, padded where it has fewer.
    pad = ascending.new_full((*ascending.shape[:-1], R + 1), torch.inf)
    smallest = torch.cat([ascending, pad], -1).sort(-1).values[..., : R + 1]
    largest = torch.cat([descending, -pad[..., :1]], -1).amax(-1, keepdim=True)
    ends = torch.cat(members.all(torch.cat([smallest, largest], -1)[None]))
    smallest, largest = ends[..., :-1].movedim(0, -2).flatten(-2).sort(-1).values, ends[..., -1].movedim(0, -1)
    total = int(members.sum(torch.tensor([S], dtype=torch.float64, device=cov_diag.device)))
    lower, upper = weyl_bounds(spectrum, smallest[..., :total], largest)
    shape = torch.broadcast_shapes(lower.shape, cov_factor.shape[:-2])
    return lower.expand(shape), upper.expand(shape)


def _terms(
    vectors: dict[str, Tensor], cov_factor: Tensor, cov_diag: Tensor, options: Options, group: Any, **weights: float
) -> tuple[Tensor, Tensor]:
    """`maha * M + logdet * log det Sigma + per_output * outputs` and the number of outputs, both of the whole."""
    mask, precision, on_failure, backend, eps = options
    _validate.gaussian(cov_factor, cov_diag, mask, diag_name="cov_diag" if eps is None else "raw_diag", **vectors)
    _validate.options(precision, on_failure)
    chosen = dispatch.choose(backend, cov_factor.device)
    terms = Terms(**weights, eps=eps, precision=PRECISIONS[precision], backend=chosen)
    value, loc = (*vectors.values(), None, None)[:2]
    tensors = (value, loc, cov_factor, cov_diag)
    differentiable = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    result, outputs = SplitTerms.apply(*tensors, mask, terms, Members(group).join, differentiable)
    if on_failure == "raise":
        _check_all(result.detach(), cov_factor, cov_diag, mask, eps, **vectors)
    return result, outputs


def _check_all(
    result: Tensor, cov_factor: Tensor, cov_diag: Tensor, mask: Tensor | None, eps: float | None, **vectors: Tensor
) -> None:
    """Raises on every process if a result is invalid; the one with the invalid number names it."""
    try:
        _validate.check_result(result, cov_factor, cov_diag, mask, eps, **vectors)
    except _validate.NotPositiveDefiniteError as error:
        if error.index is not None:
            raise
        raise _validate.NotPositiveDefiniteError(
            "the numbers of this process are valid: those of another process of the group are not, or products exceed"
            " the range of float64",
            None,
            error.smallest_diag,
            error.condition,
        ) from None


def _refuse_gradients(**tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            raise ValueError(f"there are no gradients over several processes here: detach {name}")
