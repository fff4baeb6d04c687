"""Reads pictures, flow fields and lists. A corrupt file raises `BrokenFile` with its name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lrd_uq.data.images import PICTURES, pixels
from lrd_uq.data.reading import BrokenFile, check_size, reading

FLO_MAGIC = 202021.25  # the first four bytes of every .flo file, as a float
UNKNOWN_FLOW = 1e9  # larger numbers mark unknown flow


def read_grey(path: Path, side: int) -> Tensor:
    """A greyscale picture, [side, side] in [0, 1]; raises `BrokenFile` if it has another size or cannot be read."""
    grey = torch.from_numpy(pixels(path, "L"))
    if grey.shape != (side, side):
        raise BrokenFile(f"{path} must have {side} x {side} pixels; got {grey.shape[1]} x {grey.shape[0]}")
    return grey


def read_colour(path: Path, size: tuple[int, int] | None = None) -> Tensor:
    """An RGB picture, [3, H, W] in [0, 1], resized to `size` (H, W) if given."""
    picture = torch.from_numpy(pixels(path, "RGB")).movedim(-1, 0)
    return picture if size is None else resize(picture, size)


def resize(values: Tensor, size: tuple[int, int]) -> Tensor:
    """Resizes [C, H, W]; each new pixel is a weighted mean of those that it covers."""
    if values.shape[-2:] == size:
        return values
    return F.interpolate(values[None], size, mode="bilinear", antialias=True, align_corners=False)[0]


def resize_known(values: Tensor, known: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Resizes [C, H, W] by averaging the `known` values (bool, same shape).

    Also returns where at least half of the covered values are known.
    """
    share = resize(known.to(values.dtype), size)
    sums = resize(torch.where(known, values, 0), size)
    enough = share >= 0.5
    return torch.where(enough, sums / share.clamp(min=1e-6), 0), enough


def read_flo(path: Path) -> Tensor:
    """Reads a flow field in Middlebury's .flo format: [2, H, W], horizontal and vertical, in pixels."""
    with reading(path, "a flow field") as file:
        length = file.seek(0, 2)
        file.seek(0)
        head = file.read(12)
        if len(head) < 12 or np.frombuffer(head, "<f4", 1)[0] != FLO_MAGIC:
            raise BrokenFile(f"{path} is not a .flo file: it begins with {head[:4].hex(' ') or 'nothing'}")
        width, height = (int(n) for n in np.frombuffer(head, "<i4", 2, 4))
        wanted = 12 + 8 * width * height
        if min(width, height) < 1 or length != wanted:
            raise BrokenFile(f"{path} is broken: {width} x {height} pixels need {wanted} bytes, it has {length}")
        check_size(path, wanted)
        flow = np.frombuffer(file.read(), "<f4").reshape(height, width, 2)
    return torch.from_numpy(flow.astype(np.float32)).movedim(-1, 0).contiguous()


def write_flo(path: Path, flow: Tensor) -> None:
    """Writes a flow field [2, H, W] in the .flo format."""
    height, width = flow.shape[-2:]
    numbers = flow.movedim(0, -1).contiguous().numpy().astype("<f4")
    header = np.array([FLO_MAGIC], "<f4").tobytes() + np.array([width, height], "<i4").tobytes()
    Path(path).write_bytes(header + numbers.tobytes())


def known_flow(flow: Tensor) -> Tensor:
    """Where a flow field [2, H, W] is known: bool, same shape."""
    return (flow.abs() < UNKNOWN_FLOW).all(0, keepdim=True).expand_as(flow)  # False for NaN


def pictures_of(folder: Path) -> list[Path]:
    """All pictures of a folder, sorted by name."""
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    found = sorted(file for file in folder.iterdir() if file.suffix.lower() in PICTURES)
    if not found:
        raise FileNotFoundError(f"{folder} has no picture ({', '.join(PICTURES)})")
    return found


def read_lines(path: Path) -> list[list[str]]:
    """The words of every non-empty line."""
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    with reading(path, "a text file") as file:
        check_size(path, file.seek(0, 2))
        file.seek(0)
        text = file.read().decode("utf-8")
    return [line.split() for line in text.splitlines() if line.strip()]
