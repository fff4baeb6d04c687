"""Reads MNIST's idx files, plain or gzipped. A corrupt or truncated file raises an error with its name."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import torch
from torch import Tensor

from lrd_uq.data.digits import SIDE, Digits

UNSIGNED_BYTES = 0x08  # the only data type in MNIST
PREFIXES = {"train": "train", "test": "t10k"}


def read_idx(path: str | Path) -> Tensor:
    """The uint8 array in an idx file of bytes; files named .gz are decompressed."""
    path = Path(path)
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{path} is corrupt or truncated: {error}") from error
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] != UNSIGNED_BYTES or not 1 <= data[3] <= 4:
        raise ValueError(
            f"{path} is not an idx file of unsigned bytes: it begins with {data[:4].hex(' ') or 'nothing'}"
        )
    start = 4 + 4 * data[3]
    if len(data) < start:
        raise ValueError(f"{path} is truncated: its header needs {start} bytes, it has {len(data)}")
    shape = [int.from_bytes(data[i : i + 4], "big") for i in range(4, start, 4)]
    wanted = start + math.prod(shape)
    if len(data) != wanted:
        kind = "truncated" if len(data) < wanted else "corrupt"
        raise ValueError(f"{path} is {kind}: a header of shape {shape} needs {wanted} bytes, it has {len(data)}")
    return (
        torch.frombuffer(bytearray(data[start:]), dtype=torch.uint8).reshape(shape)
        if math.prod(shape)
        else (torch.empty(shape, dtype=torch.uint8))
    )


def load_mnist(folder: str | Path, part: str = "train") -> Digits:
    """The digits in a folder of MNIST's files, in file order; `part` is "train" or "test"."""
    if part not in PREFIXES:
        raise ValueError(f"part must be one of {', '.join(PREFIXES)}; got {part!r}")
    images_file = _find(Path(folder), f"{PREFIXES[part]}-images-idx3-ubyte")
    labels_file = _find(Path(folder), f"{PREFIXES[part]}-labels-idx1-ubyte")
    images, labels = read_idx(images_file), read_idx(labels_file)
    if images.dim() != 3 or images.shape[1:] != (SIDE, SIDE):
        raise ValueError(f"{images_file} must hold pictures of {SIDE} x {SIDE}; got {tuple(images.shape)}")
    if labels.shape != images.shape[:1]:
        raise ValueError(f"{labels_file} has {tuple(labels.shape)} labels for the {len(images)} of {images_file}")
    if len(labels) and int(labels.max()) > 9:
        raise ValueError(f"{labels_file} is corrupt: it has the label {int(labels.max())}, but digits are 0 to 9")
    return Digits(images.flatten(1).float() / 255, labels.long())


def _find(folder: Path, name: str) -> Path:
    for candidate in (folder / name, folder / f"{name}.gz"):
        if candidate.is_file():
            return candidate
    raise FileNotFoundError(f"neither {name} nor {name}.gz is in {folder}")
