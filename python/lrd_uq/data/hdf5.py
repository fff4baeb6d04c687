"""Opens arrays in HDF5 files: only those whose numbers lie in the file itself, and none that is too large."""

from __future__ import annotations

import math
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from lrd_uq.data.reading import BrokenFile, check_size, most_bytes, naming, refuse_special

GZIP, SHUFFLE, CHECKSUM = 1, 2, 3  # HDF5's numbers of its filters
MOST_INFLATED = 1032  # gzip makes at most this many bytes of one


def open_hdf5(path: Path) -> Any:
    try:
        import h5py
    except ImportError as error:
        raise ImportError("NYU Depth needs h5py: pip install 'lrd-kernels[train]'") from error
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    refuse_special(path, os.stat(path))
    try:
        return h5py.File(path, "r")
    except Exception as error:  # a corrupt file can raise anything
        raise BrokenFile(f"{path} is not an HDF5 file, or is truncated: {error}") from error


class Hdf5Array:
    """An array of numbers in an open file. Indexing it reads numbers."""

    def __init__(self, path: Path, file: Any, name: str) -> None:
        self.path, self.name = path, name
        with naming(path, "an HDF5 file"):
            self._set = self._own(file)
            self.shape, self.dtype = self._set.shape, self._set.dtype
            self._check_storage()

    def __len__(self) -> int:
        return int(self.shape[0]) if self.shape else 0

    def item(self, number: int) -> np.ndarray:
        """The part with this number along the first dimension."""
        check_size(self.path, math.prod(self.shape[1:]) * self.dtype.itemsize)
        self._check_inflated(number)
        return np.asarray(self._set[number])

    def all(self) -> np.ndarray:
        """Everything."""
        check_size(self.path, math.prod(self.shape) * self.dtype.itemsize)
        self._check_inflated(None)
        return np.asarray(self._set[()])

    def _own(self, file: Any) -> Any:
        """The data set of the name, which is neither a link to another place nor spread over other files."""
        import h5py

        if self.name not in file:
            raise BrokenFile(f"{self.path} has no array {self.name}; it has {', '.join(sorted(file))}")
        link = file.get(self.name, getlink=True)
        if type(link) is not h5py.HardLink:
            raise BrokenFile(f"{self.path}: {self.name} is a link to another place, which is not followed")
        found = file[self.name]
        if not isinstance(found, h5py.Dataset) or found.shape is None or found.dtype.kind not in "buifc":
            raise BrokenFile(f"{self.path}: {self.name} is no array of numbers")
        if found.is_virtual or found.external:
            raise BrokenFile(f"{self.path}: the numbers of {self.name} lie in other files, which are not read")
        return found

    def _check_storage(self) -> None:
        """Refuses numbers that are missing, which HDF5 would read as zeros, and filters other than those of gzip."""
        plist = self._set.id.get_create_plist()
        self._filters = [plist.get_filter(i)[0] for i in range(plist.get_nfilters())]
        if not set(self._filters) <= {GZIP, SHUFFLE, CHECKSUM} or self._filters.count(GZIP) > 1:
            raise BrokenFile(f"{self.path}: {self.name} is compressed by something else than gzip")
        self._suspects: list[tuple[int, ...]] = []  # chunks that could take more than the limit when they are inflated
        if self._set.chunks is None:
            wanted, there = math.prod(self.shape) * self.dtype.itemsize, self._set.id.get_storage_size()
        else:
            check_size(self.path, self._chunk_bytes)
            wanted = math.prod(-(-n // chunk) for n, chunk in zip(self.shape, self._set.chunks, strict=True))
            there = self._set.id.get_num_chunks()
            self._set.id.chunk_iter(self._check_chunk)
        if there < wanted:
            raise BrokenFile(f"{self.path}: {self.name} has the shape {self.shape}, but parts of it are missing")

    def _check_chunk(self, info: Any) -> None:
        """Refuses a chunk outside of the file, or shorter than its checksum of 4 bytes: HDF5 would end the process."""
        least = 5 if self._filters else self._chunk_bytes
        if info.byte_offset <= 0 or info.size < least or info.byte_offset + info.size > self.path.stat().st_size:
            raise BrokenFile(f"{self.path}: a chunk of {self.name} is not in the file")
        if GZIP in self._filters and info.size * MOST_INFLATED > most_bytes():
            self._suspects.append(info.chunk_offset)

    def _check_inflated(self, number: int | None) -> None:
        """Refuses compressed chunks of an item that are larger than they may be: HDF5 would inflate them whole."""
        for offset in self._suspects:
            if number is not None and offset[0] != number // self._set.chunks[0] * self._set.chunks[0]:
                continue
            mask, data = self._set.id.read_direct_chunk(offset)
            if mask >> self._filters.index(GZIP) & 1:  # this chunk was not compressed
                continue
            most = self._chunk_bytes + 4  # and a checksum
            if len(zlib.decompressobj().decompress(data, most + 1)) > most:
                raise BrokenFile(f"{self.path}: a chunk of {self.name} is larger than its {self._chunk_bytes} bytes")

    @property
    def _chunk_bytes(self) -> int:
        return math.prod(self._set.chunks) * self.dtype.itemsize
