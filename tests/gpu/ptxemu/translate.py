"""A flat kernel -> basic blocks -> the C++ source of a shared library.

Lanes are run one basic block at a time: each block is a C++ function with a loop over the lanes
that are at its start. Registers that live across blocks are members of a Lane; all others are
local variables of the loop body.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ptxemu.errors import Unsupported
from ptxemu.flatten import COLLECTIVES, FlatKernel, Instruction, Label, Scope, round_up
from ptxemu.instructions import Collective, translate
from ptxemu.operation import MemoryInstruction, Operation
from ptxemu.ptxtypes import BIT_WIDTH

_TRACE_SPACE = {"shared": "TRACE_SHARED", "local": "TRACE_LOCAL"}


@dataclass
class BasicBlock:
    """A run of instructions entered only at its start; a collective is a block of its own."""

    index: int
    instructions: list[Instruction] = field(default_factory=list)
    is_collective: bool = False
    code: list[str] = field(default_factory=list)
    ready: str = "return true;"
    successors: set[int] = field(default_factory=set)
    traced: list[int] = field(default_factory=list)
    read_first: set[str] = field(default_factory=set)
    always_written: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)
    live_out: set[str] = field(default_factory=set)

    @property
    def line(self) -> int:
        """PTX line of the first instruction."""
        return self.instructions[0].line if self.instructions else 0


class Translation:
    """The C++ source of one kernel, and what Python must know about it."""

    def __init__(self, kernel: FlatKernel):
        self.kernel = kernel
        self.sites: list[MemoryInstruction] = []
        self._register_types: dict[str, str] = {}
        self._labels: dict[str, int] = {}
        self.blocks = self._split_blocks()
        for block in self.blocks:
            if block.is_collective:
                self._translate_collective(block)
            else:
                self._translate_block(block)
        self._persistent = self._find_persistent_registers()
        self.source = self._emit()

    def _split_blocks(self) -> list[BasicBlock]:
        blocks = [BasicBlock(0)]

        def open_block() -> BasicBlock:
            if blocks[-1].instructions:
                blocks.append(BasicBlock(len(blocks)))
            return blocks[-1]

        for item in self.kernel.items:
            if isinstance(item, Label):
                self._labels[item.name] = open_block().index
            elif item.name in COLLECTIVES:
                block = open_block()
                block.instructions.append(item)
                block.is_collective = True
                open_block()
            else:
                blocks[-1].instructions.append(item)
                if item.name in ("bra", "brx", "ret", "exit"):
                    open_block()
        open_block().instructions.append(Instruction(["exit"], [], "exit", 0, Scope()))
        return blocks

    def _record(self, operation: Operation) -> None:
        self._register_types |= operation.reads | operation.writes

    def _translate_one(self, operation: Operation) -> str | Collective:
        try:
            return translate(operation)
        except (TypeError, KeyError, IndexError, AttributeError, ValueError) as error:
            # A form the translator was not written for.
            raise operation.unsupported(f"{type(error).__name__} {error}") from error

    def _translate_collective(self, block: BasicBlock) -> None:
        operation = Operation(block.instructions[0], self.kernel, self.sites, collective=True)
        collective = self._translate_one(operation)
        self._record(operation)
        block.code = [collective.body]
        block.ready = collective.ready
        block.traced = operation.traced
        block.successors = {block.index + 1}
        block.read_first = set(operation.reads)
        block.used = set(operation.reads) | set(operation.writes)

    def _translate_block(self, block: BasicBlock) -> None:
        falls_through = True
        for instruction in block.instructions:
            operation = Operation(instruction, self.kernel, self.sites, collective=False)
            condition = ""
            if instruction.predicate:
                name, negated = instruction.predicate
                register = operation.register(name)
                if register is None:
                    raise operation.unsupported("predicate")
                condition = f"if ({'!' if negated else ''}{operation.read(register)}) "
            if instruction.name in ("bra", "brx", "ret", "exit"):
                code = self._translate_jump(operation, block)
                falls_through = bool(condition)
            else:
                code = self._translate_one(operation)
            if condition:
                code = f"{condition}{{ {code} }}"
            block.code.append(f"{code}  // {instruction.line}")
            self._record(operation)
            block.traced += operation.traced
            reads, writes = set(operation.reads), set(operation.writes)
            if condition:
                reads |= writes  # the old value survives when the predicate is false
            block.read_first |= reads - block.always_written
            if not condition:
                block.always_written |= writes
            block.used |= reads | writes
            block.written |= writes
        if falls_through:
            block.successors.add(block.index + 1)

    def _translate_jump(self, operation: Operation, block: BasicBlock) -> str:
        targets = [self._labels[label] for label in operation.instruction.targets]
        block.successors |= set(targets)
        if operation.name in ("ret", "exit"):
            return "{ next = EXITED; goto done; }"
        if operation.name == "bra":
            return f"{{ next = {targets[0]}; goto done; }}"
        table = ", ".join(map(str, targets))
        return (
            f"{{ static const int table[] = {{{table}}}; u32 index = {operation.source(0, 'u32')}; "
            f"if (index < {len(targets)}) next = table[index]; "
            f"else {{ fault(TRAP, {operation.line}, w.cta->linear, w.id * 32 + l, 0); "
            "next = EXITED; } goto done; }"
        )

    def _find_persistent_registers(self) -> set[str]:
        """Liveness: registers whose value crosses a block boundary."""
        live_in: list[set[str]] = [set() for _ in self.blocks]
        changed = True
        while changed:
            changed = False
            for block in reversed(self.blocks):
                block.live_out = set().union(*(live_in[s] for s in block.successors if s < len(self.blocks)))
                needed = block.read_first | (block.live_out - block.always_written)
                if needed != live_in[block.index]:
                    live_in[block.index] = needed
                    changed = True
        persistent = set().union(*live_in)
        for block in self.blocks:
            if block.is_collective:
                persistent |= block.used
        return persistent

    # ---- C++ text

    def _register_c_type(self, name: str) -> str:
        ptx_type = self._register_types[name]
        if ptx_type not in BIT_WIDTH:
            raise Unsupported(f"register type .{ptx_type}")
        return f"u{BIT_WIDTH[ptx_type]}"

    def _emit(self) -> str:
        widest_first = sorted(self._persistent, key=lambda n: (-BIT_WIDTH[self._register_types[n]], n))
        members = "".join(f"    {self._register_c_type(n)} {n};\n" for n in widest_first)
        lines = ", ".join(str(block.line) for block in self.blocks)
        functions = ", ".join(f"block_{block.index}" for block in self.blocks)
        cases = "".join(
            f"        case {block.index}: {{ {block.ready} }}\n"
            for block in self.blocks
            if block.ready != "return true;"
        )
        parts = [
            '#include "prelude.h"\n',
            f"struct Lane {{\n{members}}};\n",
            f"constexpr u32 LOCAL_BYTES = {max(16, round_up(self.kernel.local_bytes, 16))};\n",
            f"constexpr u32 STATIC_SHARED = {self.kernel.static_shared};\n",
            f"constexpr int BLOCKS = {len(self.blocks)};\n",
            '#include "warp.h"\n',
            "static u64 executed[BLOCKS];\n",
            *(self._emit_block(block) for block in self.blocks),
            f"static void (*const block_functions[])(Warp&, u32) = {{{functions}}};\n",
            "static void run_basic_block(int index, Warp& w, u32 mask) {\n    block_functions[index](w, mask);\n}\n",
            "static bool collective_ready(int index, Warp& w, u32 mask) {\n"
            f"    switch (index) {{\n{cases}        default: return true;\n    }}\n}}\n",
            "static u32 basic_block_line(int index) {\n"
            f"    static const u32 lines[] = {{{lines}}};\n    return lines[index];\n}}\n",
            '#include "scheduler.h"\n',
            'extern "C" u64* ptxemu_executed_lanes() { return executed; }\n',
        ]
        return "".join(parts)

    def _emit_block(self, block: BasicBlock) -> str:
        declare = "".join(f"    DECLARE_TRACE({site})\n" for site in block.traced)
        count = "".join(f"    {self._count_trace(site)}\n" for site in block.traced)
        body = block.code[0] if block.is_collective else self._lane_loop(block)
        return (
            f"static void block_{block.index}(Warp& w, u32 mask) {{  // {block.line}\n"
            f"    COUNT_LANES({block.index}, mask)\n{declare}{body}\n{count}}}\n"
        )

    def _count_trace(self, index: int) -> str:
        site = self.sites[index]
        space = _TRACE_SPACE.get(site.space, "TRACE_GLOBAL")
        read = "false" if site.kind == "store" else "true"
        write = "false" if site.kind == "load" else "true"
        return f"COUNT_TRACE({index}, {site.size}, {space}, {read}, {write})"

    def _lane_loop(self, block: BasicBlock) -> str:
        text = ["    for (int l : Lanes{mask}) {\n"]
        text.append("        Lane& lane = w.lane[l]; (void)lane;\n")
        text.append("        const Thread self_thread = w.thread(l); (void)self_thread;\n")
        text.append(f"        int next = {block.index + 1};\n")
        kept = block.written & block.live_out
        for name in sorted(block.used):
            # A register may leave the block unwritten through an early jump.
            from_lane = name in self._persistent and (name in block.read_first or name in kept)
            initial = f"lane.{name}" if from_lane else "0"
            text.append(f"        {self._register_c_type(name)} {name} = {initial};\n")
        text += [f"        {line}\n" for line in block.code]
        text.append("    done:\n")
        text += [f"        lane.{name} = {name};\n" for name in sorted(kept)]
        text.append("        w.pc[l] = next;\n    }")
        return "".join(text)
