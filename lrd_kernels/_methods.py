"""Operations on Gaussians in high dimensions, as a mixin of the distribution. None of them forms an S x S matrix.

`P` below is the factor [..., S, R], `D` the diagonal [..., S].
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lrd_kernels import functional, truncation
from lrd_kernels.linalg import products
from lrd_kernels.linalg.whitening import Root, root_of

Index = int | slice | list[int] | Tensor


class Modes(NamedTuple):
    """The leading eigenvectors of the low-rank part, with unit norm [..., S, k], and the singular values [..., k]."""

    vectors: Tensor
    singular_values: Tensor


class Aggregate(NamedTuple):
    """Mean [..., K] and covariance [..., K, K] of K linear functionals of the outputs."""

    mean: Tensor
    covariance: Tensor

    @property
    def variance(self) -> Tensor:
        return self.covariance.diagonal(dim1=-2, dim2=-1)

    @property
    def stddev(self) -> Tensor:
        return self.variance.sqrt()

    @property
    def correlation(self) -> Tensor:
        return self.covariance / (self.stddev[..., :, None] * self.stddev[..., None, :])


class Operations:
    """Methods of `LowRankMultivariateNormal` that torch's class does not have."""

    loc: Tensor
    cov_factor: Tensor
    cov_diag: Tensor
    _unbroadcasted_cov_factor: Tensor
    _unbroadcasted_cov_diag: Tensor

    def truncate(self, rank: int | None = None, *, energy: float | None = None, fold: bool = True) -> Any:
        """The same Gaussian with fewer columns; dropped variance is added to the diagonal. See `lrd.truncate`."""
        kept, folded, _ = truncation.truncate(*covariance_of(self), rank, energy=energy, fold=fold)
        return _like(self, self.loc, kept, folded)

    def marginal(self, index: Index) -> Any:
        """The marginal Gaussian of some outputs: a slice, a list or tensor of positions, or a bool mask [S]."""
        rows = _positions(index, self.loc.shape[-1], self.loc.device)
        factor, diag = covariance_of(self)
        return _like(self, self.loc[..., rows], factor[..., rows, :], diag[..., rows])

    def condition(self, index: Index, value: Tensor) -> Any:
        """The Gaussian of the other outputs, in order, given that the outputs at `index` equal `value` [..., n].

        The covariance is again low rank plus diagonal, with the same rank. One use is to fill in an image from some of
        its pixels.
        """
        S = self.loc.shape[-1]
        known = _positions(index, S, self.loc.device)
        if value.shape[-1:] != known.shape:
            raise ValueError(f"value must have shape [..., {len(known)}], as index; got {tuple(value.shape)}")
        other = torch.ones(S, dtype=torch.bool, device=self.loc.device)
        other[known] = False
        rest = other.nonzero()[:, 0]
        factor, diag = (t.double() for t in covariance_of(self))
        seen, seen_diag = factor[..., known, :], diag[..., known]
        # With C the capacitance of the known outputs: mean P C^-1 P_seen^T D_seen^-1 r, covariance D + P C^-1 P^T.
        loc = self.loc.double()
        z = functional.latent_mean(value.double() - loc[..., known], seen, seen_diag)
        chol = functional.capacitance_cholesky(seen, seen_diag)[0]
        left = torch.linalg.solve_triangular(chol, factor[..., rest, :].mT, upper=False).mT
        mean = loc[..., rest] + (factor[..., rest, :] @ z[..., None])[..., 0]
        dtype = self.loc.dtype
        return _like(self, mean.to(dtype), left.to(dtype), diag[..., rest].to(dtype))

    def aggregate(self, weights: Tensor, *, reduction: str = "sum") -> Aggregate:
        """Mean and covariance of linear functionals of the outputs. The variances account for all correlations.

        Args:
            weights: floating-point [K, S], one functional per row; or integer labels [S] of regions 0 to K - 1. An
                output with a negative label belongs to no region.
            reduction: reduction over the outputs of a labelled region: "sum" or "mean".
        """
        S = self.loc.shape[-1]
        if weights.shape[-1] != S or weights.dim() > 2:
            raise ValueError(f"weights must be [K, {S}], or labels [{S}]; got {tuple(weights.shape)}")
        if weights.dim() == 1 and not weights.is_floating_point():
            weights = _region_weights(weights, reduction)
        weights = weights.reshape(-1, S).double()
        factor, diag = covariance_of(self)
        projected = products.project(factor, weights)  # [..., K, R]
        covariance = (weights * diag.double()[..., None, :]) @ weights.mT + projected @ projected.mT
        mean = (weights @ self.loc.double()[..., None])[..., 0]
        covariance = covariance.expand(*mean.shape, covariance.shape[-1])
        return Aggregate(mean.to(self.loc.dtype), covariance.to(self.loc.dtype))

    def correlation(self, index: int) -> Tensor:
        """Correlation of one output with every output: [..., S]."""
        factor, diag = covariance_of(self)
        diag = diag.double()
        deviation = (diag + products.row_squares(factor)).sqrt()
        unit = torch.zeros(diag.shape[-1], dtype=diag.dtype, device=diag.device)
        unit[index] = 1
        row = products.lift(factor, factor[..., index, None, :])[..., 0, :] + unit * diag
        result = row / deviation / deviation[..., index, None]
        return result.to(self.loc.dtype).expand(self.loc.shape)

    def modes(self, k: int | None = None) -> Modes:
        """The k leading directions of common variation of the outputs (all if k is None), for visualisation."""
        columns, _, singular = truncation.truncate(*covariance_of(self), k, fold=False)
        lengths = singular.to(columns.dtype)[..., None, :]
        return Modes(torch.where(lengths > 0, columns / lengths, 0), singular.to(columns.dtype))

    def whiten(self, value: Tensor) -> Tensor:
        """Maps a value to independent standard normal noise [..., S]; `unwhiten` is the inverse.

        Differentiable with respect to the value and the mean, but not the covariance.
        """
        return self._root().whiten(value.double() - self.loc.double()).to(self.loc.dtype)

    def unwhiten(self, noise: Tensor) -> Tensor:
        """Maps standard normal noise to a value [..., S]. Differentiable with respect to the noise and the mean."""
        return (self.loc.double() + self._root().unwhiten(noise.double())).to(self.loc.dtype)

    def _root(self) -> Root:
        factor, diag = covariance_of(self)
        if torch.is_grad_enabled() and (factor.requires_grad or diag.requires_grad):
            raise NotImplementedError(
                "whiten and unwhiten have no gradients with respect to the covariance: detach the parameters of the"
                " distribution, or use torch.no_grad()"
            )
        return root_of(factor.detach(), diag.detach())

    def quantile(self, q: float | Tensor) -> Tensor:
        """Marginal quantiles of every output: [*q.shape, ..., S]."""
        level = torch.as_tensor(q, dtype=torch.float64, device=self.loc.device)
        if bool(((level < 0) | (level > 1)).any()):
            raise ValueError(f"quantiles are between 0 and 1; got {q}")
        normal = torch.special.ndtri(level)
        normal = normal.reshape(*normal.shape, *(1,) * self.loc.dim())
        factor, diag = covariance_of(self)
        deviation = (diag.double() + products.row_squares(factor)).sqrt()
        return (self.loc + deviation * normal).to(self.loc.dtype)

    def energy_score(self, value: Tensor, samples: int = 64, *, generator: torch.Generator | None = None) -> Tensor:
        """`E |X - value| - E |X - X'| / 2` by Monte Carlo, [...]: a proper scoring rule; lower is better."""
        draws = self.rsample((2 * samples,), generator=generator)  # type: ignore[attr-defined]
        near, far = draws[:samples], draws[samples:]
        to_value = ((near - value).norm(dim=-1) + (far - value).norm(dim=-1)) / 2
        return (to_value - (near - far).norm(dim=-1) / 2).mean(0)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """The same Gaussian on another device or in another dtype, with the arguments of `torch.Tensor.to`."""
        return _like(self, *(t.to(*args, **kwargs) for t in (self.loc, *covariance_of(self))))

    def save(self, path: str | Path) -> None:
        """Writes the parameters as safetensors."""
        from safetensors.torch import save_file

        factor, diag = covariance_of(self)
        tensors = {"loc": self.loc, "cov_factor": factor, "cov_diag": diag}
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path)

    @classmethod
    def load(cls, path: str | Path) -> Any:
        """Loads a Gaussian written by `save`."""
        from safetensors.torch import load_file

        tensors = load_file(path)
        return cls(*(tensors[name] for name in ("loc", "cov_factor", "cov_diag")))

    @classmethod
    def from_samples(cls, samples: Tensor, diag: float | Tensor, rank: int | None = None) -> Any:
        """The Gaussian with the mean and covariance of samples [N, ..., S], plus `diag` on the diagonal.

        The factor has one column per sample, or `rank` columns with the remaining variance added to the diagonal.
        """
        if samples.dim() < 2 or samples.shape[0] < 2:
            raise ValueError(f"samples must be [N, ..., S] with N of at least 2; got {tuple(samples.shape)}")
        mean = samples.double().mean(0)
        factor = ((samples - mean) / (samples.shape[0] - 1) ** 0.5).to(samples.dtype).movedim(0, -1)
        diagonal = torch.as_tensor(diag, dtype=samples.dtype, device=samples.device).expand_as(mean)
        model = cls(mean.to(samples.dtype), factor, diagonal)  # type: ignore[call-arg]
        return model if rank is None else model.truncate(rank)

    @classmethod
    def from_swag(cls, mean: Tensor, square_mean: Tensor, deviations: Tensor, floor: float = 1e-30) -> Any:
        """The SWAG Gaussian: half of `square_mean - mean^2` plus half the scatter of deviations [K, ..., S]."""
        if deviations.shape[0] < 2:
            raise ValueError(f"deviations must be [K, ..., S] with K of at least 2; got {tuple(deviations.shape)}")
        variance = (square_mean.double() - mean.double().square()).clamp(min=floor)
        factor = deviations.movedim(0, -1) / (2 * (deviations.shape[0] - 1)) ** 0.5
        return cls(mean, factor, (variance / 2).to(mean.dtype))  # type: ignore[call-arg]


