"""Which backend serves a call, or every reason why none does."""

from __future__ import annotations

import functools
import importlib.util
import os
from types import TracebackType
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from lrd_kernels.ops import load

BACKENDS = ("cpu", "triton", "cuda", "reference")
LEAST_CAPABILITY = (7, 5)  # of a GPU, for the CUDA kernels
OF_DEVICE = {"cpu": "cpu", "triton": "cuda", "cuda": "cuda"}


class BackendStatus(NamedTuple):
    """Whether a backend can serve on this machine, and what it is or why it cannot."""

    available: bool
    detail: str


_forced: str | None = None


def backends() -> dict[str, BackendStatus]:
    """Every backend by name: whether it is there, and why not."""
    cpu = (
        BackendStatus(True, f"compiled kernels, instruction set {load.cpu_isa()}")
        if load.cpu_error is None
        else BackendStatus(False, load.cpu_error)
    )
    return {
        "cpu": cpu,
        "triton": _triton(),
        "cuda": _cuda(),
        "reference": BackendStatus(True, "plain torch in float64, on any device"),
    }


@functools.cache
def _triton() -> BackendStatus:
    if importlib.util.find_spec("triton") is None:
        return BackendStatus(False, "the package triton is not installed")
    if triton_interprets():
        return BackendStatus(True, "Triton kernels in Triton's interpreter, on the CPU: for tests")
    if not torch.cuda.is_available():
        return BackendStatus(
            False, "Triton kernels need a GPU that torch can use, or TRITON_INTERPRET=1 to interpret them on the CPU"
        )
    return BackendStatus(True, f"Triton kernels on {torch.cuda.get_device_name()}")


@functools.cache
def _cuda() -> BackendStatus:
    if load.cuda_error is not None:
        return BackendStatus(False, load.cuda_error)
    if not torch.cuda.is_available():
        return BackendStatus(False, "CUDA kernels need a GPU that torch can use")
    if torch.cuda.get_device_capability() < LEAST_CAPABILITY:
        wanted = ".".join(map(str, LEAST_CAPABILITY))
        return BackendStatus(
            False, f"CUDA kernels need compute capability {wanted}, which {torch.cuda.get_device_name()} does not have"
        )
    return BackendStatus(True, f"CUDA kernels on {torch.cuda.get_device_name()}")


def triton_interprets() -> bool:
    """Whether Triton runs its kernels on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def device_of(name: str) -> str:
    """The type of device whose tensors a backend takes; "cpu" for the reference, which takes any."""
    return "cpu" if name == "triton" and triton_interprets() else OF_DEVICE.get(name, "cpu")


def _serves(name: str, device_type: str) -> bool:
    """Whether a backend takes tensors of a device; asked with every call."""
    if name == "reference":
        return True
    if name == "cpu":
        return device_type == "cpu" and load.cpu_error is None
    if name == "triton":
        return device_type == device_of(name) and _triton().available
    if name == "cuda":
        return device_type == "cuda" and _cuda().available
    return False


def choose(asked: str | None, device_type: str) -> str:
    """The backend for tensors on `device_type`. One that was asked for by name serves or raises."""
    name = asked if asked is not None else _forced
    if name is None:
        own = ("triton", "cuda") if device_type == "cuda" else ("cpu",)
        return next((name for name in own if _serves(name, device_type)), "reference")
    if _serves(name, device_type):
        return name
    _decline(name, device_type)


def _decline(name: str, device_type: str) -> NoReturn:
    _check_name(name)
    status = backends()[name]
    if not status.available:
        others = "; ".join(f"{other}: {s.detail}" for other, s in backends().items() if other != name)
        raise RuntimeError(f"backend {name!r} is not available: {status.detail}. The others: {others}")
    where = repr(device_of(name)) + (" (TRITON_INTERPRET=1 is set)" if name == "triton" and triton_interprets() else "")
    raise RuntimeError(f"backend {name!r} serves tensors on {where}, not on {device_type!r}")


def _check_name(name: str | None) -> None:
    if name is not None and name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(map(repr, BACKENDS))} or None; got {name!r}")


transforms_active = torch._C._are_functorch_transforms_active  # whether a transform of torch.func is under way


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is torch's own and not something that only acts like one."""
    return type(tensor) in (Tensor, torch.nn.Parameter)


def may_inspect(tensor: Tensor) -> bool:
    """Whether numbers may be looked at: in eager mode on the CPU. Elsewhere a look would sync, or break a graph."""
    return is_plain(tensor) and tensor.is_cpu and not (torch.compiler.is_compiling() or transforms_active())


def has_nan(result: Tensor) -> bool:
    """Looks at the numbers, a single one in the cheapest way."""
    return result.item() != result.item() if result.numel() == 1 else bool(result.isnan().any())


class use_backend:
    """Forces one backend for all calls that name none: `use_backend("reference")`, or as a context manager.

    As a plain call it holds until the next one; None gives the choice back. It is process-wide.
    """

    def __init__(self, name: str | None) -> None:
        global _forced
        _check_name(name)
        if name is not None and not (status := backends()[name]).available:
            raise RuntimeError(f"backend {name!r} is not available: {status.detail}")
        self._previous = _forced
        _forced = name

    def __enter__(self) -> use_backend:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _forced
        _forced = self._previous
