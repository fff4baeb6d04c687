"""Reads the files of NYU Depth v2: an HDF5 file of MATLAB with transposed arrays, and index lists that count from 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lrd_uq.data.hdf5 import Hdf5Array, open_hdf5
from lrd_uq.data.mat import BEGIN, read_mat
from lrd_uq.data.reading import BrokenFile, naming, reading

PARTS = ("trainNdxs", "testNdxs")
MOST_METRES = 100.0  # the camera sees 10 metres: larger numbers are millimetres


class NyuFile:
    """The pairs of `nyu_depth_v2_labeled.mat`: images [N, 3, W, H] in uint8; depths, rawDepths [N, W, H] in metres."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: Any = None
        self._arrays: dict[str, Hdf5Array] = {}

    def __len__(self) -> int:
        return len(self._images())

    def pair(self, number: int, raw: bool) -> tuple[Tensor, Tensor]:
        """Picture [3, H, W] in [0, 1] and distances [1, H, W], 0 where they are missing."""
        images, distances = self._images(), self._distances("rawDepths" if raw else "depths")
        if distances.shape != (len(images), *images.shape[2:]):
            raise BrokenFile(
                f"{self.path}: the shapes {images.shape} of the pictures and {distances.shape} of the distances differ"
            )
        with naming(self.path, f"a file whose pair {number + 1}"):
            picture, metres = images.item(number), distances.item(number).astype(np.float32)
        there = metres[np.isfinite(metres)]
        if there.size and not (there.min() >= 0 and there.max() <= MOST_METRES):
            raise BrokenFile(
                f"{self.path}: the distances of pair {number + 1} are from {there.min():g} to {there.max():g}: they"
                f" must be in metres, up to {MOST_METRES:g}, and 0 where they are missing"
            )
        return torch.from_numpy(picture).mT.float() / 255, torch.from_numpy(metres).T[None].contiguous()

    def _images(self) -> Hdf5Array:
        found = self._array("images")
        if found.dtype != np.uint8 or len(found.shape) != 4 or found.shape[1] != 3:
            raise BrokenFile(
                f"{self.path}: images must be uint8 [N, 3, W, H], 0 to 255; got {found.dtype} {list(found.shape)}"
            )
        return found

    def _distances(self, name: str) -> Hdf5Array:
        found = self._array(name)
        if found.dtype.kind != "f":
            raise BrokenFile(f"{self.path}: {name} must be floats, in metres; got {found.dtype}")
        return found

    def _array(self, name: str) -> Hdf5Array:
        if self._file is None:
            self._file = open_hdf5(self.path)
        if name not in self._arrays:
            self._arrays[name] = Hdf5Array(self.path, self._file, name)
        return self._arrays[name]

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "_file": None, "_arrays": {}}  # every worker process opens the file itself


def read_splits(path: Path, count: int) -> tuple[list[int], list[int]]:
    """Indices (from 0) of training and test pairs from `splits.mat`, in MATLAB's version 5 or HDF5 format."""
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    with reading(path, "a MATLAB file") as file:
        begin = file.read(len(BEGIN))
    if begin == BEGIN:
        arrays = read_mat(path, PARTS)
    else:
        with open_hdf5(path) as opened, naming(path, "a file with indices"):
            arrays = {name: Hdf5Array(path, opened, name).all().ravel() for name in PARTS if name in opened}
    if missing := [name for name in PARTS if name not in arrays]:
        raise BrokenFile(f"{path} has no {', '.join(missing)}")
    train, test = (_indices(path, name, arrays[name]) for name in PARTS)
    numbers = [*train, *test]
    if not train or not test or min(numbers) < 0 or max(numbers) >= count or len(set(numbers)) < len(numbers):
        raise BrokenFile(
            f"{path} does not fit {count} pairs: numbers must be 1 to {count}, and no number may be there twice or in"
            " both parts"
        )
    return train, test


def _indices(path: Path, name: str, numbers: np.ndarray) -> list[int]:
    """Indices from 0, of numbers from 1 that may be stored as floats."""
    whole = numbers.dtype.kind in "ui" or (
        numbers.dtype.kind == "f" and bool(np.isfinite(numbers).all() and (numbers == np.rint(numbers)).all())
    )
    if not whole:
        raise BrokenFile(f"{path}: {name} must be whole numbers; got {numbers.dtype} such as {numbers.ravel()[:3]}")
    return [int(number) - 1 for number in numbers]