def covariance_of(distribution: Any) -> tuple[Tensor, Tensor]:
    """Factor and diagonal as they were given, without the batch dimensions that only broadcast."""
    return distribution._unbroadcasted_cov_factor, distribution._unbroadcasted_cov_diag


def _like(self: Any, loc: Tensor, cov_factor: Tensor, cov_diag: Tensor) -> Any:
    """A plain distribution with other parameters and the same `validate_args`."""
    return self._plain_type(loc, cov_factor, cov_diag, validate_args=self._validate_args)


def _positions(index: Index, S: int, device: torch.device) -> Tensor:
    """Converts an index to positions [n], each of another output."""
    every = torch.arange(S, device=device)
    if isinstance(index, slice):
        return every[index]
    chosen = torch.as_tensor(index, device=device)
    if chosen.dtype == torch.bool and chosen.shape != (S,):
        raise ValueError(f"a bool index must have shape [{S}]; got {tuple(chosen.shape)}")
    if chosen.numel() and (chosen.is_floating_point() or chosen.is_complex()):
        raise TypeError(f"index must be a slice, integer positions or a bool mask; got {chosen.dtype}")
    positions = every[chosen if chosen.dtype == torch.bool else chosen.long()].reshape(-1)
    if len(positions.unique()) != len(positions):
        raise ValueError("index must not name an output twice")
    return positions


def _region_weights(labels: Tensor, reduction: str) -> Tensor:
    """Weights [K, S] for the sum or mean over the regions given by labels [S]."""
    if reduction not in ("sum", "mean"):
        raise ValueError(f"reduction must be 'sum' or 'mean'; got {reduction!r}")
    regions = int(labels.max()) + 1 if labels.numel() else 0
    weights = (labels == torch.arange(max(regions, 0), device=labels.device)[:, None]).double()
    return weights / weights.sum(-1, keepdim=True).clamp(min=1) if reduction == "mean" else weights
