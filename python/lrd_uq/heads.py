"""Heads: from the feature map of a backbone to the parameters of a Gaussian.

Outputs are flattened, channels first: S = outputs x positions, where positions are pixels, voxels, nodes or time steps
(1 for a table). A head multiplies [outputs, channels] weights with [B, channels, positions] features, which is a
convolution of kernel size 1 in any number of dimensions, and a linear layer on nodes. The factor is always written in
rank-major memory [B, R, S] and passed to the kernels as `.mT`, without a copy.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import lrd_kernels as lrd
from lrd_uq.checks import check_counts, check_finite, check_weights

PARAMETRISATIONS = ("plain", "scaled")


class Output(NamedTuple):
    """The raw output of a head, the input of `head.nll` and `head.gaussian`.

    Attributes:
        mean: [B, S]
        raw_diag: [B, S] with `D = eps + exp(raw_diag)`; None for a head that predicts only the mean.
        factor: [B, S, R], stored as [B, R, S]: P, or F of `P = sqrt(D) F`; R is 0 without a low-rank part.

    Examples:
        >>> from lrd_uq.heads import LowRankHead
        >>> output = LowRankHead(channels=4, rank=2)(torch.zeros(1, 4, 8, 8))
        >>> [tuple(tensor.shape) for tensor in output]
        [(1, 64), (1, 64), (1, 64, 2)]
    """

    mean: Tensor
    raw_diag: Tensor | None
    factor: Tensor


class Gaussian(NamedTuple):
    """Parameters of `N(mean, diag(diag) + factor factor^T)`.

    Attributes:
        mean: [B, S]
        factor: [B, S, R]; R is 0 for a diagonal covariance.
        diag: [B, S]

    Examples:
        >>> from lrd_uq.heads import Gaussian
        >>> Gaussian(torch.zeros(1, 3), torch.ones(1, 3, 2), torch.ones(1, 3)).distribution().variance
        tensor([[3., 3., 3.]])
    """

    mean: Tensor
    factor: Tensor
    diag: Tensor

    def distribution(self) -> lrd.LowRankMultivariateNormal:
        """The distribution with these parameters. Invalid batch items give NaN, not errors."""
        return lrd.LowRankMultivariateNormal(self.mean, self.factor, self.diag, validate_args=False)


class MeanHead(nn.Module):
    """Predicts only the mean; the covariance is the identity.

        features [B, channels, ...] -> mean [B, S],    S = outputs x positions

    Args:
        channels: channels of the feature map.
        outputs: channels of the prediction.
        features_last: features and targets are [B, nodes, channels] (graph nodes, time steps) or [B, channels]
            (tables) instead of [B, channels, ...].

    Examples:
        >>> from lrd_uq.heads import MeanHead
        >>> MeanHead(channels=4, outputs=3)(torch.zeros(2, 4, 8, 8)).mean.shape
        torch.Size([2, 192])
    """

    rank = 0
    rank_in_use = 0  # number of columns currently predicted
    is_scaled = False  # whether the predicted factor is F of P = sqrt(D) F

    def __init__(self, channels: int, outputs: int = 1, *, features_last: bool = False) -> None:
        super().__init__()
        check_counts(channels=channels, outputs=outputs)
        self.channels, self.outputs, self.features_last = channels, outputs, features_last
        self.mean_weight = nn.Parameter(torch.empty(outputs, channels))
        self.mean_bias = nn.Parameter(torch.empty(outputs))
        MeanHead.reset_parameters(self)  # subclasses reset their own parameters once these exist

    def reset_parameters(self) -> None:
        """Draws new initial weights."""
        self._reset(self.mean_weight)
        nn.init.zeros_(self.mean_bias)

    def _reset(self, weight: Tensor) -> None:
        nn.init.uniform_(weight, -1 / math.sqrt(self.channels), 1 / math.sqrt(self.channels))

    def forward(self, features: Tensor) -> Output:
        """The raw parameters for features [B, channels, ...], or in the layout of `features_last`."""
        # Densities need float32, even if the backbone or the weights have a lower precision.
        with full_precision(features):
            return self._emit(self.positions_last(features).to(density_dtype(self.mean_weight.dtype)))

    def _emit(self, features: Tensor) -> Output:
        mean = self._affine(self.mean_weight, self.mean_bias, features)
        return Output(mean, None, mean.new_zeros(*mean.shape, 0))

    @staticmethod
    def _affine(weight: Tensor, bias: Tensor, features: Tensor) -> Tensor:
        return torch.baddbmm(bias[:, None].to(features), _expand(weight, features), features).flatten(1)  # [B, S]

    def positions_last(self, tensor: Tensor) -> Tensor:
        """Reshapes a tensor in the layout of the features to [B, C, positions], as a view where possible."""
        if not self.features_last:
            return tensor.flatten(2) if tensor.dim() > 2 else tensor[..., None]
        return tensor.flatten(1, -2).mT if tensor.dim() > 2 else tensor[..., None]

    def flat(self, tensor: Tensor) -> Tensor:
        """Flattens a target or mask in the layout of the features to [B, S], in the order of the head's outputs."""
        return self.positions_last(tensor).flatten(1)

    def settle(self, output: Output, mask: Tensor | None = None) -> Output:
        """Applies the operations that depend on the mask (Gram-Schmidt, if the columns are orthogonal). Idempotent."""
        return output

    def gaussian(self, output: Output, mask: Tensor | None = None) -> Gaussian:
        """The Gaussian that an output describes.

        Where `mask` [B, S] is False, mean and factor are 0 and the diagonal is 1, so that missing outputs do not
        contribute to traces, modes and truncations.
        """
        output = self.settle(output, mask)
        diag = self.diag(output)
        factor = output.factor
        if self.is_scaled:
            factor = (factor.mT * diag.sqrt()[:, None]).mT
        if mask is None:
            return Gaussian(output.mean, factor, diag)
        return Gaussian(torch.where(mask, output.mean, 0), existing_rows(factor, mask), torch.where(mask, diag, 1))

    def diag(self, output: Output) -> Tensor:
        """The diagonal D of the covariance: [B, S]."""
        return torch.ones_like(output.mean)

    def low_rank_variance(self, output: Output) -> Tensor:
        """The diagonal of `P P^T`: [B, S]."""
        squares = output.factor.square().sum(-1)
        return squares * self.diag(output) if self.is_scaled else squares

    def nll(self, output: Output, target: Tensor, mask: Tensor | None = None) -> Tensor:
        """Negative log-density of `target` [B, S] per existing output: [B].

        An invalid item gives NaN, with zero gradients.
        """
        residual = existing(target - output.mean, mask)
        count = residual.shape[-1] if mask is None else mask.sum(-1).clamp(min=1)
        return 0.5 * residual.square().sum(-1) / count + 0.5 * math.log(2 * math.pi)


