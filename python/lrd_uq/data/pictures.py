"""Tasks on RGB pictures: inpainting and colourisation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lrd_uq.checks import picture_size
from lrd_uq.data.batch import Batch
from lrd_uq.data.files import read_colour
from lrd_uq.data.task import Datasets, Task, lazy_datasets
from lrd_uq.styles import Colour, Colouring, Style

LUMA = (0.299, 0.587, 0.114)  # weights of red, green and blue in grey


class Question:
    """Turns a picture [3, H, W] in [0, 1] into an item."""

    style: Style

    def item(self, picture: Tensor) -> Batch:
        raise NotImplementedError


class Inpainting(Question):
    """Input [4, H, W]: the visible pixels, and a map of where they are. Target: the picture. Mask: the hidden part.

    Args:
        hidden: top, left, bottom and right of the hidden box, as fractions of height and width.
    """

    style = Colour()

    def __init__(self, hidden: tuple[float, float, float, float] = (0.25, 0.25, 0.75, 0.75)) -> None:
        top, left, bottom, right = hidden
        if not (0 <= top < bottom <= 1 and 0 <= left < right <= 1):
            raise ValueError(f"hidden must be top, left, bottom and right, as fractions from 0 to 1; got {hidden}")
        self.hidden = hidden

    def box(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Top, left, bottom and right in pixels."""
        top, left, bottom, right = self.hidden
        return round(top * height), round(left * width), round(bottom * height), round(right * width)

    def item(self, picture: Tensor) -> Batch:
        top, left, bottom, right = self.box(*picture.shape[-2:])
        if top == bottom or left == right:
            raise ValueError(f"hidden {self.hidden} hides no pixel of {picture.shape[-1]} x {picture.shape[-2]}")
        hidden = torch.zeros_like(picture, dtype=torch.bool)
        hidden[:, top:bottom, left:right] = True
        return Batch(torch.cat([torch.where(hidden, 0, picture), (~hidden[:1]).float()]), picture, hidden)


class Colourisation(Question):
    """Input [1, H, W]: the picture in grey. Target: the whole picture."""

    style = Colouring()

    def item(self, picture: Tensor) -> Batch:
        grey = (picture * torch.tensor(LUMA)[:, None, None]).sum(0, keepdim=True)
        return Batch(grey, picture, None)


class PictureTask(Task):
    """A task on pictures. Subclasses implement `sources` and `picture`.

    Args:
        question: `Inpainting` or `Colourisation`.
        size: height and width to which pictures are resized.
        on_broken: "refuse" (raise an error) or "skip" files that cannot be read.
        batch_size, steps_per_epoch, seed, workers, split_seed: see `Task`.
    """

    def __init__(
        self,
        question: Question,
        size: tuple[int, int],
        on_broken: str = "refuse",
        batch_size: int = 32,
        steps_per_epoch: int | None = None,
        seed: int = 0,
        workers: int = 0,
        split_seed: int = 0,
    ) -> None:
        super().__init__(batch_size, steps_per_epoch, seed, workers, split_seed)
        self.question, self.on_broken, self.style = question, on_broken, question.style
        self.size = picture_size(size)

    def sources(self) -> Sequence[Sequence[Any]]:
        """The arguments of `picture` for all training, validation and test items."""
        raise NotImplementedError

    def picture(self, source: Any) -> Tensor:
        """A picture of the task's size: [3, H, W] in [0, 1]."""
        raise NotImplementedError

    def datasets(self) -> Datasets:
        return lazy_datasets(self.sources(), self._item, self.on_broken)

    def _item(self, source: Any) -> Batch:
        return self.question.item(self.picture(source))

    def read(self, path: Path) -> Batch:
        return self.question.item(read_colour(path, self.size))
