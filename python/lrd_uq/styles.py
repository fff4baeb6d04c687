"""How the pictures of a task are drawn: inputs, values and modes, each as [H, W, 3] in [0, 1]."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

UNSEEN = (1.0, 0.914, 0.769)  # orange: hidden from the network
ABSENT = (1.0, 1.0, 1.0)  # no output there


class Style:
    """Draws one channel as ink on paper. Other tasks have subclasses."""

    fills = False  # whether pixels that are not predicted were visible and are drawn from the target

    def like(self, values: Tensor) -> Style:
        """The same style with the scale of `values` [C, H, W], for pictures drawn next to them."""
        return self

    def seen(self, x: Tensor) -> np.ndarray:
        """Draws an input [C, H, W]."""
        return self.picture(x[:1])

    def picture(self, values: Tensor, absent: tuple[float, float, float] = ABSENT) -> np.ndarray:
        """Draws values [C, H, W]; NaN stands for missing ones."""
        return _fill(1 - _rgb(values[:1]), values, absent)

    def mode(self, column: Tensor) -> np.ndarray:
        """Draws a signed mode [C, H, W] on its own scale; NaN where there is no output."""
        return diverging(column)


class Ink(Style):
    """Digits with hidden rows; the second input channel marks the visible pixels."""

    fills = True

    def seen(self, x: Tensor) -> np.ndarray:
        return self.picture(torch.where(x[1:2] > 0, x[:1], torch.nan), UNSEEN)


class Colour(Style):
    """RGB pictures with a hidden part; the fourth input channel marks the visible pixels."""

    fills = True

    def seen(self, x: Tensor) -> np.ndarray:
        return self.picture(torch.where(x[3:4] > 0, x[:3], torch.nan), UNSEEN)

    def picture(self, values: Tensor, absent: tuple[float, float, float] = ABSENT) -> np.ndarray:
        return _fill(_rgb(values), values, absent)

    def mode(self, column: Tensor) -> np.ndarray:
        """Draws the mode as a colour shift from grey."""
        return _fill(_rgb(0.5 + 0.5 * column / largest(column)), column, ABSENT)


class Colouring(Colour):
    """RGB pictures whose input is in grey."""

    fills = False

    def seen(self, x: Tensor) -> np.ndarray:
        return _rgb(x[:1])


class Flow(Style):
    """Flow fields as a colour wheel: hue for the direction, saturation for the length.

    Args:
        longest: length that is fully saturated; None for the longest vector of the picture.
    """

    def __init__(self, longest: float | None = None) -> None:
        self.longest = longest

    def like(self, values: Tensor) -> Style:
        return Flow(largest(values)) if values.isfinite().any() else self

    def seen(self, x: Tensor) -> np.ndarray:
        return _rgb(x[:3])

    def picture(self, values: Tensor, absent: tuple[float, float, float] = ABSENT) -> np.ndarray:
        return _fill(colour_wheel(values, self.longest or largest(values)), values, absent)

    def mode(self, column: Tensor) -> np.ndarray:
        return _fill(colour_wheel(column, largest(column)), column, ABSENT)


class Depth(Style):
    """Distances: near is bright.

    Args:
        nearest, farthest: ends of the scale; None for those of the picture.
    """

    def __init__(self, nearest: float | None = None, farthest: float | None = None) -> None:
        self.nearest, self.farthest = nearest, farthest

    def like(self, values: Tensor) -> Style:
        known = values[values.isfinite()]
        return Depth(float(known.min()), float(known.max())) if known.numel() else self

    def seen(self, x: Tensor) -> np.ndarray:
        return _rgb(x[:3])

    def picture(self, values: Tensor, absent: tuple[float, float, float] = ABSENT) -> np.ndarray:
        if self.nearest is None or self.farthest is None:
            own = self.like(values)
            return own.picture(values, absent) if own is not self else _fill(_rgb(values), values, absent)
        low, high = self.nearest, self.farthest
        return _fill(_mapped((values[0] - low) / max(high - low, 1e-6), "magma_r"), values, absent)


def diverging(column: Tensor) -> np.ndarray:
    """Draws one signed channel [1, H, W]: red above zero, blue below."""
    return _fill(_mapped(0.5 + 0.5 * column[0] / largest(column), "RdBu_r"), column, ABSENT)


def colour_wheel(flow: Tensor, longest: float) -> np.ndarray:
    """Draws vectors [2, H, W] (right, down): red points right, the hue follows the angle, white is no motion."""
    from matplotlib.colors import hsv_to_rgb

    u, v = (flow[i].nan_to_num().numpy() for i in range(2))
    hue = np.mod(np.arctan2(-v, u) / (2 * math.pi), 1.0)  # counter-clockwise on the screen, where rows count downwards
    saturation = np.clip(np.hypot(u, v) / longest, 0, 1)
    return hsv_to_rgb(np.stack([hue, saturation, np.ones_like(hue)], -1))


def largest(values: Tensor) -> float:
    """Length of the longest vector (or largest absolute value), at least 1e-6."""
    lengths = values.nan_to_num().square().sum(0).sqrt() if len(values) == 2 else values.nan_to_num().abs()
    return max(float(lengths.max()), 1e-6)


def _mapped(values: Tensor, name: str) -> np.ndarray:
    from matplotlib import colormaps

    return colormaps[name](values.nan_to_num().clamp(0, 1).numpy())[..., :3]


def _rgb(values: Tensor) -> np.ndarray:
    return values.nan_to_num().clamp(0, 1).expand(3, -1, -1).movedim(0, -1).numpy()


def _fill(picture: np.ndarray, values: Tensor, absent: tuple[float, float, float]) -> np.ndarray:
    return np.where(values.isnan().any(0).numpy()[..., None], np.array(absent), picture)
