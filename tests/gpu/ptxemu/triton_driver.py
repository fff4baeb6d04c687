"""Runs ordinary Triton launches on CPU tensors in the emulator.

``emulated_gpu()`` makes a Triton driver active that reports a CUDA device of the chosen capability.
Triton then compiles for it as usual (ptxas included, so the kernel is known to assemble), and the
launcher runs the PTX here instead of loading the cubin.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.backends.nvidia.driver import ty_to_cpp
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver as _active_driver
from triton.runtime.jit import TensorWrapper

from ptxemu.errors import Unsupported
from ptxemu.launch import Kernel
from ptxemu.results import BufferTraffic, LaunchStats, Result

# Largest dynamic shared memory per block, by capability; Triton refuses kernels that need more.
_MAX_SHARED = {75: 65536, 80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
_WARP_SIZE = 32


@dataclass(frozen=True)
class TritonLaunch:
    """One launch: the Triton function's name, its grid and the emulator's result."""

    name: str
    grid: tuple[int, int, int]
    num_warps: int
    shared: int
    ptx: str
    result: Result

    @property
    def stats(self) -> LaunchStats:
        """Traffic counts; needs ``emulated_gpu(stats=True)``."""
        if self.result.stats is None:
            raise ValueError("statistics were not asked for: emulated_gpu(stats=True)")
        return self.result.stats

    def buffer(self, argument: str) -> BufferTraffic:
        """Traffic of the tensor passed as ``argument``."""
        return self.stats.buffers[argument]


class EmulatedGpu:
    """The device inside ``emulated_gpu()``; ``launches`` records every launch in order."""

    def __init__(self, capability: int, race: bool, stats: bool, order: str | int):
        self.capability = capability
        self.race = race
        self.stats = stats
        self.order = order
        self.launches: list[TritonLaunch] = []

    def last(self, name: str) -> TritonLaunch:
        """The latest launch of the Triton function ``name``."""
        for launch in reversed(self.launches):
            if launch.name == name:
                return launch
        raise KeyError(f"{name} was not launched; launches: {[x.name for x in self.launches]}")

    def bytes_by_kernel(self) -> dict[str, tuple[int, int]]:
        """(bytes loaded, bytes stored) from and to global memory, summed per kernel."""
        totals: dict[str, tuple[int, int]] = {}
        for launch in self.launches:
            loaded, stored = totals.get(launch.name, (0, 0))
            stats = launch.stats
            totals[launch.name] = (loaded + stats.bytes_loaded, stored + stats.bytes_stored)
        return totals


@functools.lru_cache(maxsize=256)
def _built_kernel(ptx: str, name: str, race: bool, stats: bool) -> Kernel:
    return Kernel(ptx, name, race=race, stats=stats)


class _Launcher:
    """Stands in for Triton's CudaLauncher."""

    def __init__(self, src, metadata):
        self._signature = src.signature
        self._metadata = metadata
        if getattr(metadata, "num_ctas", 1) > 1:
            raise Unsupported(f"{metadata.name}: thread block clusters (num_ctas > 1)")

    def __call__(
        self,
        grid_x,
        grid_y,
        grid_z,
        stream,
        function,
        packed_metadata,
        launch_metadata,
        enter_hook,
        exit_hook,
        *args,
    ):
        # The settings are those of the context around the launch, not around the compilation.
        driver = _active_driver._active
        if not isinstance(driver, _EmulatedDriver):
            raise RuntimeError("a kernel compiled inside emulated_gpu() was launched outside it")
        if enter_hook is not None:
            enter_hook(launch_metadata)
        self._run(driver.gpu, function, (int(grid_x), int(grid_y), int(grid_z)), args)
        if exit_hook is not None:
            exit_hook(launch_metadata)

    def _run(self, gpu: EmulatedGpu, ptx: str, grid: tuple[int, int, int], args) -> None:
        metadata = self._metadata
        blocks = math.prod(grid)
        arguments = self._arguments(args, blocks)
        result = _built_kernel(ptx, metadata.name, gpu.race, gpu.stats).launch(
            grid,
            _WARP_SIZE * metadata.num_warps,
            list(arguments.values()),
            shared=metadata.shared,
            order=gpu.order,
            resident=blocks if metadata.launch_cooperative_grid else 1,
            names=list(arguments),
            check=False,
        )
        gpu.launches.append(TritonLaunch(metadata.name, grid, metadata.num_warps, metadata.shared, ptx, result))
        result.raise_on_fault()

    def _arguments(self, args, blocks: int) -> dict[str, Any]:
        """Run-time arguments by name, in the order of the PTX parameters."""
        arguments: dict[str, Any] = {}
        for (name, kind), value in zip(self._signature.items(), args, strict=True):
            arguments |= _flatten(name, kind, value)
        for scratch in ("global_scratch", "profile_scratch"):
            size = getattr(self._metadata, f"{scratch}_size") * blocks
            arguments[scratch] = np.zeros(size, np.uint8) if size else None
        return arguments


