"""The base class of all tasks: three data sets, and training batches whose order depends only on seed and step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from lrd_uq.data.batch import Batch, as_batch, collate
from lrd_uq.data.files import pictures_of
from lrd_uq.data.order import ResumableBatchSampler, sampler_arguments, shared_batches
from lrd_uq.data.reading import BrokenFile
from lrd_uq.extra import lightning as L
from lrd_uq.styles import Style

PARTS = ("train", "val", "test")
ON_BROKEN = ("refuse", "skip")
EVAL_BATCH_SIZE = 50


class Items(Dataset[Batch]):
    """Items in memory, as a batch of tensors.

    Examples:
        >>> from lrd_uq.data import Batch
        >>> from lrd_uq.data.task import Items
        >>> items = Items(Batch(torch.zeros(5, 3), torch.zeros(5, 1), None))
        >>> len(items), items[0].input.shape
        (5, torch.Size([3]))
    """

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(self.batch.target)

    def __getitem__(self, index: int) -> Batch:
        return Batch(*(None if t is None else t[index] for t in self.batch))  # type: ignore[arg-type]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        return Batch(*(None if t is None else t[list(indices)] for t in self.batch))  # type: ignore[arg-type]


class LazyItems(Dataset[Batch]):
    """Items that are read or generated when they are accessed.

    Args:
        keys: one key per item, such as a file name or a number.
        make: creates an item from its key.
        on_broken: "refuse" raises the error that names the broken file; "skip" warns and leaves the item out.
        keep: cache the items; for items that take long to generate.

    Raises:
        ValueError: if on_broken is unknown.

    Examples:
        >>> from lrd_uq.data import Batch
        >>> from lrd_uq.data.task import LazyItems
        >>> items = LazyItems([3, 4], lambda n: Batch(torch.full((2,), float(n)), torch.zeros(1), None))
        >>> items[1].input
        tensor([4., 4.])
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
        found = [item for item in map(self.item_or_none, indices) if item is not None]
        if not found:
            raise BrokenFile(f"of the items {list(indices)}, none can be read")
        return collate(found)

    def item_or_none(self, index: int) -> Batch | None:
        """An item; None, with a warning, for a broken one that is skipped."""
        try:
            return self[index]
        except BrokenFile as error:
            if self.on_broken == "refuse":
                raise
            warnings.warn(f"skipped: {error}", stacklevel=2)
            return None


class OwnItems(Dataset[Batch]):
    """The items of any data set with `__len__` and `__getitem__`.

    Args:
        items: each item is `(input, target)`, `(input, target, mask)`, or a dict (see `as_batch`), of tensors, arrays
            or numbers.

    Examples:
        >>> from lrd_uq.data.task import OwnItems
        >>> OwnItems([(torch.zeros(3), torch.zeros(1)), (torch.ones(3), torch.ones(1))]).__getitems__([1, 0]).target
        tensor([[1.],
                [0.]])
    """

    def __init__(self, items: Any) -> None:
        if not (hasattr(items, "__len__") and hasattr(items, "__getitem__")):
            raise TypeError(
                f"a data set must have __len__ and __getitem__; got {type(items).__name__}. Without a task, the trainer"
                " takes any DataLoader: trainer.fit(module, loader)"
            )
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Batch:
        return as_batch(self.items[index])

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        return collate([self[index] for index in indices])


Datasets = tuple[Dataset[Batch], Dataset[Batch], Dataset[Batch]]  # training, validation, test


def lazy_datasets(
    parts: Sequence[Sequence[Any]], make: Callable[[Any], Batch], on_broken: str = "refuse", keep: bool = False
) -> Datasets:
    """Training, validation and test set from the keys of their items; the other arguments are those of `LazyItems`."""
    train, val, test = (LazyItems(keys, make, on_broken, keep) for keys in parts)
    return train, val, test


