"""Argument checks, in Python, before any kernel runs. Each error names the argument, the expected and actual value."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, NoReturn

import torch
from torch import Tensor

from lrd_kernels._policy import PRECISIONS, exp_limit
from lrd_kernels.ops.dispatch import has_nan, may_inspect

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
ON_FAILURE = ("raise", "nan")
REDUCTIONS = ("mean", "sum", "none")


class NotPositiveDefiniteError(torch.linalg.LinAlgError, ValueError):
    """Raised if a covariance is not positive definite in any precision. It is a `torch.linalg.LinAlgError`, too.

    Attributes:
        index: index of the first invalid entry in its tensor, or None if every entry is valid.
        smallest_diag: the smallest entry of the diagonal.
        condition: an upper estimate of the condition number of the capacitance matrix; NaN if it is undefined.

    Examples:
        >>> try:
        ...     lrd.logdet(torch.ones(3, 1), torch.tensor([1.0, -1.0, 1.0]))
        ... except lrd.NotPositiveDefiniteError as error:
        ...     print(error.index, error.smallest_diag)
        (1,) -1.0
    """

    def __init__(self, message: str, index: tuple[int, ...] | None, smallest_diag: float, condition: float) -> None:
        super().__init__(message)
        self.index = index
        self.smallest_diag = smallest_diag
        self.condition = condition


def option(name: str, value: Any, allowed: Collection[str]) -> None:
    """Checks that a string argument is one of the allowed values."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")


def options(precision: str, on_failure: str) -> None:
    option("precision", precision, PRECISIONS)
    option("on_failure", on_failure, ON_FAILURE)


def floating(name: str, tensor: Any) -> None:
    is_tensor(name, tensor)
    if tensor.dtype not in DTYPES:
        cast = "" if tensor.is_complex() else f" (cast it: {name}.float())"
        raise TypeError(f"{name} must be float32, float64, bfloat16 or float16; got {tensor.dtype}{cast}")


def non_negative(name: str, value: Any) -> None:
    if not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number; got {type(value).__name__}")
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be finite and not negative; got {value}")


