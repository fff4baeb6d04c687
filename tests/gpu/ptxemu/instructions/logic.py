"""Bits, comparisons, selection, moves and instructions without a functional effect."""

from __future__ import annotations

from ptxemu.instructions import translates
from ptxemu.operation import Operation
from ptxemu.parse import split_vector
from ptxemu.ptxtypes import BIT_WIDTH, FLOAT_TYPES, bits_of, c_type, unsigned_c

_BITWISE = {"and": "&", "or": "|", "xor": "^"}


@translates("and", "or", "xor")
def bitwise(op: Operation) -> str:
    expression = f"({op.source(1)}) {_BITWISE[op.name]} ({op.source(2)})"
    return op.result(f"(bool)({expression})" if op.type == "pred" else expression)


@translates("not")
def invert(op: Operation) -> str:
    return op.result(f"!({op.source(1)})" if op.type == "pred" else f"~{op.source(1)}")


@translates("cnot")
def cnot(op: Operation) -> str:
    return op.result(f"{op.source(1)} == 0 ? 1 : 0")


@translates("lop3")
def lop3(op: Operation) -> str:
    if len(op.operands) != 5:
        raise op.unsupported("predicate output")
    a, b, c = (op.source(i) for i in (1, 2, 3))
    return op.result(f"logic3({a}, {b}, {c}, {op.source(4, 'u32')})")


@translates("shl")
def shl(op: Operation) -> str:
    return op.result(f"shift_left<{unsigned_c(op.type)}>({op.source(1)}, {op.source(2, 'u32')})")


@translates("shr")
def shr(op: Operation) -> str:
    return op.result(f"shift_right<{c_type(op.type)}>({op.source(1)}, {op.source(2, 'u32')})")


@translates("shf", modifiers="l r wrap clamp")
def funnel_shift(op: Operation) -> str:
    amount = op.source(3, "u32")
    amount = f"({amount} & 31)" if op.has("wrap") else f"std::min(32u, {amount})"
    pair = f"(((u64){op.source(2)} << 32) | (u64){op.source(1)})"
    shifted = f"({pair} << {amount}) >> 32" if op.has("l") else f"{pair} >> {amount}"
    return op.result(f"(u32)({shifted})")


@translates("bfe")
def bfe(op: Operation) -> str:
    position, length = op.source(2, "u32"), op.source(3, "u32")
    return op.result(f"extract_bits<{c_type(op.type)}>({op.source(1)}, {position}, {length})")


@translates("bfi")
def bfi(op: Operation) -> str:
    a, b, position, length = op.source(1), op.source(2), op.source(3, "u32"), op.source(4, "u32")
    return op.result(f"insert_bits<{c_type(op.type)}>({a}, {b}, {position}, {length})")


@translates("bfind", modifiers="shiftamt")
def bfind(op: Operation) -> str:
    as_shift = "true" if op.has("shiftamt") else "false"
    return op.result(f"find_top_bit<{c_type(op.type)}>({op.source(1)}, {as_shift})", "u32")


@translates("brev")
def brev(op: Operation) -> str:
    return op.result(f"reverse_bits<{c_type(op.type)}>({op.source(1)})")


@translates("clz")
def clz(op: Operation) -> str:
    return op.result(f"count_leading_zeros({op.source(1)})", "u32")


@translates("popc")
def popc(op: Operation) -> str:
    return op.result(f"__builtin_popcountll((u64){op.source(1)})", "u32")


@translates("prmt")
def prmt(op: Operation) -> str:
    return op.result(f"permute_bytes({op.source(1)}, {op.source(2)}, {op.source(3)})")


_ORDERED = {
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "lo": "<", "ls": "<=", "hi": ">", "hs": ">=",
}  # fmt: skip
# True also when an operand is NaN: the negation of the opposite ordered comparison.
_UNORDERED = {"ltu": ">=", "leu": ">", "gtu": "<=", "geu": "<", "neu": "=="}
_COMPARISONS = " ".join([*_ORDERED, *_UNORDERED, "equ", "num", "nan"])


def _comparison(op: Operation, ptx_type: str) -> str:
    how = op.modifiers[0]
    a, b = op.source(1, ptx_type), op.source(2, ptx_type)
    if op.has("ftz") and ptx_type == "f32":
        a, b = f"flush({a})", f"flush({b})"
    numbers = f"({a} == {a} && {b} == {b})"
    if how == "ne" and ptx_type in FLOAT_TYPES:
        return f"({numbers} && {a} != {b})"
    if how in _ORDERED:
        return f"({a} {_ORDERED[how]} {b})"
    if how in _UNORDERED:
        return f"(!({a} {_UNORDERED[how]} {b}))"
    if how == "equ":
        return f"(!{numbers} || {a} == {b})"
    if how in ("num", "nan"):
        return numbers if how == "num" else f"(!{numbers})"
    raise op.unsupported("comparison")


