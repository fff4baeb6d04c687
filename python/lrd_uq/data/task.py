"""What all tasks share: three data sets, and batches in an order that seed and step alone decide."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from lrd_uq.data.batch import Batch
from lrd_uq.data.files import BrokenFile, pictures_of
from lrd_uq.data.order import StepOrder, place_of
from lrd_uq.extra import lightning as L
from lrd_uq.styles import Style

PARTS = ("train", "val", "test")
ON_BROKEN = ("refuse", "skip")
EVALUATED_AT_ONCE = 50


class Items(Dataset[Batch]):
    """Tensors in memory, whole batches at a time."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(self.batch.target)

    def __getitem__(self, index: int) -> Batch:
        return Batch(*(None if t is None else t[index] for t in self.batch))  # type: ignore[arg-type]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        return Batch(*(None if t is None else t[list(indices)] for t in self.batch))  # type: ignore[arg-type]


class MadeItems(Dataset[Batch]):
    """Items that are read or made when they are asked for.

    Args:
        keys: what each is made from: a file's name, a number.
        make: an item from its key.
        on_broken: "refuse" ends with the error that names a broken file; "skip" warns with it, and leaves the item out.
        keep: holds what was made: for items that take longer to make than to train on.
    """

    def __init__(
        self, keys: Sequence[Any], make: Callable[[Any], Batch], on_broken: str = "refuse", keep: bool = False
    ) -> None:
        if on_broken not in ON_BROKEN:
            raise ValueError(f"on_broken must be one of {', '.join(ON_BROKEN)}; got {on_broken!r}")
        self.keys, self.make, self.on_broken = keys, make, on_broken
        self.kept: dict[int, Batch] | None = {} if keep else None

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> Batch:
        if self.kept is None:
            return self.make(self.keys[index])
        if index not in self.kept:
            self.kept[index] = self.make(self.keys[index])
        return self.kept[index]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        found = [item for item in map(self._item, indices) if item is not None]
        if not found:
            raise BrokenFile(f"of the items {list(indices)} none can be read")
        return together(found)

    def _item(self, index: int) -> Batch | None:
        try:
            return self[index]
        except BrokenFile as error:
            if self.on_broken == "refuse":
                raise
            warnings.warn(f"skipped: {error}", stacklevel=2)
            return None


def together(items: Sequence[Batch]) -> Batch:
    """Items without a first dimension as a batch."""
    inputs, targets, masks = zip(*items, strict=True)
    return Batch(torch.stack(inputs), torch.stack(targets), None if masks[0] is None else torch.stack(masks))


Datasets = tuple[Dataset[Batch], Dataset[Batch], Dataset[Batch]]  # training, validation, test


def made(
    parts: Sequence[Sequence[Any]], make: Callable[[Any], Batch], on_broken: str = "refuse", keep: bool = False
) -> Datasets:
    """Three data sets from the keys of their items; the options are those of `MadeItems`."""
    train, val, test = (MadeItems(keys, make, on_broken, keep) for keys in parts)
    return train, val, test


def numbered(counts: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Keys of items that are generated: the part's number, and the item's own."""
    return [[(part, number) for number in range(count)] for part, count in enumerate(counts)]


def at_most(parts: Sequence[Sequence[Any]], counts: Sequence[int | None]) -> list[Sequence[Any]]:
    """The first of each part; None for all."""
    return [part[:count] for part, count in zip(parts, counts, strict=True)]


class Task(L.pytorch.LightningDataModule):
    """A task is a subclass with `datasets` and, where its outputs are pictures, a `style`.

    Args:
        batch_size: items of a training step.
        steps_per_epoch: None for one walk through the training items.
        seed: of the split and of the order of training.
        workers: processes that read items.
    """

    style: Style | None = None  # how its pictures are drawn

    def __init__(
        self, batch_size: int = 32, steps_per_epoch: int | None = None, seed: int = 0, workers: int = 0
    ) -> None:
        super().__init__()
        self.batch_size, self.steps_per_epoch, self.seed, self.workers = batch_size, steps_per_epoch, seed, workers
        self._datasets: Datasets | None = None

    def datasets(self) -> Datasets:
        """Training, validation and test items; each has `__getitems__`, which gives a batch."""
        raise NotImplementedError

    def inputs_of(self, folder: Path) -> list[Path]:
        """The files of a folder that `read` takes, one an item."""
        return pictures_of(folder)

    def read(self, path: Path) -> Batch:
        """An item to predict, from a file; its target is NaN where the truth is not known."""
        raise ValueError(f"{type(self).__name__} has no predictions for folders of files")

    def setup(self, stage: str | None = None) -> None:
        if self._datasets is None:
            self._datasets = self.datasets()

    def dataset(self, part: str) -> Any:
        """The items of "train", "val" or "test"."""
        if part not in PARTS:
            raise ValueError(f"part must be one of {', '.join(PARTS)}; got {part!r}")
        self.setup()
        assert self._datasets is not None
        return self._datasets[PARTS.index(part)]

    def part(self, name: str) -> Batch:
        """All items of "train", "val" or "test" in memory."""
        dataset = self.dataset(name)
        return dataset.__getitems__(range(len(dataset)))

    def train_dataloader(self) -> DataLoader:
        items = self.dataset("train")
        order = StepOrder(len(items), self.batch_size, self.steps_per_epoch, self.seed, **place_of(self.trainer))
        return self._loader(items, batch_sampler=order)

    def val_dataloader(self) -> DataLoader:
        return self._loader(self.dataset("val"), batch_size=EVALUATED_AT_ONCE)

    def test_dataloader(self) -> DataLoader:
        return self._loader(self.dataset("test"), batch_size=EVALUATED_AT_ONCE)

    def _loader(self, items: Dataset[Batch], **options: Any) -> DataLoader:
        return DataLoader(items, collate_fn=_as_it_is, num_workers=self.workers, **options)


def _as_it_is(batch: Any) -> Any:
    """The data sets give whole batches already."""
    return batch


def shares(count: int, seed: int, first: float, second: float) -> tuple[list[int], list[int], list[int]]:
    """Numbers 0 to count - 1 in an order that the seed fixes, cut after shares of them."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    a, b = int(first * count), int(first * count) + int(second * count)
    return order[:a], order[a:b], order[b:]
