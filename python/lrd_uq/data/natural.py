"""Random crops of the photographs that come with scikit-image; no download."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from lrd_uq.checks import check_counts
from lrd_uq.data.files import resize
from lrd_uq.data.pictures import Inpainting, PictureTask, Question
from lrd_uq.data.task import numbered_keys

PHOTOGRAPHS = ("astronaut", "chelsea", "coffee", "rocket")
# Horizontal ranges of every photograph for training, validation and test; they do not overlap.
STRIPS = ((0.0, 0.6), (0.6, 0.8), (0.8, 1.0))


@cache
def photograph(name: str) -> Tensor:
    """A photograph, [3, H, W] in [0, 1]."""
    try:
        from skimage import data
    except ImportError as error:
        raise ImportError("the photographs need scikit-image: pip install 'lrd-kernels[train]'") from error
    return torch.from_numpy(getattr(data, name)()[..., :3].copy()).movedim(-1, 0).float() / 255


def random_strip(part: int, generator: torch.Generator) -> Tensor:
    """The strip of a random photograph that belongs to a part (0, 1 or 2): [3, H, W]."""
    picture = photograph(PHOTOGRAPHS[int(torch.randint(len(PHOTOGRAPHS), (), generator=generator))])
    begin, end = (int(share * picture.shape[-1]) for share in STRIPS[part])
    return picture[..., begin:end]


def random_crop(picture: Tensor, size: tuple[int, int], generator: torch.Generator) -> Tensor:
    """A random crop of 1 to 2 times `size`, resized to [3, *size] and flipped horizontally at random."""
    most = min(picture.shape[-2] / size[0], picture.shape[-1] / size[1], 2.0)
    scale = 1.0 + (most - 1.0) * float(torch.rand((), generator=generator)) if most > 1 else most
    height, width = (max(int(scale * side), 1) for side in size)
    top = int(torch.randint(picture.shape[-2] - height + 1, (), generator=generator))
    left = int(torch.randint(picture.shape[-1] - width + 1, (), generator=generator))
    crop = resize(picture[:, top : top + height, left : left + width], size)
    return crop.flip(-1) if torch.rand((), generator=generator) < 0.5 else crop


def item_generator(seed: int, part: int, number: int) -> torch.Generator:
    """A random generator for an item, with the same seed every time."""
    return torch.Generator().manual_seed((seed * 1_000_003 + part * 500_009 + number * 7_919) % 2**63)


class NaturalPictures(PictureTask):
    """Crops of four photographs; those for training, validation and test come from strips that do not overlap.

    Args:
        question: `Inpainting` (None: of the middle) or `Colourisation`.
        size: height and width of a crop.
        train, val, test: number of crops of each part.
        batch_size, steps_per_epoch, seed, workers, split_seed: see `Task`.
    """

    def __init__(
        self,
        question: Question | None = None,
        size: tuple[int, int] = (64, 64),
        train: int = 2000,
        val: int = 50,
        test: int = 50,
        batch_size: int = 16,
        steps_per_epoch: int | None = None,
        seed: int = 0,
        workers: int = 0,
        split_seed: int = 0,
    ) -> None:
        question = Inpainting() if question is None else question
        super().__init__(question, size, "refuse", batch_size, steps_per_epoch, seed, workers, split_seed)
        check_counts(train=train, val=val, test=test)
        self.counts = (train, val, test)

    def sources(self) -> Sequence[Sequence[tuple[int, int]]]:
        return numbered_keys(self.counts)

    def picture(self, source: tuple[int, int]) -> Tensor:
        part, number = source
        generator = item_generator(self.split_seed, part, number)
        return random_crop(random_strip(part, generator), self.size, generator)
