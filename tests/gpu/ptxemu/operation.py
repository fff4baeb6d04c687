"""One instruction while it is translated: access to its operands as C++ expressions."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from ptxemu.errors import Unsupported
from ptxemu.flatten import (
    FlatKernel,
    GlobalSlot,
    Instruction,
    KernelParam,
    LocalSlot,
    Register,
    SharedSlot,
)
from ptxemu.parse import Immediate, parse_immediate
from ptxemu.ptxtypes import BIT_WIDTH, FLOAT_TYPES, c_type, is_signed

SPECIAL_REGISTERS = {
    "%laneid": "(u32)l",
    "%warpid": "(u32)w.id",
    "%nwarpid": "w.cta->warp_count",
    "%lanemask_eq": "(1u << l)",
    "%lanemask_lt": "((1u << l) - 1)",
    "%lanemask_le": "((2u << l) - 1)",
    "%lanemask_gt": "(~((2u << l) - 1))",
    "%lanemask_ge": "(~((1u << l) - 1))",
    "%clock": "(u32)G->steps",
    "%clock64": "(u64)G->steps",
    "%globaltimer": "(u64)G->steps",
    "%globaltimer_lo": "(u32)G->steps",
    "%smid": "(w.cta->linear % 8)",
    "%nsmid": "8u",
    "%gridid": "0u",
    "%dynamic_smem_size": "G->dynamic_shared",
    "%total_smem_size": "w.cta->shared_size",
    "%cluster_ctarank": "0u",
    "%cluster_nctarank": "1u",
}
for _index, _axis in enumerate("xyz"):
    SPECIAL_REGISTERS |= {
        f"%tid.{_axis}": f"w.tid[l][{_index}]",
        f"%ntid.{_axis}": f"G->block[{_index}]",
        f"%ctaid.{_axis}": f"w.cta->index[{_index}]",
        f"%nctaid.{_axis}": f"G->grid[{_index}]",
        f"%clusterid.{_axis}": f"w.cta->index[{_index}]",
        f"%nclusterid.{_axis}": f"G->grid[{_index}]",
        f"%cluster_ctaid.{_axis}": "0u",
        f"%cluster_nctaid.{_axis}": "1u",
    }

_FROM_BITS = {"f16": "as_f16((u16)", "bf16": "from_bf16((u16)", "f32": "as_f32((u32)",
              "f64": "as_f64((u64)"}  # fmt: skip
_ROUNDING_MODE = {"rz": "FE_TOWARDZERO", "rm": "FE_DOWNWARD", "rp": "FE_UPWARD"}
_ACCESS_FUNCTION = {
    "global": "access_global",
    "const": "access_global",
    "shared": "access_shared",
    "local": "access_local",
    "": "access_generic",
}


@dataclass(frozen=True)
class MemoryInstruction:
    """A memory access site; its counters have the same index in the launch's statistics."""

    line: int
    text: str
    space: str
    size: int
    kind: str


