"""Optical flow: the motion of every pixel of the first of two frames."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from lrd_uq.checks import check_counts, check_positive, picture_size
from lrd_uq.data import motorcycle
from lrd_uq.data.batch import Batch
from lrd_uq.data.files import known_flow, pictures_of, read_colour, read_flo, read_lines, resize, resize_known
from lrd_uq.data.layers import moving_layers
from lrd_uq.data.natural import item_generator
from lrd_uq.data.reading import BrokenFile
from lrd_uq.data.task import Datasets, Task, at_most, lazy_datasets, numbered_keys, random_split
from lrd_uq.styles import Flow

CHANGE = 4.0  # scale of the difference between two frames in the input


class FlowTask(Task):
    """Input [6, H, W]: the first frame, and four times the difference between the second and the first (the frames are
    nearly equal, and networks learn faster from their scaled difference). Target [2, H, W]: motion to the right and
    down, in units of `unit` pixels after resizing. Mask: where the motion is known."""

    style = Flow()

    def __init__(
        self,
        size: tuple[int, int],
        unit: float,
        batch_size: int = 8,
        steps_per_epoch: int | None = None,
        seed: int = 0,
        workers: int = 0,
        split_seed: int = 0,
    ) -> None:
        super().__init__(batch_size, steps_per_epoch, seed, workers, split_seed)
        check_positive(unit=unit)
        self.size, self.unit = picture_size(size), unit

    def item(self, first: Tensor, second: Tensor, flow: Tensor, known: Tensor) -> Batch:
        """An item from two frames [3, H, W] and the motion in pixels [2, H, W]."""
        return Batch(torch.cat([first, CHANGE * (second - first)]), flow / self.unit, known)

    def inputs_of(self, folder: Path) -> list[Path]:
        """The first frames of a folder, named `<name>_img1.<extension>`."""
        found = [path for path in pictures_of(folder) if path.stem.endswith("_img1")]
        if not found:
            raise FileNotFoundError(f"{folder} has no first frame <name>_img1.png (or .ppm, .jpg)")
        return found

    def read(self, path: Path) -> Batch:
        second = path.with_name(path.name.replace("_img1", "_img2"))
        unknown = torch.full((2, *self.size), torch.nan)
        one, other = (resize(frame, self.size) for frame in read_frames(path, second))
        return self.item(one, other, unknown, torch.ones_like(unknown, dtype=torch.bool))


def read_frames(first: Path, second: Path) -> tuple[Tensor, Tensor]:
    """Two frames of one size, [3, H, W] each."""
    frames = read_colour(first), read_colour(second)
    if frames[0].shape != frames[1].shape:
        raise BrokenFile(f"{second} must have the size of {first.name}, {_size(frames[0])}; got {_size(frames[1])}")
    return frames


def _size(values: Tensor) -> str:
    return f"{values.shape[-1]} x {values.shape[-2]}"


class FlyingChairs(FlowTask):
    """Flying Chairs as it is distributed: `00001_img1.ppm`, `00001_img2.ppm` and `00001_flow.flo` in one folder.

    Without a split file, the pairs are split randomly into 80, 10 and 10 %: 18,297, 2,287 and 2,288 of all 22,872, as
    in the paper.

    Args:
        folder: folder of the files.
        split: file with 1 (training), 2 (validation) or 3 (test) for every pair, in order. If there is no 3, as in
            `FlyingChairs_train_val.txt`, the pairs marked 2 are the test pairs, and a tenth of those marked 1 is used
            for validation.
        size: height and width to which frames are resized; the motion is scaled accordingly.
        unit: motion in pixels that corresponds to a target of 1.
        train, val, test: maximum number of items of each part; None for all.
        on_broken: "refuse" (raise an error) or "skip" pairs that cannot be read.
        batch_size, steps_per_epoch, seed, workers: see `Task`.
        split_seed: see `Task`; None for 42. A file that names all three parts leaves nothing for it to choose.
    """

    def __init__(
        self,
        folder: str,
        split: str | None = None,
        size: tuple[int, int] = (192, 256),
        unit: float = 10.0,
        train: int | None = None,
        val: int | None = None,
        test: int | None = None,
        on_broken: str = "refuse",
        batch_size: int = 8,
        steps_per_epoch: int | None = None,
        seed: int = 42,
        workers: int = 0,
        split_seed: int | None = None,
    ) -> None:
        super().__init__(size, unit, batch_size, steps_per_epoch, seed, workers)
        check_counts(train=train, val=val, test=test)
        self.chosen_seed = split_seed
        self.folder, self.split_file, self.on_broken = Path(folder), split, on_broken
        self.most = (train, val, test)

    def datasets(self) -> Datasets:
        names = self.names()
        parts = [[names[i] for i in part] for part in self.split(len(names))]
        return lazy_datasets(at_most(parts, self.most), self.pair, self.on_broken)

    def names(self) -> list[str]:
        if not self.folder.is_dir():
            raise FileNotFoundError(f"there is no folder {self.folder}")
        found = sorted(path.name.removesuffix("_flow.flo") for path in self.folder.glob("*_flow.flo"))
        if not found:
            raise FileNotFoundError(f"{self.folder} has no flow field <number>_flow.flo")
        return found

    def split(self, count: int) -> tuple[list[int], list[int], list[int]]:
        seed = 42 if self.chosen_seed is None else self.chosen_seed
        if self.split_file is None:
            return random_split(count, seed, 0.8, 0.1)
        path = Path(self.split_file)
        words = [" ".join(line) for line in read_lines(path)]
        if len(words) != count or set(words) - {"1", "2", "3"}:
            raise BrokenFile(
                f"{path} must have a line with 1, 2 or 3 for each of {count} pairs; it has {len(words)} lines, with"
                f" {', '.join(sorted(set(words))[:5])}"
            )
        train, val, test = ([i for i, word in enumerate(words) if word == part] for part in "123")
        if not test:
            kept, _, held_out = random_split(len(train), seed, 0.9, 0.0)
            train, val, test = [train[i] for i in kept], [train[i] for i in held_out], val
        elif self.chosen_seed is not None:
            raise ValueError(f"split_seed has no effect: {path} says where every pair belongs")
        return train, val, test

    def pair(self, name: str) -> Batch:
        first, second = read_frames(*(self.folder / f"{name}_img{i}.ppm" for i in (1, 2)))
        field = self.folder / f"{name}_flow.flo"
        flow = read_flo(field)
        if flow.shape[1:] != first.shape[1:]:
            raise BrokenFile(f"{field} must have the size of its frames, {_size(first)}; got {_size(flow)}")
        scale = torch.tensor([self.size[1] / flow.shape[2], self.size[0] / flow.shape[1]])[:, None, None]
        motion, known = resize_known(flow, known_flow(flow), self.size)
        return self.item(resize(first, self.size), resize(second, self.size), motion * scale, known)


class MovingLayers(FlowTask):
    """Flow without a download: pieces of photographs move over a background, each by its own affine map, so that the
    motion of every pixel is known exactly.

    Args:
        size: height and width of a frame.
        unit: motion in pixels that corresponds to a target of 1.
        layers: maximum number of pieces over the background.
        train, val, test: number of pairs of each part.
        test_on: "generated", or "motorcycle" for crops of a real stereo pair with measured disparities.
        batch_size, steps_per_epoch, seed, workers, split_seed: see `Task`.
    """

    def __init__(
        self,
        size: tuple[int, int] = (48, 64),
        unit: float = 1.0,
        layers: int = 3,
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
        super().__init__(size, unit, batch_size, steps_per_epoch, seed, workers, split_seed)
        check_counts(layers=layers, train=train, val=val, test=test)
        self.layers, self.counts, self.test_on = layers, (train, val, test), test_on

    def datasets(self) -> Datasets:
        return lazy_datasets(numbered_keys(self.counts), self.pair, keep=True)

    def pair(self, key: tuple[int, int]) -> Batch:
        part, number = key
        generator = item_generator(self.split_seed, part, number)
        if part == 2 and self.test_on == "motorcycle":
            first, second, disparity, known = motorcycle.crop(self.size, generator)
            flow = torch.cat([-disparity, torch.zeros_like(disparity)])
            return self.item(first, second, flow, known.expand(2, -1, -1))
        first, second, flow = moving_layers(self.size, self.layers, part, generator)
        return self.item(first, second, flow, torch.ones_like(flow, dtype=torch.bool))