def _flatten(name: str, kind: Any, value: Any) -> dict[str, Any]:
    """The run-time arguments behind one Triton argument; tuples are passed by element."""
    if isinstance(kind, tuple):
        flat: dict[str, Any] = {}
        for index, (inner_kind, inner) in enumerate(zip(kind, value, strict=True)):
            flat |= _flatten(f"{name}[{index}]", inner_kind, inner)
        return flat
    if kind == "constexpr":
        return {}
    if kind.startswith(("tensordesc", "nvTmaDesc")):
        raise Unsupported(f"argument {name}: tensor descriptors (TMA)")
    # triton.reinterpret wraps a tensor.
    return {name: value.base if isinstance(value, TensorWrapper) else value}


class _DeviceUtils:
    """What Triton asks a driver's native helpers for."""

    def __init__(self, gpu: EmulatedGpu):
        self._gpu = gpu

    def load_binary(self, name: str, binary: bytes, shared: int, device):
        """(module, function, registers, spills, threads per block); nothing is loaded."""
        return name, None, 0, 0, 1024

    def get_device_properties(self, device) -> dict[str, int]:
        return {
            "max_shared_mem": _MAX_SHARED.get(self._gpu.capability, max(_MAX_SHARED.values())),
            "max_num_regs": 65536,
            "multiprocessor_count": 8,
            "warpSize": _WARP_SIZE,
            "sm_clock_rate": 1,
            "mem_clock_rate": 1,
            "mem_bus_width": 1,
        }


class _EmulatedDriver(DriverBase):
    launcher_cls = _Launcher

    def __init__(self, gpu: EmulatedGpu):
        super().__init__()
        self.gpu = gpu
        self.utils = _DeviceUtils(gpu)

    @classmethod
    def is_active(cls) -> bool:
        return False  # never chosen by Triton's own search

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty_to_cpp(ty)

    def get_current_device(self) -> str:
        # Triton keys its caches of compiled kernels by device, and any hashable value will do.
        return f"ptxemu:sm_{self.gpu.capability}"

    def set_current_device(self, device) -> None:
        pass

    def get_current_stream(self, device) -> int:
        return 0

    def get_device_capability(self, device=None) -> tuple[int, int]:
        return divmod(self.gpu.capability, 10)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.gpu.capability, _WARP_SIZE)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self):
        raise Unsupported("timing a kernel in the emulator (triton.autotune)")


@contextlib.contextmanager
def emulated_gpu(
    capability: int = 80, race: bool = False, stats: bool = False, order: str | int = "forward"
) -> Iterator[EmulatedGpu]:
    """Make ``kernel[grid](cpu_tensors, ...)`` compile for ``capability`` and run in the emulator.

    Args:
        capability: CUDA compute capability times ten, such as 80 or 100.
        race: Detect races and reads of uninitialised shared memory.
        stats: Count memory traffic, per kernel and per tensor.
        order: Order of blocks and warps, as for :meth:`ptxemu.Kernel.launch`.

    A fault raises :class:`~ptxemu.errors.KernelFault`, which names the kernel and the source line.
    The previous driver is active again afterwards.
    """
    previous = _active_driver._active  # reading .active would look for a real GPU
    initialise = CompiledKernel._init_handles

    def initialise_with_ptx(compiled: CompiledKernel) -> None:
        # Triton passes the "function" on to the launcher, and the launcher needs the PTX.
        initialise(compiled)
        compiled.function = compiled.asm["ptx"]

    gpu = EmulatedGpu(capability, race, stats, order)
    _active_driver.set_active(_EmulatedDriver(gpu))
    CompiledKernel._init_handles = initialise_with_ptx
    try:
        yield gpu
    finally:
        CompiledKernel._init_handles = initialise
        _active_driver.set_active(previous)
