"""Random and adversarial Gaussians: families of numbers, and everything else that a call can vary.

Each call varies dtypes, memory layouts, broadcasts of the batch dimensions of every argument, sizes and masks.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lrd_kernels import testing
from lrd_kernels.testing import Inputs

HALF = (torch.bfloat16, torch.float16)


class Draw:
    """Random choices of one case, which depend on the seed, the function and the number of the case alone."""

    def __init__(self, seed: int, function: str, number: int) -> None:
        self.generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {function} {number}".encode()))
        self.number = number
        self.family = ""
        self.size = 1.0  # the largest eigenvalue of the capacitance

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=self.generator))

    def power(self, low: float, high: float) -> float:
        """10 to a random power."""
        return 10 ** self.uniform(low, high)

    def index(self, size: int) -> int:
        return int(torch.randint(size, (), generator=self.generator))

    def chance(self, one_in: int) -> bool:
        return self.index(one_in) == 0

    def pick(self, options: Sequence):
        return options[self.index(len(options))]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def dtype(self, half: bool = True) -> torch.dtype:
        other = (torch.float64, *HALF) if half else (torch.float64,)
        return torch.float32 if self.index(5) < 3 else self.pick(other)

    def sizes(self, most: int = 24, columns: int = 6) -> tuple[int, int]:
        """Outputs and columns; about one case in eight has at least as many columns as outputs, some have none."""
        S, R = 1 + self.index(most), 1 + self.index(columns)
        if self.chance(8):
            S = 1 + self.index(R)
        return S, 0 if self.chance(40) else R

    def batch(self) -> tuple[int, ...]:
        return self.pick(((), (), (), (2,), (3,), (1,), (2, 2), (1, 3)))

    def part(self, batch: Sequence[int]) -> tuple[int, ...]:
        """A shape that broadcasts to the batch dimensions."""
        kept = [1 if self.chance(3) else n for n in batch]
        return tuple(kept[self.index(len(kept) + 1) :] if self.chance(2) else kept)

    def vector(self, tensor: Tensor) -> Tensor:
        """The same numbers, one time in four as a strided slice of a larger tensor full of NaN."""
        if not self.chance(4):
            return tensor
        wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1), torch.nan, dtype=tensor.dtype)
        wide[..., 1::2] = tensor
        return wide[..., 1::2]


Family = Callable[[Inputs, Draw], None]

# Families change random inputs in place, in float64. Their docstrings become cells of the report.


def plain(x: Inputs, g: Draw) -> None:
    """scales of P and D over six orders of magnitude"""
    x.cov_factor.mul_(g.power(-3, 3))
    x.cov_diag.mul_(g.power(-3, 3))


def duplicate_columns(x: Inputs, g: Draw) -> None:
    """two columns the same, or nearly"""
    x.cov_factor.mul_(g.power(0, 6))
    x.cov_factor[..., 0] = x.cov_factor[..., -1] * (1 + (0.0 if g.chance(2) else g.power(-7, -2)))


def all_columns_equal(x: Inputs, g: Draw) -> None:
    """a factor of rank one"""
    x.cov_factor[:] = x.cov_factor[..., :1].clone() * g.power(-2, 8)


def zero_columns(x: Inputs, g: Draw) -> None:
    """some columns, or all, zero"""
    x.cov_factor[..., g.index(x.cov_factor.shape[-1]) :] = 0
    if g.chance(4):
        x.cov_factor.zero_()


def huge(x: Inputs, g: Draw) -> None:
    """everything times up to 1e12"""
    _scale_all(x, g.power(3, 12))


def tiny(x: Inputs, g: Draw) -> None:
    """everything times down to 1e-12"""
    _scale_all(x, g.power(-12, -3))


def extreme(x: Inputs, g: Draw) -> None:
    """everything times 1e13 to 1e18, or 1e-13 to 1e-18"""
    _scale_all(x, g.power(13, 18) if g.chance(2) else g.power(-18, -13))


def _scale_all(x: Inputs, scale: float) -> None:
    x.cov_factor.mul_(scale)
    x.cov_diag.mul_(scale * scale)
    x.value.mul_(scale)
    x.loc.mul_(scale)


def small_floor(x: Inputs, g: Draw) -> None:
    """the whole diagonal down to 1e-14"""
    x.cov_diag.mul_(g.power(-14, -4))


def dead_pixel(x: Inputs, g: Draw) -> None:
    """one output whose variance is next to nothing, its factor row zero or not"""
    at = g.index(x.cov_diag.shape[-1])
    x.cov_diag[..., at] = g.power(-22, -6)
    if g.chance(2):
        x.cov_factor[..., at, :] = 0


def enormous_row(x: Inputs, g: Draw) -> None:
    """one diagonal entry of 1e-16 to 1e-42 beside others near 1"""
    x.cov_diag[..., g.index(x.cov_diag.shape[-1])] = g.power(-42, -16)


def constant_regions(x: Inputs, g: Draw) -> None:
    """outputs that share one row of the factor, and one diagonal entry"""
    cut = 1 + g.index(x.cov_diag.shape[-1])
    x.cov_factor[..., :cut, :] = x.cov_factor[..., :1, :].clone()
    x.cov_diag[..., :cut] = x.cov_diag[..., :1].clone() * g.power(-8, 0)


def denormals(x: Inputs, g: Draw) -> None:
    """entries below the normal range of float32"""
    x.cov_factor[..., 0] *= 1e-42
    x.cov_factor[..., g.index(x.cov_diag.shape[-1]), :] *= 1e-40
    if g.chance(2):
        x.loc.mul_(1e-41)


def small_factor(x: Inputs, g: Draw) -> None:
    """a factor of 1e-25 to 1e-5"""
    x.cov_factor.mul_(g.power(-25, -5))


def mixed_scales(x: Inputs, g: Draw) -> None:
    """every row and every column at a scale of its own"""
    S, R = x.cov_factor.shape[-2:]
    rows, columns = torch.rand(S, 1, generator=g.generator).double(), torch.rand(R, generator=g.generator).double()
    x.cov_factor.mul_(10 ** (4 * rows - 2)).mul_(10 ** (6 * columns - 3))
    x.cov_diag.mul_(10 ** (6 * torch.rand(S, generator=g.generator).double() - 5))


def far_value(x: Inputs, g: Draw) -> None:
    """a value up to 1e9 standard deviations away, in a direction the factor explains or in any"""
    x.value.mul_(g.power(2, 9))
    if g.chance(2):
        along = x.cov_factor[..., 0].reshape(-1, x.cov_factor.shape[-2])[0]
        x.value.copy_((along * g.power(2, 9)).expand_as(x.value))


FAMILIES: tuple[Family, ...] = (
    *(plain, duplicate_columns, all_columns_equal, zero_columns, huge, tiny, extreme, small_floor, dead_pixel),
    *(enormous_row, constant_regions, denormals, small_factor, mixed_scales, far_value),
)


def covariances(
    g: Draw, *, dtype: torch.dtype | None = None, batch: Sequence[int] | None = None, S: int = 0, R: int = -1
) -> Inputs:
    """A case's Gaussian and value, of random size and shape where none is given: the next family in turn."""
    dtype = dtype or g.dtype()
    drawn = g.sizes()
    S, R = S or drawn[0], drawn[1] if R < 0 else R
    batch = g.batch() if batch is None else batch
    parts = [g.part(batch) for _ in range(4)]
    factor = g.normal(*parts[2], S, R)
    diag = 0.05 + torch.rand(*parts[3], S, generator=g.generator, dtype=torch.float64)
    x = Inputs(g.normal(*parts[0], S), g.normal(*parts[1], S), factor, diag)
    # Shifted with each round, or each instruction set would always meet the same families.
    family = FAMILIES[(g.number + g.number // len(FAMILIES)) % len(FAMILIES)]
    g.family = family.__name__
    if R:
        family(x, g)
    if g.chance(3):  # a value near the mean
        x.value.copy_((x.value * x.cov_diag.sqrt().mean() * 3 + x.loc).reshape(-1, S)[0].expand_as(x.value))
    x = Inputs(*(_fit(t, dtype) for t in x))
    x = Inputs(*(g.vector(t) for t in x[:2]), testing.in_layout(x.cov_factor, g.pick(testing.LAYOUTS)), g.vector(x[3]))
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    x = x._replace(cov_diag=x.cov_diag.clamp(min=smallest) if bool((x.cov_diag <= 0).any()) else x.cov_diag)
    note_size(g, x.cov_factor, x.cov_diag)
    return x


def _fit(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to a dtype, within a sixteenth of its range."""
    limit = torch.finfo(dtype).max / 16
    return tensor.clamp(-limit, limit).to(dtype)


def note_size(g: Draw, factor: Tensor, diag: Tensor) -> None:
    """Remembers the largest eigenvalue of the capacitance, from the rows' lengths."""
    scaled = factor.double() / diag.double().sqrt()[..., None]
    if scaled.numel():
        g.size = max(g.size, 1 + float(scaled.square().sum((-2, -1)).max()))


def masked(g: Draw, batch: Sequence[int], S: int) -> Tensor | None:
    """None, or a mask [..., S] that broadcasts with the batch and keeps at least one output."""
    if not g.chance(3):
        return None
    mask = torch.rand(*g.part(batch), S, generator=g.generator) < 0.7
    mask[..., g.index(S)] = True
    return mask


def spoil(x: Inputs, mask: Tensor) -> Inputs:
    """NaN in the entries that every batch item masks."""
    gone = ~mask.reshape(-1, mask.shape[-1]).any(0)
    nan = torch.tensor(torch.nan, dtype=x.cov_diag.dtype)
    vectors = [torch.where(gone, nan, t) for t in (x.value, x.loc, x.cov_diag)]
    factor = x.cov_factor.clone()  # keeps the layout
    factor[..., gone, :] = torch.nan
    return Inputs(vectors[0], vectors[1], factor, vectors[2])
