"""A drop-in replacement for `torch.distributions.LowRankMultivariateNormal`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.distributions import LowRankMultivariateNormal as TorchLowRankMultivariateNormal
from torch.distributions.utils import lazy_property

from lrd_kernels import _validate, functional, reference, sampling
from lrd_kernels._methods import Operations, covariance_of
from lrd_kernels._policy import LOG_2PI
from lrd_kernels.autograd.forward import Factorisation
from lrd_kernels.linalg import products
from lrd_kernels.ops import dispatch

__all__ = ["LowRankMultivariateNormal"]

Self = TypeVar("Self", bound="LowRankMultivariateNormal")


# `patch_torch` adds these methods to torch's class, so none of them may call `super()`.
class LowRankMultivariateNormal(Operations["LowRankMultivariateNormal"], TorchLowRankMultivariateNormal):
    """A Gaussian over many correlated outputs, whose covariance is never formed.

        y ~ N(loc, Sigma),    Sigma = diag(cov_diag) + cov_factor cov_factor^T

    This is a subclass of torch's class, with the same constructor, results and attributes. It differs in cost and
    accuracy: the covariance is factorised only when a density is computed, batches that share a factor or a diagonal
    are not materialised, and float32 inputs are accumulated in float64.

    Args:
        loc: mean, [..., S]
        cov_factor: P, [..., S, R]; each of its R columns is a pattern by which the outputs vary together
        cov_diag: D, [..., S], positive: the variance that each output has on its own
        validate_args: whether invalid numbers raise an error. On a GPU and in compiled code they are not checked.

    Raises:
        ValueError: if a shape is wrong, or if a parameter is invalid.
        TypeError: if a parameter is not a tensor.

    Examples:
        >>> d = lrd.LowRankMultivariateNormal(torch.zeros(3), torch.tensor([[1.0], [1.0], [0.0]]), torch.ones(3))
        >>> d.variance
        tensor([2., 2., 1.])
        >>> d.log_prob(torch.zeros(3))
        tensor(-3.3061)
        >>> d.aggregate(torch.ones(1, 3)).stddev  # the error bar of the sum
        tensor([2.6458])
    """

    @property
    def _plain_type(self) -> type:
        """The type returned by methods that create another Gaussian."""
        return LowRankMultivariateNormal

    def __init__(self, loc: Tensor, cov_factor: Tensor, cov_diag: Tensor, validate_args: bool | None = None) -> None:
        batch_shape = _checked_batch_shape(loc, cov_factor, cov_diag)
        event_shape = loc.shape[-1:]
        self.loc = loc.expand(batch_shape + event_shape)
        self.cov_factor = cov_factor.expand(batch_shape + cov_factor.shape[-2:])
        self.cov_diag = cov_diag.expand(batch_shape + event_shape)
        self._unbroadcasted_cov_factor = cov_factor
        self._unbroadcasted_cov_diag = cov_diag
        Distribution.__init__(self, batch_shape, event_shape, validate_args=False)
        self._validate_args = Distribution._validate_args if validate_args is None else bool(validate_args)
        if self._validate_args and dispatch.may_inspect(cov_diag):
            _check_parameters(self, loc, cov_factor, cov_diag)

    def expand(self: Self, batch_shape: Sequence[int], _instance: Any = None) -> Self:
        """The same Gaussian with batch dimensions `batch_shape`. Nothing is copied or factorised again.

        Examples:
            >>> d = lrd.LowRankMultivariateNormal(torch.zeros(3), torch.tensor([[1.0], [1.0], [0.0]]), torch.ones(3))
            >>> d.expand((4, 2)).sample().shape
            torch.Size([4, 2, 3])
        """
        owner = (
            LowRankMultivariateNormal if isinstance(self, LowRankMultivariateNormal) else TorchLowRankMultivariateNormal
        )
        new = self._get_checked_instance(owner, _instance)
        batch_shape = torch.Size(batch_shape)
        loc_shape = batch_shape + self.event_shape
        new.loc = self.loc.expand(loc_shape)
        new.cov_diag = self.cov_diag.expand(loc_shape)
        new.cov_factor = self.cov_factor.expand(loc_shape + self.cov_factor.shape[-1:])
        new._unbroadcasted_cov_factor = self._unbroadcasted_cov_factor
        new._unbroadcasted_cov_diag = self._unbroadcasted_cov_diag
        new._factorisation = _factorisation(self)
        if "_capacitance_tril" in vars(self):
            new._capacitance_tril = self._capacitance_tril
        Distribution.__init__(new, batch_shape, self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: an instance of torch's class opens without this package."""
        state = {name: value for name, value in vars(self).items() if name != "_factorisation"}
        if not isinstance(self, LowRankMultivariateNormal):
            state["_capacitance_tril"] = self._capacitance_tril
        return state

    @lazy_property
    def _capacitance_tril(self) -> Tensor:
        """Cholesky factor of `I + P^T D^-1 P`. torch's class computes it eagerly, and third-party code reads it."""
        return functional.capacitance_cholesky(*covariance_of(self))[0]

    # Dense matrices are computed in float64, without forming what a factorisation in float32 could not take apart.
    @lazy_property
    def scale_tril(self) -> Tensor:
        """The lower Cholesky factor L of the covariance, `L L^T = Sigma`: [..., S, S], for few outputs only.

        Examples:
            >>> d = lrd.LowRankMultivariateNormal(torch.zeros(3), torch.tensor([[1.0], [1.0], [0.0]]), torch.ones(3))
            >>> d.scale_tril @ d.scale_tril.mT
            tensor([[2.0000, 1.0000, 0.0000],
                    [1.0000, 2.0000, 0.0000],
                    [0.0000, 0.0000, 1.0000]])
        """
        root = self._unbroadcasted_cov_diag.double().sqrt()[..., None]
        tril = root * reference.qr_tril((self._unbroadcasted_cov_factor.double() / root).mT)
        return tril.to(self.loc.dtype).expand(self._batch_shape + self._event_shape + self._event_shape)

    @lazy_property
    def precision_matrix(self) -> Tensor:
        """The inverse of the covariance, `Sigma^-1`: [..., S, S], for few outputs only. See `lrd.solve` for many.

        Examples:
            >>> d = lrd.LowRankMultivariateNormal(torch.zeros(3), torch.tensor([[1.0], [1.0], [0.0]]), torch.ones(3))
            >>> d.precision_matrix
            tensor([[ 0.6667, -0.3333,  0.0000],
                    [-0.3333,  0.6667,  0.0000],
                    [ 0.0000,  0.0000,  1.0000]])
        """
        P, D = (t.double() for t in covariance_of(self))
        units = torch.eye(D.shape[-1], dtype=D.dtype, device=D.device)
        batch = torch.broadcast_shapes(P.shape[:-2], D.shape[:-1])
        units = units.reshape(D.shape[-1], *(1,) * len(batch), D.shape[-1])
        columns = functional.solve(units, P, D, on_failure="nan").movedim(0, -1)
        precision = (columns + columns.mT) / 2
        return precision.to(self.loc.dtype).expand(self._batch_shape + self._event_shape + self._event_shape)

    @property
    def variance(self) -> Tensor:
        """The variance of every output, `D_i + sum_r P_ir^2`: [..., S]."""
        return self._wide_variance().to(self.loc.dtype).expand(self._batch_shape + self._event_shape)

    @property
    def stddev(self) -> Tensor:
        """The standard deviation of every output, its error bar: [..., S]."""
        return self._wide_variance().sqrt().to(self.loc.dtype).expand(self._batch_shape + self._event_shape)

    def _wide_variance(self) -> Tensor:
        factor, diag = covariance_of(self)
        return diag.double() + products.row_squares(factor)

    def log_prob(self, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Log-density of `value` [..., S]: shape [...].

            log p(y) = -1/2 ((y - mu)^T Sigma^-1 (y - mu) + log det Sigma + S log 2 pi)

        A value of a narrower dtype is cast to that of `loc`. The covariance is factorised at the first call and kept.

        Args:
            mask: bool [..., S], True where an output exists: the log-density of these outputs alone. Then the
                covariance is factorised at every call.

        Raises:
            ValueError: if the shape of `value` or `mask` is wrong, or if `value` is not finite.
            TypeError: if `value` is not a tensor, or if its dtype is wider than that of `loc`.
            NotPositiveDefiniteError: if the covariance is not positive definite. With `validate_args=False`, invalid
                batch items give NaN instead of an error.

        Examples:
            >>> d = lrd.LowRankMultivariateNormal(torch.zeros(3), torch.tensor([[1.0], [1.0], [0.0]]), torch.ones(3))
            >>> d.log_prob(torch.ones(5, 3)).shape
            torch.Size([5])
            >>> d.log_prob(torch.tensor([1.0, 1.0, torch.nan]), mask=torch.tensor([True, True, False]))
            tensor(-2.7205)
        """
        if isinstance(value, Tensor) and torch.promote_types(value.dtype, self.loc.dtype) == self.loc.dtype:
            value = value.to(self.loc.dtype)
        per_output = -0.5 * LOG_2PI
        return _terms(self, {"value": value, "loc": self.loc}, mask, maha=-0.5, logdet=-0.5, per_output=per_output)

    def entropy(self) -> Tensor:
        """Differential entropy in nats: shape [...].

            H = 1/2 (log det Sigma + S (1 + log 2 pi))

        Raises the same errors as `log_prob`.

        Examples:
            >>> d = lrd.LowRankMultivariateNormal(torch.zeros(3), torch.tensor([[1.0], [1.0], [0.0]]), torch.ones(3))
            >>> d.entropy()
            tensor(4.8061)
        """
        return _terms(self, {}, None, maha=0.0, logdet=0.5, per_output=0.5 * (1 + LOG_2PI)).expand(self._batch_shape)

    def rsample(self, sample_shape: Sequence[int] = torch.Size(), **options: Any) -> Tensor:
        """Samples that are differentiable in loc, cov_factor and cov_diag: shape `[*sample_shape, ..., S]`.

            y = mu + P xi + sqrt(D) * eta,    xi ~ N(0, I_R),    eta ~ N(0, I_S)

        `generator`, `antithetic`, `noise` and `mask` are options as in `lrd.rsample`, which raises the same errors.

        Examples:
            >>> d = lrd.LowRankMultivariateNormal(torch.zeros(3), torch.tensor([[1.0], [1.0], [0.0]]), torch.ones(3))
            >>> d.rsample((7,), generator=torch.Generator().manual_seed(0)).shape
            torch.Size([7, 3])
        """
        return sampling.rsample(self.loc, *covariance_of(self), torch.Size(sample_shape), **options)

    def sample(self, sample_shape: Sequence[int] = torch.Size(), **options: Any) -> Tensor:
        """Samples without gradients, with the options of `rsample`: shape `[*sample_shape, ..., S]`.

        Examples:
            >>> d = lrd.LowRankMultivariateNormal(torch.zeros(3), torch.tensor([[1.0], [1.0], [0.0]]), torch.ones(3))
            >>> d.sample((7,)).shape
            torch.Size([7, 3])
        """
        with torch.no_grad():
            return self.rsample(sample_shape, **options)


def _terms(self: Any, vectors: dict[str, Tensor], mask: Tensor | None, **weights: float) -> Tensor:
    """A scalar of the distribution, whose calls without a mask share one factorisation."""
    cov_factor, cov_diag = covariance_of(self)
    return functional.terms(
        vectors,
        cov_factor,
        cov_diag,
        functional.Options(mask=mask, on_failure="raise" if self._validate_args else "nan"),
        factorisation=_factorisation(self) if mask is None else None,
        **weights,
    )


def _factorisation(self: Any) -> Factorisation:
    """Created on demand: an instance of torch's class created before `patch_torch` has none."""
    if "_factorisation" not in vars(self):
        self._factorisation = Factorisation()
    return vars(self)["_factorisation"]


def _checked_batch_shape(loc: Tensor, cov_factor: Tensor, cov_diag: Tensor) -> torch.Size:
    """Returns the broadcast batch shape, or raises the errors of torch, with what to do about them."""
    for name, tensor in (("loc", loc), ("cov_factor", cov_factor), ("cov_diag", cov_diag)):
        _validate.is_tensor(name, tensor)
    if loc.dim() < 1:
        raise ValueError("loc must be at least one-dimensional.")
    if cov_factor.dim() < 2:
        raise ValueError("cov_factor must be at least two-dimensional, with optional leading batch dimensions")
    if cov_factor.shape[-2] != loc.shape[-1]:
        hint = _validate.vector_hint("loc", loc, cov_factor.shape[-2])
        if cov_factor.shape[-1] == loc.shape[-1]:
            hint = " (if it is [..., R, S], pass cov_factor.mT)"
        raise ValueError(
            f"cov_factor must be a batch of matrices with shape {loc.shape[-1]} x m; got {tuple(cov_factor.shape)}"
            f" with loc {tuple(loc.shape)}{hint}"
        )
    if cov_diag.shape[-1:] != loc.shape[-1:]:
        raise ValueError(
            f"cov_diag must be a batch of vectors with shape {tuple(loc.shape[-1:])}; got {tuple(cov_diag.shape)}"
            f"{_validate.vector_hint('cov_diag', cov_diag, loc.shape[-1])}"
        )
    try:
        return torch.broadcast_shapes(loc.shape[:-1], cov_factor.shape[:-2], cov_diag.shape[:-1])
    except RuntimeError:
        raise ValueError(
            f"Incompatible batch shapes: loc {tuple(loc.shape)}, cov_factor {tuple(cov_factor.shape)},"
            f" cov_diag {tuple(cov_diag.shape)}{_validate.matrix_hint('cov_diag', cov_diag)}"
        ) from None


def _check_parameters(distribution: Distribution, loc: Tensor, cov_factor: Tensor, cov_diag: Tensor) -> None:
    """Checks torch's constraints on the parameters. A sum detects NaN without a temporary of the factor's size."""
    for name, tensor in (("loc", loc), ("cov_factor", cov_factor), ("cov_diag", cov_diag)):
        plain = tensor.detach()
        if plain.numel() == 0 or not (bool(plain.sum().isnan()) or (name == "cov_diag" and not bool(plain.min() > 0))):
            continue
        constraint = distribution.arg_constraints[name]
        if not bool(constraint.check(plain).all()):
            raise ValueError(
                f"Expected parameter {name} ({type(plain).__name__} of shape {tuple(plain.shape)}) of distribution"
                f" {distribution!r} to satisfy the constraint {constraint!r}, but found invalid values:\n{plain}"
            )
