"""PTX text -> module, functions and statements."""

from __future__ import annotations

import bisect
import re
import struct
from dataclasses import dataclass, field

from ptxemu.errors import Unsupported
from ptxemu.ptxtypes import BIT_WIDTH, byte_width

_LINKAGE = r"(?:\.(?:visible|extern|weak|common)\s+)*"
_FUNCTION = re.compile(_LINKAGE + r"\.(entry|func)\b")
_VARIABLE = re.compile(_LINKAGE + r"\.(global|const|shared|local)\s+(.*)$", re.S)
_VARIABLE_BODY = re.compile(r"\s*(?:\.(v[24])\s+)?\.(\w+)\s+([\w$%.]+)\s*((?:\[\s*\d*\s*\])*)\s*(?:=\s*(.*))?$", re.S)
_PARAMETER = re.compile(r"\s*\.(?:param|reg)\s+\.(\w+)\s+([\w$%.]+)\s*(?:\[(\d*)\])?")
_ALIGN = re.compile(r"\.align\s+(\d+)")
_LABEL = re.compile(r"([\w$%.]+)\s*:(?!:)")


@dataclass(frozen=True)
class Immediate:
    """A literal operand: ``kind`` is int, f32 or f64 (bit patterns) or decimal."""

    kind: str
    value: int | float


def parse_immediate(text: str) -> Immediate | None:
    """Read a PTX literal, or return None when ``text`` is something else."""
    if match := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", text):
        return Immediate("f32", int(match[1], 16))
    if match := re.fullmatch(r"0[dD]([0-9a-fA-F]{16})", text):
        return Immediate("f64", int(match[1], 16))
    if match := re.fullmatch(r"(-?)(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)[uU]?", text):
        digits = match[2]
        value = int(digits, 8) if re.fullmatch(r"0[0-7]+", digits) else int(digits, 0)
        return Immediate("int", -value if match[1] else value)
    if re.fullmatch(r"-?\d+\.\d*([eE][-+]?\d+)?", text):
        return Immediate("decimal", float(text))
    return None


def split_operands(text: str) -> list[str]:
    """Split at the commas that are outside braces, brackets and parentheses."""
    parts, depth, current = [], 0, ""
    for char in text:
        if char in "{[(":
            depth += 1
        elif char in "}])":
            depth -= 1
        if char == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += char
    if current.strip():
        parts.append(current.strip())
    return parts


def split_vector(operand: str) -> list[str]:
    """The elements of ``{a, b}``, or the operand itself."""
    operand = operand.strip()
    if operand.startswith("{"):
        return [element.strip() for element in operand[1:-1].split(",")]
    return [operand]


@dataclass(frozen=True)
class Variable:
    """A variable declared in memory. ``size`` is None for dynamic shared memory."""

    name: str
    space: str
    size: int | None
    align: int
    data: bytes | None = None


@dataclass
class Parameter:
    """A kernel or function parameter; ``offset`` is its place in the kernel's argument block."""

    name: str
    type: str
    size: int
    align: int
    offset: int = 0


@dataclass(frozen=True)
class Statement:
    """``kind`` is open, close (a scope), label, declaration or instruction."""

    kind: str
    text: str
    line: int


@dataclass
class Function:
    """A kernel (``is_entry``) or a device function."""

    name: str
    is_entry: bool
    params: list[Parameter]
    returns: list[Parameter]
    body: list[Statement] = field(repr=False)


def parse_variable(declaration: str, line: int) -> Variable | None:
    """Parse a variable declaration; None for declarations that need no storage."""
    if declaration.startswith(".alias"):
        return None
    match = _VARIABLE.match(declaration)
    if not match:
        raise Unsupported(f"declaration {declaration[:100]!r} (PTX line {line})")
    space, rest = match.groups()
    align = _ALIGN.search(rest)
    rest = re.sub(r"\.align\s+\d+|\.attribute\([^)]*\)|\.managed", "", rest)
    body = _VARIABLE_BODY.match(rest)
    if not body or body[2] not in BIT_WIDTH:
        raise Unsupported(f"declaration {declaration[:100]!r} (PTX line {line})")
    vector, ptx_type, name, dimensions, initializer = body.groups()
    element = byte_width(ptx_type)
    size: int | None = element * (int(vector[1]) if vector else 1)
    alignment = int(align[1]) if align else size
    for extent in re.findall(r"\[\s*(\d*)\s*\]", dimensions):
        size = None if extent == "" or size is None else size * int(extent)
    if size is None and space != "shared":
        raise Unsupported(f"array without a size: {declaration[:100]!r} (PTX line {line})")
    data = None
    if space in ("global", "const"):
        data = _initial_bytes(initializer, ptx_type, size, line)
    return Variable(name, space, size, alignment, data)


