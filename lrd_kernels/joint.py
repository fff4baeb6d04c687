"""Combines T sampled predictions into one Gaussian, by the law of total covariance.

For predictions `N(mu_t, diag(D_t) + P_t P_t^T)`, the mean and the diagonal are means over t, and the factor is

    P = [ P_1 .. P_T / sqrt(T)  |  (mu_1 - mu) .. (mu_T - mu) / sqrt(T - 1) ]

The left block is the aleatoric part, the uncertainty within each prediction. The right block is the epistemic part,
the differences between predictions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from lrd_kernels import _validate
from lrd_kernels._methods import covariance_of
from lrd_kernels.autograd.truncate import truncate
from lrd_kernels.distribution import LowRankMultivariateNormal
from lrd_kernels.linalg.stack import Stack, mean_of
from lrd_kernels.ops import dispatch
from lrd_kernels.ops.views import is_rank_major
from lrd_kernels.reference import result_dtype

__all__ = ["JointAccumulator", "JointNormal", "SemidefiniteNormal", "joint"]

Self = TypeVar("Self", bound="JointNormal")


class SemidefiniteNormal(LowRankMultivariateNormal):
    """A Gaussian whose covariance may be singular, such as that of T sampled means: `JointNormal.epistemic`.

        y ~ N(loc, diag(cov_diag) + cov_factor cov_factor^T),    cov_diag >= 0

    `loc` and `cov_diag` are [..., S], `cov_factor` is [..., S, R]. It has variances, modes and samples, but no density.

    Examples:
        >>> part = lrd.joint(torch.tensor([[0.0, 0.0], [2.0, 4.0]]), None, torch.ones(2, 2)).epistemic
        >>> part.variance
        tensor([2., 8.])
    """

    def log_prob(self, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Raises NotImplementedError: there is no density."""
        raise NotImplementedError(
            "this part has no density: the rank of its covariance is lower than the number of outputs, so almost every"
            " value has probability 0. Score the joint distribution or the aleatoric part instead"
        )

    def entropy(self) -> Tensor:
        """Raises NotImplementedError: there is no density."""
        raise NotImplementedError("this part has no density: its entropy is minus infinity")

    @property
    def _plain_type(self) -> type:
        return SemidefiniteNormal


class JointNormal(LowRankMultivariateNormal):
    """The joint predictive Gaussian with its two parts, the result of `joint` and of `JointAccumulator.finalize`.

        Sigma = Sigma_aleatoric + Sigma_epistemic

    It has all methods of `LowRankMultivariateNormal`. The sum is exact unless columns were dropped (`rank`); then it is
    exact for the variances.

    Args:
        loc: [..., S]
        cov_factor: [..., S, R]
        cov_diag: [..., S]
        parts: aleatoric and epistemic part, or None.

    Examples:
        >>> joint = lrd.joint(torch.tensor([[0.0, 0.0], [2.0, 4.0]]), None, torch.ones(2, 2))
        >>> joint.variance, joint.aleatoric.variance, joint.epistemic.variance
        (tensor([3., 9.]), tensor([1., 1.]), tensor([2., 8.]))
    """

    def __init__(
        self,
        loc: Tensor,
        cov_factor: Tensor,
        cov_diag: Tensor,
        parts: tuple[LowRankMultivariateNormal, SemidefiniteNormal] | None,
        validate_args: bool | None = None,
    ) -> None:
        super().__init__(loc, cov_factor, cov_diag, validate_args)
        self._parts = parts

    @property
    def aleatoric(self) -> LowRankMultivariateNormal:
        """The uncertainty within the predictions, around the common mean [..., S].

        Raises ValueError if the joint distribution was created with `parts=False`.
        """
        return self._both()[0]

    @property
    def epistemic(self) -> SemidefiniteNormal:
        """The differences between predictions, around the common mean [..., S]; no columns if there is one prediction.

        Raises ValueError if the joint distribution was created with `parts=False`.
        """
        return self._both()[1]

    def _both(self) -> tuple[LowRankMultivariateNormal, SemidefiniteNormal]:
        if self._parts is None:
            raise ValueError("this joint was created with parts=False: it has neither .aleatoric nor .epistemic")
        return self._parts

    def expand(self: Self, batch_shape: Sequence[int], _instance: Any = None) -> Self:
        """The same Gaussian and parts with batch dimensions `batch_shape`. Nothing is copied.

        Examples:
            >>> joint = lrd.joint(torch.tensor([[0.0, 0.0], [2.0, 4.0]]), None, torch.ones(2, 2))
            >>> joint.expand((3,)).epistemic.batch_shape
            torch.Size([3])
        """
        new = super().expand(batch_shape, _instance or JointNormal.__new__(JointNormal))
        new._parts = self._parts and (self._parts[0].expand(batch_shape), self._parts[1].expand(batch_shape))
        return new