def positive(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int; got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1; got {value}")


def rank(value: Any) -> int:
    """Checks a number of columns to keep."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"rank must be an int or None; got {type(value).__name__}")
    if value < 0:
        raise ValueError(f"rank must not be negative; got {value}")
    return value


def gaussian(
    cov_factor: Tensor,
    cov_diag: Tensor,
    mask: Tensor | None = None,
    *,
    diag_name: str = "cov_diag",
    **vectors: Tensor,
) -> None:
    """Checks types, dtypes, devices and shapes of a call. `vectors` are the [..., S] arguments by name."""
    floating("cov_factor", cov_factor)
    if cov_factor.dim() < 2:
        hint = " (a single column is cov_factor[:, None])" if cov_factor.dim() else ""
        raise ValueError(f"cov_factor must have shape [..., S, R]; got {_shape(cov_factor)}{hint}")
    rows, dtype, device = cov_factor.shape[:-1], cov_factor.dtype, cov_factor.device
    S, batch = rows[-1], tuple(rows[:-1])
    for name, tensor in ((diag_name, cov_diag), *vectors.items()):
        if _is_like(tensor, rows, dtype, device):
            continue
        _vector(name, tensor, S, cov_factor)
        if tensor.dtype != cov_factor.dtype:
            raise TypeError(
                f"{name} must have cov_factor's dtype {cov_factor.dtype}; got {tensor.dtype}"
                f" (cast it: {name}.to({cov_factor.dtype}))"
            )
        batch = _broadcast(batch, tensor.shape[:-1], name, tensor, cov_factor)
    if mask is not None:
        _vector("mask", mask, S, cov_factor)
        if mask.dtype != torch.bool:
            raise TypeError(f"mask must be bool, True where an output exists; got {mask.dtype} (cast it: mask.bool())")
        _broadcast(batch, mask.shape[:-1], "mask", mask, cov_factor)


def _is_like(tensor: Any, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> bool:
    """The common case in as few steps as possible: checks are a large part of a small call."""
    same = type(tensor) is Tensor and tensor.shape == shape and tensor.dtype == dtype and tensor.device == device
    return same and tensor.layout == torch.strided


def is_tensor(name: str, tensor: Any) -> None:
    """Checks that an argument is a dense tensor."""
    if not isinstance(tensor, Tensor):
        hint = f" (convert it: torch.as_tensor({name}))" if type(tensor).__module__ == "numpy" else ""
        hint = f" (convert it: torch.tensor({name}))" if isinstance(tensor, (list, tuple, int, float)) else hint
        raise TypeError(f"{name} must be a torch.Tensor; got {type(tensor).__name__}{hint}")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} must be a dense (strided) tensor; got layout {tensor.layout}")


def _vector(name: str, tensor: Any, S: int, cov_factor: Tensor) -> None:
    is_tensor(name, tensor)
    if tensor.dim() < 1 or tensor.shape[-1] != S:
        hint = vector_hint(name, tensor, S)
        if not hint and tensor.shape[-1] == cov_factor.shape[-1]:
            hint = " (if cov_factor is [..., R, S], pass cov_factor.mT)"
        raise ValueError(
            f"{name} must have shape [..., S] with S = {S}, as in cov_factor {_shape(cov_factor)}; got {_shape(tensor)}"
            f"{hint}"
        )
    if tensor.device != cov_factor.device:
        raise ValueError(
            f"{name} must be on cov_factor's device {cov_factor.device}; got {tensor.device}"
            f" (move it: {name}.to({str(cov_factor.device)!r}))"
        )


def matrix_hint(name: str, tensor: Tensor) -> str:
    """What to do about a diagonal matrix in the place of its diagonal."""
    is_matrix = name == "cov_diag" and tensor.dim() > 1 and tensor.shape[-1] == tensor.shape[-2]
    return " (of a diagonal matrix, pass cov_diag.diagonal(dim1=-2, dim2=-1))" if is_matrix else ""


def vector_hint(name: str, tensor: Tensor, S: int) -> str:
    """What to do about a tensor that should be [..., S], if its shape tells."""
    if tensor.dim() == 0:
        return f" (for the same number for all outputs, pass {name}.expand({S}))"
    if tensor.dim() > 1 and tensor.shape[-2:] == (S, 1):
        return f" (drop the last dimension: {name}.squeeze(-1))"
    for count in range(2, tensor.dim() + 1):
        if math.prod(tensor.shape[-count:]) == S:
            return f" (flatten the dimensions of the outputs: {name}.flatten(-{count}))"
    return ""


def _broadcast(
    batch: tuple[int, ...], other: tuple[int, ...], name: str, tensor: Tensor, cov_factor: Tensor
) -> tuple[int, ...]:
    if batch == other or not other:
        return batch
    try:
        return torch.broadcast_shapes(batch, other)
    except RuntimeError:
        raise ValueError(
            f"batch dimensions of {name} {_shape(tensor)} do not broadcast with those of the arguments before it:"
            f" {tuple(batch)} (cov_factor is {_shape(cov_factor)}){matrix_hint(name, tensor)}"
        ) from None


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def check_result(
    result: Tensor,
    cov_factor: Tensor,
    cov_diag: Tensor,
    mask: Tensor | None,
    eps: float | None = None,
    **vectors: Tensor,
) -> None:
    """Raises if a result is NaN. Every invalid input makes a result NaN, so valid inputs need no check of their own."""
    if may_inspect(result) and has_nan(result.detach()):
        explain(cov_factor, cov_diag, mask, eps, **vectors)


def check_numbers(cov_factor: Tensor, cov_diag: Tensor, **vectors: Tensor) -> None:
    """Raises for numbers that are not finite and for a diagonal that is not positive. A sum shows them without a
    temporary of the factor's size."""

    def finite(tensor: Tensor) -> bool:
        return bool(tensor.sum(dtype=torch.float64).isfinite()) or bool(tensor.isfinite().all())

    is_positive = cov_diag.numel() == 0 or bool(cov_diag.detach().min() > 0)
    if not (is_positive and all(finite(t.detach()) for t in (cov_factor, cov_diag, *vectors.values()))):
        explain(cov_factor, cov_diag, None, None, **vectors)


def explain(
    cov_factor: Tensor, cov_diag: Tensor, mask: Tensor | None, eps: float | None = None, **vectors: Tensor
) -> NoReturn:
    """Finds the first invalid entry and raises an error that names it."""
    diag_name = "cov_diag" if eps is None else "raw_diag"
    diag = cov_diag.detach().double()
    if eps is not None:  # finite raw entries cannot overflow
        diag = torch.where(diag.isfinite(), diag.clamp(max=exp_limit(cov_diag.dtype)), diag).exp() + eps
    wide_mask = None if mask is None else mask.detach()
    counted = diag if wide_mask is None else torch.where(wide_mask, diag, torch.inf)
    smallest = float(counted.min()) if counted.numel() else float("nan")
    spread = cov_factor.detach().double().square().sum(-1) / diag
    spread = spread if wide_mask is None else torch.where(wide_mask, spread, 0)
    condition = 1 + float(spread.sum(-1).max()) if spread.numel() else float("nan")

    def covariance_error(message: str, index: tuple[int, ...] | None) -> NoReturn:
        detail = f"; smallest diagonal entry {smallest:.6g}, condition number of the capacitance below {condition:.3g}"
        raise NotPositiveDefiniteError(message + detail, index, smallest, condition)

    if (index := _first(~(diag.isfinite() & (diag > 0)), wide_mask)) is not None:
        got = _entry(cov_diag, index)
        wanted = "positive and finite" if eps is None else f"such that {eps:g} + exp(raw) is positive and finite"
        covariance_error(f"{diag_name}{list(index)} must be {wanted}; got {got:g}", index)
    factor_mask = None if wide_mask is None else wide_mask[..., None]
    if (index := _first(~cov_factor.detach().isfinite(), factor_mask)) is not None:
        covariance_error(f"cov_factor{list(index)} must be finite; got {_entry(cov_factor, index):g}", index)
    for name, tensor in vectors.items():
        if (index := _first(~tensor.detach().isfinite(), wide_mask)) is not None:
            raise ValueError(f"{name}{list(index)} must be finite; got {_entry(tensor, index):g}")
    covariance_error("all entries are finite, but their products exceed the range of float64", None)


def _first(bad: Tensor, mask: Tensor | None) -> tuple[int, ...] | None:
    """Index of the first invalid unmasked entry, in the broadcast shape."""
    bad = bad if mask is None else bad & mask
    flat = bad.reshape(-1)
    if not bool(flat.any()):
        return None
    at = int(flat.to(torch.uint8).argmax())
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(at), bad.shape))


def _entry(tensor: Tensor, index: tuple[int, ...]) -> float:
    """The entry at a broadcast index."""
    own = index[len(index) - tensor.dim() :]
    return float(tensor.detach()[tuple(i if n > 1 else 0 for i, n in zip(own, tensor.shape, strict=True))])
