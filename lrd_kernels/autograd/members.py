"""The processes of a `torch.distributed` group as the parts of a Gaussian."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from lrd_kernels.autograd.split import Part, Root, Sums
from lrd_kernels.linalg import capacitance


class Members:
    """The processes of a group, and what they exchange."""

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError("torch.distributed is not initialised: call torch.distributed.init_process_group first")
        self._dist, self._group = dist, group

    def join(self, part: Part) -> Joined:
        return Joined(part, self)

    def sum(self, numbers: Tensor) -> Tensor:
        """The sum over all processes."""
        total = numbers.detach().clone(memory_format=torch.contiguous_format)
        self._dist.all_reduce(total, group=self._group)
        return total

    def all(self, numbers: Tensor) -> list[Tensor]:
        """The tensors of all processes, which have the same shape."""
        found = [torch.empty_like(numbers, memory_format=torch.contiguous_format) for _ in range(self.count)]
        self._dist.all_gather(found, numbers.detach().contiguous(), group=self._group)
        return found

    def first(self, numbers: Tensor) -> Tensor:
        """The tensor of the first process."""
        found = numbers.detach().clone(memory_format=torch.contiguous_format)
        first = 0 if self._group is None else self._dist.get_global_rank(self._group, 0)
        self._dist.broadcast(found, first, group=self._group)
        return found

    def eigenvectors(self, gram: Tensor) -> tuple[Tensor, Tensor]:
        """Eigenvalues and eigenvectors of the sum of Gram matrices, bitwise the same on all processes."""
        values, vectors = capacitance.eigenvectors(self.sum(gram))
        both = self.first(torch.cat([values[..., None, :], vectors], -2))
        return both[..., 0, :], both[..., 1:, :]

    @property
    def count(self) -> int:
        return self._dist.get_world_size(self._group)


class Joined:
    """All processes together, seen from one of them."""

    def __init__(self, part: Part, members: Members) -> None:
        self._part, self._members = part, members

    def sums(self) -> Sums:
        own = self._part.sums()
        return own.unpacked(self._members.sum(own.packed()))

    def residual(self, z: Tensor) -> Tensor:
        return self._members.sum(self._part.residual(z))

    def decomposed(self) -> list[Root]:
        own = self._part.decomposed()
        every = zip(*(self._members.all(tensor) for tensor in own), strict=True)
        return [Root(*tensors) for tensors in every]


class SumOfAll(Function):
    """The sum over all processes, whose gradient is the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, numbers: Tensor, sum_of: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.sum_of = sum_of
        return sum_of(numbers)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.sum_of(grad), None