def joint(
    means: Tensor,
    cov_factors: Tensor | None,
    cov_diags: Tensor | None,
    *,
    rank: int | None = None,
    aleatoric: LowRankMultivariateNormal | tuple[Tensor | None, Tensor] | None = None,
    parts: bool = True,
    validate_args: bool | None = None,
) -> JointNormal:
    """One Gaussian from T predictions: means [T, ..., S], cov_factors [T, ..., S, R], cov_diags [T, ..., S].

        mu = mean_t mu_t,    Sigma = mean_t (diag(D_t) + P_t P_t^T) + sum_t (mu_t - mu) (mu_t - mu)^T / (T - 1)

    The first term is the aleatoric part, the second the epistemic one. The result has T (R + 1) columns, or `rank`.

    Args:
        cov_factors: factors of the predictions, or None for diagonal predictions.
        rank: number of columns of the joint factor and of each part. The variance of the other columns is added to the
            diagonals. The stacked S x T (R + 1) matrix is then not formed. None keeps all columns.
        aleatoric: a single prediction (a distribution, or its factor and diagonal), such as that of the expected
            weights, to use instead of the T aleatoric parts. cov_factors and cov_diags are then not used and may be
            None.
        parts: whether to create the two parts as well, each with its own leading columns. Scoring does not need them.

    Raises:
        ValueError: if a shape is wrong, if cov_diags is missing, or if rank is negative.
        TypeError: if rank is not an int, or for wrong types and dtypes.

    Examples:
        >>> joint = lrd.joint(torch.randn(16, 100), torch.randn(16, 100, 3), torch.ones(16, 100))
        >>> joint.cov_factor.shape, joint.truncate(8).cov_factor.shape
        (torch.Size([100, 64]), torch.Size([100, 8]))
    """
    rank = None if rank is None else _validate.rank(rank)
    mean, diag, columns = columns_of(means, cov_factors, cov_diags, aleatoric)
    return _assemble(mean, diag, torch.zeros_like(diag), columns, rank, parts, validate_args)


def columns_of(
    means: Tensor, cov_factors: Tensor | None, cov_diags: Tensor | None, aleatoric: Any = None
) -> tuple[Tensor, Tensor, Stack]:
    """Mean and diagonal [..., S] of the joint Gaussian, and its columns, read where the samples lie."""
    means, P, D = _checked(means, cov_factors, cov_diags, aleatoric)
    T = means.shape[0]
    mean, diag = mean_of(means).to(means.dtype), mean_of(D).to(D.dtype)
    factor_scale = 1.0 if P is None else 1 / math.sqrt(P.shape[0])
    deviating = means if T > 1 else None
    return mean, diag, Stack.of(mean, P, deviating, factor_scale, 1 / math.sqrt(max(T - 1, 1)), centre=True)


