"""The order of the training data, as a function of seed and step alone: a resumed run goes on with the next batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import Sampler

from lrd_uq.extra import lightning as L


class StepOrder(Sampler[list[int]]):
    """Batches of an endless walk through the data, `steps` of them an epoch.

    The walk is a row of permutations of all items, the p-th drawn from (seed, p). So an epoch, after which a checkpoint
    is written, may be shorter or longer than the data.

    Args:
        items: how many there are.
        batch: items of a batch, no more than there are.
        steps: batches of an epoch; None for as many whole ones as the data has.
        position: how many batches of the walk are done as an epoch begins. lightning tells samplers the epoch too late
            for the first one after a restart, so this is asked of its trainer instead.
        process, processes: of distributed training, where each takes its share of every batch.
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
        if not processes <= batch <= items:
            raise ValueError(f"batch must be from {processes} to the number of training items, {items}; got {batch}")
        self.items, self.batch, self.seed = items, batch, seed
        self.position, self.process, self.processes = position, process, processes
        self.steps = items // batch if steps is None else steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        whole = self.items // self.batch  # batches of a permutation; its rest waits for the next one
        first = self.position()
        for step in range(first, first + self.steps):
            walk, place = divmod(step, whole)
            batch = self._permutation(walk)[place * self.batch : (place + 1) * self.batch]
            yield batch[self.process :: self.processes]

    def _permutation(self, walk: int) -> list[int]:
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + walk) % 2**63)
        return torch.randperm(self.items, generator=generator).tolist()


def place_of(trainer: L.pytorch.Trainer | None) -> dict[str, Any]:
    """Arguments of `StepOrder` for the data of a trainer."""
    if trainer is None:
        return {}
    loop = trainer.fit_loop
    places = {"process": trainer.global_rank, "processes": trainer.world_size}
    return {"position": lambda: loop.total_batch_idx + 1, **places}


class EpochSeeds(L.pytorch.Callback):
    """Seeds torch's noise (dropout, weight draws) from (seed, epoch, process) as every epoch begins.

    With `StepOrder` and a checkpoint after every epoch, a run that was killed and resumed ends with the weights of one
    that was not.

    Args:
        seed: of the run.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def on_train_epoch_start(self, trainer: L.pytorch.Trainer, pl_module: L.pytorch.LightningModule) -> None:
        # An odd multiplier keeps neighbouring seeds and epochs apart; processes draw different noise.
        torch.manual_seed((self.seed * 1_000_003 + trainer.current_epoch * 1_009 + trainer.global_rank) % 2**63)
