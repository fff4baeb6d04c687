"""Renders two frames of moving pieces of photographs, and the exact motion of every pixel."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from lrd_uq.data.natural import random_crop, random_strip

Between = Callable[[float, float], float]  # a uniform random number from an interval
MOST_SHIFT, MOST_TURN, MOST_GROWTH = 0.03, 0.02, 0.02  # relative to the frame's longer side, in radians, relative


def moving_layers(
    size: tuple[int, int], layers: int, part: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Two frames [3, H, W], and the motion right and down in pixels [2, H, W]; `part` selects the photographs."""

    def between(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=generator))

    place, still = _places(size), torch.eye(3, dtype=torch.float64)
    first, second, flow = torch.zeros(3, *size), torch.zeros(3, *size), torch.zeros(*size, 2, dtype=torch.float64)
    for number in range(1 + int(torch.randint(1, layers + 1, (), generator=generator))):
        move, texture = _affine(size, between), _texture(size, part, generator)
        shape = _Blob(size, between) if number else None  # layer 0 is the background
        early, here = _seen(texture, shape, place, still)
        late, there = _seen(texture, shape, place, torch.linalg.inv(move))
        first, second = torch.where(here, early, first), torch.where(there, late, second)
        flow = torch.where(here[..., None], _apply(move, place) - place, flow)
    return first, second, flow.movedim(-1, 0).float()


class _Blob:
    """A star-shaped region with a wavy boundary."""

    def __init__(self, size: tuple[int, int], between: Between) -> None:
        side = min(size)
        self.middle = torch.tensor([between(0.2, 0.8) * size[1], between(0.2, 0.8) * size[0]], dtype=torch.float64)
        self.radius = between(0.15, 0.35) * side
        self.waves = [(k, between(0, 0.25 / k), between(0, 2 * math.pi)) for k in (1, 2, 3, 5)]

    def inside(self, place: Tensor) -> Tensor:
        """Whether positions [H, W, 2] are inside: bool [H, W]."""
        x, y = (place - self.middle).unbind(-1)
        angle = torch.atan2(y, x)
        rim = 1 + sum(height * torch.cos(k * angle + start) for k, height, start in self.waves)
        return torch.hypot(x, y) < self.radius * rim


def _affine(size: tuple[int, int], between: Between) -> Tensor:
    """A random rotation and scaling about the centre of the frame, and a shift: [3, 3]."""
    side = max(size)
    turn, growth = between(-MOST_TURN, MOST_TURN), 1 + between(-MOST_GROWTH, MOST_GROWTH)
    c, s = growth * math.cos(turn), growth * math.sin(turn)
    linear = torch.tensor([[c, -s], [s, c]], dtype=torch.float64)
    middle = torch.tensor([size[1] / 2, size[0] / 2], dtype=torch.float64)
    shift = torch.tensor([between(-MOST_SHIFT, MOST_SHIFT) * side for _ in range(2)], dtype=torch.float64)
    map_ = torch.eye(3, dtype=torch.float64)
    map_[:2, :2], map_[:2, 2] = linear, middle - linear @ middle + shift
    return map_


def _apply(map_: Tensor, place: Tensor) -> Tensor:
    return place @ map_[:2, :2].T + map_[:2, 2]


def _places(size: tuple[int, int]) -> Tensor:
    """The positions (x, y) of all pixels: [H, W, 2]."""
    ys, xs = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) for n in size), indexing="ij")
    return torch.stack([xs, ys], -1)


def _texture(size: tuple[int, int], part: int, generator: torch.Generator) -> Tensor:
    """A texture of twice the size of the frame, because parts of it may move into view: [3, 2 H, 2 W]."""
    return random_crop(random_strip(part, generator), (2 * size[0], 2 * size[1]), generator)


def _seen(texture: Tensor, shape: _Blob | None, place: Tensor, back: Tensor) -> tuple[Tensor, Tensor]:
    """Renders a layer in a frame; `back` maps positions in this frame to those in the first frame. Returns colours
    [3, H, W] and where the layer is visible, bool [H, W]."""
    source = _apply(back, place)
    height, width = place.shape[:2]
    scaled = (source + torch.tensor([width / 2, height / 2]) + 0.5) / torch.tensor([width, height]) - 1
    colours = F.grid_sample(
        texture[None], scaled[None].float(), mode="bilinear", padding_mode="reflection", align_corners=False
    )[0]
    return colours, torch.ones(height, width, dtype=torch.bool) if shape is None else shape.inside(source)
