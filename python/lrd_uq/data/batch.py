"""The batch format of all tasks: input, target, and a mask of the targets that exist."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Batch(NamedTuple):
    """A batch, or a single item without the batch dimension.

    Attributes:
        input: [B, ...], the input of the backbone.
        target: [B, outputs, ...], or [B, ..., outputs] for heads with `features_last=True`.
        mask: bool, with the shape of target: True where it exists; None if all of it does.

    Examples:
        >>> from lrd_uq.data import Batch
        >>> Batch(torch.zeros(5, 2, 28, 28), torch.zeros(5, 1, 28, 28), None).target.shape
        torch.Size([5, 1, 28, 28])
    """

    input: Tensor
    target: Tensor
    mask: Tensor | None
