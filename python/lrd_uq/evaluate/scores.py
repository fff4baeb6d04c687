"""Scores of held-out items for every Gaussian that can be formed from the predictions of a network, a few items at a
time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import lrd_kernels as lrd
from lrd_uq.bayes.base import Method, NoExpectedWeights, eval_predictor
from lrd_uq.data.loading import numbered_batches
from lrd_uq.evaluate.reconstruction import unexplained_error
from lrd_uq.evaluate.region_sum import standardised_sum
from lrd_uq.evaluate.sweep import kept_columns
from lrd_uq.nets import batch_for

MAX_NUMBERS = 1 << 28  # in the predictions held at once, about 1 GiB
MAX_ITEMS = 25  # predicted at once


class ItemScores(NamedTuple):
    """Scores of N items, each a tensor [N] on the CPU.

    Attributes:
        items: their numbers in the data.
        log_probs: log-likelihoods in nats, by kind of prediction (see `Row`).
        z: `standardised_sum` over the existing outputs, by kind of prediction.
        squared_error: sum over the existing outputs of the squared error of the mean.
        absolute_error: likewise, of the absolute error.
        outputs: number of existing outputs.
        unexplained: `unexplained_error` of a single prediction.

    Examples:
        >>> from lrd_uq.bayes import Method
        >>> from lrd_uq.evaluate import stream
        >>> from lrd_uq.heads import DiagonalHead
        >>> from lrd_uq.nets import wrap
        >>> net, pairs = wrap(torch.nn.Conv2d(1, 4, 1), DiagonalHead(4)), [(torch.ones(1, 2, 2),) * 2] * 5
        >>> next(stream(Method(), net, pairs, images_at_once=3)).outputs
        tensor([4, 4, 4])
    """

    items: Tensor
    log_probs: Mapping[str, Tensor]
    z: Mapping[str, Tensor]
    squared_error: Tensor
    absolute_error: Tensor
    outputs: Tensor
    unexplained: Tensor


class Predictions(NamedTuple):
    """T predictions of B items."""

    means: Tensor  # [T, B, S]
    factors: Tensor  # [T, B, S, R]
    diags: Tensor  # [T, B, S]


def collect(method: Method, net: nn.Module, x: Tensor, T: int, mask: Tensor | None, seed: int = 0) -> Predictions:
    """Stacks T predictions for inputs `x` [B, ...], for scores that need all of them at once."""
    means, factors, diags = zip(*method.sample_predictions(net, x, T, mask=mask, seed=seed), strict=True)
    stacked = torch.stack([factor.mT for factor in factors]).mT  # stays rank-major
    return Predictions(torch.stack(means), stacked, torch.stack(diags))


def stream(
    method: Method,
    net: nn.Module,
    data: Any,
    T: int = 64,
    ranks: Sequence[int] = (),
    images_at_once: int | None = None,
    seed: int = 0,
) -> Iterator[ItemScores]:
    """Scores items as they are read, so that memory does not grow with their number. The arguments are those of
    `evaluate`.

    Examples:
        >>> from lrd_uq.bayes import Method
        >>> from lrd_uq.evaluate import stream
        >>> from lrd_uq.heads import DiagonalHead
        >>> from lrd_uq.nets import wrap
        >>> net, pairs = wrap(torch.nn.Conv2d(1, 4, 1), DiagonalHead(4)), [(torch.ones(1, 2, 2),) * 2] * 5
        >>> [scores.items.tolist() for scores in stream(Method(), net, pairs, images_at_once=3)]
        [[0, 1, 2], [3, 4]]
    """
    rank = method.members(net)[0].head.rank

    def at_once(target: Tensor) -> int:
        if images_at_once is not None:
            return images_at_once
        return min(MAX_ITEMS, max(1, MAX_NUMBERS // (target.numel() * T * (rank + 2))))

    for numbers, batch in numbered_batches(data, at_once):
        with torch.no_grad():
            yield _score_batch(method, net, numbers, batch, T, ranks, seed)


def _score_batch(
    method: Method, net: nn.Module, numbers: Sequence[int], given: Any, T: int, ranks: Sequence[int], seed: int
) -> ItemScores:
    member = method.members(net)[0]
    x, target, mask = batch_for(net, given)
    target = member.head.flat(target)
    mask = torch.ones_like(target, dtype=torch.bool) if mask is None else member.head.flat(mask)
    predictions = collect(method, net, x, T, mask, seed)
    log_probs, z = {}, {}
    for key, gaussian in _gaussians(predictions, ranks):
        log_probs[key], z[key] = _score(gaussian, target, mask)
    if len(predictions.means) > 1:
        # The joint Gaussian has the mean and covariance of this mixture.
        each = lrd.log_prob(target, *predictions, mask=mask, on_failure="nan")
        log_probs["mixture"] = each.logsumexp(0) - math.log(len(each))
        expected = _expected(method, net, x, mask)
        if expected is not None:
            aleatoric = expected.factor, expected.diag
            gaussian = lrd.joint(predictions.means, None, None, aleatoric=aleatoric, parts=False, validate_args=False)
            log_probs["expected"], z["expected"] = _score(gaussian, target, mask)
    single = eval_predictor(member)(x, mask)
    error = torch.where(mask, target - predictions.means.mean(0), 0).double()
    found = ItemScores(
        items=torch.tensor(numbers),
        log_probs=log_probs,
        z=z,
        squared_error=error.square().sum(-1),
        absolute_error=error.abs().sum(-1),
        outputs=mask.sum(-1),
        unexplained=unexplained_error(single.factor, torch.where(mask, target - single.mean, 0)),
    )
    return ItemScores(*(_on_cpu(part) for part in found))


def _gaussians(predictions: Predictions, ranks: Sequence[int]) -> Iterator[tuple[str, lrd.LowRankMultivariateNormal]]:
    joint = lrd.joint(*predictions, parts=False, validate_args=False)
    several = len(predictions.means) > 1
    yield "joint" if several else "single", joint
    if joint.cov_factor.shape[-1]:
        yield "diagonal", _without_factor(joint)
    if several:
        yield from kept_columns(joint, ranks)


def _expected(method: Method, net: nn.Module, x: Tensor, mask: Tensor) -> Any:
    try:
        return method.expected(net)(x, mask)
    except NoExpectedWeights:
        return None


def _without_factor(gaussian: lrd.LowRankMultivariateNormal) -> lrd.LowRankMultivariateNormal:
    """The same variances, without correlations."""
    nothing = gaussian.loc.new_zeros(*gaussian.loc.shape, 0)
    return lrd.LowRankMultivariateNormal(gaussian.loc, nothing, gaussian.variance, validate_args=False)


def _score(gaussian: lrd.LowRankMultivariateNormal, target: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Log-likelihood and standardised sum of every item: [B] each."""
    log_probs = lrd.log_prob(target, gaussian.loc, gaussian.cov_factor, gaussian.cov_diag, mask=mask, on_failure="nan")
    return log_probs, standardised_sum(gaussian, target, mask)


def _on_cpu(part: Any) -> Any:
    return {key: tensor.cpu() for key, tensor in part.items()} if isinstance(part, Mapping) else part.cpu()


def joined(parts: Sequence[ItemScores]) -> ItemScores:
    """The scores of all items of several batches."""
    if not parts:
        raise ValueError("there are no items to score")

    def cat(several: Sequence[Any]) -> Any:
        if isinstance(several[0], Mapping):
            return {key: torch.cat([part[key] for part in several]) for key in several[0]}
        return torch.cat(list(several))

    return ItemScores(*map(cat, zip(*parts, strict=True)))