class DiagonalHead(MeanHead):
    """Predicts mean and variance of every output, without correlations.

        features [B, channels, ...] -> mean [B, S], raw [B, S],    D = eps + exp(raw)

    Args:
        channels: channels of the feature map.
        outputs: channels of the prediction.
        eps: smallest variance, 0.01 if neither is given. It may change during training, and is saved with the weights.
        eps_std: smallest standard deviation, instead of eps: `eps = eps_std^2`.
        initial_raw: initial bias of `raw`.
        features_last: as for `MeanHead`.

    Raises:
        ValueError: if eps and eps_std are both given, or if one is negative or not finite.

    Examples:
        >>> from lrd_uq.heads import DiagonalHead
        >>> head = DiagonalHead(channels=4, eps=0.01)
        >>> head.nll(head(torch.randn(2, 4, 8, 8)), torch.zeros(2, 64)).shape
        torch.Size([2])
    """

    def __init__(
        self,
        channels: int,
        outputs: int = 1,
        *,
        eps: float | None = None,
        eps_std: float | None = None,
        initial_raw: float = -3.0,
        features_last: bool = False,
    ) -> None:
        super().__init__(channels, outputs, features_last=features_last)
        check_finite(initial_raw=initial_raw)
        self.own_eps = smallest_variance(eps, eps_std)  # as the head was built
        self.eps, self.initial_raw = self.own_eps, initial_raw
        self.diag_weight = nn.Parameter(torch.empty(outputs, channels))
        self.diag_bias = nn.Parameter(torch.empty(outputs))
        DiagonalHead.reset_parameters(self)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self._reset(self.diag_weight)
        nn.init.constant_(self.diag_bias, self.initial_raw)

    def _emit(self, features: Tensor) -> Output:
        return super()._emit(features)._replace(raw_diag=self._affine(self.diag_weight, self.diag_bias, features))

    def diag(self, output: Output) -> Tensor:
        assert output.raw_diag is not None
        return lrd.positive_diag(output.raw_diag, self.eps)

    def nll(self, output: Output, target: Tensor, mask: Tensor | None = None) -> Tensor:
        assert output.raw_diag is not None
        options: dict[str, Any] = {"eps": self.eps, "mask": mask, "reduction": "none", "on_failure": "nan"}
        return lrd.nll_loss(output.mean, output.raw_diag, output.factor, target, **options)

    def get_extra_state(self) -> dict[str, Any]:
        return {"eps": self.eps, "rank_in_use": self.rank_in_use}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.eps, self.rank_in_use = state["eps"], state["rank_in_use"]


