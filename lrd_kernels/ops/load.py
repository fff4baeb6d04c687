"""Loads the compiled libraries, and records why one could not be loaded."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch  # loads libtorch, which the compiled libraries need


def _load_cpu() -> tuple[ModuleType | None, str | None]:
    try:
        return importlib.import_module("lrd_kernels._C"), None
    except ImportError as error:
        return None, f"the compiled library lrd_kernels/_C.abi3.so did not load: {error}"


def _load_cuda() -> str | None:
    """Returns why the CUDA ops could not be loaded, or None if they were."""
    if torch.version.cuda is None:
        return f"CUDA kernels need a torch that was built for CUDA; this is torch {torch.__version__}"
    try:
        importlib.import_module("lrd_kernels._C_cuda")
    except ModuleNotFoundError:
        return "this build has no CUDA kernels: nvcc was not found, or LRD_CUDA=OFF was set"
    except ImportError as error:
        return f"the compiled library lrd_kernels/_C_cuda.abi3.so did not load: {error}"
    return None


_cpu_library, cpu_error = _load_cpu()
cuda_error = _load_cuda()


def cpu_isa() -> str | None:
    """The instruction set of the CPU kernels, or None if the library is not loaded."""
    return _cpu_library.cpu_isa() if _cpu_library else None


def release_memory() -> None:
    """Releases the memory that the CPU kernels cache for reuse, that of up to four large gradients.

    The operating system can also reclaim this memory when memory is low; call this to release it immediately.

    Examples:
        >>> lrd.release_memory()
    """
    if _cpu_library:
        _cpu_library.release_memory()


def available_isas() -> list[str]:
    """The instruction sets that this machine supports, best first."""
    return _cpu_library.available_isas() if _cpu_library else []
