"""Loads, stores, atomics and cp.async."""

from __future__ import annotations

from ptxemu.instructions import CACHE_PREFIXES, MEMORY_WORDS, translates
from ptxemu.operation import Operation
from ptxemu.parse import parse_immediate, split_vector
from ptxemu.ptxtypes import FLOAT_TYPES, bits_of, byte_width, c_type


@translates("ld", "ldu", modifiers=MEMORY_WORDS, prefixes=CACHE_PREFIXES)
def ld(op: Operation) -> str:
    size = byte_width(op.type)
    # Signed loads extend into wider registers; all others move bits.
    moved = op.type if op.type[0] in "us" else bits_of(op.type)
    targets = split_vector(op.operands[0])
    space = op.space("global", "shared", "local", "param", "const")
    address = op.address(op.operands[1])
    if space == "param":
        code = _param_access(op, op.operands[1], address, size * len(targets), "load")
    else:
        code = op.access(space, address, size * len(targets))
    for index, target in enumerate(targets):
        code += op.assign(target, moved, f"load<{c_type(moved)}>(p + {size * index})")
    return f"{{ {code} }}"


def _param_access(op: Operation, operand: str, address: str, size: int, kind: str) -> str:
    """Parameters of the kernel are in the argument block, those of calls in local memory."""
    if op.is_local_param(operand):
        return f"u8* p = w.local[l] + ({address}); "
    write = "true" if kind == "store" else "false"
    access = f"{{{size}, {op.line}, {write}, false}}"
    return f"u8* p = access_param(self_thread, {address}, {access}); "


@translates("st", modifiers=MEMORY_WORDS, prefixes=CACHE_PREFIXES)
def st(op: Operation) -> str:
    size, moved = byte_width(op.type), bits_of(op.type)
    sources = split_vector(op.operands[1])
    space = op.space("global", "shared", "local", "param")
    address = op.address(op.operands[0])
    if space == "param":
        code = _param_access(op, op.operands[0], address, size * len(sources), "store")
    else:
        code = op.access(space, address, size * len(sources), "store")
    for index, source in enumerate(sources):
        code += f"store<{c_type(moved)}>(p + {size * index}, {op.value(source, moved)}); "
    if space != "param":
        code += f"finish_write(self_thread, p, {size * len(sources)}, {op.line});"
    return f"{{ {code} }}"


_UPDATE = {
    "add": "old + {v}",
    "min": "min_of<{c}>(old, {v})",
    "max": "max_of<{c}>(old, {v})",
    "and": "old & {v}",
    "or": "old | {v}",
    "xor": "old ^ {v}",
    "exch": "{v}",
    "inc": "(old >= {v} ? 0 : old + 1)",
    "dec": "((old == 0 || old > {v}) ? {v} : old - 1)",
    "cas": "(old == {v} ? {swap} : old)",
}


def load_value(ptx_type: str, pointer: str) -> str:
    """The value of ``ptx_type`` at ``pointer``."""
    if ptx_type == "bf16":
        return f"from_bf16(load<u16>({pointer}))"
    return f"load<{c_type(ptx_type)}>({pointer})"


def store_value(ptx_type: str, pointer: str, value: str) -> str:
    """Statement storing ``value`` of ``ptx_type`` at ``pointer``."""
    if ptx_type == "bf16":
        return f"store<u16>({pointer}, to_bf16({value}));"
    return f"store<{c_type(ptx_type)}>({pointer}, {value});"


@translates("atom", "red", modifiers=f"{MEMORY_WORDS} {' '.join(_UPDATE)} noftz", prefixes=CACHE_PREFIXES)
def atomic(op: Operation) -> str:
    returns = op.name == "atom"
    how = op.one_of(*_UPDATE)
    if how is None or op.type == "b128":
        raise op.unsupported()
    if op.type in FLOAT_TYPES and how not in ("add", "min", "max", "exch"):
        raise op.unsupported()
    space = op.space("global", "shared")
    first = 1 if returns else 0
    address = op.address(op.operands[first])
    values = split_vector(op.operands[first + 1])
    targets = split_vector(op.operands[0]) if returns else [None] * len(values)
    size = byte_width(op.type)
    code = op.access(space, address, size * len(values), "atomic")
    if op.one_of("release", "acq_rel") and op.one_of("gpu", "sys"):  # what the block has done comes before
        code = f"w.cta->fences++; {code}"
    if op.type in ("f16x2", "bf16x2"):
        if how != "add":
            raise op.unsupported()
        return f"{{ {code}{_atomic_add_pairs(op, values, targets)} }}"
    swap = op.value(op.operands[first + 2], op.type) if how == "cas" else ""
    ctype = c_type(op.type)
    for index, (value, target) in enumerate(zip(values, targets, strict=True)):
        place = f"p + {size * index}"
        update = _UPDATE[how].format(v=op.value(value, op.type), c=ctype, swap=swap)
        code += f"{{ {ctype} old = {load_value(op.type, place)}; {ctype} updated = {update}; "
        code += store_value(op.type, place, "updated")
        if target:
            code += op.assign(target, op.type, "old")
        code += " }"
    return f"{{ {code} }}"


def _atomic_add_pairs(op: Operation, values: list[str], targets: list[str | None]) -> str:
    code = ""
    if op.type == "f16x2":
        half = "(u32)bits((f16)(as_f16((u16)(old >> {s})) + as_f16((u16)({v} >> {s}))))"
    else:
        half = "(u32)to_bf16(from_bf16((u16)(old >> {s})) + from_bf16((u16)({v} >> {s})))"
    for index, (value, target) in enumerate(zip(values, targets, strict=True)):
        v = op.value(value, "b32")
        low, high = half.format(s=0, v=v), half.format(s=16, v=v)
        place = f"p + {4 * index}"
        code += f"{{ u32 old = load<u32>({place}); store<u32>({place}, {low} | ({high} << 16)); "
        if target:
            code += op.assign(target, "b32", "old")
        code += " }"
    return code


@translates(
    "cp",
    modifiers="async ca cg shared shared::cta shared::cluster global commit_group wait_group wait_all",
    prefixes=CACHE_PREFIXES,
)
def cp_async(op: Operation) -> str:
    if not op.has("async"):
        raise op.unsupported()
    if op.has("commit_group"):
        return "w.copies[l].commit();"
    if op.has("wait_group"):
        return f"w.copies[l].wait({parse_immediate(op.operands[0]).value}, self_thread);"
    if op.has("wait_all"):
        return "w.copies[l].commit(); w.copies[l].wait(0, self_thread);"
    target, source = op.address(op.operands[0]), op.address(op.operands[1])
    size = parse_immediate(op.operands[2]).value
    trace = op.trace("global", source, size, "load")
    return (
        f"{{ u32 source_size = {_source_size(op, size)}; if (source_size) {{ {trace} }} "
        f"w.copies[l].issue({{{target}, {source}, {size}, source_size, {op.line}}}); }}"
    )


def _source_size(op: Operation, size: int) -> str:
    """Bytes really read; the rest of the copy is zeros. The operand may be absent."""
    has_policy = any(part.endswith("cache_hint") for part in op.modifiers)
    if len(op.operands) - has_policy < 4:
        return str(size)
    register = op.register(op.operands[3])
    if register and register.type == "pred":
        return f"({op.source(3, 'pred')} ? 0 : {size})"
    return op.source(3, "u32")
