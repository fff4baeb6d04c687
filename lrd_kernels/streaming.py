"""One Gaussian that is read in blocks of rows, for factors that do not fit into memory.

`chunks` is an iterable of blocks, each the tensors of some outputs, in the shapes of the functions of the same names in
`lrd_kernels`, with its own number of outputs as S. R, the batch dimensions and the dtype must be those of the first
block. Where blocks are read more than once, `chunks` must be an object that can be iterated again, such as a list, a
DataLoader, or a class whose `__iter__` reads a memory-mapped file; a generator is refused. One block is held at a time.

The results are the same as those for all rows at once, to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from lrd_kernels import _validate, reference
from lrd_kernels._policy import LOG_2PI, PRECISIONS
from lrd_kernels.autograd.forward import Arguments, Terms
from lrd_kernels.autograd.log_prob import gradients_of
from lrd_kernels.autograd.split import Part, Root, Sums, Whole, refuse_qr, result_of, saved_of, whole_of
from lrd_kernels.joint import columns_of
from lrd_kernels.linalg import capacitance
from lrd_kernels.linalg.stack import Stack
from lrd_kernels.ops import dispatch
from lrd_kernels.ops.views import is_rank_major

__all__ = ["Gradients", "Rows", "gradients", "joint", "log_prob", "truncate"]

Block = Sequence[Tensor | None]


class Gradients(NamedTuple):
    """The gradients of the log-density for one block, from `gradients`.

    Attributes:
        value: [..., S]
        loc: [..., S]
        cov_factor: [..., S, R]
        cov_diag: [..., S]

    Examples:
        >>> list(lrd.streaming.Gradients._fields)
        ['value', 'loc', 'cov_factor', 'cov_diag']
    """

    value: Tensor
    loc: Tensor
    cov_factor: Tensor
    cov_diag: Tensor


class Rows(NamedTuple):
    """A Gaussian that is computed block by block, the result of `truncate` and `joint`.

    Attributes:
        blocks: an iterator over the blocks of the result, which reads the chunks once more as it goes.
        singular_values: [..., k], those of the columns kept; None if all columns of a joint Gaussian are kept.

    Examples:
        >>> list(lrd.streaming.Rows._fields)
        ['blocks', 'singular_values']
    """

    blocks: Iterator[tuple[Tensor, ...]]
    singular_values: Tensor | None


@torch.no_grad()
def log_prob(
    chunks: Iterable[Block], *, precision: str = "auto", on_failure: str = "raise", backend: str | None = None
) -> Tensor:
    """Log-density of a value, from blocks (value, loc, cov_factor, cov_diag) or (..., mask): shape [...].

    Blocks are read once; a second time if r^T D^-1 r is 1e5 times the Mahalanobis term and more, or if the covariance
    is so ill-conditioned that QR takes over. There are no gradients: see `gradients`.

    Args:
        chunks: the blocks, see above.
        precision: "auto" computes products in float64. The other options are those of `lrd.log_prob`.

    Raises:
        ValueError: if there are no blocks, or if blocks do not fit together.
        TypeError: if `chunks` cannot be read again, but has to be.

    Other errors are those of `lrd.log_prob`.

    Examples:
        >>> value, loc, P, D = torch.zeros(100), torch.zeros(100), torch.ones(100, 4), torch.ones(100)
        >>> blocks = [[tensor[rows] for tensor in (value, loc, P, D)] for rows in (slice(0, 64), slice(64, 100))]
        >>> lrd.streaming.log_prob(blocks), lrd.log_prob(value, loc, P, D)
        (tensor(-94.8908), tensor(-94.8908))
    """
    read = _Read(chunks, precision, on_failure, backend)
    return result_of(read.whole, read.terms, read.dtype)


@torch.no_grad()
def gradients(
    chunks: Iterable[Block],
    grad: Tensor | float = 1.0,
    *,
    precision: str = "auto",
    on_failure: str = "raise",
    backend: str | None = None,
) -> Iterator[Gradients]:
    """The gradients of the log-density for every block, in order: a second pass, one block at a time.

    Args:
        chunks: the blocks of `log_prob`, which are read twice.
        grad: gradient of a loss for the log-density, [...].

    Raises:
        RuntimeError: if the covariance is too ill-conditioned for gradients from several blocks.

    Other errors are those of `log_prob`.

    Examples:
        >>> value, loc, P, D = torch.ones(100), torch.zeros(100), torch.ones(100, 4), torch.ones(100)
        >>> blocks = [[tensor[rows] for tensor in (value, loc, P, D)] for rows in (slice(0, 64), slice(64, 100))]
        >>> [found.cov_factor.shape for found in lrd.streaming.gradients(blocks)]
        [torch.Size([64, 4]), torch.Size([36, 4])]
    """
    _refuse_generator(chunks, "gradients")
    read = _Read(chunks, precision, on_failure, backend)
    refuse_qr(read.whole, "gradients")
    return _gradients(read, torch.as_tensor(grad))


def _gradients(read: _Read, grad: Tensor) -> Iterator[Gradients]:
    grad = grad.to(reference.result_dtype(read.dtype)).expand(read.shape)
    saved, needs = saved_of(read.whole), (True, True, True, True)
    for arguments in read.blocks():
        given = (grad, *arguments, *saved, read.terms, needs)
        with torch.no_grad():
            found = gradients_of(*given)
        yield Gradients(*found)  # type: ignore[arg-type]


@torch.no_grad()
def truncate(
    chunks: Iterable[Block], rank: int | None = None, *, fold: bool = True, backend: str | None = None
) -> Rows:
    """The best low-rank part with fewer columns, from blocks (cov_factor, cov_diag), as `lrd.truncate`.

    Yields blocks (cov_factor, cov_diag) in order. The columns come from the Gram matrix of the whole: singular values
    below about 1e-7 of the largest are rounding.

    Raises:
        ValueError: if there are no blocks, or if blocks do not fit together; or as `lrd.truncate`.
        TypeError: if `chunks` cannot be read again.

    Examples:
        >>> P, D = torch.ones(100, 4), torch.ones(100)
        >>> blocks = [(P[rows], D[rows]) for rows in (slice(0, 64), slice(64, 100))]
        >>> found = lrd.streaming.truncate(blocks, 1)
        >>> found.singular_values, [factor.shape for factor, _ in found.blocks]
        (tensor([20.0000], dtype=torch.float64), [torch.Size([64, 1]), torch.Size([36, 1])])
    """
    _refuse_generator(chunks, "truncate")

    def columns(block: Block) -> tuple[Tensor, Stack]:
        factor, diag = _tensors(block, ("cov_factor", "cov_diag"))
        _validate.gaussian(factor, diag)
        shape = torch.broadcast_shapes(factor.shape[:-2], diag.shape[:-1])
        diag = diag.expand(*shape, diag.shape[-1])
        return diag, Stack.of(diag, factor.expand(*shape, *factor.shape[-2:])[None], None)

    gram = _total(columns(block)[1].gram(backend=backend) for block in chunks)
    R = gram.shape[-1]
    kept = R if rank is None else min(_validate.rank(rank), R)
    values, basis = capacitance.eigenvectors(gram)
    basis = basis[..., :kept].contiguous()

    def projected() -> Iterator[tuple[Tensor, ...]]:
        for block in chunks:
            with torch.no_grad():
                diag, stack = columns(block)
                yield stack.project_fold(
                    diag, basis, fold and kept < R, rank_major=is_rank_major(stack.factors), backend=backend
                )

    return Rows(projected(), values[..., :kept].clamp(min=0).sqrt())


@torch.no_grad()
def joint(chunks: Iterable[Block], *, rank: int | None = None) -> Rows:
    """The joint Gaussian of T predictions, from blocks (means, cov_factors, cov_diags), as `lrd.joint`.

    Yields blocks (loc, cov_factor, cov_diag) in order. `cov_factors` may be None. Without a rank all columns are kept,
    and the chunks are read once.

    Raises:
        ValueError: if there are no blocks, or if blocks do not fit together; or as `lrd.joint`.
        TypeError: if `chunks` cannot be read again, but has to be.

    Examples:
        >>> means, P, D = torch.randn(16, 100), torch.randn(16, 100, 3), torch.ones(16, 100)
        >>> blocks = [(means[:, rows], P[:, rows], D[:, rows]) for rows in (slice(0, 64), slice(64, 100))]
        >>> [factor.shape for _, factor, _ in lrd.streaming.joint(blocks, rank=8).blocks]
        [torch.Size([64, 8]), torch.Size([36, 8])]
    """
    if rank is None:
        return Rows(((mean, stack.dense(), diag) for mean, diag, stack in map(_columns_of, chunks)), None)
    _refuse_generator(chunks, "joint with a rank")
    kept = _validate.rank(rank)
    values, basis = capacitance.eigenvectors(_total(_columns_of(block)[2].gram() for block in chunks))
    basis = basis[..., :kept].contiguous()

    def projected() -> Iterator[tuple[Tensor, ...]]:
        for block in chunks:
            with torch.no_grad():
                mean, diag, stack = _columns_of(block)
                fold = basis.shape[-1] < stack.columns
                yield mean, *stack.project_fold(diag, basis, fold, rank_major=stack.rank_major)

    return Rows(projected(), values[..., :kept].clamp(min=0).sqrt())


class _Read:
    """All blocks together, and what was found in the first pass over them."""

    def __init__(self, chunks: Iterable[Block], precision: str, on_failure: str, backend: str | None) -> None:
        _validate.options(precision, on_failure)
        self._chunks, self._backend, self._passes = chunks, backend, 0
        self._precision = PRECISIONS[precision]
        self._first: Arguments | None = None
        self._terms: Terms | None = None
        sums = self.sums()
        assert self._first is not None
        self.whole: Whole = whole_of(self, self._first, self.terms, sums)
        self.dtype: torch.dtype = self._first.cov_factor.dtype
        result = result_of(self.whole, self.terms, torch.float64)
        self.shape: torch.Size = result.shape
        if on_failure == "raise" and dispatch.may_inspect(result) and bool(result.isnan().any()):
            self._explain()

    @property
    def terms(self) -> Terms:
        assert self._terms is not None
        return self._terms

    def blocks(self) -> Iterator[Arguments]:
        """The blocks in order, checked."""
        if self._passes:
            _refuse_generator(self._chunks, "this covariance")
        self._passes += 1
        for number, block in enumerate(self._chunks):
            value, loc, cov_factor, cov_diag, mask = _tensors(
                block, ("value", "loc", "cov_factor", "cov_diag"), ("mask",)
            )
            _validate.gaussian(cov_factor, cov_diag, mask, value=value, loc=loc)
            arguments = Arguments(value, loc, cov_factor, cov_diag, mask)
            if self._first is None:
                self._first = Arguments(*(None if t is None else torch.empty_like(t, device="meta") for t in arguments))  # type: ignore[arg-type]
                backend = dispatch.choose(self._backend, cov_factor.device)
                self._terms = Terms(-0.5, -0.5, -0.5 * LOG_2PI, precision=self._precision, backend=backend)
            _check_fit(arguments, self._first, number)
            yield arguments

    def sums(self) -> Sums:
        total = None
        for arguments in self.blocks():
            own = Part(arguments, self.terms).sums()
            total = own if total is None else total.plus(own)
        if total is None:
            raise ValueError("chunks has no blocks")
        return total

    def residual(self, z: Tensor) -> Tensor:
        return _total(Part(arguments, self.terms).residual(z) for arguments in self.blocks())

    def decomposed(self) -> list[Root]:
        return [Part(arguments, self.terms).decomposed() for arguments in self.blocks()]

    def _explain(self) -> NoReturn:
        """Raises an error that names the invalid number, and its block if it is found."""
        if not _is_generator(self._chunks):
            for number, (*vectors, cov_factor, cov_diag, mask) in enumerate(self.blocks()):
                value, loc = vectors
                try:
                    _validate.explain(cov_factor, cov_diag, mask, value=value, loc=loc)  # type: ignore[arg-type]
                except _validate.NotPositiveDefiniteError as error:
                    if error.index is not None:
                        message = f"block {number}: {error}"
                        raise _validate.NotPositiveDefiniteError(
                            message, error.index, error.smallest_diag, error.condition
                        ) from None
                except ValueError as error:
                    raise ValueError(f"block {number}: {error}") from None
        raise _validate.NotPositiveDefiniteError(
            "a number of a block is invalid, or products exceed the range of float64", None, math.nan, math.nan
        )


def _tensors(block: Block, names: Sequence[str], optional: Sequence[str] = ()) -> list[Any]:
    """The tensors of a block, with None for optional ones that are not there."""
    if not isinstance(block, (tuple, list)) or not len(names) <= len(block) <= len(names) + len(optional):
        got = f"{len(block)} entries" if isinstance(block, (tuple, list)) else type(block).__name__
        wanted = ", ".join(names) + "".join(f"[, {name}]" for name in optional)
        raise TypeError(f"every block of chunks must be ({wanted}); got {got}")
    return [*block, *(None,) * (len(names) + len(optional) - len(block))]


def _columns_of(block: Block) -> tuple[Tensor, Tensor, Stack]:
    return columns_of(*_tensors(block, ("means", "cov_factors", "cov_diags")))


def _check_fit(arguments: Arguments, first: Arguments, number: int) -> None:
    """Raises unless a block has the batch dimensions, rank and dtype of the first one."""
    for name, tensor, like in zip(Arguments._fields, arguments, first, strict=True):
        event = 1 if name == "cov_factor" else 0
        if (tensor is None) != (like is None):
            raise ValueError(f"block {number} has {'no ' if tensor is None else 'a '}{name}, unlike block 0")
        if tensor is None or like is None:
            continue
        shape, wanted = list(tensor.shape), list(like.shape)
        shape[-1 - event] = wanted[-1 - event] = 0  # the number of outputs
        if shape != wanted or tensor.dtype != like.dtype:
            raise ValueError(
                f"{name} of block {number} must have the batch dimensions, columns and dtype of block 0,"
                f" {tuple(like.shape)} in {like.dtype}; got {tuple(tensor.shape)} in {tensor.dtype}"
            )


def _total(parts: Iterable[Tensor]) -> Tensor:
    total = None
    for part in parts:
        if total is not None and part.shape != total.shape:
            raise ValueError("blocks must have the same batch dimensions and columns")
        total = part if total is None else total + part
    if total is None:
        raise ValueError("chunks has no blocks")
    return total


def _is_generator(chunks: Iterable[Block]) -> bool:
    return isinstance(chunks, Iterator)


def _refuse_generator(chunks: Iterable[Block], what: str) -> None:
    if _is_generator(chunks):
        raise TypeError(
            f"{what} needs to read the chunks more than once: pass a list, or an object whose __iter__ starts anew,"
            " instead of a generator"
        )
