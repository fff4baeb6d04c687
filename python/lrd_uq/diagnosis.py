"""How well conditioned the covariances are that a network predicts, a few items at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import lrd_kernels as lrd
from lrd_uq.bayes.base import Method, eval_predictor
from lrd_uq.data.loading import named, numbered_batches
from lrd_uq.heads import DiagonalHead
from lrd_uq.nets import batch_for

MAX_NUMBERS = 1 << 25  # in the predictions held at once


def diagnose(method: Method, net: nn.Module, data: Any) -> list[str]:
    """Lines about the covariances that all members predict with their own weights, in evaluation mode and without
    gradients. Outputs that do not exist are left out.

    Args:
        method: the distribution over the weights.
        net: the network that the method prepared and training filled.
        data: a batch, a data set, a DataLoader or another iterable of batches.
    """
    members = method.members(net)
    head = members[0].head
    parts: list[lrd.Diagnosis] = []
    invalid: set[int] = set()
    empty: set[int] = set()

    def at_once(target: Tensor) -> int:
        return max(1, MAX_NUMBERS // (target.numel() * (head.rank + 2)))

    for numbers, given in numbered_batches(data, at_once):
        x, target, mask = batch_for(net, given)
        target = head.flat(target)
        mask = torch.ones_like(target, dtype=torch.bool) if mask is None else head.flat(mask)
        for member in members:
            gaussian = eval_predictor(member)(x, mask)
            eps = member.head.eps if isinstance(member.head, DiagonalHead) else None
            for some, kept in _of_one_mask(mask, len(numbers)):
                if not bool(kept.any()):
                    empty.update(numbers[some])
                    continue
                found = lrd.diagnose(gaussian.factor[some][:, kept], gaussian.diag[some][:, kept], eps=eps)
                parts.append(found)
                bad = (found.bad_entries > 0).nonzero()[:, 0].tolist()
                invalid.update(numbers[some][i] for i in bad)
    if not parts:
        raise ValueError("there are no covariances to diagnose")
    lines = [str(_joined(parts))]
    for what, items in (("an invalid covariance", invalid), ("no outputs, left out", empty)):
        if items:
            lines.append(f"  items with {what:<17} {len(items)}: {named(sorted(items))}")
    return lines


def _of_one_mask(mask: Tensor, count: int) -> Iterator[tuple[slice, Tensor]]:
    """Items that have the same outputs, and these outputs: bool [S]."""
    if bool((mask == mask[:1]).all()):
        yield slice(0, count), mask[0]
    else:
        yield from ((slice(i, i + 1), mask[i]) for i in range(count))


def _joined(parts: Sequence[lrd.Diagnosis]) -> lrd.Diagnosis:
    """The diagnosis of all items; `outputs` is that of the largest one."""
    outputs, rank, *_ = zip(*parts, strict=True)
    tensors = [torch.cat([t.cpu() for t in field]) for field in list(zip(*parts, strict=True))[2:]]
    return lrd.Diagnosis(max(outputs), rank[0], *tensors)