def _combined(op: Operation, condition: str) -> str:
    how = op.one_of(*_BITWISE)
    if how is None:
        return condition
    return f"(bool)({condition} {_BITWISE[how]} ({op.source(3, 'pred')}))"


@translates("setp", modifiers=f"{_COMPARISONS} and or xor ftz")
def setp(op: Operation) -> str:
    destinations = op.operands[0].split("|")
    code = f"{{ bool condition = {_comparison(op, op.type)}; "
    code += op.assign(destinations[0], "pred", _combined(op, "condition"))
    if len(destinations) > 1:
        code += op.assign(destinations[1], "pred", _combined(op, "!condition"))
    return code + " }"


@translates("set", modifiers=f"{_COMPARISONS} and or xor ftz")
def set_value(op: Operation) -> str:
    if len(op.types) != 2 or op.types[0] not in ("u32", "s32", "f32"):
        raise op.unsupported("operand types")
    destination, compared = op.types
    true, false = ("1.0f", "0.0f") if destination == "f32" else ("0xffffffffu", "0u")
    condition = _combined(op, _comparison(op, compared))
    return op.result(f"{condition} ? {true} : {false}", destination)


@translates("selp")
def selp(op: Operation) -> str:
    return op.result(f"{op.source(3, 'pred')} ? {op.source(1)} : {op.source(2)}")


@translates("slct", modifiers="ftz")
def slct(op: Operation) -> str:
    if len(op.types) != 2:
        raise op.unsupported("operand types")
    value, condition = op.types
    chosen = f"({op.source(3, condition)} >= 0) ? {op.source(1, value)} : {op.source(2, value)}"
    return op.result(chosen, value)


@translates("mov")
def mov(op: Operation) -> str:
    if op.type == "pred":
        return op.result(op.source(1))
    width, whole = BIT_WIDTH[op.type], bits_of(op.type)
    targets, sources = split_vector(op.operands[0]), split_vector(op.operands[1])
    if len(targets) > 1:
        part = width // len(targets)
        code = f"{{ u{width} whole = {op.source(1, whole)}; "
        for index, target in enumerate(targets):
            code += op.assign(target, f"b{part}", f"(u{part})(whole >> {part * index})")
        return code + " }"
    if len(sources) > 1:
        part = width // len(sources)
        parts = [
            f"((u{width})(u{part}){op.value(source, f'b{part}')} << {part * index})"
            for index, source in enumerate(sources)
        ]
        return op.result(" | ".join(parts), whole)
    return op.result(op.source(1, whole), whole)


@translates(
    "membar",
    "fence",
    modifiers="cta gl gpu sys cluster sc acq_rel acquire release proxy async alias global local shared shared::cta "
    "mbarrier_init sync aligned tensormap",
    prefixes=("proxy", "async"),
)
def fence(op: Operation) -> str:
    """Counted for the races between blocks, where it reaches beyond the block; otherwise memory is sequential."""
    return ";" if op.one_of("gl", "gpu", "sys") is None else "w.cta->fences++;"


_NO_EFFECT = "prefetch prefetchu discard applypriority nanosleep pmevent griddepcontrol setmaxnreg brkpt"


@translates(
    *_NO_EFFECT.split(),
    modifiers="cta gl gpu sys cluster sc acq_rel acquire release proxy async alias global local "
    "shared shared::cta mbarrier_init wait launch_dependents inc dec sync aligned tensormap",
    prefixes=("L1", "L2", "level", "async", "proxy"),
)
def no_effect(op: Operation) -> str:
    return ";"


@translates("createpolicy", modifiers="fractional range cvt global", prefixes=("L2",))
def createpolicy(op: Operation) -> str:
    return op.result("0ull", "b64")


@translates("trap", modifiers="assert")
def trap(op: Operation) -> str:
    kind = "ASSERTION" if op.has("assert") else "TRAP"
    return f"{{ fault({kind}, {op.line}, w.cta->linear, w.id * 32 + l, 0); next = EXITED; goto done; }}"


@translates("barrier_result", modifiers="cta red sync aligned popc and or")
def barrier_result(op: Operation) -> str:
    target = op.operands[0].split("|")[0]
    return op.assign(target, "u32" if op.has("popc") else "pred", "w.barrier[l].result")
