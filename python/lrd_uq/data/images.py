"""Pictures from files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def read_grey(path: Path, side: int) -> Tensor:
    """A picture in grey, [side, side] in [0, 1]. One that cannot be read or has another size is named and refused."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            grey = np.asarray(image.convert("L"), dtype=np.float32) / 255
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise ValueError(f"{path} is not a picture that can be read: {error}") from error
    if grey.shape != (side, side):
        raise ValueError(f"{path} must have {side} x {side} pixels; got {grey.shape[1]} x {grey.shape[0]}")
    return torch.from_numpy(grey)
