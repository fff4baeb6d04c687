"""Decodes picture files: every mode by its own scale, or refused by name. docs/tasks.md has the table."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lrd_uq.data.reading import BrokenFile, check_size, reading

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".pgm", ".ppm", ".tif", ".tiff")
FORMATS = ("PNG", "JPEG", "BMP", "PPM", "TIFF")  # no others, whatever the name: some start other programs
BYTES = ("1", "L", "P", "RGB", "CMYK", "YCbCr", "LA", "PA", "La", "RGBA", "RGBa", "RGBX")  # modes of 0 to 255
BITS_PER_SAMPLE, PHOTOMETRIC = 258, 262  # tags of TIFF
WHITE_IS_ZERO = 0

_lock = threading.Lock()


def pixels(path: Path, mode: str) -> np.ndarray:
    """A picture, upright, as float32 in [0, 1]: [H, W] for the mode "L", [H, W, 3] for "RGB"."""
    from PIL import ImageOps

    with reading(path, "a picture") as file, _opened(file) as image:
        check_size(path, 4 * len(mode) * image.width * image.height)
        if image.format != "MPO" and getattr(image, "n_frames", 1) != 1:  # MPO: a JPEG with previews
            raise BrokenFile(f"{path} has {image.n_frames} pictures: save the one that is meant to a file of its own")
        white = _white(path, image)
        _refuse_transparent(path, image)
        upright = ImageOps.exif_transpose(image)
        values = np.array(upright.convert(mode) if white == 255 else upright, dtype=np.float32)
        if not (values.min() >= 0 and values.max() <= white):  # NaN is neither
            raise BrokenFile(
                f"{path} has values from {values.min():g} to {values.max():g}: those of the mode {image.mode} must be"
                f" from 0 (black) to {white} (white)"
            )
    values /= white
    return values if values.shape[2:] or mode == "L" else np.repeat(values[..., None], len(mode), -1)


def _opened(file: BinaryIO) -> Any:
    """A picture whose header was read. Ours replaces Pillow's limit of sizes, a setting of the whole process."""
    from PIL import Image, UnidentifiedImageError

    with _lock:
        before, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            return Image.open(file, formats=FORMATS)
        except UnidentifiedImageError:
            raise ValueError(f"it is no sound {', '.join(FORMATS[:-1])} or {FORMATS[-1]} file") from None
        finally:
            Image.MAX_IMAGE_PIXELS = before


def _white(path: Path, image: Any) -> int:
    """The number that means white."""
    if image.mode in BYTES:
        return 255
    tags = getattr(image, "tag_v2", {})
    if tags.get(PHOTOMETRIC) != WHITE_IS_ZERO:
        if image.mode == "F":
            return 1
        if image.mode.startswith("I;16") and tags.get(BITS_PER_SAMPLE, 16) in (16, (16,)):
            return 65535
        if image.mode == "I" and image.format in ("PNG", "PPM"):  # Pillow's mode for their 16 bits
            return 65535
    raise BrokenFile(
        f"{path} has the mode {image.mode} of {image.format}, whose scale is not known: save it with 8 or 16 bits per"
        " channel"
    )


def _refuse_transparent(path: Path, image: Any) -> None:
    """What lies under transparent pixels is arbitrary."""
    if not image.has_transparency_data:
        return
    if image.mode in BYTES:
        transparent = image.convert("RGBA").getchannel("A").getextrema()[0] < 255
    else:
        transparent = bool((np.asarray(image) == image.info["transparency"]).any())
    if transparent:
        raise BrokenFile(f"{path} has transparent pixels: put the picture on a background first")
