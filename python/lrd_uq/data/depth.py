"""Depth estimation: the distance of every pixel of a picture."""

from __future__ import annotations

from pathlib import Path

import torch

from lrd_uq.checks import check_counts, picture_size
from lrd_uq.data import motorcycle
from lrd_uq.data.batch import Batch
from lrd_uq.data.files import read_colour, resize, resize_known
from lrd_uq.data.natural import item_generator
from lrd_uq.data.nyu import NyuFile, read_splits
from lrd_uq.data.rooms import room
from lrd_uq.data.task import Datasets, Task, at_most, lazy_datasets, numbered_keys, random_split
from lrd_uq.styles import Depth


class DepthTask(Task):
    """Input: picture [3, H, W]. Target: distances [1, H, W] in metres. Mask: where they were measured."""

    style = Depth()

    def __init__(
        self,
        size: tuple[int, int],
        batch_size: int = 8,
        steps_per_epoch: int | None = None,
        seed: int = 0,
        workers: int = 0,
        split_seed: int = 0,
    ) -> None:
        super().__init__(batch_size, steps_per_epoch, seed, workers, split_seed)
        self.size = picture_size(size)

    def read(self, path: Path) -> Batch:
        unknown = torch.full((1, *self.size), torch.nan)
        return Batch(read_colour(path, self.size), unknown, torch.ones_like(unknown, dtype=torch.bool))


class NyuDepth(DepthTask):
    """The labelled pairs of NYU Depth v2: `nyu_depth_v2_labeled.mat`, with the official split of `splits.mat`. A fifth
    of the training pairs is used for validation.

    (The paper has 695 training and 174 validation pairs beside the 654 of the official test split. The file has 1,449
    pairs, of which 795 are not test pairs: here 636 and 159.)

    Args:
        file: `nyu_depth_v2_labeled.mat`, an HDF5 file written by MATLAB.
        splits: `splits.mat`, which counts from 1.
        raw: use the distances of the camera, with holes, instead of the filled-in ones.
        size: height and width to which pictures are resized.
        train, val, test: maximum number of items of each part; None for all.
        on_broken: "refuse" (raise an error) or "skip" pairs that cannot be read.
        batch_size, steps_per_epoch, seed, workers, split_seed: see `Task`.
    """

    def __init__(
        self,
        file: str,
        splits: str,
        raw: bool = True,
        size: tuple[int, int] = (240, 320),
        train: int | None = None,
        val: int | None = None,
        test: int | None = None,
        on_broken: str = "refuse",
        batch_size: int = 8,
        steps_per_epoch: int | None = None,
        seed: int = 42,
        workers: int = 0,
        split_seed: int = 42,
    ) -> None:
        super().__init__(size, batch_size, steps_per_epoch, seed, workers, split_seed)
        check_counts(train=train, val=val, test=test)
        self.file, self.splits, self.raw, self.on_broken = NyuFile(Path(file)), Path(splits), raw, on_broken
        self.most = (train, val, test)

    def datasets(self) -> Datasets:
        count = len(self.file)
        known, held_out = read_splits(self.splits, count)
        kept, _, chosen = random_split(len(known), self.split_seed, 0.8, 0.0)
        parts = ([known[i] for i in kept], [known[i] for i in chosen], held_out)
        return lazy_datasets(at_most(parts, self.most), self.pair, self.on_broken)

    def pair(self, number: int) -> Batch:
        picture, metres = self.file.pair(number, self.raw)
        known = metres.isfinite() & (metres > 0)
        return Batch(resize(picture, self.size), *resize_known(metres, known, self.size))


class RenderedRooms(DepthTask):
    """Depth without a download: rendered rooms with boxes, whose walls show photographs. The distances have holes, like
    those of a real camera.

    Args:
        size: height and width of a picture.
        train, val, test: number of rooms of each part.
        test_on: "generated", or "motorcycle" for a real picture with measured distances.
        batch_size, steps_per_epoch, seed, workers, split_seed: see `Task`.
    """

    def __init__(
        self,
        size: tuple[int, int] = (48, 64),
        train: int = 3000,
        val: int = 50,
        test: int = 50,
        test_on: str = "generated",
        batch_size: int = 16,
        steps_per_epoch: int | None = None,
        seed: int = 0,
        workers: int = 0,
        split_seed: int = 0,
    ) -> None:
        motorcycle.check(test_on)
        super().__init__(size, batch_size, steps_per_epoch, seed, workers, split_seed)
        check_counts(train=train, val=val, test=test)
        self.counts, self.test_on = (train, val, test), test_on

    def datasets(self) -> Datasets:
        train, val, test = numbered_keys(self.counts)
        return lazy_datasets((train, val, test[:1] if self.test_on == "motorcycle" else test), self.view, keep=True)

    def view(self, key: tuple[int, int]) -> Batch:
        if key[0] == 2 and self.test_on == "motorcycle":  # a single picture
            return Batch(*motorcycle.depth(self.size))
        return Batch(*room(self.size, key[0], item_generator(self.split_seed, *key)))
