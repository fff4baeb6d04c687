"""Loads the compiled libraries and keeps the reason where one could not be loaded."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch  # which loads libtorch, for the compiled libraries to find by its name


def _load_cpu() -> tuple[ModuleType | None, str | None]:
    try:
        return importlib.import_module("lrd_kernels._C"), None
    except ImportError as error:
        return None, f"the compiled library lrd_kernels/_C.abi3.so did not load: {error}"


def _load_cuda() -> str | None:
    """Why there are no CUDA ops; None where they were loaded."""
    if torch.version.cuda is None:
        return f"CUDA kernels need a torch that was built for CUDA, this one is {torch.__version__}"
    try:
        importlib.import_module("lrd_kernels._C_cuda")
    except ModuleNotFoundError:
        return "this build has no CUDA kernels: nvcc was not there, or LRD_CUDA=OFF was given"
    except ImportError as error:
        return f"the compiled library lrd_kernels/_C_cuda.abi3.so did not load: {error}"
    return None


_cpu_library, cpu_error = _load_cpu()
cuda_error = _load_cuda()


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
