"""Renders a room with boxes on its floor: a picture, and exact distances with holes."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from lrd_uq.data.natural import random_strip

MOST_BOXES = 4
HOLE = 0.2  # pixels where smoothed uniform noise is below this have no distance


def room(size: tuple[int, int], part: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Picture [3, H, W], distances along the camera axis in metres [1, H, W], and where they were measured."""

    def between(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=generator))

    extent = torch.tensor([between(3, 6), between(2.4, 3.2), between(4, 8)])  # in metres: width, height, length
    eye = torch.tensor([between(0.3, 0.7) * float(extent[0]), between(1.1, 1.8), between(0.3, 1.2)])
    rays = _rays(size, between(-0.5, 0.5), between(-0.3, 0.1))  # [H, W, 3], of length 1 along the camera axis
    light = torch.tensor([between(0.2, 0.8), 0.95, between(0.2, 0.8)]) * extent

    distance, side = _walls(eye, rays, extent)
    surfaces = [_paper(part, generator) for _ in range(6)]
    shift = torch.zeros_like(rays)
    number = side.clone()
    for box in range(int(torch.randint(1, MOST_BOXES + 1, (), generator=generator))):
        low = torch.tensor([between(0, 0.8), 0.0, between(0.3, 0.85)]) * extent
        high = low + torch.tensor([between(0.4, 1.4), between(0.3, 1.5), between(0.3, 1.2)])
        near, hit_side = _box(eye, rays, low, high)
        closer = near < distance
        distance = torch.where(closer, near, distance)
        number = torch.where(closer, 6 + box, number)
        side = torch.where(closer, hit_side, side)
        shift = torch.where(closer[..., None], low, shift)
        surfaces.append(_paper(part, generator))
    point = eye + rays * distance[..., None]
    picture = _colours(surfaces, number, side, point - shift) * _shading(point, side, light)[..., None]
    noise = 0.02 * torch.randn(picture.shape, generator=generator)
    known = _measured(size, generator) & (distance < 10)
    return (picture + noise).clamp(0, 1).movedim(-1, 0), torch.where(known, distance, 0)[None], known[None]


def _rays(size: tuple[int, int], turn: float, tilt: float) -> Tensor:
    """The rays of a camera that looks along the room, with a horizontal field of view of 60 degrees: [H, W, 3]."""
    height, width = size
    reach = math.tan(math.radians(30))
    ys, xs = torch.meshgrid(
        (0.5 - (torch.arange(height) + 0.5) / height) * 2 * reach * height / width,
        ((torch.arange(width) + 0.5) / width - 0.5) * 2 * reach,
        indexing="ij",
    )
    rays = torch.stack([xs, ys, torch.ones_like(xs)], -1)
    c, s, ct, st = math.cos(turn), math.sin(turn), math.cos(tilt), math.sin(tilt)
    tilted = rays @ torch.tensor([[1.0, 0, 0], [0, ct, st], [0, -st, ct]]).T
    return tilted @ torch.tensor([[c, 0, s], [0, 1.0, 0], [-s, 0, c]]).T


def _walls(eye: Tensor, rays: Tensor, extent: Tensor) -> tuple[Tensor, Tensor]:
    """Distance and number (0 to 5) of the wall that each ray hits: [H, W] each."""
    steps = torch.where(rays > 0, extent - eye, -eye) / torch.where(rays.abs() < 1e-9, 1e-9, rays)
    distance, axis = steps.min(-1)
    behind = rays.gather(-1, axis[..., None])[..., 0] > 0
    return distance, 2 * axis + behind.long()


def _box(eye: Tensor, rays: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Distance of a box (infinite where a ray misses it), and the number of the side that is hit: [H, W] each."""
    safe = torch.where(rays.abs() < 1e-9, 1e-9, rays)
    one, other = (low - eye) / safe, (high - eye) / safe
    enter, axis = torch.minimum(one, other).max(-1)
    leave = torch.maximum(one, other).min(-1).values
    hit = (enter < leave) & (enter > 0.05)
    return torch.where(hit, enter, torch.inf), 2 * axis + (rays.gather(-1, axis[..., None])[..., 0] < 0).long()


def _paper(part: int, generator: torch.Generator) -> Tensor:
    """A wallpaper: a piece of a photograph, or a plain colour: [3, 64, 64]."""
    if torch.rand((), generator=generator) < 0.5:
        return torch.rand(3, 1, 1, generator=generator).mul(0.7).add(0.2).expand(3, 64, 64)
    strip = random_strip(part, generator)
    top, left = (int(torch.randint(side - 64 + 1, (), generator=generator)) for side in strip.shape[-2:])
    return strip[:, top : top + 64, left : left + 64]


def _colours(surfaces: list[Tensor], number: Tensor, side: Tensor, point: Tensor) -> Tensor:
    """Colour of every pixel, from the wallpaper of its surface, which is two metres wide and mirrored: [H, W, 3]."""
    axis = side // 2
    across = torch.stack([(axis == 0).long() * 2, torch.where(axis == 1, 2, 1)], -1)  # the surface's two directions
    place = point.gather(-1, across) - 1.0
    picture = torch.zeros_like(point)
    for i, paper in enumerate(surfaces):
        drawn = F.grid_sample(
            paper[None], place[None], mode="bilinear", padding_mode="reflection", align_corners=False
        )[0].movedim(0, -1)
        picture = torch.where((number == i)[..., None], drawn, picture)
    return picture


def _shading(point: Tensor, side: Tensor, light: Tensor) -> Tensor:
    """Brightness of every pixel, which falls with the angle and the distance of the light: [H, W]."""
    towards = light - point
    length = towards.norm(dim=-1).clamp(min=0.1)
    facing = (towards / length[..., None]).abs().gather(-1, (side // 2)[..., None])[..., 0]
    return 0.35 + 0.65 * facing / (1 + 0.05 * length.square())


def _measured(size: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Where distances are measured: like a depth camera, with patches of holes: bool [H, W]."""
    coarse = torch.rand(1, 1, max(size[0] // 4, 1), max(size[1] // 4, 1), generator=generator)
    return F.interpolate(coarse, size, mode="bilinear", align_corners=False)[0, 0] > HOLE
