"""Operations on Gaussians in high dimensions, as a mixin of the distribution. None of them forms an S x S matrix.

`P` below is the factor [..., S, R], `D` the diagonal [..., S].
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from lrd_kernels import _validate, functional, truncation
from lrd_kernels._selection import Index, measurement_noise, positions, region_weights
from lrd_kernels.linalg import products
from lrd_kernels.linalg.whitening import Root, root_of
from lrd_kernels.ops import dispatch

RESOLVED_MODES = 1e-13  # directions shorter than this share of the longest are rounding

Gaussian = TypeVar("Gaussian")  # what methods that make another Gaussian return


class Modes(NamedTuple):
    """The leading directions of common variation, the result of `modes`.

    Attributes:
        vectors: orthogonal columns of unit norm, [..., S, k].
        singular_values: the standard deviation of the outputs along each of them, without `cov_diag`, [..., k].

    Examples:
        >>> d = lrd.LowRankMultivariateNormal(torch.zeros(3), torch.tensor([[3.0], [4.0], [0.0]]), torch.ones(3))
        >>> d.modes(1).singular_values
        tensor([5.])
    """

    vectors: Tensor
    singular_values: Tensor


class Aggregate(NamedTuple):
    """Mean and covariance of K linear functionals of the outputs, the result of `aggregate`.

    Attributes:
        mean: [..., K]
        covariance: [..., K, K]

    Examples:
        >>> d = lrd.LowRankMultivariateNormal(torch.zeros(3), torch.tensor([[1.0], [1.0], [0.0]]), torch.ones(3))
        >>> pairs = d.aggregate(torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]]))
        >>> pairs.variance, pairs.stddev
        (tensor([6., 3.]), tensor([2.4495, 1.7321]))
        >>> pairs.correlation
        tensor([[1.0000, 0.7071],
                [0.7071, 1.0000]])
    """

    mean: Tensor
    covariance: Tensor

    @property
    def variance(self) -> Tensor:
        """The variance of each functional, the diagonal of `covariance`: [..., K]."""
        return self.covariance.diagonal(dim1=-2, dim2=-1)

    @property
    def stddev(self) -> Tensor:
        """The standard deviation of each functional, its error bar: [..., K]."""
        return self.variance.sqrt()

    @property
    def correlation(self) -> Tensor:
        """`covariance_ij / (stddev_i stddev_j)`: [..., K, K]."""
        return self.covariance / (self.stddev[..., :, None] * self.stddev[..., None, :])


class Operations(Generic[Gaussian]):
    """Methods of `LowRankMultivariateNormal` that torch's class does not have."""

    loc: Tensor
    cov_factor: Tensor
    cov_diag: Tensor
    _unbroadcasted_cov_factor: Tensor
    _unbroadcasted_cov_diag: Tensor

    def truncate(self, rank: int | None = None, *, energy: float | None = None, fold: bool = True) -> Gaussian:
        """The Gaussian with `rank` columns that is closest in its low-rank part; dropped variance goes to the diagonal.

            P' = P V_k,    D'_i = D_i + sum_r P_ir^2 - sum_r P'_ir^2

        `V_k` [R, k] are the leading eigenvectors of `P^T P`. The result has the same mean and, with `fold=True`, the
        same variances. `lrd.truncate` describes the arguments and raises the same errors.

        Examples:
            >>> d = lrd.LowRankMultivariateNormal(torch.zeros(50), torch.ones(50, 8), torch.ones(50))
            >>> small = d.truncate(1)
            >>> small.cov_factor.shape, torch.allclose(small.variance, d.variance)
            (torch.Size([50, 1]), True)
        """
        kept, folded, _ = truncation.truncate(*covariance_of(self), rank, energy=energy, fold=fold)
        return _like(self, self.loc, kept, folded)

    def marginal(self, index: Index) -> Gaussian:
        """The marginal Gaussian of n outputs: mean [..., n], factor [..., n, R] and diagonal [..., n].

            y_A ~ N(mu_A, diag(D_A) + P_A P_A^T)

        Args:
            index: A: a slice, a list or tensor of positions, or a bool mask [S].

        Raises:
            ValueError: if an output is named twice, or if a mask does not have shape [S].
            IndexError: if there is no such output.

        Examples:
            >>> d = lrd.LowRankMultivariateNormal(torch.zeros(50), torch.ones(50, 8), torch.ones(50))
            >>> d.marginal(slice(0, 10)).event_shape
            torch.Size([10])
        """
        rows = positions(index, self.loc.shape[-1], self.loc.device)
        factor, diag = covariance_of(self)
        return _like(self, self.loc[..., rows], factor[..., rows, :], diag[..., rows])

    def condition(self, index: Index, value: Tensor, noise: float | Tensor | None = None) -> Gaussian:
        """The Gaussian of the other outputs, in order, given that the outputs at `index` equal `value` [..., n].

            mean mu_B + P_B C^-1 P_A^T D_A^-1 (value - mu_A),    covariance diag(D_B) + P_B C^-1 P_B^T

        with A the known outputs, B the others and `C = I + P_A^T D_A^-1 P_A`. The result has S - n outputs and the same
        rank. One use is to fill in an image from some of its pixels.

        With `noise` N, `value` is not the outputs themselves but a measurement of them, with independent errors of
        variance N. Then the measured outputs stay uncertain, and the result has all S outputs, in their order:

            C = I + P_A^T (D_A + N)^-1 P_A,    z = C^-1 P_A^T (D_A + N)^-1 (value - mu_A),    s = N / (D_A + N)
            of A: mean s (mu_A + P_A z) + (1 - s) value,    covariance diag(s D_A) + s P_A C^-1 P_A^T s
            of B: mean mu_B + P_B z,    covariance diag(D_B) + P_B C^-1 P_B^T

        Args:
            index: a slice, a list or tensor of positions, or a bool mask [S].
            value: the known or measured numbers, [..., n].
            noise: variance of the errors of a measurement, a number or [..., n], positive. None for exact values.

        Raises:
            ValueError: if an output is named twice, if `value`, `noise` or a mask has the wrong shape, or if `noise` is
                not positive and finite.
            IndexError: if there is no such output.

        Examples:
            >>> d = lrd.LowRankMultivariateNormal(torch.zeros(3), torch.tensor([[1.0], [1.0], [0.0]]), torch.ones(3))
            >>> rest = d.condition([0], torch.tensor([2.0]))
            >>> rest.mean, rest.variance
            (tensor([1., 0.]), tensor([1.5000, 1.0000]))
            >>> measured = d.condition([0], torch.tensor([2.0]), noise=2.0)
            >>> measured.mean, measured.variance
            (tensor([1.0000, 0.5000, 0.0000]), tensor([1.0000, 1.7500, 1.0000]))
        """
        S = self.loc.shape[-1]
        known = positions(index, S, self.loc.device)
        _validate.floating("value", value)
        if value.shape[-1:] != known.shape:
            raise ValueError(f"value must have shape [..., {len(known)}], as index; got {tuple(value.shape)}")
        _check_batch("value", value, self.loc)
        factor, diag = (t.double() for t in covariance_of(self))
        loc, value = self.loc.double(), value.double()
        seen, seen_diag = factor[..., known, :], diag[..., known]
        if noise is not None:
            noise = measurement_noise(noise, value)
            shrink, pull = noise / (seen_diag + noise), seen_diag / (seen_diag + noise)
            seen_diag = seen_diag + noise
        z = functional.latent_mean(value - loc[..., known], seen, seen_diag)
        chol = functional.capacitance_cholesky(seen, seen_diag)[0]
        if noise is None:
            other = torch.ones(S, dtype=torch.bool, device=loc.device)
            other[known] = False
            rest = other.nonzero()[:, 0]
            loc, factor, diag = loc[..., rest], factor[..., rest, :], diag[..., rest]
        mean = loc + (factor @ z[..., None])[..., 0]
        left = torch.linalg.solve_triangular(chol, factor.mT, upper=False).mT
        if noise is not None:
            mean = mean.index_copy(-1, known, shrink * mean[..., known] + pull * value)
            scale = torch.ones_like(diag).expand(*shrink.shape[:-1], S).index_copy(-1, known, shrink)
            left, diag = scale[..., None] * left, scale * diag
        dtype = self.loc.dtype
        return _like(self, mean.to(dtype), left.to(dtype), diag.to(dtype))

    def aggregate(self, weights: Tensor, *, reduction: str = "sum") -> Aggregate:
        """Mean [..., K] and covariance [..., K, K] of K linear functionals of the outputs, with all correlations.

            mean W mu,    covariance W diag(D) W^T + (W P) (W P)^T

        Args:
            weights: floating-point [K, S], one functional per row; or integer labels [S] of regions 0 to K - 1. An
                output with a negative label belongs to no region.
            reduction: reduction over the outputs of a labelled region: "sum" or "mean".

        Raises:
            ValueError: if the weights have the wrong shape, or if the reduction is unknown.

        Examples:
            >>> d = lrd.LowRankMultivariateNormal(torch.ones(4), torch.ones(4, 1), torch.ones(4))
            >>> halves = d.aggregate(torch.tensor([0, 0, 1, 1]), reduction="mean")
            >>> halves.mean, halves.variance
            (tensor([1., 1.]), tensor([1.5000, 1.5000]))
        """
        S = self.loc.shape[-1]
        _validate.is_tensor("weights", weights)
        if weights.dim() not in (1, 2) or weights.shape[-1] != S:
            raise ValueError(f"weights must be [K, {S}], or labels [{S}]; got {tuple(weights.shape)}")
        if weights.dtype == torch.bool or weights.is_complex():
            raise TypeError(f"weights must be floating-point, or integer labels; got {weights.dtype}")
        if weights.dim() == 1 and not weights.is_floating_point():
            weights = region_weights(weights, reduction)
        weights = weights.reshape(-1, S).double()
        factor, diag = covariance_of(self)
        projected = products.project(factor, weights)  # [..., K, R]
        covariance = (weights * diag.double()[..., None, :]) @ weights.mT + projected @ projected.mT
        mean = (weights @ self.loc.double()[..., None])[..., 0]
        covariance = covariance.expand(*mean.shape, covariance.shape[-1])
        return Aggregate(mean.to(self.loc.dtype), covariance.to(self.loc.dtype))

    def correlation(self, index: int) -> Tensor:
        """Correlation of output number `index` with every output: [..., S].

            rho_i = Sigma_i,index / sqrt(Sigma_ii Sigma_index,index)

        Raises IndexError if there is no such output.

        Examples:
            >>> d = lrd.LowRankMultivariateNormal(torch.zeros(3), torch.tensor([[1.0], [1.0], [0.0]]), torch.ones(3))
            >>> d.correlation(0)
            tensor([1.0000, 0.5000, 0.0000])
        """
        S = self.loc.shape[-1]
        number = not isinstance(index, Tensor) or (index.numel() == 1 and not index.is_floating_point())
        if isinstance(index, (bool, float)) or not (number and hasattr(index, "__index__")):
            raise TypeError(f"index must be an integer; got {type(index).__name__}")
        if not -S <= index < S:
            raise IndexError(f"index must be from {-S} to {S - 1}; got {index}")
        factor, diag = covariance_of(self)
        diag = diag.double()
        deviation = (diag + products.row_squares(factor)).sqrt()
        unit = torch.zeros(diag.shape[-1], dtype=diag.dtype, device=diag.device)
        unit[index] = 1
        row = products.lift(factor, factor[..., index, None, :])[..., 0, :] + unit * diag
        result = row / deviation / deviation[..., index, None]
        return result.to(self.loc.dtype).expand(self.loc.shape)

    def modes(self, k: int | None = None) -> Modes:
        """The k leading directions of common variation of the outputs (all if k is None), for visualisation.

            P = U diag(s) V^T,    the first k columns of U [..., S, k] and the first k of s [..., k]

        `loc + s_j u_j` is the mean, changed by one standard deviation along direction j. Directions of length 0, or
        below 1e-13 of the longest, are zero, and so is their s_j. Directions are orthogonal to about `1e-16 s_1 / s_j`.
        Raises ValueError if k is negative.

        Examples:
            >>> d = lrd.LowRankMultivariateNormal(torch.zeros(3), torch.tensor([[3.0], [4.0], [0.0]]), torch.ones(3))
            >>> d.modes(1).vectors.abs()[:, 0]
            tensor([0.6000, 0.8000, 0.0000])
        """
        # in float64, since the shortest columns may be subnormal numbers of narrower types
        factor, diag = (t.double() for t in covariance_of(self))
        columns, _, singular = truncation.truncate(factor, diag, k, fold=False)
        singular = torch.where(singular > RESOLVED_MODES * singular[..., :1], singular, 0)
        lengths = singular[..., None, :]
        vectors = torch.where(lengths > 0, columns / lengths, 0)
        return Modes(vectors.to(self.loc.dtype), singular.to(self.loc.dtype))

    def whiten(self, value: Tensor) -> Tensor:
        """Maps a value [..., S] to independent standard normal noise [..., S]; `unwhiten` is the inverse.

            W (value - mu),    W Sigma W^T = I,    |W (value - mu)|^2 = (value - mu)^T Sigma^-1 (value - mu)

        Differentiable with respect to the value and the mean, but not the covariance: raises NotImplementedError if the
        covariance requires gradients.

        Examples:
            >>> d = lrd.LowRankMultivariateNormal(torch.zeros(3), torch.tensor([[1.0], [1.0], [0.0]]), torch.ones(3))
            >>> d.whiten(torch.ones(3)).square().sum()  # the squared Mahalanobis distance
            tensor(1.6667)
        """
        self._check_vector("value", value)
        return self._root().whiten(value.double() - self.loc.double()).to(self.loc.dtype)

    def unwhiten(self, noise: Tensor) -> Tensor:
        """Maps standard normal noise [..., S] to a value [..., S].

            mu + W^-1 noise,    W^-1 W^-T = Sigma

        Differentiable with respect to the noise and the mean: raises NotImplementedError if the covariance requires
        gradients.

        Examples:
            >>> d = lrd.LowRankMultivariateNormal(torch.zeros(3), torch.tensor([[1.0], [1.0], [0.0]]), torch.ones(3))
            >>> value = torch.tensor([1.0, 2.0, 3.0])
            >>> torch.allclose(d.unwhiten(d.whiten(value)), value)
            True
        """
        self._check_vector("noise", noise)
        return (self.loc.double() + self._root().unwhiten(noise.double())).to(self.loc.dtype)

    def _check_vector(self, name: str, vector: Tensor) -> None:
        _validate.floating(name, vector)
        if vector.shape[-1:] != self.loc.shape[-1:]:
            raise ValueError(f"{name} must have shape [..., {self.loc.shape[-1]}]; got {tuple(vector.shape)}")
        _check_batch(name, vector, self.loc)

    def _root(self) -> Root:
        factor, diag = covariance_of(self)
        if torch.is_grad_enabled() and (factor.requires_grad or diag.requires_grad):
            raise NotImplementedError(
                "whiten and unwhiten have no gradients with respect to the covariance: detach the parameters of the"
                " distribution, or use torch.no_grad()"
            )
        dispatch.refuse_tangents("the covariance in whiten and unwhiten", factor, diag)
        return root_of(factor.detach(), diag.detach())

    def quantile(self, q: float | Tensor) -> Tensor:
        """Marginal quantiles of every output: `[*q.shape, ..., S]`.

            mu_i + sqrt(Sigma_ii) Phi^-1(q)

        Raises ValueError if `q` is not between 0 and 1.

        Examples:
            >>> d = lrd.LowRankMultivariateNormal(torch.zeros(3), torch.tensor([[1.0], [1.0], [0.0]]), torch.ones(3))
            >>> d.quantile(torch.tensor([0.05, 0.95]))
            tensor([[-2.3262, -2.3262, -1.6449],
                    [ 2.3262,  2.3262,  1.6449]])
        """
        level = torch.as_tensor(q, dtype=torch.float64, device=self.loc.device)
        if bool(((level < 0) | (level > 1)).any()):
            raise ValueError(f"quantiles are between 0 and 1; got {q}")
        normal = torch.special.ndtri(level)
        normal = normal.reshape(*normal.shape, *(1,) * self.loc.dim())
        factor, diag = covariance_of(self)
        deviation = (diag.double() + products.row_squares(factor)).sqrt()
        return (self.loc + deviation * normal).to(self.loc.dtype)

    def energy_score(self, value: Tensor, samples: int = 64, *, generator: torch.Generator | None = None) -> Tensor:
        """Energy score of `value` [..., S], a proper scoring rule; lower is better: shape [...].

            E |X - value| - E |X - X'| / 2

        X and X' are independent samples, `samples` of each: the result is a Monte Carlo estimate.

        Examples:
            >>> d = lrd.LowRankMultivariateNormal(torch.zeros(3), torch.tensor([[1.0], [1.0], [0.0]]), torch.ones(3))
            >>> near, far = (d.energy_score(torch.full((3,), x)) for x in (0.0, 10.0))
            >>> bool(near < far)
            True
        """
        self._check_vector("value", value)
        draws = self.rsample((2 * samples,), generator=generator)  # type: ignore[attr-defined]
        near, far = draws[:samples], draws[samples:]
        to_value = ((near - value).norm(dim=-1) + (far - value).norm(dim=-1)) / 2
        return (to_value - (near - far).norm(dim=-1) / 2).mean(0)

    def to(self, *args: Any, **kwargs: Any) -> Gaussian:
        """The same Gaussian, of the same shape, on another device or in another dtype: arguments as `torch.Tensor.to`.

        Examples:
            >>> d = lrd.LowRankMultivariateNormal(torch.zeros(3), torch.tensor([[1.0], [1.0], [0.0]]), torch.ones(3))
            >>> d.to(torch.float64).loc.dtype
            torch.float64
        """
        return _like(self, *(t.to(*args, **kwargs) for t in (self.loc, *covariance_of(self))))

    def save(self, path: str | Path) -> None:
        """Writes loc [..., S], cov_factor [..., S, R] and cov_diag [..., S] to a file, as safetensors.

        Raises ImportError without the package safetensors (`pip install 'lrd-kernels[io]'`).

        Examples:
            >>> d = lrd.LowRankMultivariateNormal(torch.zeros(3), torch.tensor([[1.0], [1.0], [0.0]]), torch.ones(3))
            >>> d.save("gaussian.safetensors")
        """
        from safetensors.torch import save_file

        factor, diag = covariance_of(self)
        tensors = {"loc": self.loc, "cov_factor": factor, "cov_diag": diag}
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path)

    @classmethod
    def load(cls, path: str | Path) -> Gaussian:
        """Loads a Gaussian written by `save`, with the shapes and dtypes that it had, on the CPU.

        Raises FileNotFoundError if there is no such file, and ImportError without the package safetensors.

        Examples:
            >>> d = lrd.LowRankMultivariateNormal(torch.zeros(3), torch.tensor([[1.0], [1.0], [0.0]]), torch.ones(3))
            >>> d.save("gaussian.safetensors")
            >>> lrd.LowRankMultivariateNormal.load("gaussian.safetensors").event_shape
            torch.Size([3])
        """
        from safetensors.torch import load_file

        tensors = load_file(path)
        return cls(*(tensors[name] for name in ("loc", "cov_factor", "cov_diag")))  # type: ignore[return-value]

    @classmethod
    def from_samples(cls, samples: Tensor, diag: float | Tensor, rank: int | None = None) -> Gaussian:
        """The Gaussian with the mean and covariance of samples x [N, ..., S], plus `diag` on the diagonal.

            mu = mean_n x_n,    P = [(x_1 - mu) .. (x_N - mu)] / sqrt(N - 1),    D = diag

        The factor is [..., S, N], or [..., S, rank] with the remaining variance added to the diagonal.

        Args:
            diag: a number, or a tensor that broadcasts to [..., S]; positive.

        Raises:
            ValueError: if there are fewer than two samples.

        Examples:
            >>> samples = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
            >>> d = lrd.LowRankMultivariateNormal.from_samples(samples, diag=0.01)
            >>> d.mean, d.variance
            (tensor([2., 4.]), tensor([2.0100, 8.0100]))
        """
        if samples.dim() < 2 or samples.shape[0] < 2:
            raise ValueError(f"samples must be [N, ..., S] with N of at least 2; got {tuple(samples.shape)}")
        mean = samples.double().mean(0)
        factor = ((samples - mean) / (samples.shape[0] - 1) ** 0.5).to(samples.dtype).movedim(0, -1)
        diagonal = torch.as_tensor(diag, dtype=samples.dtype, device=samples.device).expand_as(mean)
        model: Any = cls(mean.to(samples.dtype), factor, diagonal)  # type: ignore[call-arg]
        return model if rank is None else model.truncate(rank)

    @classmethod
    def from_swag(cls, mean: Tensor, square_mean: Tensor, deviations: Tensor, floor: float = 1e-30) -> Gaussian:
        """The Gaussian of stochastic weight averaging (SWAG), from running averages over training steps.

            D = (square_mean - mean^2) / 2,    P = deviations^T / sqrt(2 (K - 1))

        `mean` and `square_mean` are [..., S], `deviations` are the last K deviations from the mean, [K, ..., S], and
        `floor` is a lower bound on `square_mean - mean^2`. Raises ValueError if K is below 2.

        Examples:
            >>> mean, square_mean, deviations = torch.zeros(5), torch.ones(5), torch.ones(3, 5)
            >>> lrd.LowRankMultivariateNormal.from_swag(mean, square_mean, deviations).variance
            tensor([1.2500, 1.2500, 1.2500, 1.2500, 1.2500])
        """
        if deviations.shape[0] < 2:
            raise ValueError(f"deviations must be [K, ..., S] with K of at least 2; got {tuple(deviations.shape)}")
        variance = (square_mean.double() - mean.double().square()).clamp(min=floor)
        factor = deviations.movedim(0, -1) / (2 * (deviations.shape[0] - 1)) ** 0.5
        return cls(mean, factor, (variance / 2).to(mean.dtype))  # type: ignore[call-arg, return-value]


def covariance_of(distribution: Any) -> tuple[Tensor, Tensor]:
    """Factor and diagonal as they were given, without the batch dimensions that only broadcast."""
    return distribution._unbroadcasted_cov_factor, distribution._unbroadcasted_cov_diag


def _like(self: Any, loc: Tensor, cov_factor: Tensor, cov_diag: Tensor) -> Any:
    """A plain distribution with other parameters and the same `validate_args`."""
    return self._plain_type(loc, cov_factor, cov_diag, validate_args=self._validate_args)


def _check_batch(name: str, vector: Tensor, loc: Tensor) -> None:
    try:
        torch.broadcast_shapes(vector.shape[:-1], loc.shape[:-1])
    except RuntimeError:
        batch = tuple(loc.shape[:-1])
        raise ValueError(
            f"{name} must have batch dimensions that broadcast with {batch}; got {tuple(vector.shape)}"
        ) from None
