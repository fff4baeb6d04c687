"""The order of the training data. It depends only on seed and step, so a resumed run continues with the next batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from lrd_uq.extra import lightning as L


class ResumableBatchSampler(Sampler[list[int]]):
    """Cuts an endless sequence of permutations of the data into batches, `steps` per epoch.

    Permutation p is drawn from (seed, p). An epoch, after which a checkpoint is written, may therefore be shorter or
    longer than one pass over the data.

    Args:
        items: number of items.
        batch: batch size, at most `items`.
        steps: batches per epoch; None for as many full batches as the data has.
        position: returns the number of batches already used when an epoch begins. After a restart, lightning calls
            `set_epoch` too late for the first epoch, so the trainer is asked instead.
        process, processes: rank and world size in distributed training; each process takes its share of every batch.
            The shares are equal, so that the mean of their gradients is the gradient of the batch.
    """

    def __init__(
        self,
        items: int,
        batch: int,
        steps: int | None,
        seed: int,
        position: Callable[[], int] = lambda: 0,
        process: int = 0,
        processes: int = 1,
    ) -> None:
        if not 1 <= batch <= items:
            raise ValueError(f"batch_size must be from 1 to the number of training items, {items}; got {batch}")
        if batch % processes:
            raise ValueError(f"batch_size must be a multiple of the number of processes, {processes}; got {batch}")
        if steps is not None and steps < 1:
            raise ValueError(f"steps_per_epoch must be at least 1; got {steps}")
        self.items, self.batch, self.seed = items, batch, seed
        self.position, self.process, self.processes = position, process, processes
        self.steps = items // batch if steps is None else steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        per_pass = self.items // self.batch  # full batches of a permutation; the remaining items are left out
        first = self.position()
        for step in range(first, first + self.steps):
            number, index = divmod(step, per_pass)
            batch = self._permutation(number)[index * self.batch : (index + 1) * self.batch]
            yield batch[self.process :: self.processes]

    def _permutation(self, number: int) -> list[int]:
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + number) % 2**63)
        return torch.randperm(self.items, generator=generator).tolist()


WHOLE = (SequentialSampler, RandomSampler, DistributedSampler)  # samplers of all items of a data set


def one_pass(loader: DataLoader, batches_of_epoch: float = math.inf) -> Iterator[Any]:
    """Batches of every item of a loader once, in order.

    If the loader has a sampler of its own, or reads a stream, these are the batches of an epoch.

    Raises:
        TypeError: if the loader reads a stream that may have no end.
    """
    sampler, size, most = loader.batch_sampler, None, None
    if isinstance(loader.dataset, IterableDataset):
        if batches_of_epoch == math.inf:
            raise TypeError(
                "one pass over the training items is needed, but the stream may have no end: give the data set,"
                f" {type(loader.dataset).__name__}, a __len__, or set limit_train_batches of the trainer"
            )
        most = int(batches_of_epoch)
    elif isinstance(sampler, ResumableBatchSampler):
        size = sampler.batch
    elif type(sampler) is BatchSampler and type(sampler.sampler) in WHOLE:
        size = sampler.batch_size
    if size is not None:
        options: dict[str, Any] = {"collate_fn": loader.collate_fn, "num_workers": loader.num_workers}
        loader = DataLoader(loader.dataset, batch_size=size, **options)
    yield from itertools.islice(loader, most)


def sampler_arguments(trainer: L.pytorch.Trainer | None) -> dict[str, Any]:
    """Position, rank and world size of a trainer, as arguments of `ResumableBatchSampler`."""
    if trainer is None:
        return {}
    loop = trainer.fit_loop
    places = {"process": trainer.global_rank, "processes": trainer.world_size}
    return {"position": lambda: loop.total_batch_idx + 1, **places}


def shared_batches(items: int, batch: int, trainer: L.pytorch.Trainer | None) -> list[range]:
    """Batches, in order, of this process's share of all items: those of all processes together are all items."""
    process, processes = (0, 1) if trainer is None else (trainer.global_rank, trainer.world_size)
    if items < processes:
        raise ValueError(f"each of {processes} processes needs an item to validate or test; there are {items}")
    share = range(process, items, processes)
    return [share[begin : begin + batch] for begin in range(0, len(share), batch)]


class BatchSeeds(L.pytorch.Callback):
    """Seeds torch's random numbers before every batch, from the seed, the number of the batch and the process.

    The weights of a run therefore do not depend on when it is validated, interrupted and resumed.

    Args:
        seed: seed of the run.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def on_train_batch_start(
        self, trainer: L.pytorch.Trainer, pl_module: L.pytorch.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        number = trainer.fit_loop.total_batch_idx  # over all epochs
        # An odd multiplier keeps neighbouring seeds and batches apart; processes draw different noise.
        torch.manual_seed((self.seed * 1_000_003 + number * 1_009 + trainer.global_rank) % 2**63)
