"""What every task gives a network: an input, a target, and where the target exists."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor


class Batch(NamedTuple):
    """A batch, or without its first dimension one item."""

    input: Tensor  # [B, ...], whatever the backbone takes
    target: Tensor  # [B, outputs, ...] as the head's features, or [B, ..., outputs] where they come last
    mask: Tensor | None  # bool, of the target's shape: True where it exists and counts


class ImageTask(Protocol):
    """What scores, predictions for folders and pictures ask of a task, beside what lightning does."""

    def part(self, name: str) -> Batch:
        """All items of "train", "val" or "test"."""
        ...

    def read(self, path: Path) -> Tensor:
        """A picture of this task from a file; ValueError names one that is not."""
        ...

    def encode(self, images: Tensor) -> Batch:
        """A batch of such pictures, as items."""
        ...

    def visible_part(self, target: Tensor, mask: Tensor) -> Tensor:
        """A target [H, W] with NaN for what the network does not see, to be drawn."""
        ...