class LowRankHead(DiagonalHead):
    """Predicts mean, diagonal and a factor of `rank` columns.

        features [B, channels, ...] -> mean [B, S], raw [B, S], P [B, S, rank],    Sigma = diag(eps + exp(raw)) + P P^T

    Args:
        channels: channels of the feature map.
        rank: columns of the factor. Only `rank_in_use` of them are predicted: training may start with 0.
        parametrisation: "plain" for `D + P P^T`, or "scaled" for `sqrt(D) (I + F F^T) sqrt(D)`, whose capacitance
            matrix `I + F^T F` does not depend on D.
        initial_factor: scale of the factor's initial weights, relative to those of the mean.
        outputs: channels of the prediction.
        eps: as for `DiagonalHead`.
        eps_std: as for `DiagonalHead`.
        initial_raw: as for `DiagonalHead`.
        orthogonal: orthogonalise the columns (Gram-Schmidt) over the outputs that exist.
        svd: in training, rotate the columns to the left singular vectors times the singular values of the factor, over
            the outputs that exist. The covariance stays the same; the capacitance matrix is better conditioned.
        features_last: as for `MeanHead`.

    Raises:
        ValueError: if the rank is below 1, if the parametrisation is unknown, if both orthogonal and svd are set, or
            for eps and eps_std as for `DiagonalHead`.

    Examples:
        >>> from lrd_uq.heads import LowRankHead
        >>> head = LowRankHead(channels=4, rank=8)
        >>> gaussian = head.gaussian(head(torch.randn(2, 4, 16, 16)))
        >>> gaussian.factor.shape, gaussian.distribution().sample().shape
        (torch.Size([2, 256, 8]), torch.Size([2, 256]))
    """

    def __init__(
        self,
        channels: int,
        rank: int = 8,
        outputs: int = 1,
        *,
        parametrisation: str = "plain",
        eps: float | None = None,
        eps_std: float | None = None,
        initial_raw: float = -3.0,
        initial_factor: float = 0.1,
        orthogonal: bool = False,
        svd: bool = False,
        features_last: bool = False,
    ) -> None:
        if rank < 1:
            raise ValueError(f"rank must be at least 1; got {rank} (use a DiagonalHead for rank 0)")
        if parametrisation not in PARAMETRISATIONS:
            raise ValueError(f"parametrisation must be one of {', '.join(PARAMETRISATIONS)}; got {parametrisation!r}")
        if orthogonal and svd:
            raise ValueError("orthogonal and svd exclude one another: orthogonal columns need no rotation")
        super().__init__(
            channels, outputs, eps=eps, eps_std=eps_std, initial_raw=initial_raw, features_last=features_last
        )
        check_finite(initial_factor=initial_factor)
        self.rank = self.rank_in_use = rank
        self.is_scaled, self.initial_factor = parametrisation == "scaled", initial_factor
        self.orthogonal, self.svd = orthogonal, svd
        self.factor_weight = nn.Parameter(torch.empty(rank * outputs, channels))
        LowRankHead.reset_parameters(self)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self._reset(self.factor_weight)
        with torch.no_grad():
            self.factor_weight.mul_(self.initial_factor)

    def _emit(self, features: Tensor) -> Output:
        output = super()._emit(features)
        k = self.rank_in_use
        if k == 0:
            return output
        weight = self.factor_weight[: k * self.outputs]
        columns = torch.bmm(_expand(weight, features), features)  # [B, k outputs, positions]
        return output._replace(factor=columns.view(len(columns), k, -1).mT)

    def settle(self, output: Output, mask: Tensor | None = None) -> Output:
        rotates = self.svd and self.training
        if not (self.orthogonal or rotates):
            return output
        factor = existing_rows(output.factor, mask)
        return output._replace(factor=rotated(factor) if rotates else gram_schmidt(factor))

    def nll(self, output: Output, target: Tensor, mask: Tensor | None = None) -> Tensor:
        if not self.is_scaled or output.factor.shape[-1] == 0:
            return super().nll(output, target, mask)
        # log p(y) = log N(r / sqrt(D); 0, I + F F^T) - 1/2 sum log D: P itself is never formed
        diag = self.diag(output)
        if mask is not None:
            diag = torch.where(mask, diag, 1)
        residual = existing(target - output.mean, mask) * diag.rsqrt()
        ones = torch.ones_like(diag)
        white = lrd.log_prob(residual, torch.zeros_like(ones), output.factor, ones, mask=mask, on_failure="nan")
        count = diag.shape[-1] if mask is None else mask.sum(-1).clamp(min=1)
        return (0.5 * diag.log().sum(-1) - white) / count


