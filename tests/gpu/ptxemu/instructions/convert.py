"""cvt, cvta and isspacep."""

from __future__ import annotations

from ptxemu.instructions import translates
from ptxemu.operation import Operation
from ptxemu.ptxtypes import BIT_WIDTH, FLOAT_TYPES, c_type

_TO_INTEGER = {"rni": "TO_NEAREST", "rzi": "TO_ZERO", "rmi": "TO_FLOOR", "rpi": "TO_CEIL"}
_WINDOWS = {"shared": "SHARED_WINDOW", "local": "LOCAL_WINDOW"}


@translates("cvt", modifiers="rn rz rm rp rna rni rzi rmi rpi ftz sat relu")
def cvt(op: Operation) -> str:
    if len(op.types) != 2:
        raise op.unsupported("operand types")
    target, source = op.types
    if target in ("f16x2", "bf16x2"):
        return _to_packed(op, target, source)
    if target == "tf32":
        if source != "f32" or not (op.has("rn") or op.has("rna")) or op.has("relu"):
            raise op.unsupported()
        ties_away = "true" if op.has("rna") else "false"
        return op.result(f"to_tf32({op.source(1, 'b32')}, {ties_away})", "b32")
    if source not in FLOAT_TYPES and BIT_WIDTH[source] > 64 or "x2" in source or source == "tf32":
        raise op.unsupported("operand types")
    if source in FLOAT_TYPES and target in FLOAT_TYPES:
        return _float_to_float(op, target, source)
    if source in FLOAT_TYPES:
        return _float_to_int(op, target, source)
    if target in FLOAT_TYPES:
        return _int_to_float(op, target, source)
    value = op.source(1, source)
    ctype = c_type(target)
    return op.result(f"clamp_int<{ctype}>({value})" if op.has("sat") else value, target)


def _to_packed(op: Operation, target: str, source: str) -> str:
    if source != "f32" or len(op.operands) != 3 or op.has("sat"):
        raise op.unsupported()
    rounding = op.one_of("rn", "rz")
    pack = {
        ("f16x2", "rn"): "bits((f16)({}))",
        ("bf16x2", "rn"): "to_bf16({})",
        ("bf16x2", "rz"): "to_bf16_toward_zero({})",
        ("f16x2", "rz"): "bits(convert_rounded<f16, f32>(FE_TOWARDZERO, {}))",
    }.get((target, rounding))
    if pack is None:
        raise op.unsupported("rounding")
    halves = []
    for index in (1, 2):
        value = op.source(index, "f32")
        halves.append(pack.format(f"max_of<f32>({value}, 0)" if op.has("relu") else value))
    return op.result(f"((u32){halves[0]} << 16) | (u32){halves[1]}", "b32")


def _float_source(op: Operation, source: str) -> str:
    value = op.source(1, source)
    return f"flush({value})" if op.has("ftz") and source == "f32" else value


def _float_to_float(op: Operation, target: str, source: str) -> str:
    value = _float_source(op, source)
    ctype = c_type(target)
    mode = op.rounding()
    integral = op.one_of(*_TO_INTEGER)
    if integral:
        if source != target:
            raise op.unsupported("integral rounding between types")
        value = f"round_to_integer((f64){value}, {_TO_INTEGER[integral]})"
    elif target == "bf16":
        # Not narrowed yet: a double is rounded once, by to_bf16().
        ctype = "f64" if source == "f64" else "f32"
        if mode and (mode, ctype) != ("FE_TOWARDZERO", "f32"):
            raise op.unsupported("rounding")
    elif mode and BIT_WIDTH[target] < BIT_WIDTH[source]:
        value = f"convert_rounded<{ctype}, {c_type(source)}>({mode}, {value})"
    value = f"({ctype})({value})"
    if op.has("sat"):
        value = f"saturate({value})"
    if op.has("ftz") and target == "f32":
        value = f"flush({value})"
    if op.has("relu"):
        value = f"max_of<{ctype}>({value}, 0)"
    if target == "bf16" and mode:
        return op.result(f"to_bf16_toward_zero({value})", "b16")
    return op.result(value, target)


def _float_to_int(op: Operation, target: str, source: str) -> str:
    how = _TO_INTEGER[op.one_of(*_TO_INTEGER) or "rzi"]
    target = target.replace("b", "u")
    return op.result(f"float_to_int<{c_type(target)}>({_float_source(op, source)}, {how})", target)


def _int_to_float(op: Operation, target: str, source: str) -> str:
    value, ctype, mode = op.source(1, source), c_type(target), op.rounding()
    if target == "bf16":
        if mode or BIT_WIDTH[source] > 32 or op.has("sat"):
            raise op.unsupported()
        return op.result(f"(f64){value}", "bf16")
    if mode:
        value = f"convert_rounded<{ctype}, {c_type(source)}>({mode}, {value})"
    value = f"({ctype}){value}"
    return op.result(f"saturate({value})" if op.has("sat") else value, target)


@translates("cvta", modifiers="to global shared shared::cta shared::cluster local const param param::entry")
def cvta(op: Operation) -> str:
    window = _WINDOWS.get(op.space("global", "shared", "local", "const", "param"))
    value = op.source(1)
    if window is None:
        return op.result(value)
    return op.result(f"{value} & ~{window}" if op.has("to") else f"{value} | {window}")


@translates("isspacep", modifiers="global shared shared::cta shared::cluster local const param param::entry")
def isspacep(op: Operation) -> str:
    address = op.source(1, "u64")
    space = op.space("global", "shared", "local", "const", "param")
    if space == "global":
        return op.result(f"!({address} & (SHARED_WINDOW | LOCAL_WINDOW))", "pred")
    if space in _WINDOWS:
        return op.result(f"(({address} & {_WINDOWS[space]}) != 0)", "pred")
    return op.result("false", "pred")
