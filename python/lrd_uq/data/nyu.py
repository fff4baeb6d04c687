"""Reads the files of NYU Depth v2: an HDF5 file of MATLAB with transposed arrays, and index lists that count from 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lrd_uq.data.files import BrokenFile


class NyuFile:
    """The pairs of `nyu_depth_v2_labeled.mat`: images [N, 3, W, H] in uint8; depths, rawDepths [N, W, H] in metres."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: Any = None

    def __len__(self) -> int:
        return len(self._array("images"))

    def pair(self, number: int, raw: bool) -> tuple[Tensor, Tensor]:
        """Picture [3, H, W] in [0, 1] and distances [1, H, W], 0 where they are missing."""
        try:
            picture = np.asarray(self._array("images")[number])
            metres = np.asarray(self._array("rawDepths" if raw else "depths")[number], dtype=np.float32)
        except OSError as error:  # raised by HDF5 for a missing chunk
            raise BrokenFile(f"{self.path} is broken at pair {number + 1}: {error}") from error
        if picture.shape != (3, *metres.shape):
            raise BrokenFile(
                f"{self.path}: the shapes {picture.shape} of a picture and {metres.shape} of its distances differ"
            )
        return torch.from_numpy(picture).mT.float() / 255, torch.from_numpy(metres).T[None].contiguous()

    def _array(self, name: str) -> Any:
        if self._file is None:
            self._file = open_hdf5(self.path)
        if name not in self._file:
            raise BrokenFile(f"{self.path} has no array {name}; it has {', '.join(sorted(self._file))}")
        return self._file[name]

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "_file": None}  # every worker process opens the file itself


def open_hdf5(path: Path) -> Any:
    try:
        import h5py
    except ImportError as error:
        raise ImportError("NYU Depth needs h5py: pip install 'lrd-kernels[train]'") from error
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise BrokenFile(f"{path} is not an HDF5 file, or is truncated: {error}") from error


def read_splits(path: Path, count: int) -> tuple[list[int], list[int]]:
    """Indices (from 0) of training and test pairs from `splits.mat`, in MATLAB's version 5 or HDF5 format."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    names = ("trainNdxs", "testNdxs")
    if path.read_bytes()[:10].startswith(b"MATLAB 5.0"):
        from scipy.io import loadmat
        from scipy.io.matlab import MatReadError

        try:
            arrays: Any = loadmat(path)
        except (MatReadError, OSError, ValueError, TypeError, IndexError) as error:
            raise BrokenFile(f"{path} is corrupt or truncated: {error}") from error
    else:
        arrays = open_hdf5(path)
    if missing := [name for name in names if name not in arrays]:
        raise BrokenFile(f"{path} has no {', '.join(missing)}")
    train, test = ([int(n) - 1 for n in np.asarray(arrays[name]).ravel()] for name in names)
    if min(*train, *test) < 0 or max(*train, *test) >= count or set(train) & set(test):
        raise BrokenFile(
            f"{path} does not fit {count} pairs: numbers must be 1 to {count}, and no number may be in both parts"
        )
    return train, test