def _checked(
    means: Tensor, cov_factors: Tensor | None, cov_diags: Tensor | None, aleatoric: Any
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Means [T, ..., S], factors [T or 1, ..., S, R] or None, and diagonals [T or 1, ..., S]."""
    _validate.floating("means", means)
    if means.dim() < 2 or means.shape[0] < 1:
        raise ValueError(f"means must have shape [T, ..., S] with T of at least 1; got {tuple(means.shape)}")
    if aleatoric is not None:
        if isinstance(aleatoric, LowRankMultivariateNormal):
            aleatoric = covariance_of(aleatoric)
        factor, diag = aleatoric
        cov_factors, cov_diags = None if factor is None else factor[None], diag[None]
    if cov_diags is None:
        raise ValueError("cov_diags must be given, unless aleatoric is given")
    for name, tensor, event in (("cov_factors", cov_factors, 2), ("cov_diags", cov_diags, 1)):
        if tensor is None:
            continue
        _validate.floating(name, tensor)
        S = tensor.shape[-event] if tensor.dim() > event else None
        if means.shape[-1] != S or tensor.shape[0] not in (1, means.shape[0]):
            wanted = "[T, ..., S, R]" if event == 2 else "[T, ..., S]"
            raise ValueError(
                f"{name} must have shape {wanted} as means {tuple(means.shape)}; got {tuple(tensor.shape)}"
            )
        if tensor.dtype != means.dtype:
            raise TypeError(f"{name} must have the dtype of means, {means.dtype}; got {tensor.dtype}")
    return means, cov_factors, cov_diags


def _assemble(
    mean: Tensor,
    diag: Tensor,
    epistemic_diag: Tensor,
    columns: Stack,
    rank: int | None,
    parts: bool,
    validate_args: bool | None,
    dtype: torch.dtype | None = None,
) -> JointNormal:
    """The joint distribution and its parts: factors of the stack are aleatoric columns, vectors are epistemic ones. The
    result has another dtype if one is given."""
    split = columns.split
    if rank is None:
        X = columns.dense()
        found = [(X, diag + epistemic_diag), (X[..., :split], diag), (X[..., split:], epistemic_diag)]
        found = found if parts else found[:1]
    else:
        pieces = [(columns, slice(None), diag + epistemic_diag)]
        if parts:
            pieces.append((columns.only_factors, slice(0, split), diag))
            pieces.append((columns.only_vectors, slice(split, None), epistemic_diag))
        if columns.requires_grad:
            found = [
                truncate(piece, own_diag, min(rank, piece.columns), backend=None)[:2] for piece, _, own_diag in pieces
            ]
        else:
            gram = columns.basis_gram(rank)
            found = [
                piece.truncate(own_diag, rank, gram[..., own, own], rank_major=columns.rank_major)
                for piece, own, own_diag in pieces
            ]
    mean, found = mean.to(dtype), [(factor.to(dtype), own.to(dtype)) for factor, own in found]
    made = None
    if parts:
        plain = LowRankMultivariateNormal(mean, *found[1], validate_args=validate_args)
        made = (plain, SemidefiniteNormal(mean, *found[2], validate_args=False))
    return JointNormal(mean, *found[0], made, validate_args=validate_args)


class JointAccumulator:
    """The joint distribution of predictions that arrive one at a time, in memory that does not grow with their number.

        mu_t = mu_(t-1) + d_t / t,    d_t = m_t - mu_(t-1),    scatter = sum_t (t - 1) / t d_t d_t^T

    m_t [..., S] is the mean of prediction t. Each part holds at most `rank + oversample` columns [..., S, columns].
    Mean and deviations are accumulated exactly. Aleatoric and epistemic columns are stored separately, because their
    weights 1/T and 1/(T - 1) change differently. When a part is full, it is truncated to `rank` columns and the dropped
    variance is added to a diagonal, so the variances of the result are exact. Until a part is full for the first time,
    the whole result is exact.

    Args:
        rank: number of columns of the result and of each part.
        oversample: number of extra columns that a part may have before it is truncated (default: `rank`).

    Raises:
        ValueError: if rank is below 1, or if oversample is negative.

    Examples:
        >>> accumulator = lrd.JointAccumulator(rank=8)
        >>> for _ in range(16):
        ...     _ = accumulator.update(torch.randn(100), torch.randn(100, 3), torch.ones(100))
        >>> accumulator.count, accumulator.finalize().cov_factor.shape
        (16, torch.Size([100, 8]))
    """

    def __init__(self, rank: int, oversample: int | None = None) -> None:
        if rank < 1:
            raise ValueError(f"rank must be at least 1; got {rank}")
        self.rank = rank
        self.oversample = rank if oversample is None else oversample
        _validate.non_negative("oversample", self.oversample)
        self.count = 0
        self._dtype: torch.dtype | None = None  # of the predictions; columns of half types are kept in float32
        self._mean: Tensor | None = None  # [..., S] in float64
        self._diag: Tensor | None = None  # sum of the diagonals, in float64
        self._parts = self._no_columns()

    def _no_columns(self) -> dict[str, _Columns]:
        return {name: _Columns(self.rank, self.oversample) for name in ("aleatoric", "epistemic")}

    @torch.no_grad()
    def update(self, mean: Tensor, cov_factor: Tensor | None, cov_diag: Tensor) -> JointAccumulator:
        """Adds one prediction: mean [..., S], factor [..., S, R] or None, diagonal [..., S]. Returns the accumulator.

        An update that raises leaves the accumulator as it was: ValueError for another shape than before or an invalid
        number, TypeError for another dtype or device, NotPositiveDefiniteError for an invalid covariance.

        Examples:
            >>> accumulator = lrd.JointAccumulator(rank=8)
            >>> accumulator.update(torch.zeros(100), torch.ones(100, 3), torch.ones(100)).count
            1
        """
        _validate.floating("mean", mean)
        _validate.floating("cov_diag", cov_diag)
        factor = cov_diag.new_empty(*cov_diag.shape, 0) if cov_factor is None else cov_factor
        _validate.gaussian(factor, cov_diag, mean=mean)
        self._check_like_before(mean, factor, cov_diag)
        if dispatch.may_inspect(mean):
            _validate.check_numbers(factor, cov_diag, mean=mean)
        # All that can fail, for want of memory too, comes before the first change.
        count, commits, wide = self.count + 1, [], result_dtype(mean.dtype)
        if self._mean is None or self._diag is None:
            new_mean, new_diag = mean.to(torch.float64, copy=True), cov_diag.double().expand_as(mean).clone()
        else:
            deviation = mean.double() - self._mean
            new_mean, new_diag = self._mean + deviation / count, self._diag + cov_diag.double()
            # The scatter about the final mean is the sum of (t - 1) / t d_t d_t^T
            scale = math.sqrt((count - 1) / count)
            commits.append(self._parts["epistemic"].prepare((scale * deviation).to(wide)[..., None]))
        if factor.shape[-1]:
            commits.append(self._parts["aleatoric"].prepare(factor.to(wide).expand(*mean.shape, factor.shape[-1])))
        for commit in commits:
            commit()
        self.count, self._dtype, self._mean, self._diag = count, mean.dtype, new_mean, new_diag
        return self

    def _check_like_before(self, mean: Tensor, factor: Tensor, cov_diag: Tensor) -> None:
        """All predictions have one shape, dtype and device, that of the mean."""
        if self._mean is not None and mean.shape != self._mean.shape:
            raise ValueError(
                f"mean must have the shape of those before, {tuple(self._mean.shape)}; got {tuple(mean.shape)}"
            )
        if self._mean is not None and (mean.dtype != self._dtype or mean.device != self._mean.device):
            raise TypeError(
                f"mean must have the dtype and device of those before, {self._dtype} on {self._mean.device};"
                f" got {mean.dtype} on {mean.device}"
            )
        batch = torch.broadcast_shapes(factor.shape[:-2], cov_diag.shape[:-1], mean.shape[:-1])
        if batch != mean.shape[:-1]:
            raise ValueError(
                f"mean must have all batch dimensions, as [{', '.join(map(str, batch))}, S]; got {tuple(mean.shape)}"
            )

    @torch.no_grad()
    def merge(self, other: JointAccumulator) -> JointAccumulator:
        """Adds all predictions of another accumulator, of the same shape [..., S], as if one had received them all.

            scatter = scatter_1 + scatter_2 + n m / (n + m) d d^T

        n and m are the counts, d [..., S] the difference of the means. Raises ValueError for another shape or dtype.

        Examples:
            >>> first, second = lrd.JointAccumulator(rank=8), lrd.JointAccumulator(rank=8)
            >>> _ = first.update(torch.zeros(2), None, torch.ones(2))
            >>> _ = second.update(torch.tensor([2.0, 4.0]), None, torch.ones(2))
            >>> first.merge(second).finalize().variance
            tensor([3., 9.])
        """
        if other.count == 0:
            return self
        if other._mean is None or other._diag is None or other._dtype is None:
            raise ValueError("the other accumulator is invalid: its count is positive, but it holds no predictions")
        if self._mean is None or self._diag is None:
            self.load_state_dict(other.state_dict())
            return self
        if other._dtype != self._dtype or other._mean.shape != self._mean.shape:
            raise ValueError(
                f"the other accumulator must hold predictions of {self._dtype} {tuple(self._mean.shape)};"
                f" got {other._dtype} {tuple(other._mean.shape)}"
            )
        n, m = self.count, other.count
        deviation = other._mean - self._mean
        merged = JointAccumulator(self.rank, self.oversample)  # a copy, so that a merge that fails changes nothing
        merged.load_state_dict(self.state_dict())
        apart = (math.sqrt(n * m / (n + m)) * deviation).to(result_dtype(other._dtype))
        merged._parts["epistemic"].add(apart[..., None])
        for name, part in merged._parts.items():
            part.merge(other._parts[name])
        mean, diag = self._mean + deviation * (m / (n + m)), self._diag + other._diag
        self.count, self._mean, self._diag, self._parts = n + m, mean, diag, merged._parts
        return self

    @torch.no_grad()
    def finalize(self, *, parts: bool = True, validate_args: bool | None = None) -> JointNormal:
        """The joint distribution of all predictions so far, with or without its parts. Updates may follow.

            D = mean_t D_t,    P P^T = mean_t P_t P_t^T + scatter / (T - 1)

        The factor is [..., S, R] with at most `rank` columns. Raises ValueError if there are no predictions.

        Examples:
            >>> accumulator = lrd.JointAccumulator(rank=8).update(torch.zeros(2), None, torch.ones(2))
            >>> accumulator.finalize().variance
            tensor([1., 1.])
        """
        if self._mean is None or self._diag is None or self._dtype is None:
            raise ValueError("no predictions have been added")
        T = self.count
        weights = {"aleatoric": T, "epistemic": max(T - 1, 1)}
        diags = {name: 0 if part.folded is None else part.folded / weights[name] for name, part in self._parts.items()}
        mean = self._mean.to(result_dtype(self._dtype))
        diag = (self._diag / T + diags["aleatoric"]).to(mean.dtype)
        epistemic_diag = torch.zeros_like(self._diag).add(diags["epistemic"]).to(mean.dtype)
        factor, deviations = (self._parts[name].columns for name in weights)
        columns = Stack.of(
            mean,
            None if factor is None else factor[None],
            None if deviations is None else deviations.movedim(-1, 0),
            1 / math.sqrt(weights["aleatoric"]),
            1 / math.sqrt(weights["epistemic"]),
        )
        return _assemble(mean, diag, epistemic_diag, columns, self.rank, parts, validate_args, self._dtype)

    def state_dict(self) -> dict[str, Any]:
        """The state for `load_state_dict`: numbers, a dtype, and copies of the tensors, [..., S] and [..., S, columns].

        Examples:
            >>> lrd.JointAccumulator(rank=8).state_dict()["rank"]
            8
        """
        state: dict[str, Any] = {"rank": self.rank, "oversample": self.oversample, "count": self.count}
        state |= {"dtype": self._dtype, "mean": self._mean, "diag": self._diag}
        for name, part in self._parts.items():
            state |= {f"{name}_columns": part.columns, f"{name}_folded": part.folded}
        return {key: v.clone() if isinstance(v, Tensor) else v for key, v in state.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replaces the state by that of another accumulator, from `state_dict()`; a missing entry raises KeyError.

        Examples:
            >>> accumulator = lrd.JointAccumulator(rank=8).update(torch.zeros(2), None, torch.ones(2))
            >>> other = lrd.JointAccumulator(rank=1)
            >>> other.load_state_dict(accumulator.state_dict())
            >>> other.rank, other.count
            (8, 1)
        """
        self.rank, self.oversample, self.count = state["rank"], state["oversample"], state["count"]
        self._dtype = state["dtype"]
        self._mean, self._diag = (None if state[k] is None else state[k].clone() for k in ("mean", "diag"))
        self._parts = self._no_columns()
        for name, part in self._parts.items():
            if state[f"{name}_columns"] is not None:
                part.add(state[f"{name}_columns"])
            if state[f"{name}_folded"] is not None:
                part.folded = state[f"{name}_folded"].clone()


class _Columns:
    """Up to rank + oversample columns [..., S, columns], and the variances of the dropped columns in float64."""

    def __init__(self, rank: int, oversample: int) -> None:
        self.rank, self.room = rank, rank + oversample
        self.folded: Tensor | None = None
        self._memory: Tensor | None = None  # [..., S, rank + oversample]; the first `_used` are valid
        self._used = 0

    @property
    def columns(self) -> Tensor | None:
        return None if self._memory is None else self._memory[..., : self._used]

    def add(self, new: Tensor) -> None:
        self.prepare(new)()

    def prepare(self, new: Tensor) -> Callable[[], None]:
        """Does all of `add` that can fail, and returns what cannot."""
        memory, used, folded = self._memory, self._used, self.folded
        if memory is None:
            rank_major = is_rank_major(new)
            shape = (self.room, new.shape[-2]) if rank_major else (new.shape[-2], self.room)
            memory = new.new_empty(*new.shape[:-2], *shape)
            memory = memory.mT if rank_major else memory
        if used + new.shape[-1] <= self.room:
            begin, used, kept = used, used + new.shape[-1], new
        else:
            none = new.new_zeros(new.shape[:-1])
            both = Stack.of(none, memory[None, ..., :used], new.movedim(-1, 0))
            gram = both.basis_gram(self.rank)
            kept, lost = both.truncate(none, self.rank, gram, rank_major=both.rank_major)
            begin, used = 0, kept.shape[-1]
            folded = lost.double() if folded is None else folded + lost.double()

        def commit() -> None:
            memory[..., begin:used] = kept
            self._memory, self._used, self.folded = memory, used, folded

        return commit

    def merge(self, other: _Columns) -> None:
        if other.columns is not None:
            self.add(other.columns)
        if other.folded is not None:
            self.folded = other.folded.clone() if self.folded is None else self.folded + other.folded
