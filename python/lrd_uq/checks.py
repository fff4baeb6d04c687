"""Checks of settings: each raises a ValueError that names the setting, what was wanted and what came."""

from __future__ import annotations

import math


def check_weights(**weights: float) -> None:
    """Weights are finite and not negative."""
    for name, value in weights.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be a finite number, 0 or above; got {value}")


def check_positive(**numbers: float) -> None:
    """Scales are finite and above 0."""
    for name, value in numbers.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be a finite number above 0; got {value}")


def check_finite(**numbers: float) -> None:
    for name, value in numbers.items():
        if not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number; got {value}")


def check_counts(**counts: int | None) -> None:
    """Numbers of things are at least 1, or None where all are meant."""
    for name, value in counts.items():
        if value is not None and not value >= 1:
            raise ValueError(f"{name} must be at least 1; got {value}")


def check_dropout(rate: float) -> None:
    if not 0 <= rate <= 1:
        raise ValueError(f"dropout must be a rate from 0 to 1; got {rate}")


def picture_size(size: tuple[int, int]) -> tuple[int, int]:
    """Height and width of a picture, in pixels."""
    height, width = (int(side) for side in size)
    if min(height, width) < 1:
        raise ValueError(f"size must be a height and a width of at least 1 pixel; got {height}, {width}")
    return height, width
