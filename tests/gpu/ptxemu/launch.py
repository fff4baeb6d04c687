"""Kernel: PTX translated, compiled and ready to launch on host memory."""

from __future__ import annotations

import bisect
import ctypes
import math
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ptxemu import abi
from ptxemu.arguments import MemoryRange, memory_of, merge_ranges, pack_arguments
from ptxemu.build import load_library
from ptxemu.flatten import FlatKernel
from ptxemu.parse import Module
from ptxemu.results import (
    FAULT_KINDS,
    BufferTraffic,
    Fault,
    LaunchStats,
    Result,
    Traffic,
    count_touched,
)
from ptxemu.translate import Translation

_ORDERS = {"forward": 0, "reverse": 1}
_MAX_THREADS = 1024
# A library keeps its launch in static variables, and two Kernels may share a library.
_LAUNCH_LOCK = threading.Lock()


class Kernel:
    """A kernel of a PTX module.

    Args:
        ptx: PTX text.
        name: The kernel's name, or a part of it (for example of a mangled C++ name) that no other
            kernel of the module contains. May be omitted when the module has one kernel.
        race: Detect races and reads of uninitialised shared memory (five to ten times
            slower).
        stats: Count memory traffic and instructions.
        optimize: g++ optimisation flag. ``-O0`` builds fastest, ``-O2`` runs large launches fastest.
    """

    def __init__(
        self,
        ptx: str,
        name: str | None = None,
        *,
        race: bool = False,
        stats: bool = False,
        optimize: str = "-O0",
    ):
        self._module = Module(ptx)
        self.name = self._module.kernel_name(name)
        self._flat = FlatKernel(self._module, self.name)
        self._translation = Translation(self._flat)
        self.params = self._flat.function.params
        self._stats = stats
        defines = (("PTXEMU_RACE",) if race else ()) + (("PTXEMU_STATS",) if stats else ())
        self._library = load_library(self._translation.source, defines, optimize)
        self._library.ptxemu_executed_lanes.restype = ctypes.POINTER(ctypes.c_uint64)
        # Module variables keep their contents from launch to launch, as on a device.
        self.variables: dict[str, np.ndarray] = {
            variable.name: np.frombuffer(variable.data, np.uint8).copy() for variable in self._flat.variables
        }

    def launch(
        self,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[Any],
        *,
        shared: int = 0,
        readonly: Sequence[int] = (),
        order: str | int = "forward",
        resident: int = 1,
        poison: int = 0xCD,
        step_limit: int = 10**10,
        fault_capacity: int = 200,
        check: bool = True,
        names: Sequence[str] | None = None,
        memory: Sequence[MemoryRange] = (),
    ) -> Result:
        """Run the kernel on ``args`` in place.

        Args:
            grid, block: One to three extents.
            args: NumPy arrays, CPU tensors, numbers, None (null pointer) or bytes (structs).
            shared: Bytes of dynamic shared memory.
            readonly: Indices of array arguments the kernel must not write.
            order: Order of blocks and warps: forward, reverse, or a number from 2 that seeds a
                random interleaving of warps.
            resident: Blocks that run at the same time; kernels in which blocks wait for each other
                need all of them.
            poison: Byte that fills registers, local and shared memory at the start.
            step_limit: Basic blocks after which the launch is given up as endless.
            fault_capacity: Faults to keep in detail.
            check: Raise :class:`~ptxemu.errors.KernelFault` when there was any fault.
            names: Names of the arguments in reports; the PTX parameter names by default.
            memory: Further host memory that the kernel may touch, by pointers inside of structs.
        """
        names = list(names) if names else [param.name for param in self.params]
        block_bytes = pack_arguments(self.params, args, self._flat.param_bytes)
        argument_block = (ctypes.c_uint8 * len(block_bytes)).from_buffer(block_bytes)
        ranges = self._memory_ranges(args, names, readonly, argument_block, memory)
        buffers, bitmaps = self._make_buffers(ranges)
        faults = (abi.Fault * fault_capacity)()
        counters = (abi.InstructionStats * max(1, len(self._translation.sites)))()
        addresses = [array.ctypes.data for array in self.variables.values()]
        variables = (ctypes.c_uint64 * max(1, len(addresses)))(*addresses)

        launch = abi.Launch()
        launch.grid[:] = _three(grid, "grid")
        launch.block[:] = _three(block, "block")
        if not 1 <= math.prod(launch.block) <= _MAX_THREADS:
            raise ValueError(f"a block has 1 to {_MAX_THREADS} threads, got {block!r}")
        launch.dynamic_shared = shared
        launch.order = _order_code(order)
        launch.resident = resident
        launch.fault_capacity = fault_capacity
        launch.buffer_count = len(ranges)
        launch.poison = poison
        launch.params = ctypes.addressof(argument_block)
        launch.buffers = ctypes.addressof(buffers)
        launch.faults = ctypes.addressof(faults)
        launch.stats = ctypes.addressof(counters)
        launch.global_variables = ctypes.addressof(variables)
        launch.step_limit = step_limit

        with _LAUNCH_LOCK:
            executed = self._library.ptxemu_executed_lanes()
            block_count = len(self._translation.blocks)
            ctypes.memset(executed, 0, 8 * block_count)
            start = time.perf_counter()
            status = self._library.ptxemu_launch(ctypes.byref(launch))
            seconds = time.perf_counter() - start
            executed_lanes = list(executed[:block_count])

        result = Result(
            self.name,
            [self._describe(fault, ranges) for fault in faults[: launch.faults_kept]],
            launch.fault_count,
            status == 0,
            seconds,
            launch.steps,
        )
        if self._stats:
            result.stats = self._collect_stats(counters, buffers, bitmaps, ranges, executed_lanes)
        if check:
            result.raise_on_fault()
        return result

    def _memory_ranges(self, args, names, readonly, argument_block, memory) -> list[MemoryRange]:
        size = len(argument_block)
        ranges = [MemoryRange(ctypes.addressof(argument_block), size, False), *memory]
        for index, (value, name) in enumerate(zip(args, names, strict=True)):
            memory = memory_of(value)
            if memory:
                ranges.append(MemoryRange(memory[1], memory[2], index not in readonly, [name]))
        for variable in self._flat.variables:
            array = self.variables[variable.name]
            writable = variable.space == "global"
            ranges.append(MemoryRange(array.ctypes.data, array.size, writable, [variable.name]))
        return merge_ranges(ranges)

    def _make_buffers(self, ranges: list[MemoryRange]):
        buffers = (abi.Buffer * len(ranges))()
        bitmaps = []
        for buffer, memory in zip(buffers, ranges, strict=True):
            buffer.base, buffer.size = memory.base, memory.size
            buffer.writable = memory.writable
            if self._stats:
                pair = [np.zeros(memory.size // 8 + 1, np.uint8) for _ in range(2)]
                buffer.read_bits, buffer.write_bits = (bitmap.ctypes.data for bitmap in pair)
                bitmaps.append(pair)
        return buffers, bitmaps

    def _describe(self, fault: abi.Fault, ranges: list[MemoryRange]) -> Fault:
        kind = FAULT_KINDS[fault.kind]
        detail = ""
        if kind.startswith("global memory out"):
            detail = f"{fault.detail} bytes at {_locate(fault.address, ranges)}"
        elif kind.startswith("global memory race"):
            detail = f"{_locate(fault.address, ranges)}, {_other('block', fault.detail)}"
        elif kind.startswith("shared memory race"):
            detail = f"with {_other('thread', fault.detail)}"
        elif kind.startswith("warp collective"):
            detail = f"present 0x{fault.address:x}, wanted 0x{fault.detail:x}"
        elif kind == "divergent barrier":
            where = f"PTX line {fault.detail}" if fault.detail else "the end of the kernel"
            detail = f"this thread is at {where}"
        elif fault.detail:
            detail = f"{fault.detail} bytes at 0x{fault.address:x}"
        text = self._module.lines[fault.line - 1].strip() if fault.line else ""
        return Fault(
            kind,
            fault.cta,
            fault.thread,
            fault.address,
            detail,
            fault.line,
            text,
            self._module.source_line(fault.line) if fault.line else "",
        )

    def _collect_stats(self, counters, buffers, bitmaps, ranges, executed_lanes) -> LaunchStats:
        memory: dict[tuple[str, str], Traffic] = {}
        instructions = []
        for site, counter in zip(self._translation.sites, counters, strict=False):
            traffic = Traffic(*(getattr(counter, name) for name, _ in counter._fields_))
            memory.setdefault((site.space, site.kind), Traffic()).add(traffic)
            instructions.append((site.line, site.text, traffic))
        touched: dict[str, BufferTraffic] = {}
        for buffer, (read, written), item in zip(buffers, bitmaps, ranges, strict=True):
            read_bytes, read_sectors = count_touched(read, item.base, item.size)
            written_bytes, written_sectors = count_touched(written, item.base, item.size)
            traffic = BufferTraffic(
                buffer.bytes_read,
                buffer.bytes_written,
                read_bytes,
                written_bytes,
                read_sectors,
                written_sectors,
            )
            touched |= dict.fromkeys(item.names, traffic)
        executed = sum(
            lanes * len(block.instructions)
            for lanes, block in zip(executed_lanes, self._translation.blocks, strict=True)
        )
        return LaunchStats(executed, memory, touched, instructions)


def _three(extents: int | Sequence[int], what: str) -> tuple[int, ...]:
    values = (extents,) if isinstance(extents, int) else tuple(extents)
    if not 1 <= len(values) <= 3 or min(values) < 0:
        raise ValueError(f"{what}: one to three extents wanted, got {extents!r}")
    return values + (1,) * (3 - len(values))


def _order_code(order: str | int) -> int:
    if order in _ORDERS:
        return _ORDERS[order]
    if isinstance(order, int) and order > max(_ORDERS.values()):
        return order
    raise ValueError(f"order: forward, reverse or a number from 2 wanted, got {order!r}")


def _other(what: str, index: int) -> str:
    return f"several {what}s" if index >= 0xFFFFFFFE else f"{what} {index}"


def _locate(address: int, ranges: list[MemoryRange]) -> str:
    """An address in words, relative to the nearest buffer below it."""
    index = bisect.bisect_right([item.base for item in ranges], address) - 1
    if index < 0 or not ranges[index].names:
        return f"0x{address:x}"
    nearest = ranges[index]
    name = "/".join(nearest.names)
    if address < nearest.end:
        return f"0x{address:x}, byte {address - nearest.base} of {name}"
    return f"0x{address:x}, {address - nearest.end} bytes after the end of {name}"
