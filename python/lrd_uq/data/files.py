"""Reads pictures, flow fields and lists. A corrupt file raises `BrokenFile` with its name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

FLO_MAGIC = 202021.25  # the first four bytes of every .flo file, as a float
UNKNOWN_FLOW = 1e9  # larger numbers mark unknown flow
PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".ppm")


class BrokenFile(ValueError):
    """A file that is corrupt, truncated or of another kind; the message names it."""


def read_grey(path: Path, side: int) -> Tensor:
    """A greyscale picture, [side, side] in [0, 1]; raises `BrokenFile` if it has another size or cannot be read."""
    grey = torch.from_numpy(_read(path, "L"))
    if grey.shape != (side, side):
        raise BrokenFile(f"{path} must have {side} x {side} pixels; got {grey.shape[1]} x {grey.shape[0]}")
    return grey


def read_colour(path: Path, size: tuple[int, int] | None = None) -> Tensor:
    """An RGB picture, [3, H, W] in [0, 1], resized to `size` (H, W) if given."""
    picture = torch.from_numpy(_read(path, "RGB")).movedim(-1, 0)
    return picture if size is None else resize(picture, size)


def _read(path: Path, mode: str) -> np.ndarray:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            return np.asarray(image.convert(mode), dtype=np.float32) / 255
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        raise BrokenFile(f"{path} is not a picture that can be read: {error}") from error


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
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise BrokenFile(f"{path} cannot be read: {error}") from error
    if len(data) < 12 or np.frombuffer(data, "<f4", 1)[0] != FLO_MAGIC:
        raise BrokenFile(f"{path} is not a .flo file: it begins with {data[:4].hex(' ') or 'nothing'}")
    width, height = (int(n) for n in np.frombuffer(data, "<i4", 2, 4))
    wanted = 12 + 8 * width * height
    if width < 1 or height < 1 or len(data) != wanted:
        raise BrokenFile(f"{path} is broken: {width} x {height} pixels need {wanted} bytes, it has {len(data)}")
    flow = np.frombuffer(data, "<f4", 2 * width * height, 12).reshape(height, width, 2)
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
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BrokenFile(f"{path} is not a text file: {error}") from error
    return [line.split() for line in text.splitlines() if line.strip()]
