"""Reads arrays of numbers from MATLAB files of version 5, with every length checked before it is believed."""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lrd_uq.data.reading import BrokenFile, check_size, reading

BEGIN = b"MATLAB 5.0"
HEADER = 128
MATRIX, COMPRESSED = 14, 15
NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}  # by type
NUMERIC_CLASSES = range(6, 16)  # double, single and integers; the others are text, cells, structures, ...
COMPLEX = 0x800


class Element(NamedTuple):
    kind: int
    data: bytes


def read_mat(path: Path, names: Collection[str]) -> dict[str, np.ndarray]:
    """The arrays of these names that the file has, flattened in MATLAB's order."""
    found = {}
    with reading(path, "a MATLAB file") as file:
        check_size(path, file.seek(0, 2))
        file.seek(0)
        data = file.read()
        if len(data) < HEADER or data[126:128] not in (b"IM", b"MI"):
            raise BrokenFile(f"{path} is corrupt or truncated: it has no header of MATLAB 5.0")
        order = "<" if data[126:128] == b"IM" else ">"
        for element in _elements(data[HEADER:], order):
            matrix = _inflated(path, element, order) if element.kind == COMPRESSED else element
            if matrix.kind == MATRIX and matrix.data:
                name, values = _array(matrix.data, order, names)
                if values is not None:
                    found[name] = values
    return found


def _elements(data: bytes, order: str) -> Iterator[Element]:
    """The elements one after the other. A tag is kind and length, of four bytes each, or of two in a small element."""
    at = 0
    while at + 8 <= len(data):
        first, length = (int(n) for n in np.frombuffer(data, f"{order}u4", 2, at))
        small = first >> 16
        kind, length, begin = (first & 0xFFFF, small, at + 4) if small else (first, length, at + 8)
        if length > (4 if small else len(data) - begin):
            raise ValueError(f"an element of {length} bytes is cut short")
        yield Element(kind, data[begin : begin + length])
        at = at + 8 if small else begin + length + (0 if kind == COMPRESSED else -length % 8)
    if data[at:]:
        raise ValueError(f"{len(data) - at} bytes at the end are no element")


def _inflated(path: Path, element: Element, order: str) -> Element:
    unpacker = zlib.decompressobj()
    tag = unpacker.decompress(element.data, 8)
    if len(tag) < 8:
        raise ValueError("a compressed element is cut short")
    kind, length = (int(n) for n in np.frombuffer(tag, f"{order}u4", 2))
    check_size(path, length)
    data = unpacker.decompress(unpacker.unconsumed_tail, length) if length else b""
    if kind != MATRIX or len(data) != length:
        raise ValueError("a compressed element is no array, or cut short")
    if unpacker.decompress(unpacker.unconsumed_tail, 1) or not unpacker.eof:
        raise ValueError("a compressed element is longer than it says, or its checksum is missing")
    return Element(kind, data)


def _array(data: bytes, order: str, names: Collection[str]) -> tuple[str, np.ndarray | None]:
    """Name and numbers of an array; None for one that is not wanted."""
    parts = _elements(data, order)
    flags, shape, label = (next(parts, Element(0, b"")) for _ in range(3))
    if (flags.kind, len(flags.data), shape.kind, label.kind) != (6, 8, 5, 1):
        raise ValueError("an array does not begin with its class, shape and name")
    name = label.data.decode("ascii", "replace")
    if name not in names:
        return name, None
    word = int(np.frombuffer(flags.data, f"{order}u4", 1)[0])
    if word & 0xFF not in NUMERIC_CLASSES or word & COMPLEX:
        raise ValueError(f"{name} must be an array of real numbers")
    sizes = np.frombuffer(shape.data, f"{order}i4").tolist()
    numbers = next(parts, Element(0, b""))
    if numbers.kind not in NUMBERS:
        raise ValueError(f"{name} has no numbers")
    values = np.frombuffer(numbers.data, order + NUMBERS[numbers.kind])
    if len(sizes) < 2 or min(sizes) < 0 or math.prod(sizes) != len(values):
        raise ValueError(f"{name} has {len(values)} numbers, but the shape {sizes}")
    return name, values
