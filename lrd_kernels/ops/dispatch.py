"""Selects the backend of a call, or reports why none is available."""

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
LEAST_CAPABILITY = (7, 5)  # the lowest compute capability that the CUDA and the Triton kernels support
OF_DEVICE = {"cpu": "cpu", "triton": "cuda", "cuda": "cuda"}


class BackendStatus(NamedTuple):
    """Whether a backend is available on this machine, and its description or the reason why it is not."""

    available: bool
    detail: str


_forced: str | None = None


def backends() -> dict[str, BackendStatus]:
    """Returns the status of every backend by name: whether it is available, and if not, why."""
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
def _triton(index: int | None = None) -> BackendStatus:
    """The status on a GPU; on the current one without an index."""
    if importlib.util.find_spec("triton") is None:
        return BackendStatus(False, "the package triton is not installed")
    if triton_interprets():
        return BackendStatus(True, "Triton kernels in Triton's interpreter, on the CPU: for tests")
    if not torch.cuda.is_available():
        return BackendStatus(
            False, "Triton kernels need a GPU that torch can use, or TRITON_INTERPRET=1 to interpret them on the CPU"
        )
    if reason := _too_old("Triton", index):
        return BackendStatus(False, reason)
    return BackendStatus(True, f"Triton kernels on {torch.cuda.get_device_name(index)}")


@functools.cache
def _cuda(index: int | None = None) -> BackendStatus:
    """The status on a GPU; on the current one without an index."""
    if load.cuda_error is not None:
        return BackendStatus(False, load.cuda_error)
    if not torch.cuda.is_available():
        return BackendStatus(False, "CUDA kernels need a GPU that torch can use")
    if reason := _too_old("CUDA", index):
        return BackendStatus(False, reason)
    name = torch.cuda.get_device_name(index)
    if error := _first_launch(index):
        reason = "so the driver may be too old for the CUDA version of this build"
        return BackendStatus(False, f"the first launch of a CUDA kernel on {name} failed, {reason}: {error}")
    return BackendStatus(True, f"CUDA kernels on {name}")


def _too_old(kernels: str, index: int | None) -> str | None:
    """Why a GPU is too old for kernels, or None if it is not."""
    if torch.version.hip is not None or torch.cuda.get_device_capability(index) >= LEAST_CAPABILITY:
        return None
    wanted = ".".join(map(str, LEAST_CAPABILITY))
    name = torch.cuda.get_device_name(index)
    return f"{kernels} kernels need compute capability {wanted}, which {name} does not have"


def _first_launch(index: int | None) -> str | None:
    """The error of a launch of the smallest CUDA kernel, or None if it succeeds. Does not synchronise."""
    device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
    sums = [torch.zeros(shape, dtype=torch.float64, device=device) for shape in ((1, 1, 1), (1, 0, 1), (1, 0), (1,))]
    try:
        torch.ops.lrd_cuda.capacitance_fwd(*sums)
    except RuntimeError as error:
        return str(error)
    return None


def triton_interprets() -> bool:
    """Whether Triton runs its kernels on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def device_of(name: str) -> str:
    """The device type that a backend supports; "cpu" for the reference, which supports any device."""
    return "cpu" if name == "triton" and triton_interprets() else OF_DEVICE.get(name, "cpu")


def _serves(name: str, device_type: str, index: int | None = None) -> bool:
    """Whether a backend supports tensors on a device. Called for every op."""
    if name == "reference":
        return True
    if name == "cpu":
        return device_type == "cpu" and load.cpu_error is None
    if name == "triton":
        return device_type == device_of(name) and _triton(index).available
    if name == "cuda":
        return device_type == "cuda" and _cuda(index).available
    return False


def choose(asked: str | None, device: torch.device) -> str:
    """The backend for tensors on `device`. Raises an error if a backend requested by name is unavailable."""
    device_type, index = device.type, device.index
    name = asked if asked is not None else _forced
    if name is None:
        own = ("cuda", "triton") if device_type == "cuda" else ("cpu",)
        return next((name for name in own if _serves(name, device_type, index)), "reference")
    if _serves(name, device_type, index):
        return name
    _decline(name, device_type, index)


def _decline(name: str, device_type: str, index: int | None) -> NoReturn:
    _check_name(name)
    status = backends()[name]
    if status.available and name in ("triton", "cuda") and device_type == "cuda":
        status = (_triton if name == "triton" else _cuda)(index)  # of this GPU, which may not be the current one
    if not status.available:
        others = "; ".join(f"{other}: {s.detail}" for other, s in backends().items() if other != name)
        raise RuntimeError(f"backend {name!r} is not available: {status.detail}. Other backends: {others}")
    where = repr(device_of(name)) + (" (TRITON_INTERPRET=1 is set)" if name == "triton" and triton_interprets() else "")
    raise RuntimeError(f"backend {name!r} supports tensors on {where}, not on {device_type!r}")


def _check_name(name: str | None) -> None:
    if name is not None and name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(map(repr, BACKENDS))} or None; got {name!r}")


transforms_active = torch._C._are_functorch_transforms_active  # whether a torch.func transform is active


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is a plain tensor or parameter, and not another tensor subclass."""
    return type(tensor) in (Tensor, torch.nn.Parameter)


def may_inspect(tensor: Tensor) -> bool:
    """Whether values may be inspected: in eager mode on the CPU. Elsewhere this would synchronise or break a graph."""
    return is_plain(tensor) and tensor.is_cpu and not (torch.compiler.is_compiling() or transforms_active())


def has_nan(result: Tensor) -> bool:
    """Whether a result contains NaN; a single number is checked in the cheapest way."""
    return result.item() != result.item() if result.numel() == 1 else bool(result.isnan().any())


class use_backend:
    """Sets the backend of all calls without a `backend` argument, as a function or as a context manager.

    A plain call such as `use_backend("reference")` applies until the next one; None restores the automatic choice. The
    setting is process-wide.
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
