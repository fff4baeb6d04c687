"""Samples of a Gaussian with low-rank-plus-diagonal covariance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lrd_kernels import _validate, reference
from lrd_kernels.ops.views import BatchViews

__all__ = ["rsample"]


def rsample(
    loc: Tensor,
    cov_factor: Tensor,
    cov_diag: Tensor,
    sample_shape: Sequence[int] = (),
    *,
    generator: torch.Generator | None = None,
    antithetic: bool = False,
    noise: tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Reparameterised samples, differentiable in all parameters: shape `[*sample_shape, ..., S]`.

        y = mu + P xi + sqrt(D) * eta,    xi ~ N(0, I_R),    eta ~ N(0, I_S)

    mu is `loc` [..., S], P is `cov_factor` [..., S, R] and D is `cov_diag` [..., S]. Draws the same numbers as
    `torch.distributions.LowRankMultivariateNormal.rsample` from the same generator state.

    Args:
        antithetic: if True, the second half of the samples mirrors the first half about the mean; the number of samples
            must be even.
        noise: standard normal numbers to use instead of new ones, for the columns `[*sample_shape, ..., R]` and for
            the outputs `[*sample_shape, ..., S]`. Samples of two Gaussians with the same noise differ only because of
            the parameters.
        mask: bool [..., S], True for the outputs to sample; the others are set to the mean.

    Raises:
        ValueError: if a shape is wrong, or if the number of antithetic samples is odd.
        TypeError: if an argument is not a tensor, or if dtypes differ.

    Examples:
        >>> loc, P, D = torch.zeros(2, 100), torch.ones(2, 100, 4), torch.ones(100)
        >>> lrd.rsample(loc, P, D, (7,)).shape
        torch.Size([7, 2, 100])
    """
    _validate.gaussian(cov_factor, cov_diag, loc=loc)
    batch_shape = torch.broadcast_shapes(loc.shape[:-1], cov_factor.shape[:-2], cov_diag.shape[:-1])
    shape = (*sample_shape, *batch_shape)
    noise_factor, noise_diag = _noise(
        loc, cov_factor, shape, generator, tuple(sample_shape) if antithetic else False, noise
    )
    # All samples share the factor, so they become the rows of one product.
    views = BatchViews(cov_factor, cov_diag, None, (noise_diag,))
    P = _multipliable(views.factor(cov_factor))  # [F, S, R]
    rows = _multipliable(views.rows(noise_factor))  # [F, K N, R]
    wide = reference.result_dtype(loc.dtype)
    result = loc + (views.from_rows(rows @ P.mT).to(wide) + cov_diag.to(wide).sqrt() * noise_diag)
    return result.to(loc.dtype) if mask is None else torch.where(mask, result.to(loc.dtype), loc)


def _noise(
    loc: Tensor,
    cov_factor: Tensor,
    shape: tuple[int, ...],
    generator: torch.Generator | None,
    mirrored: Sequence[int] | bool,
    given: tuple[Tensor, Tensor] | None,
) -> Iterator[Tensor]:
    """Standard normal numbers for the columns [*shape, R], then for the outputs [*shape, S]."""
    sizes = (cov_factor.shape[-1], cov_factor.shape[-2])
    if given is not None:
        for tensor, size in zip(given, sizes, strict=True):
            if tensor.shape != (*shape, size):
                raise ValueError(f"noise must have shape {(*shape, size)}; got {tuple(tensor.shape)}")
            yield tensor
        return
    if mirrored is not False and (not mirrored or shape[0] % 2):
        raise ValueError(f"antithetic samples come in pairs: sample_shape must begin with an even number; got {shape}")
    drawn = (shape[0] // 2, *shape[1:]) if mirrored else shape
    for size in sizes:
        if generator is None:  # torch.compile does not trace the argument, not even if it is None
            numbers = torch.randn((*drawn, size), dtype=loc.dtype, device=loc.device)
        else:
            numbers = torch.randn((*drawn, size), dtype=loc.dtype, device=loc.device, generator=generator)
        yield torch.cat([numbers, -numbers]) if mirrored else numbers


def _multipliable(matrix: Tensor) -> Tensor:
    """Widens half-precision matrices on the CPU, where their products lose accuracy or, on some machines, trap."""
    return matrix.float() if matrix.device.type == "cpu" and matrix.dtype.itemsize == 2 else matrix
