"""The noise of predictions. It depends only on the seed, the number of the draw and, for dropout, the content of the
item, so that a prediction does not depend on the items that share its batch.

Draw t of the weights is the same for all items. A dropout mask belongs to draw t and one item.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

PER_ELEMENT = (nn.Dropout, nn.AlphaDropout)  # the others drop whole channels
ALPHA = -1.7580993408473766  # what the alpha dropouts put in place of a dropped value


class OtherLayout(Exception):
    """Raised by a dropout layer whose input does not have the items as its first dimension."""


def generator(device: torch.device, seed: int, *key: int | bytes) -> torch.Generator:
    """A generator of random numbers that belongs to a seed and a key."""
    digest = hashlib.blake2b(repr((seed, *key)).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little"))


def contents(x: Tensor) -> list[bytes]:
    """A digest of every item of a batch [B, ...]."""
    items = x.detach().cpu().contiguous()
    return [hashlib.blake2b(item.view(-1).view(torch.uint8).numpy(), digest_size=16).digest() for item in items]


def dropout_layers(net: nn.Module) -> list[_DropoutNd]:
    return [module for module in net.modules() if isinstance(module, _DropoutNd)]


@contextmanager
def dropout_masks(net: nn.Module, generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Applies dropout inside the block, to a network in evaluation mode, with one generator for every row of the batch.

    Layers must see the rows as their first dimension and raise `OtherLayout` if they do not; a single row may have any
    layout.
    """

    def drop(layer: _DropoutNd, inputs: tuple[Tensor, ...], values: Tensor) -> Tensor:
        rows = len(generators)
        if rows != 1 and len(values) != rows:
            raise OtherLayout
        if layer.p == 0 or values.numel() == 0:
            return values
        size = len(values) if rows == 1 else 1
        shape = values.shape[1:] if isinstance(layer, PER_ELEMENT) else (*values.shape[1:2], *(1,) * (values.dim() - 2))
        uniform = [
            torch.rand(size, *shape, generator=one, device=values.device, dtype=torch.float32) for one in generators
        ]
        return _dropped(layer, values, torch.cat(uniform) >= layer.p)

    with ExitStack() as hooks:
        for layer in dropout_layers(net):
            hooks.callback(layer.register_forward_hook(drop).remove)
        yield


def _dropped(layer: _DropoutNd, values: Tensor, kept: Tensor) -> Tensor:
    p = layer.p
    if not isinstance(layer, (nn.AlphaDropout, nn.FeatureAlphaDropout)):
        return torch.where(kept, values / (1 - p) if p < 1 else 0, 0)
    scale = ((1 - p) * (1 + p * ALPHA**2)) ** -0.5 if p < 1 else 0.0  # keeps mean 0 and variance 1
    return scale * (torch.where(kept, values, ALPHA) - p * ALPHA)