def density_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a network of this dtype computes densities: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def full_precision(tensor: Tensor) -> torch.autocast:
    """Ends mixed precision in a block: densities need float32, even if the backbone ran in lower precision."""
    return torch.autocast(tensor.device.type, enabled=False)


def existing(values: Tensor, mask: Tensor | None) -> Tensor:
    """`values` [B, S] with 0 for outputs that do not exist, which may hold any value, including NaN.

    Call it before squaring: the gradient of a square at NaN is NaN, even if the result is masked later.
    """
    return values if mask is None else torch.where(mask, values, 0)


def existing_rows(factor: Tensor, mask: Tensor | None) -> Tensor:
    """`factor` [B, S, R] with rows of 0 for outputs that do not exist."""
    return factor if mask is None else torch.where(mask[:, None], factor.mT, 0).mT


def smallest_variance(eps: float | None, eps_std: float | None) -> float:
    """The floor of the variances that `eps` or `eps_std` sets."""
    if eps is not None and eps_std is not None:
        raise ValueError(f"give eps or eps_std, not both; got {eps} and {eps_std}")
    name, value = ("eps_std", eps_std) if eps_std is not None else ("eps", 0.01 if eps is None else eps)
    check_weights(**{name: value})
    return value if eps_std is None else value * value


def rotated(factor: Tensor) -> Tensor:
    """The columns `U S` of the singular value decomposition `P = U S V^T` of `factor` [B, S, R], as `P V`.

    V is detached: no function of `P P^T` depends on it, so that the gradient is exact, and finite for repeated singular
    values. An item that is not finite is not rotated.
    """
    wide = factor.detach().double()
    gram = wide.mT @ wide  # [B, R, R]
    usable = gram.isfinite().all(-1).all(-1)[:, None, None]
    V = torch.linalg.eigh(torch.where(usable, gram, torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)))[1]
    return (V.flip(-1).mT.to(factor.dtype) @ factor.mT).mT


def gram_schmidt(factor: Tensor, *, detach_earlier: bool = False) -> Tensor:
    """Orthogonalises the columns of `factor` [B, S, R] without normalising them (Gram-Schmidt).

    With `detach_earlier`, no gradient goes through the directions that a column is made orthogonal to: each column is
    trained for what the ones before it leave, so that they come in the order of their importance.

    With `P^T P = L L^T`, the orthonormal directions are the columns of `P L^-T` and the lengths are the diagonal of L:
    this takes one product of the size of the factor instead of R. Columns that depend linearly on earlier ones become
    almost zero.
    """
    if detach_earlier:
        value = gram_schmidt(factor.detach())
        directions = value / value.square().sum(-2, keepdim=True).sqrt().clamp(min=1e-12)
        own = factor - directions @ (directions.mT @ factor).triu(1)
        return (value + (own - own.detach())).mT.contiguous().mT  # the values as without, the gradient of `own`
    wide = factor.double()
    gram = wide.mT @ wide  # [B, R, R]
    scale = gram.diagonal(dim1=-2, dim2=-1)
    lift = 1e-13 * scale.sum(-1, keepdim=True) + torch.finfo(torch.float64).tiny
    tril = torch.linalg.cholesky_ex(gram + torch.diag_embed(lift.expand_as(scale))).L  # NaN stays within its item
    lengths = tril.diagonal(dim1=-2, dim2=-1)
    eye = torch.eye(tril.shape[-1], dtype=tril.dtype, device=tril.device).expand_as(tril)
    transform = lengths[..., None] * torch.linalg.solve_triangular(tril, eye, upper=False)  # diag(lengths) L^-1
    return (transform.to(factor.dtype) @ factor.mT).mT


def _expand(weight: Tensor, features: Tensor) -> Tensor:
    """The weight as a batched view, because a `matmul` of a 2-d with a 3-d tensor would transpose the features."""
    return weight.to(features.dtype).expand(len(features), *weight.shape)
