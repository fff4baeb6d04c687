"""A table with correlated outputs: the measurements of cell nuclei that come with scikit-learn."""

from __future__ import annotations

import torch

from lrd_uq.data.batch import Batch
from lrd_uq.data.task import Datasets, Items, Task, random_split

QUANTITIES = 10  # radius, texture, perimeter, area, smoothness, ...


class CellMeasurements(Task):
    """Input [20]: means and standard errors of ten quantities over the cell nuclei of a sample. Target [10]: their
    largest values. 569 samples (Wisconsin breast cancer data), standardised with the training samples.

    A table has no positions: use a head with `features_last=True` and 10 outputs.

    Args:
        train: fraction of the samples for training; half of the others are used for validation.
        batch_size, steps_per_epoch, seed, split_seed: see `Task`.
    """

    def __init__(
        self,
        train: float = 0.6,
        batch_size: int = 32,
        steps_per_epoch: int | None = None,
        seed: int = 0,
        split_seed: int = 0,
    ) -> None:
        super().__init__(batch_size, steps_per_epoch, seed, split_seed=split_seed)
        if not 0 < train < 1:
            raise ValueError(f"train must be a fraction between 0 and 1; got {train}")
        self.train = train

    def datasets(self) -> Datasets:
        try:
            from sklearn.datasets import load_breast_cancer
        except ImportError as error:
            raise ImportError("the table needs scikit-learn: pip install 'lrd-kernels[train]'") from error
        values = torch.from_numpy(load_breast_cancer().data).log1p()  # all positive, and skewed
        parts = random_split(len(values), self.split_seed, self.train, (1 - self.train) / 2)
        if not all(parts):
            raise ValueError(f"train {self.train} leaves a part without samples: {[len(part) for part in parts]}")
        known = values[parts[0]]
        values = ((values - known.mean(0)) / known.std(0)).float()
        train, val, test = (
            Items(Batch(values[part, : 2 * QUANTITIES], values[part, 2 * QUANTITIES :], None)) for part in parts
        )
        return train, val, test