class Operation:
    """Translates the operands of one instruction and records which registers it uses.

    ``collective`` code runs once for all lanes and reaches a lane's registers through the warp;
    other code runs inside a loop over lanes, with the registers in local variables.
    """

    def __init__(
        self,
        instruction: Instruction,
        kernel: FlatKernel,
        sites: list[MemoryInstruction],
        collective: bool,
    ):
        self.instruction = instruction
        self.kernel = kernel
        self.collective = collective
        self.reads: dict[str, str] = {}
        self.writes: dict[str, str] = {}
        self.traced: list[int] = []
        self._sites = sites
        self.name = instruction.name
        self.opcode = instruction.opcode
        self.operands = instruction.operands
        self.line = instruction.line
        self.modifiers = instruction.opcode[1:]
        self.types = [part for part in self.modifiers if part in BIT_WIDTH]

    # ---- the opcode

    @property
    def type(self) -> str:
        """The operand type; instructions naming several must not use this."""
        if len(self.types) != 1:
            raise self.unsupported("operand types")
        return self.types[0]

    def has(self, modifier: str) -> bool:
        """Whether the opcode carries ``.modifier``."""
        return modifier in self.modifiers

    def one_of(self, *choices: str) -> str | None:
        """The first modifier among ``choices``, or None."""
        return next((part for part in self.modifiers if part in choices), None)

    def rounding(self) -> str | None:
        """The C rounding mode, or None for round to nearest even."""
        return _ROUNDING_MODE.get(self.one_of(*_ROUNDING_MODE) or "")

    def unsupported(self, reason: str = "") -> Unsupported:
        """The exception naming this instruction."""
        detail = f": {reason}" if reason else ""
        return Unsupported(f"instruction {self.instruction.text!r} (PTX line {self.line}){detail}")

    # ---- registers and values

    def register(self, name: str) -> Register | None:
        """The register called ``name``, if it is one."""
        symbol = self.instruction.scope.lookup(name)
        return symbol if isinstance(symbol, Register) else None

    def _reference(self, register: Register) -> str:
        return f"w.lane[l].{register.name}" if self.collective else register.name

    def read(self, register: Register) -> str:
        """C++ reference to a register that the instruction reads."""
        self.reads[register.name] = register.type
        return self._reference(register)

    def source(self, index: int, ptx_type: str | None = None) -> str:
        """Operand ``index`` as a C++ value."""
        if index >= len(self.operands):
            raise self.unsupported("missing operand")
        return self.value(self.operands[index], ptx_type or self.type)

    def value(self, operand: str, ptx_type: str) -> str:
        """Any source operand as a C++ value of ``ptx_type``."""
        operand = operand.strip()
        negated = operand.startswith("!")
        if negated:
            operand = operand[1:].strip()
        register = self.register(operand)
        if register:
            reference = self.read(register)
            if ptx_type == "pred":
                return f"(!{reference})" if negated else f"(bool){reference}"
            if ptx_type in _FROM_BITS:
                return f"{_FROM_BITS[ptx_type]}{reference})"
            return f"({c_type(ptx_type)}){reference}"
        if operand in SPECIAL_REGISTERS:
            return f"(({c_type(ptx_type)})({SPECIAL_REGISTERS[operand]}))"
        immediate = parse_immediate("32" if operand == "WARP_SZ" else operand)
        if immediate:
            return _literal(immediate, ptx_type)
        address = self._symbol_address(operand)
        if address:
            return f"({c_type(ptx_type)})({address})"
        raise self.unsupported(f"operand {operand!r}")

    def assign(self, destination: str, ptx_type: str, expression: str) -> str:
        """C++ statement that stores a value of ``ptx_type`` in a register."""
        destination = destination.strip()
        if destination == "_":
            return f"(void)({expression});"
        register = self.register(destination)
        if register is None:
            raise self.unsupported(f"destination {destination!r}")
        self.writes[register.name] = register.type
        width = BIT_WIDTH[register.type]
        target = self._reference(register)
        if ptx_type == "pred":
            return f"{target} = ({expression});"
        if ptx_type == "bf16":
            return f"{target} = (u{width})to_bf16({expression});"
        if ptx_type in FLOAT_TYPES:
            return f"{target} = (u{width})bits(({c_type(ptx_type)})({expression}));"
        if is_signed(ptx_type) and width > BIT_WIDTH[ptx_type]:
            return f"{target} = (u{width})(s{width})({c_type(ptx_type)})({expression});"
        return f"{target} = (u{width})({c_type(ptx_type)})({expression});"

    def result(self, expression: str, ptx_type: str | None = None) -> str:
        """Store into the first operand."""
        return self.assign(self.operands[0], ptx_type or self.type, expression)

    # ---- memory

    def _symbol_address(self, name: str) -> str | None:
        symbol = self.instruction.scope.lookup(name)
        if isinstance(symbol, LocalSlot):
            return f"{symbol.offset}ull"
        if isinstance(symbol, SharedSlot):
            return f"{self.kernel.shared_offset[symbol.name]}ull"
        if isinstance(symbol, KernelParam):
            return f"((u64)G->params + {symbol.offset})"
        if isinstance(symbol, GlobalSlot):
            return f"G->global_variables[{symbol.index}]"
        return None

    def address(self, operand: str) -> str:
        """The address inside ``[base + offset]`` as a 64-bit C++ value."""
        match = re.fullmatch(r"\[\s*([\w$%.]+)\s*(?:\+\s*(-?\s*\w+)|(-\s*\w+))?\s*\]", operand.strip())
        if not match:
            raise self.unsupported(f"address {operand!r}")
        base = match[1]
        offset = int((match[2] or match[3] or "0").replace(" ", ""), 0)
        register = self.register(base)
        if register:
            reference = self.read(register)
            if BIT_WIDTH[register.type] == 32:
                return f"(u64)(u32)({reference} + ({offset}))"
            return f"(u64)({reference} + ({offset}ll))"
        immediate = parse_immediate(base)
        if immediate:
            return f"{immediate.value + offset}ull"
        symbol = self._symbol_address(base)
        if symbol is None:
            raise self.unsupported(f"address {operand!r}")
        return f"(u64)({symbol} + ({offset}ll))"

    def is_local_param(self, operand: str) -> bool:
        """Whether ``[name]`` is a call parameter kept in local memory."""
        match = re.match(r"\[\s*([\w$%.]+)", operand.strip())
        return isinstance(self.instruction.scope.lookup(match[1]), LocalSlot)

    def space(self, *allowed: str) -> str:
        """The state space in the opcode; empty means a generic address."""
        for part in self.modifiers:
            if part.split("::")[0] in allowed:
                return part.split("::")[0]
        return ""

    def access(
        self,
        space: str,
        address: str,
        size: int,
        kind: str = "load",
        lane: str = "l",
        pointer: str = "p",
    ) -> str:
        """C++ that checks an access and defines ``pointer``; ``kind`` is load, store or atomic.

        Expects ``self_thread`` to be the accessing thread.
        """
        write = "false" if kind == "load" else "true"
        atomic = "true" if kind == "atomic" else "false"
        trace = self.trace(space, address, size, kind, lane)
        return (
            f"{trace}u8* {pointer} = {_ACCESS_FUNCTION[space]}(self_thread, {address}, "
            f"{{{size}, {self.line}, {write}, {atomic}}}); "
        )

    def trace(self, space: str, address: str, size: int, kind: str, lane: str = "l") -> str:
        """C++ that records an access for the statistics."""
        site = MemoryInstruction(self.line, self.instruction.text, space or "generic", size, kind)
        self._sites.append(site)
        self.traced.append(len(self._sites) - 1)
        return f"TRACE({len(self._sites) - 1}, {lane}, {address}) "


def _literal(immediate: Immediate, ptx_type: str) -> str:
    kind, value = immediate.kind, immediate.value
    if ptx_type == "pred":
        return "true" if value else "false"
    width = BIT_WIDTH[ptx_type]
    if kind == "decimal":
        code = {16: ("<e", "<H"), 32: ("<f", "<I"), 64: ("<d", "<Q")}[width]
        value = struct.unpack(code[1], struct.pack(code[0], value))[0]
    elif kind == "int" and ptx_type in ("f32", "f64"):
        return f"({ptx_type}){value}"
    elif kind == "f64" and ptx_type == "f32":
        return f"(f32)as_f64(0x{value:x}ull)"
    elif kind == "f32" and ptx_type == "f64":
        return f"(f64)as_f32(0x{value:x}u)"
    value &= (1 << min(width, 64)) - 1
    if ptx_type in _FROM_BITS:
        return f"{_FROM_BITS[ptx_type]}0x{value:x}ull)"
    return f"({c_type(ptx_type)})0x{value:x}ull"
