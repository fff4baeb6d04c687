"""Batches of any data: a data set, a DataLoader, or a batch in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from lrd_uq.data.batch import Batch, as_batch, collate

NAMED = 10  # items that a message names


Size = int | Callable[[Tensor], int]  # the most items of a batch, or what makes it from the target of one item


def batches(data: Any, size: Size) -> Iterator[Batch]:
    """The items of a batch, a data set, or a DataLoader (or other iterable of batches), `size` items at a time."""
    return (batch for _, batch in numbered_batches(data, size))


def numbered_batches(data: Any, size: Size) -> Iterator[tuple[list[int], Batch]]:
    """As `batches`, with the numbers of the items. A data set is read item by item, so that memory has one batch."""
    if not isinstance(data, (tuple, Mapping, DataLoader)) and hasattr(data, "__getitem__"):
        yield from _of_dataset(data, size)
        return
    first = 0
    for batch in map(as_batch, [data] if isinstance(data, (tuple, Mapping)) else data):
        count = len(batch.target)
        step = _items(size, batch.target[0]) if count else 1
        for begin in range(0, count, step):
            some = slice(begin, min(begin + step, count))
            part = Batch(*(None if t is None else t[some] for t in batch))  # type: ignore[arg-type]
            yield list(range(first + some.start, first + some.stop)), part
        first += count


def _of_dataset(data: Any, size: Size) -> Iterator[tuple[list[int], Batch]]:
    """Batches of a data set; an item that it skips has no part in them, but keeps its number."""
    held: list[tuple[int, Batch]] = []
    read = getattr(data, "item_or_none", data.__getitem__)
    for number in range(len(data)):
        item = read(number)
        if item is None:
            continue
        held.append((number, as_batch(item)))
        if len(held) == _items(size, held[0][1].target):
            yield [number for number, _ in held], collate([item for _, item in held])
            held = []
    if held:
        yield [number for number, _ in held], collate([item for _, item in held])


def _items(size: Size, target: Tensor) -> int:
    return size if isinstance(size, int) else size(target)


def named(items: Sequence[int]) -> str:
    """The numbers of some items, for a message."""
    rest = len(items) - NAMED
    return ", ".join(map(str, items[:NAMED])) + (f" and {rest} more" if rest > 0 else "")
