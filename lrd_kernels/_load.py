"""Loads the compiled libraries and keeps the reason where one could not be loaded."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch  # noqa: F401  (loads libtorch, which the compiled library finds by its name)


def _load_cpu() -> tuple[ModuleType | None, str | None]:
    try:
        return importlib.import_module("lrd_kernels._C"), None
    except ImportError as error:
        return None, f"the compiled library lrd_kernels/_C.abi3.so did not load: {error}"


_cpu_library, cpu_error = _load_cpu()


def cpu_isa() -> str | None:
    """The instruction set the CPU kernels use, None without the library."""
    return _cpu_library.cpu_isa() if _cpu_library else None


def release_memory() -> None:
    """Gives back to the system what the CPU kernels keep for later: the memory of up to four large gradients.

    The system may take that memory by itself when it is short; this is for those who want to see it gone.
    """
    if _cpu_library:
        _cpu_library.release_memory()


def available_isas() -> list[str]:
    """The instruction sets this machine can run, best first."""
    return _cpu_library.available_isas() if _cpu_library else []
