"""Tensor-core instructions: mma, wmma and the ldmatrix / stmatrix moves that feed them.

Products are summed in double precision (integers in 64 bits) and rounded once. Hardware rounds
differently inside a dot product; see the README.
"""

from __future__ import annotations

import re

from ptxemu.instructions import MEMORY_WORDS, Collective, translates
from ptxemu.instructions.collective import ADVANCE, FOR_LANES
from ptxemu.operation import Operation
from ptxemu.parse import split_vector

_ELEMENT_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "f32": 32, "f64": 64, "s8": 8, "u8": 8,
                 "s32": 32}  # fmt: skip
# Register bits -> number.
_DECODE = {
    "f16": "(f64)as_f16((u16)({}))",
    "bf16": "(f64)from_bf16((u16)({}))",
    "tf32": "(f64)from_tf32((u32)({}))",
    "f32": "(f64)as_f32((u32)({}))",
    "f64": "as_f64({})",
    "s8": "(s64)(s8)({})",
    "u8": "(s64)(u8)({})",
    "s32": "(s64)(s32)({})",
}
# Number -> register bits.
_ENCODE = {
    "f16": "bits((f16)({}))",
    "f32": "bits((f32)({}))",
    "f64": "bits((f64)({}))",
    "s32": "(u32)(s32)({})",
}
_SHAPES = "m8n8k4 m16n8k4 m16n8k8 m16n8k16 m16n8k32 m16n16k16 m32n8k16 m8n32k16 m16n16k8"


def _full_warp(op: Operation, body: str) -> Collective:
    """A collective that waits for every living lane and reports missing ones."""
    check = f"require_full_warp(w, mask, {op.line}); "
    return Collective(check + body + ADVANCE, "return (w.alive() & ~mask) == 0;")


def _shape(op: Operation) -> tuple[int, int, int]:
    text = op.one_of(*_SHAPES.split())
    if text is None:
        raise op.unsupported("shape")
    m, n, k = (int(number) for number in re.findall(r"\d+", text))
    return m, n, k


def _register_bits(op: Operation, register: str, element: str, shift: int) -> str:
    width = 64 if element == "f64" else 32
    value = op.value(register, f"b{width}")
    return f"{value} >> {shift}" if shift else value


def _multiply(m: int, n: int, k: int, number: str, fused: bool, saturate: bool) -> str:
    step = "__builtin_fma(A[i][x], B[x][j], sum)" if fused else "sum + A[i][x] * B[x][j]"
    stored = "clamp_int<s32>(sum)" if saturate else "sum"
    return (
        f"for (int i = 0; i < {m}; i++) for (int j = 0; j < {n}; j++) {{ {number} sum = C[i][j]; "
        f"for (int x = 0; x < {k}; x++) sum = {step}; C[i][j] = {stored}; }} "
    )


def _operand_arrays(m: int, n: int, k: int, number: str) -> str:
    return f"{number} A[{m}][{k}] = {{}}, B[{k}][{n}] = {{}}, C[{m}][{n}] = {{}}; "


