"""Reads MNIST's idx files, plain or gzipped. A corrupt or truncated file raises an error with its name."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from lrd_uq.data.digits import SIDE, Digits
from lrd_uq.data.reading import BrokenFile, check_size, reading

UNSIGNED_BYTES = 0x08  # the only data type in MNIST
PREFIXES = {"train": "train", "test": "t10k"}


def read_idx(path: str | Path) -> Tensor:
    """The uint8 array in an idx file of bytes; files named .gz are decompressed."""
    path = Path(path)
    with reading(path, "an idx file") as file:
        try:
            return _array(path, gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file)
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise BrokenFile(f"{path} is corrupt or truncated: {error}") from error


def _array(path: Path, file: BinaryIO | gzip.GzipFile) -> Tensor:
    """The array of an open file, whose size is known from its header before the numbers are read."""
    head = file.read(4)
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] != UNSIGNED_BYTES or not 1 <= head[3] <= 4:
        raise BrokenFile(f"{path} is not an idx file of unsigned bytes: it begins with {head.hex(' ') or 'nothing'}")
    sizes = file.read(4 * head[3])
    if len(sizes) < 4 * head[3]:
        raise BrokenFile(f"{path} is truncated: its header needs {4 + 4 * head[3]} bytes, it has {4 + len(sizes)}")
    shape = [int.from_bytes(sizes[i : i + 4], "big") for i in range(0, len(sizes), 4)]
    count = math.prod(shape)
    check_size(path, count)
    data = bytearray(file.read(count))
    more = file.read(1)  # also verifies the checksum of gzip
    if len(data) < count or more:
        kind, there = ("corrupt", "more") if more else ("truncated", 4 + len(sizes) + len(data))
        raise BrokenFile(
            f"{path} is {kind}: a header of shape {shape} needs {4 + len(sizes) + count} bytes, it has {there}"
        )
    return (torch.frombuffer(data, dtype=torch.uint8) if count else torch.empty(0, dtype=torch.uint8)).reshape(shape)


def load_mnist(folder: str | Path, part: str = "train") -> Digits:
    """The digits in a folder of MNIST's files, in file order; `part` is "train" or "test"."""
    if part not in PREFIXES:
        raise ValueError(f"part must be one of {', '.join(PREFIXES)}; got {part!r}")
    images_file = _find(Path(folder), f"{PREFIXES[part]}-images-idx3-ubyte")
    labels_file = _find(Path(folder), f"{PREFIXES[part]}-labels-idx1-ubyte")
    images, labels = read_idx(images_file), read_idx(labels_file)
    if images.dim() != 3 or images.shape[1:] != (SIDE, SIDE):
        raise BrokenFile(f"{images_file} must hold pictures of {SIDE} x {SIDE}; got {tuple(images.shape)}")
    if labels.shape != images.shape[:1]:
        raise BrokenFile(f"{labels_file} has {tuple(labels.shape)} labels for the {len(images)} of {images_file}")
    if len(labels) and int(labels.max()) > 9:
        raise BrokenFile(f"{labels_file} is corrupt: it has the label {int(labels.max())}, but digits are 0 to 9")
    return Digits(images.flatten(1).float() / 255, labels.long())


def _find(folder: Path, name: str) -> Path:
    for candidate in (folder / name, folder / f"{name}.gz"):
        if candidate.exists():
            return candidate
    raise FileNotFoundError(f"neither {name} nor {name}.gz is in {folder}")
