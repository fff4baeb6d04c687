"""Selects the backend of a call, or reports why none is available."""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from contextvars import ContextVar
from types import TracebackType
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor
from torch._functorch import eager_transforms
from torch.autograd import forward_ad

from lrd_kernels.ops import load

BACKENDS = ("cpu", "triton", "cuda", "reference")
LEAST_CAPABILITY = (7, 5)  # the lowest compute capability that the CUDA and the Triton kernels support
OF_DEVICE = {"cpu": "cpu", "triton": "cuda", "cuda": "cuda"}


class BackendStatus(NamedTuple):
    """The status of one backend, from `backends()`.

    Attributes:
        available: whether it can be used on this machine.
        detail: its description, or the reason why it is not available.
    """

    available: bool
    detail: str


# The settings of `use_backend` in force, the last of which counts: one tuple per thread or asynchronous task.
_settings: ContextVar[tuple[use_backend, ...]] = ContextVar("lrd_kernels_backend", default=())
_traced: str | None = None  # the name set last in any thread, for compiled code, which cannot read a ContextVar


def forced() -> str | None:
    """The backend that `use_backend` sets, or None."""
    if torch.compiler.is_compiling():
        return _traced
    settings = _settings.get()
    return settings[-1].name if settings else None


def backends() -> dict[str, BackendStatus]:
    """The status of every backend by name: whether it is available, and if not, why.

    Examples:
        >>> lrd.backends()["reference"].available
        True
        >>> list(lrd.backends())
        ['cpu', 'triton', 'cuda', 'reference']
    """
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
    name = asked if asked is not None else forced()
    if name is None:
        own = ("cuda", "triton") if device_type == "cuda" else ("cpu",)
        served = next((name for name in own if _serves(name, device_type, index)), "reference")
        if served == "reference" and device_type == "cpu":
            if torch.compiler.is_compiling():
                from torch._dynamo.comptime import comptime

                comptime(_warn_of_reference)  # while the graph is traced; a plain call would break it
            else:
                _warn_of_reference()
        return served
    if _serves(name, device_type, index):
        return name
    _decline(name, device_type, index)


_warned = False


def _warn_of_reference(_: object = None) -> None:
    """Warns once in a process that the reference serves the CPU because the compiled kernels are missing."""
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"lrd_kernels uses its slow reference in plain torch, because {load.cpu_error}. Reinstall lrd-kernels, or"
            " correct what the reason names; use_backend('reference') accepts the reference without this warning.",
            RuntimeWarning,
            stacklevel=2,
        )


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


def forward_mode() -> bool:
    """Whether a level of forward-mode differentiation is open."""
    return not torch.compiler.is_compiling() and forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()


def forward_mode_is_nested() -> bool:
    """Whether `torch.func.jvp` is active within itself, where torch takes the inner tangent of a custom function for a
    constant."""
    return forward_mode() and eager_transforms.JVP_NESTING > 1


def refuse_tangents(what: str, *tensors: Tensor) -> None:
    """Raises an error where forward mode would lose a derivative without a word."""
    if forward_mode() and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise NotImplementedError(f"{what} has no forward-mode derivative; use reverse mode, such as torch.func.grad")


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is a plain tensor or parameter, and not another tensor subclass."""
    return type(tensor) in (Tensor, torch.nn.Parameter)


def may_inspect(tensor: Tensor) -> bool:
    """Whether values may be inspected: in eager mode on the CPU. Elsewhere this would synchronise or break a graph."""
    return is_plain(tensor) and tensor.is_cpu and not (torch.compiler.is_compiling() or transforms_active())


def has_nan(result: Tensor) -> bool:
    """Whether a result contains NaN; a single number is checked in the cheapest way."""
    if result.numel() != 1:
        return bool(result.isnan().any())
    number = result.item()
    return number != number


class use_backend:
    """Sets the backend of all calls without a `backend` argument, as a function or as a context manager.

    A plain call such as `use_backend("reference")` applies until the next one, or to the end of the `with` block around
    it; None restores the automatic choice. As with `torch.set_grad_enabled`, a setting belongs to the thread (or
    asynchronous task) that made it. Blocks may be left in any order. `torch.compile` traces with the setting made last.

    Raises:
        ValueError: if there is no backend of that name.
        RuntimeError: if the backend is not available; the message gives the reason.

    Examples:
        >>> with lrd.use_backend("reference"):
        ...     lrd.logdet(torch.ones(3, 1), torch.ones(3))
        tensor(1.3863)
    """

    def __init__(self, name: str | None) -> None:
        _check_name(name)
        if name is not None and not (status := backends()[name]).available:
            raise RuntimeError(f"backend {name!r} is not available: {status.detail}")
        self.name = name
        self._is_block = False
        _set((*_without_calls_after_last_block(_settings.get()), self))

    def __enter__(self) -> use_backend:
        self._is_block = True
        if self not in _settings.get():  # made in another thread, or entered again
            _set((*_settings.get(), self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        settings = _settings.get()
        if self in settings:
            at = settings.index(self)
            later = settings[at + 1 :]
            while later and not later[0]._is_block:  # plain calls of this block
                later = later[1:]
            _set((*settings[:at], *later))


def _without_calls_after_last_block(settings: tuple[use_backend, ...]) -> tuple[use_backend, ...]:
    while settings and not settings[-1]._is_block:
        settings = settings[:-1]
    return settings


def _set(settings: tuple[use_backend, ...]) -> None:
    global _traced
    _settings.set(settings)
    _traced = settings[-1].name if settings else None
