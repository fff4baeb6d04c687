"""What every task gives a network: an input, a target, and where the target exists."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Batch(NamedTuple):
    """A batch, or without its first dimension one item."""

    input: Tensor  # [B, ...], whatever the backbone takes
    target: Tensor  # [B, outputs, ...] as the head's features, or [B, ..., outputs] where they come last
    mask: Tensor | None  # bool, of the target's shape: True where it exists and counts
