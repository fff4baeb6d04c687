"""The batch format of all tasks: input, target, and a mask of the targets that exist."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Batch(NamedTuple):
    """A batch, or a single item without the batch dimension."""

    input: Tensor  # [B, ...], the input of the backbone
    target: Tensor  # [B, outputs, ...], or [B, ..., outputs] for heads with features_last=True
    mask: Tensor | None  # bool, same shape as target: True where it exists; None if all of it does
