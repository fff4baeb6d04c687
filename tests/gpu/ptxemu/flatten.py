"""Inlines device functions and resolves names: a kernel becomes one flat list of instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from ptxemu.errors import Unsupported
from ptxemu.parse import Function, Module, Statement, Variable, parse_variable, split_operands
from ptxemu.ptxtypes import byte_width

# Instructions in which lanes of a warp or block take part together.
COLLECTIVES = frozenset({
    "activemask", "bar", "barrier", "elect", "ldmatrix", "match", "mma", "redux", "shfl",
    "stmatrix", "vote", "wmma",
})  # fmt: skip


@dataclass(frozen=True)
class Register:
    """A virtual register; ``name`` is unique in the kernel and a C++ identifier."""

    name: str
    type: str


@dataclass(frozen=True)
class LocalSlot:
    """Bytes in a thread's local memory: a local variable or a call parameter."""

    offset: int


@dataclass(frozen=True)
class SharedSlot:
    """A shared-memory variable, named uniquely in the kernel."""

    name: str


@dataclass(frozen=True)
class GlobalSlot:
    """A module variable in global or constant memory; ``index`` counts ``FlatKernel.variables``."""

    index: int


@dataclass(frozen=True)
class KernelParam:
    """A kernel parameter at ``offset`` of the argument block."""

    offset: int


class Scope:
    """Names visible in one ``{ }`` of the PTX text."""

    def __init__(self, parent: Scope | None = None, symbols: dict | None = None):
        self.parent = parent
        self.symbols = symbols if symbols is not None else {}
        self.labels: dict[str, str] = {}

    def lookup(self, name: str):
        """What ``name`` stands for, or None."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.symbols:
                return scope.symbols[name]
            scope = scope.parent
        return None

    def label(self, name: str, line: int) -> str:
        """The unique label behind ``name``."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.labels:
                return scope.labels[name]
            scope = scope.parent
        raise Unsupported(f"branch to unknown label {name} (PTX line {line})")


@dataclass
class Instruction:
    """One instruction with its scope. ``predicate`` is (register, negated)."""

    opcode: list[str]
    operands: list[str]
    text: str
    line: int
    scope: Scope
    predicate: tuple[str, bool] | None = None
    targets: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode[0]


@dataclass(frozen=True)
class Label:
    """A branch target."""

    name: str


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


