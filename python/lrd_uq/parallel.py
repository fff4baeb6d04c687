"""Several processes: what the training layer adds to lightning's strategies.

`ddp` keeps a copy of the network in each process. `fsdp2` shards weights, gradients and the optimiser's state over them
(torch's `fully_shard`). Each process takes its share of every batch, and the gradient is the mean over the processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

import lrd_kernels as lrd
from lrd_uq import checkpoints
from lrd_uq.bayes.base import Method
from lrd_uq.extra import lightning as L

SHARDED = "fsdp2"
Result = TypeVar("Result")


class ShardedStrategy(L.pytorch.strategies.ModelParallelStrategy):
    """FSDP2 over all processes, with the checkpoints of a single process."""

    def __init__(self, **options: Any) -> None:
        super().__init__(tensor_parallel_size=1, save_distributed_checkpoint=False, **options)

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Every process reads the whole file, verifies it, and keeps its shards."""
        found = checkpoints.load(Path(self.broadcast(checkpoint_path)))
        assert self.model is not None
        own = self.model.state_dict()
        self.model.load_state_dict({name: _as(value, own.get(name)) for name, value in found["state_dict"].items()})
        for optimizer, saved in zip(self.optimizers, found["optimizer_states"], strict=True):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            state = {
                number: {name: _as(value, parameters[number]) for name, value in values.items()}
                for number, values in saved["state"].items()
            }
            optimizer.load_state_dict({**saved, "state": state})
        return found


def _as(value: Any, like: Any) -> Any:
    """A whole tensor, sharded as another one of its shape is; other values as they are."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)


L.pytorch.strategies.StrategyRegistry.register(SHARDED, ShardedStrategy, description="FSDP2 over all processes")


def prepare(strategy: Any) -> None:
    """Lets DDP train networks of which a part gets no gradients, such as the factor in a phase of rank 0."""
    if isinstance(strategy, L.pytorch.strategies.DDPStrategy):
        strategy._ddp_kwargs.setdefault("find_unused_parameters", True)


def launch(
    trainer: L.pytorch.Trainer, module: L.pytorch.LightningModule, function: Callable[[int, int], Result]
) -> Result:
    """Calls `function(process, processes)` in every process of a trainer's strategy. Returns this one's result."""
    strategy = trainer.strategy

    def call() -> Result:
        if isinstance(strategy, L.pytorch.strategies.ParallelStrategy):
            strategy.connect(module)
            strategy.setup_environment()
        return function(trainer.global_rank, trainer.world_size)

    return call() if strategy.launcher is None else strategy.launcher.launch(call)


def shard(method: Method, net: nn.Module, mesh: Any) -> None:
    """Shards the weights of every member over the processes of a device mesh."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    if method.needs_all_weights:
        raise ValueError(f"{type(method).__name__} needs all weights in one process: use the strategy ddp")
    for member in method.members(net):
        if not isinstance(member, FSDPModule):
            for part in member.children():
                fully_shard(part, mesh=mesh)
            fully_shard(member, mesh=mesh)


def skip_bad_gradients(parameters: Iterable[nn.Parameter], strategy: Any) -> bool:
    """Drops all gradients if one of them is not finite, on any process. Returns whether they were dropped."""
    owners = [p for p in parameters if p.grad is not None]
    shards = [p.grad.to_local() for p in owners if isinstance(p.grad, DTensor)]
    if not shards:  # all processes have the same gradients
        return lrd.filter_gradients(owners, mode="skip") > 0
    finite = torch.stack([shard.isfinite().all() for shard in shards]).all()
    bad = bool(strategy.reduce((~finite).float(), reduce_op="max"))
    if bad:
        for owner in owners:
            owner.grad = None
    return bad
