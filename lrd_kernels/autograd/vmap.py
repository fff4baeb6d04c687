"""What the vmap rules share: the mapped dimension becomes the outermost batch dimension, and leads the results."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def lead(
    size: int, in_dims: tuple[Any, ...], args: tuple[Any, ...], event_dims: tuple[int, ...], expand: bool = False
) -> list[Any]:
    """A vmap rule's tensors with the mapped dimension as the outermost batch dimension of all.

    The first `len(event_dims)` arguments are tensors or None; tensors that are not mapped broadcast, or are expanded.
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
    """The shape of one of a mapped tensor's elements."""
    shape = list(tensor.shape)
    if dim is not None:
        del shape[dim]
    return shape


def trail(outputs: tuple[Tensor, ...], size: int) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """A vmap rule's outputs and where they are mapped: a leading 1 that only broadcasts is taken away."""
    mapped = [t.shape[0] == size for t in outputs]
    tensors = tuple(t[0] if t.shape[0] == 1 != size else t for t in outputs)
    return tensors, tuple(0 if m else None for m in mapped)
