"""The motorcycle of Middlebury's stereo data (2014), which comes with scikit-image: a real stereo pair with measured
disparities."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from lrd_uq.data.files import resize, resize_known

TEST_ON = ("generated", "motorcycle")
# Calibration of the cameras at this image size, from the data set.
FOCAL_PIXELS, BASELINE_METRES, OFFSET_PIXELS = 994.978, 0.193001, 31.086


def check(test_on: str) -> None:
    """Validates the option of tasks that can be tested on generated items or on these pictures."""
    if test_on not in TEST_ON:
        raise ValueError(f"test_on must be one of {', '.join(TEST_ON)}; got {test_on!r}")


@cache
def pair() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Left and right [3, 500, 741] in [0, 1], disparity in pixels [1, 500, 741] and where it was measured."""
    try:
        from skimage.data import stereo_motorcycle
    except ImportError as error:
        raise ImportError("the motorcycle needs scikit-image: pip install 'lrd-kernels[train]'") from error
    left, right, disparity = (torch.from_numpy(array.copy()) for array in stereo_motorcycle())
    known = disparity.isfinite() & (disparity > 0)
    disparity = torch.where(known, disparity, 0).float()
    return left.movedim(-1, 0) / 255, right.movedim(-1, 0) / 255, disparity[None], known[None]


def crop(size: tuple[int, int], generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A random window of four times `size`, scaled down: both frames [3, *size], the disparity minus its mean over the
    window in pixels after scaling [1, *size], and where it was measured.

    The window of the right picture is shifted by the mean disparity, so that the remaining motion is as small as
    between frames of a video.
    """
    left, right, disparity, known = pair()
    scale = min(4.0, left.shape[-2] / size[0], left.shape[-1] / size[1] / 1.3)
    height, width = (int(scale * side) for side in size)
    while True:
        top = int(torch.randint(left.shape[-2] - height + 1, (), generator=generator))
        start = int(torch.randint(left.shape[-1] - width + 1, (), generator=generator))
        box = (slice(None), slice(top, top + height), slice(start, start + width))
        if known[box].float().mean() < 0.5:
            continue
        shift = round(float(disparity[box][known[box]].mean()))
        if start - shift >= 0:
            break
    other = (slice(None), box[1], slice(start - shift, start - shift + width))
    rest, there = resize_known((disparity[box] - shift) / scale, known[box], size)
    return resize(left[box], size), resize(right[other], size), rest, there


def depth(size: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """The left picture [3, *size], distances in metres [1, *size], and where they were measured."""
    left, _, disparity, known = pair()
    metres = torch.where(known, FOCAL_PIXELS * BASELINE_METRES / (disparity + OFFSET_PIXELS), 0)
    return resize(left, size), *resize_known(metres, known, size)