def _initial_bytes(initializer: str | None, ptx_type: str, size: int, line: int) -> bytes:
    element = byte_width(ptx_type)
    data = bytearray(size)
    for index, token in enumerate(re.findall(r"[^\s{},]+", initializer or "")):
        immediate = parse_immediate(token)
        if immediate is None:
            raise Unsupported(f"initializer {token!r} (PTX line {line})")
        if immediate.kind == "decimal":
            encoded = struct.pack("<d" if element == 8 else "<f", immediate.value)
        else:
            encoded = (immediate.value & ((1 << 8 * element) - 1)).to_bytes(element, "little")
        data[index * element : (index + 1) * element] = encoded
    return bytes(data)


def _parse_parameter(text: str) -> Parameter:
    align = None if ".ptr" in text else _ALIGN.search(text)
    bare = re.sub(r"\.align\s+\d+|\.ptr(\s*\.(global|const|shared|local))?", "", text)
    match = _PARAMETER.match(bare)
    if not match or match[1] not in BIT_WIDTH:
        raise Unsupported(f"parameter {text!r}")
    element = byte_width(match[1])
    count = int(match[3] or 1)
    return Parameter(match[2], match[1], element * count, int(align[1]) if align else element)


class Module:
    """A parsed PTX file: its functions, memory variables and source-line table."""

    def __init__(self, text: str):
        self.lines = text.split("\n")
        self.functions: dict[str, Function] = {}
        self.variables: dict[str, Variable] = {}
        clean = re.sub(r"/\*.*?\*/", _blank, text, flags=re.S)
        clean = re.sub(r"//[^\n]*", _blank, clean)
        self._read_source_lines(clean)
        clean = re.sub(
            r"^[ \t]*\.(version|target|address_size|file|loc|pragma)\b[^\n]*",
            _blank,
            clean,
            flags=re.M,
        )
        self._text = re.sub(r"\.section\s+\.\w+\s*\{[^}]*\}", _blank, clean, flags=re.S)
        self._newlines = [i for i, char in enumerate(self._text) if char == "\n"]
        self._parse()

    def kernel_name(self, wanted: str | None) -> str:
        """The kernel with this name, or the only one whose (mangled) name contains it."""
        names = [f.name for f in self.functions.values() if f.is_entry]
        if wanted in names:
            return wanted
        found = [name for name in names if wanted is None or wanted in name]
        if len(found) != 1:
            problem = "no kernel" if not found else "more than one kernel"
            raise ValueError(f"{problem} matches {wanted!r}; the module has {names}")
        return found[0]

    def source_line(self, ptx_line: int) -> str:
        """``file:line`` the instruction at ``ptx_line`` was compiled from, if known."""
        index = bisect.bisect_right(self._source_starts, ptx_line) - 1
        return self._sources[index] if index >= 0 else ""

    def _read_source_lines(self, text: str) -> None:
        files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.M))
        self._source_starts: list[int] = []
        self._sources: list[str] = []
        for number, line in enumerate(text.split("\n"), start=1):
            if match := re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", line):
                self._source_starts.append(number)
                self._sources.append(f"{files.get(match[1], '?')}:{match[2]}")

    def _line(self, position: int) -> int:
        return bisect.bisect_left(self._newlines, position) + 1

    def _parse(self) -> None:
        text, position = self._text, 0
        while position < len(text):
            if text[position].isspace() or text[position] == ";":
                position += 1
            elif match := _FUNCTION.match(text, position):
                position = self._parse_function(match)
            else:
                end = text.index(";", position)
                variable = parse_variable(text[position:end].strip(), self._line(position))
                if variable:
                    self.variables[variable.name] = variable
                position = end + 1

    def _parse_function(self, match: re.Match) -> int:
        """Parse the function starting at ``match`` and return the position after it."""
        start = re.compile(r"[{;]").search(self._text, match.end()).start()
        if self._text[start] == ";":
            return start + 1
        depth = 0
        for brace in re.compile(r"[{}]").finditer(self._text, start):
            depth += 1 if brace.group() == "{" else -1
            if depth == 0:
                break
        header = self._text[match.end() : start].strip()
        returns: list[Parameter] = []
        if header.startswith("("):
            close = header.index(")")
            returns = [_parse_parameter(p) for p in split_operands(header[1:close])]
            header = header[close + 1 :].strip()
        signature = re.match(r"([\w$%.]+)\s*(?:\(([^)]*)\))?", header, re.S)
        params = [_parse_parameter(p) for p in split_operands(signature[2] or "")]
        body = list(self._statements(start + 1, brace.start()))
        name = signature[1]
        self.functions[name] = Function(name, match[1] == "entry", params, returns, body)
        return brace.end()

    def _statements(self, position: int, end: int):
        text = self._text
        while position < end:
            char = text[position]
            line = self._line(position)
            if char.isspace() or char == ";":
                position += 1
            elif char in "{}":
                yield Statement("open" if char == "{" else "close", char, line)
                position += 1
            elif match := _LABEL.match(text, position):
                yield Statement("label", match[1], line)
                position = match.end()
            else:
                stop = text.index(";", position)
                statement = " ".join(text[position:stop].split())
                kind = "declaration" if statement.startswith(".") else "instruction"
                yield Statement(kind, statement, line)
                position = stop + 1


def _blank(match: re.Match) -> str:
    """Replace text by spaces, keeping line numbers."""
    return re.sub(r"[^\n]", " ", match.group())