def numbered_keys(counts: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Keys of generated items: (number of the part, number of the item)."""
    return [[(part, number) for number in range(count)] for part, count in enumerate(counts)]


def at_most(parts: Sequence[Sequence[Any]], counts: Sequence[int | None]) -> list[Sequence[Any]]:
    """The first items of each part, at most `counts` of them; None for all."""
    return [part[:count] for part, count in zip(parts, counts, strict=True)]


class Task(L.pytorch.LightningDataModule):
    """Base class of the tasks. A subclass implements `datasets`, and has a `style` if its outputs are pictures.

    Args:
        batch_size: items per training step.
        steps_per_epoch: None for one pass over the training items.
        seed: seed of the order of the training items.
        workers: number of processes that load items.
        split_seed: seed of what the items of the three parts are, so that runs with different seeds are scored on the
            same test items.

    Examples:
        >>> from lrd_uq.data import Batch
        >>> from lrd_uq.data.task import Items, Task
        >>> class Doubled(Task):
        ...     def datasets(self):
        ...         x = torch.arange(9.0)[:, None]
        ...         return tuple(Items(Batch(part, 2 * part, None)) for part in x.chunk(3))
        >>> Doubled().part("test").target[:, 0]
        tensor([12., 14., 16.])
    """

    style: Style | None = None  # how pictures of the task are drawn

    def __init__(
        self,
        batch_size: int = 32,
        steps_per_epoch: int | None = None,
        seed: int = 0,
        workers: int = 0,
        split_seed: int = 0,
    ) -> None:
        super().__init__()
        self.batch_size, self.steps_per_epoch, self.seed, self.workers = batch_size, steps_per_epoch, seed, workers
        self.split_seed = split_seed
        self._datasets: Datasets | None = None

    @classmethod
    def of_datasets(cls, train: Any, val: Any, test: Any, **settings: Any) -> Task:
        """A task of three data sets of your own.

        Args:
            train: a data set with `__len__` and `__getitem__`. Each item is `(input, target)`,
                `(input, target, mask)`, or a dict (see `lrd_uq.data.as_batch`).
            val: another one, for validation.
            test: another one, for the scores.
            settings: those of `Task`, but for split_seed: there is nothing to split.

        Examples:
            >>> from lrd_uq.data.task import Task
            >>> pairs = [(torch.zeros(3), torch.ones(1)) for _ in range(40)]
            >>> Task.of_datasets(pairs, pairs[:5], pairs[:7], batch_size=8).part("test").target.shape
            torch.Size([7, 1])
        """
        if "split_seed" in settings:
            raise ValueError("of_datasets splits nothing, so that it takes no split_seed")
        task = cls(**settings)
        train, val, test = (
            part if isinstance(part, (Items, LazyItems)) else OwnItems(part) for part in (train, val, test)
        )
        task._datasets = train, val, test
        return task

    def datasets(self) -> Datasets:
        """Training, validation and test items; `__getitems__` of each must return a `Batch`."""
        raise NotImplementedError

    def inputs_of(self, folder: Path) -> list[Path]:
        """The files of a folder that `read` accepts, one per item."""
        return pictures_of(folder)

    def read(self, path: Path) -> Batch:
        """An item to predict from a file; the target is NaN where it is not known."""
        raise ValueError(f"{type(self).__name__} cannot predict from files")

    def setup(self, stage: str | None = None) -> None:
        """Creates the data sets once; Lightning calls it."""
        if self._datasets is None:
            self._datasets = self.datasets()

    def dataset(self, part: str) -> Any:
        """The data set "train", "val" or "test"."""
        if part not in PARTS:
            raise ValueError(f"part must be one of {', '.join(PARTS)}; got {part!r}")
        self.setup()
        assert self._datasets is not None
        return self._datasets[PARTS.index(part)]

    def part(self, name: str, items: Sequence[int] | None = None) -> Batch:
        """Some items of "train", "val" or "test" as one batch; None for all of them, which have to fit into memory."""
        dataset = self.dataset(name)
        return dataset.__getitems__(range(len(dataset)) if items is None else items)

    def train_dataloader(self) -> DataLoader:
        """Training batches, in an order that depends only on the seed and the step."""
        items = self.dataset("train")
        order = ResumableBatchSampler(
            len(items), self.batch_size, self.steps_per_epoch, self.seed, **sampler_arguments(self.trainer)
        )
        # Lightning does not know that this order goes on where a checkpoint in the middle of an epoch left it.
        warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
        return self._loader(items, batch_sampler=order)

    def val_dataloader(self) -> DataLoader:
        """Validation batches, in order."""
        return self._in_order("val")

    def test_dataloader(self) -> DataLoader:
        """Test batches, in order."""
        return self._in_order("test")

    def _in_order(self, part: str) -> DataLoader:
        items = self.dataset(part)
        return self._loader(items, batch_sampler=shared_batches(len(items), EVAL_BATCH_SIZE, self.trainer))

    def _loader(self, items: Dataset[Batch], **options: Any) -> DataLoader:
        return DataLoader(items, collate_fn=_already_collated, num_workers=self.workers, **options)


def _already_collated(batch: Any) -> Any:
    """The data sets return whole batches."""
    return batch


def random_split(count: int, seed: int, first: float, second: float) -> tuple[list[int], list[int], list[int]]:
    """Randomly splits 0 ... count - 1 into three parts; `first` and `second` are the fractions of the first two."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    a, b = int(first * count), int(first * count) + int(second * count)
    return order[:a], order[a:b], order[b:]
