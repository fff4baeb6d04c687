"""Helpers of the vmap rules: the mapped dimension becomes the outermost batch dimension, also of the results."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def lead(
    size: int, in_dims: tuple[Any, ...], args: tuple[Any, ...], event_dims: tuple[int, ...], expand: bool = False
) -> list[Any]:
    """Moves the mapped dimension of a vmap rule's tensors to the outermost batch dimension.

    The first `len(event_dims)` arguments are tensors or None. Tensors that are not mapped broadcast, or are expanded if
    `expand` is True.
    """
    count = len(event_dims)
    shapes = [
        0 if t is None else t.dim() - e - (d is not None)
        for t, d, e in zip(args[:count], in_dims[:count], event_dims, strict=True)
    ]
    inner = max(shapes)  # batch dimensions inside the mapped one
    led = []
    for tensor, dim, own in zip(args[:count], in_dims[:count], shapes, strict=True):
        if tensor is not None and (dim is not None or expand):
            tensor = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            tensor = tensor[(slice(None),) + (None,) * (inner - own)]
        led.append(tensor)
    return [*led, *args[count:]]


def inner_shape(tensor: Tensor, dim: int | None) -> list[int]:
    """The shape of one element of a mapped tensor."""
    shape = list(tensor.shape)
    if dim is not None:
        del shape[dim]
    return shape


def trail(outputs: tuple[Tensor, ...], size: int) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """The outputs of a vmap rule and their mapped dimensions; a leading 1 that only broadcasts is removed."""
    mapped = [t.shape[0] == size for t in outputs]
    tensors = tuple(t[0] if t.shape[0] == 1 != size else t for t in outputs)
    return tensors, tuple(0 if m else None for m in mapped)
