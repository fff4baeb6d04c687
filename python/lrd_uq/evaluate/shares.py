"""Evaluation by several processes: each scores a share of the items, and all have the scores of the whole."""

from __future__ import annotations

from typing import Any

import torch

from lrd_uq.evaluate.scores import ItemScores, joined


class Share:
    """The items of a data set that one of several processes scores: every `processes`-th from number `process` on.

    Examples:
        >>> from lrd_uq.evaluate.shares import Share
        >>> share = Share([10, 11, 12, 13, 14], process=1, processes=2)
        >>> list(share.numbers), share[1]
        ([1, 3], 13)
    """

    def __init__(self, items: Any, process: int, processes: int) -> None:
        if len(items) < processes:
            raise ValueError(f"each of {processes} processes needs an item; there are {len(items)}")
        self.items, self.numbers = items, range(process, len(items), processes)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Any:
        return self.items[self.numbers[index]]

    def item_or_none(self, index: int) -> Any:
        """As `item_or_none` of the data set, which may skip an item that cannot be read."""
        return getattr(self.items, "item_or_none", self.items.__getitem__)(self.numbers[index])

    def gathered(self, own: ItemScores) -> ItemScores:
        """The scores of all items in their order, from those of this share and the shares of the other processes."""
        own = own._replace(items=torch.as_tensor(self.numbers)[own.items])
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            every: list[Any] = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(every, own)
        else:
            every = [own]
        found = joined(every)
        order = found.items.argsort()

        def sort(scores: Any) -> Any:
            return scores[order] if torch.is_tensor(scores) else {key: each[order] for key, each in scores.items()}

        return ItemScores(*map(sort, found))
