"""The batch format of all tasks: input, target, and a mask of the targets that exist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

NAMES = (("input", "target"), ("image", "label"), ("x", "y"))  # of input and target in a dict


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


def as_batch(given: Any) -> Batch:
    """A batch, or a single item, from `(input, target)`, `(input, target, mask)`, or a dict with keys such as "input",
    "target" and "mask" ("image" and "label", or "x" and "y" will do; other keys are ignored).

    Raises:
        TypeError: if it has another form, or if the mask is not bool.
        ValueError: if the mask has another shape than the target.

    Examples:
        >>> from lrd_uq.data import as_batch
        >>> as_batch({"image": torch.zeros(5, 1, 8, 8), "label": torch.zeros(5, 1, 8, 8), "name": "a"}).mask is None
        True
    """
    if isinstance(given, Batch):
        return given
    if isinstance(given, Mapping):
        pair = next((pair for pair in NAMES if all(name in given for name in pair)), None)
        if pair is None:
            wanted = ", or ".join(f'"{x}" and "{y}"' for x, y in NAMES)
            raise TypeError(f"a batch that is a dict needs the keys {wanted}; got {', '.join(map(str, given))}")
        parts = [given[pair[0]], given[pair[1]], given.get("mask")]
    elif isinstance(given, (tuple, list)) and len(given) in (2, 3):
        parts = [*given, None][:3]
    else:
        got = f"{len(given)} elements" if isinstance(given, (tuple, list)) else type(given).__name__
        raise TypeError(f"a batch must be (input, target), (input, target, mask) or a dict; got {got}")
    x, target, mask = (None if part is None else torch.as_tensor(part) for part in parts)
    if x is None or target is None:
        raise TypeError("a batch needs an input and a target; got None")
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(f"the mask of a batch must be bool, True where a target exists; got {mask.dtype}")
    if mask is not None and mask.shape != target.shape:
        raise ValueError(
            f"the mask of a batch must have the shape of the target, {list(target.shape)}; got {list(mask.shape)}"
        )
    return Batch(x, target, mask)


def collate(items: Sequence[Batch]) -> Batch:
    """Stacks items into a batch."""
    inputs, targets, masks = zip(*items, strict=True)
    return Batch(torch.stack(inputs), torch.stack(targets), None if masks[0] is None else torch.stack(masks))