class FlatKernel:
    """A kernel with every call inlined and all memory laid out."""

    def __init__(self, module: Module, name: str):
        self.module = module
        self.function = module.functions[name]
        self.items: list[Instruction | Label] = []
        self.variables: list[Variable] = []
        self.shared_offset: dict[str, int] = {}
        self.local_bytes = 0
        self.static_shared = 0
        self._dynamic_shared: list[str] = []
        self._dynamic_align = 16
        self._unique = 0
        self._call_stack: list[str] = []

        self._module_scope = Scope()
        for variable in module.variables.values():
            self._declare_variable(variable, self._module_scope, variable.name)
        offset = 0
        symbols = {}
        for param in self.function.params:
            param.offset = round_up(offset, param.align)
            offset = param.offset + param.size
            symbols[param.name] = KernelParam(param.offset)
        self.param_bytes = offset
        self._inline(self.function, Scope(self._module_scope, symbols), None)
        self.static_shared = round_up(self.static_shared, self._dynamic_align)
        for dynamic in self._dynamic_shared:
            self.shared_offset[dynamic] = self.static_shared

    def _unique_name(self, prefix: str) -> str:
        self._unique += 1
        return f"{prefix}{self._unique}"

    def _allocate_local(self, size: int, align: int) -> LocalSlot:
        offset = round_up(self.local_bytes, max(8, align))
        self.local_bytes = offset + size
        return LocalSlot(offset)

    def _declare_variable(self, variable: Variable, scope: Scope, unique: str) -> None:
        if variable.space in ("global", "const"):
            scope.symbols[variable.name] = GlobalSlot(len(self.variables))
            self.variables.append(variable)
        elif variable.space == "local":
            scope.symbols[variable.name] = self._allocate_local(variable.size, variable.align)
        else:
            scope.symbols[variable.name] = SharedSlot(unique)
            if variable.size is None:
                self._dynamic_shared.append(unique)
                self._dynamic_align = max(self._dynamic_align, variable.align)
            else:
                offset = round_up(self.static_shared, variable.align)
                self.shared_offset[unique] = offset
                self.static_shared = offset + variable.size

    def _inline(self, function: Function, top: Scope, return_label: str | None) -> None:
        if function.name in self._call_stack:
            raise Unsupported(f"recursion in {function.name}")
        self._call_stack.append(function.name)
        scopes = self._open_scopes(function, top)
        opened = iter(scopes[1:])
        stack = [top]
        tables: dict[str, list[str]] = {}
        last_label = ""
        for statement in function.body:
            scope = stack[-1]
            if statement.kind == "open":
                stack.append(next(opened))
            elif statement.kind == "close":
                stack.pop()
            elif statement.kind == "label":
                self.items.append(Label(scope.labels[statement.text]))
                last_label = statement.text
            elif statement.text.startswith(".branchtargets"):
                names = split_operands(statement.text[len(".branchtargets") :])
                tables[last_label] = [scope.label(name, statement.line) for name in names]
            elif statement.kind == "declaration":
                self._declare(statement, scope)
            else:
                self._add_instruction(statement, scope, return_label, tables)
        self._call_stack.pop()

    def _open_scopes(self, function: Function, top: Scope) -> list[Scope]:
        """Create the scopes of a body, in order, and their labels, which may be used early."""
        scopes, stack = [top], [top]
        for statement in function.body:
            if statement.kind == "open":
                scopes.append(Scope(stack[-1]))
                stack.append(scopes[-1])
            elif statement.kind == "close":
                stack.pop()
            elif statement.kind == "label":
                stack[-1].labels[statement.text] = self._unique_name("label")
        return scopes

    def _declare(self, statement: Statement, scope: Scope) -> None:
        text = statement.text
        if text.startswith(".reg"):
            self._declare_registers(statement, scope)
        elif text.startswith(".param"):
            align = re.search(r"\.align\s+(\d+)", text)
            bare = re.sub(r"\.align\s+\d+", "", text)
            match = re.match(r"\.param\s+\.(\w+)\s+([\w$%.]+)\s*(?:\[(\d+)\])?", bare)
            size = byte_width(match[1]) * int(match[3] or 1)
            alignment = int(align[1]) if align else byte_width(match[1])
            scope.symbols[match[2]] = self._allocate_local(size, alignment)
        elif text.startswith((".shared", ".extern", ".local", ".global", ".const")):
            variable = parse_variable(text, statement.line)
            unique = self._unique_name(f"{variable.name}__")
            self._declare_variable(variable, scope, unique)
        elif not text.startswith((".callprototype", ".pragma", ".maxnreg")):
            raise Unsupported(f"declaration {text!r} (PTX line {statement.line})")

    def _declare_registers(self, statement: Statement, scope: Scope) -> None:
        match = re.match(r"\.reg\s+\.(\w+)\s+(.*)$", statement.text)
        if not match:
            raise Unsupported(f"declaration {statement.text!r} (PTX line {statement.line})")
        ptx_type = match[1]
        for name in split_operands(match[2]):
            family = re.fullmatch(r"([\w$%]+)<(\d+)>", name)
            names = [f"{family[1]}{i}" for i in range(int(family[2]))] if family else [name]
            prefix = self._unique_name("v")
            for one in names:
                unique = f"{prefix}_{re.sub(r'[^0-9A-Za-z_]', '_', one)}"
                scope.symbols[one] = Register(unique, ptx_type)

    def _add_instruction(
        self,
        statement: Statement,
        scope: Scope,
        return_label: str | None,
        tables: dict[str, list[str]],
    ) -> None:
        body, predicate = statement.text, None
        if match := re.match(r"@(!?)\s*([\w$%]+)\s+(.*)$", body):
            predicate = (match[2], match[1] == "!")
            body = match[3]
        match = re.match(r"([\w.:]+)\s*(.*)$", body)
        instruction = Instruction(
            match[1].split("."),
            split_operands(match[2]),
            statement.text,
            statement.line,
            scope,
            predicate,
        )
        name = instruction.name
        if name == "bra":
            instruction.targets = [scope.label(instruction.operands[0], statement.line)]
        elif name == "brx":
            instruction.targets = tables[instruction.operands[1]]
        elif name == "ret" and return_label:
            instruction.opcode = ["bra"]
            instruction.targets = [return_label]
        elif name == "call":
            self._add_call(instruction)
            return
        if name in COLLECTIVES:
            self._add_collective(instruction)
        else:
            self.items.append(instruction)

    def _skip_unless(self, instruction: Instruction) -> Label | None:
        """Turn a predicate into a branch around what follows; returns the label to place there."""
        if instruction.predicate is None:
            return None
        register, negated = instruction.predicate
        after = Label(self._unique_name("label"))
        self.items.append(
            replace(
                instruction,
                opcode=["bra"],
                operands=[],
                predicate=(register, not negated),
                targets=[after.name],
            )
        )
        instruction.predicate = None
        return after

    def _add_collective(self, instruction: Instruction) -> None:
        after = self._skip_unless(instruction)
        self.items.append(instruction)
        if instruction.name in ("bar", "barrier") and "red" in instruction.opcode:
            # The result exists only once the barrier has released the lanes.
            self.items.append(replace(instruction, opcode=["barrier_result", *instruction.opcode[1:]]))
        if after:
            self.items.append(after)

    def _add_call(self, call: Instruction) -> None:
        operands = list(call.operands)
        returns: list[str] = []
        if operands[0].startswith("("):
            returns = split_operands(operands.pop(0)[1:-1])
        callee = operands[0]
        arguments = split_operands(operands[1][1:-1]) if len(operands) > 1 else []
        if callee == "vprintf":
            return
        if callee == "__assertfail":
            call.opcode = ["trap", "assert"]
            self.items.append(call)
            return
        function = self.module.functions.get(callee)
        if function is None:
            raise Unsupported(f"call of {callee!r} in {call.text!r} (PTX line {call.line})")
        bound = {}
        for names, params in ((arguments, function.params), (returns, function.returns)):
            for name, param in zip(names, params, strict=True):
                symbol = call.scope.lookup(name)
                if symbol is None:
                    raise Unsupported(f"argument {name!r} of {call.text!r} (PTX line {call.line})")
                bound[param.name] = symbol
        after = self._skip_unless(call)
        done = Label(self._unique_name("label"))
        self._inline(function, Scope(self._module_scope, bound), done.name)
        self.items.append(done)
        if after:
            self.items.append(after)