def _place(index: int, per_register: int, element: int) -> tuple[int, int]:
    """Row offset and column offset (beyond the lane's own) of an element of an A register."""
    return 8 * (index % 2), element + (index // 2) * 4 * per_register


@translates("mma", modifiers=f"sync aligned row col satfinite {_SHAPES}")
def mma(op: Operation) -> Collective:
    m, n, k = _shape(op)
    types = [part for part in op.modifiers if part in _ELEMENT_BITS]
    layout = [part for part in op.modifiers if part in ("row", "col")]
    if len(types) != 4 or layout != ["row", "col"] or len(op.operands) != 4:
        raise op.unsupported()
    d_type, a_type, b_type, c_type = types
    if (m, n) not in ((16, 8), (8, 8)) or (m == 8 and a_type != "f64"):
        raise op.unsupported("shape")
    if d_type not in _ENCODE or c_type not in _ENCODE:
        raise op.unsupported("accumulator type")
    number = "s64" if a_type in ("s8", "u8") else "f64"
    d, a, b, c = (split_vector(operand) for operand in op.operands)
    per_register = max(1, 32 // _ELEMENT_BITS[a_type])
    if 32 * per_register * len(a) != m * k or 32 * per_register * len(b) != k * n:
        raise op.unsupported("number of registers")

    load = "int row = l >> 2, quad = l & 3; "
    for index, register in enumerate(a):
        for element in range(per_register):
            bits = _register_bits(op, register, a_type, element * _ELEMENT_BITS[a_type])
            down, right = _place(index, per_register, element)
            place = f"A[row + {down}][quad * {per_register} + {right}]"
            load += f"{place} = {_DECODE[a_type].format(bits)}; "
    for index, register in enumerate(b):
        for element in range(per_register):
            bits = _register_bits(op, register, b_type, element * _ELEMENT_BITS[b_type])
            down = element + index * 4 * per_register
            place = f"B[quad * {per_register} + {down}][row]"
            load += f"{place} = {_DECODE[b_type].format(bits)}; "
    for place, register, shift in _accumulators(c, c_type):
        load += f"{place} = {_DECODE[c_type].format(_register_bits(op, register, c_type, shift))}; "

    store: dict[str, list[str]] = {}
    for place, register, shift in _accumulators(d, d_type):
        store.setdefault(register, []).append(f"{_encode(d_type, place)} << {shift}")
    saturate = op.has("satfinite") and number == "s64"
    body = _operand_arrays(m, n, k, number) + f"{FOR_LANES} {{ {load} }} "
    body += _multiply(m, n, k, number, a_type == "f64", saturate)
    body += f"{FOR_LANES} {{ int row = l >> 2, quad = l & 3; {_assign_all(op, store, d_type)} }} "
    return _full_warp(op, body)


def _accumulators(registers: list[str], ptx_type: str):
    """(matrix element, register, shift) of every accumulator element a lane holds."""
    if ptx_type == "f16":
        for index, register in enumerate(registers):
            for element in range(2):
                yield f"C[row + {8 * index}][quad * 2 + {element}]", register, 16 * element
    else:
        for index, register in enumerate(registers):
            yield f"C[row + {8 * (index // 2)}][quad * 2 + {index % 2}]", register, 0


def _encode(ptx_type: str, expression: str) -> str:
    return f"(u{64 if ptx_type == 'f64' else 32}){_ENCODE[ptx_type].format(expression)}"


def _assign_all(op: Operation, parts: dict[str, list[str]], ptx_type: str) -> str:
    whole = "b64" if ptx_type == "f64" else "b32"
    return "".join(
        op.assign(register, whole, " | ".join(f"({p})" for p in pieces)) for register, pieces in parts.items()
    )


_MATRIX_WORDS = "sync aligned m8n8 x1 x2 x4 trans shared shared::cta"


def _matrix_count(op: Operation) -> int:
    if op.type != "b16" or not op.has("m8n8"):
        raise op.unsupported()
    return int(op.one_of("x1", "x2", "x4")[1:])


def _matrix_element(op: Operation, matrix: int, half: int) -> str:
    row, column = "l / 4", f"2 * (l % 4) + {half}"
    return f"M[{matrix}][{column}][{row}]" if op.has("trans") else f"M[{matrix}][{row}][{column}]"


@translates("ldmatrix", modifiers=_MATRIX_WORDS)
def ldmatrix(op: Operation) -> Collective:
    count = _matrix_count(op)
    access = op.access("shared", "rows[i]", 16, lane="i")
    body = "u64 rows[32] = {}; "
    body += f"{FOR_LANES} rows[l] = {op.address(op.operands[1])} & ~SHARED_WINDOW; "
    body += f"u16 M[{count}][8][8]; for (int i = 0; i < {8 * count}; i++) {{ "
    body += f"const Thread self_thread = w.thread(i); {access} memcpy(M[i / 8][i % 8], p, 16); }} "
    deliver = ""
    for index, register in enumerate(split_vector(op.operands[0])):
        low, high = (_matrix_element(op, index, half) for half in (0, 1))
        deliver += op.assign(register, "b32", f"(u32){low} | ((u32){high} << 16)")
    return _full_warp(op, f"{body}{FOR_LANES} {{ {deliver} }} ")


@translates("stmatrix", modifiers=_MATRIX_WORDS)
def stmatrix(op: Operation) -> Collective:
    count = _matrix_count(op)
    access = op.access("shared", "rows[i]", 16, "store", lane="i")
    body = f"u64 rows[32] = {{}}; u16 M[{count}][8][8] = {{}}; {FOR_LANES} {{ "
    body += f"rows[l] = {op.address(op.operands[0])} & ~SHARED_WINDOW; "
    for index, register in enumerate(split_vector(op.operands[1])):
        value = op.value(register, "u32")
        body += f"{_matrix_element(op, index, 0)} = (u16){value}; "
        body += f"{_matrix_element(op, index, 1)} = (u16)({value} >> 16); "
    body += f"}} for (int i = 0; i < {8 * count}; i++) {{ "
    body += f"const Thread self_thread = w.thread(i); {access} memcpy(p, M[i / 8][i % 8], 16); "
    body += f"finish_write(self_thread, p, 16, {op.line}); }} "
    return _full_warp(op, body)


@translates(
    "wmma",
    modifiers=f"{MEMORY_WORDS} load store mma sync aligned row col a b c d {_SHAPES} satfinite",
)
def wmma(op: Operation) -> Collective:
    """PTX leaves the fragment layout open: lane l keeps elements l * n ... l * n + n - 1."""
    if op.modifiers[0] == "mma":
        return _wmma_multiply(op)
    m, n, k = _shape(op)
    is_load = op.modifiers[0] == "load"
    rows, columns = {"a": (m, k), "b": (k, n)}.get(op.modifiers[1], (m, n))
    element = next(part for part in op.modifiers if part in _ELEMENT_BITS)
    width = _ELEMENT_BITS[element]
    pointer, fragment = (1, 0) if is_load else (0, 1)
    registers = split_vector(op.operands[fragment])
    address = op.address(op.operands[pointer])
    by_row = op.has("row")
    packed_stride = str(columns if by_row else rows)
    stride = op.source(2, "u32") if len(op.operands) > 2 else packed_stride
    space = op.space("global", "shared")
    per_lane = rows * columns // 32
    whole = 64 if width == 64 else 32
    pieces: dict[str, list[str]] = {register: [] for register in registers}
    code = "const Thread self_thread = w.thread(l); "
    for slot in range(per_lane):
        register, shift = _wmma_slot(registers, per_lane, width, slot)
        index = f"(l * {per_lane} + {slot})"
        row, column = f"(u64)({index} / {columns})", f"(u64)({index} % {columns})"
        offset = f"{row} * {stride} + {column}" if by_row else f"{column} * {stride} + {row}"
        place = f"{address} + ({offset}) * {width // 8}"
        name = f"p{slot}"
        kind = "load" if is_load else "store"
        code += op.access(space, place, width // 8, kind, pointer=name)
        if is_load:
            pieces[register].append(f"((u{whole})load<u{width}>({name}) << {shift})")
        else:
            value = op.value(register, f"b{whole}")
            code += f"store<u{width}>({name}, (u{width})({value} >> {shift})); "
            code += f"finish_write(self_thread, {name}, {width // 8}, {op.line}); "
    if is_load:
        for register, parts in pieces.items():
            code += op.assign(register, f"b{whole}", " | ".join(parts) or "0")
    return _full_warp(op, f"{FOR_LANES} {{ {code} }} ")


def _wmma_slot(registers: list[str], per_lane: int, width: int, slot: int) -> tuple[str, int]:
    """Register and shift of a lane's element ``slot``."""
    per_register = max(1, per_lane // len(registers))
    return registers[slot // per_register], (slot % per_register) * width


def _wmma_multiply(op: Operation) -> Collective:
    m, n, k = _shape(op)
    types = [part for part in op.modifiers if part in _ELEMENT_BITS]
    d_type, c_type = types[0], types[-1]
    ab_types = types[1:3] if len(types) == 4 else ["f16", "f16"]
    number = "s64" if ab_types[0] in ("s8", "u8") else "f64"
    d, a, b, c = (split_vector(operand) for operand in op.operands)
    load = ""
    a_type, b_type = ab_types
    for name, registers, size, element in (
        ("A", a, m * k, a_type),
        ("B", b, k * n, b_type),
        ("C", c, m * n, c_type),
    ):
        for slot in range(size // 32):
            width = _ELEMENT_BITS[element]
            register, shift = _wmma_slot(registers, size // 32, width, slot)
            value = _DECODE[element].format(_register_bits(op, register, element, shift))
            load += f"(&{name}[0][0])[l * {size // 32} + {slot}] = {value}; "
    per_lane = m * n // 32
    store: dict[str, list[str]] = {}
    for slot in range(per_lane):
        register, shift = _wmma_slot(d, per_lane, _ELEMENT_BITS[d_type], slot)
        place = f"(&C[0][0])[l * {per_lane} + {slot}]"
        store.setdefault(register, []).append(f"{_encode(d_type, place)} << {shift}")
    saturate = op.has("satfinite") and number == "s64"
    body = _operand_arrays(m, n, k, number) + f"{FOR_LANES} {{ {load} }} "
    body += _multiply(m, n, k, number, ab_types[0] == "f64", saturate)
    body += f"{FOR_LANES} {{ {_assign_all(op, store, d_type)} }} "
    return _full_warp(op, body)
