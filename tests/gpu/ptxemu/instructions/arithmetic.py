"""Integer and floating-point arithmetic on scalars."""

from __future__ import annotations

from ptxemu.instructions import translates
from ptxemu.operation import Operation
from ptxemu.ptxtypes import BIT_WIDTH, FLOAT_TYPES, c_type, is_signed, unsigned_c

ROUNDING = "rn rz rm rp"
_CARRY = "carry_flag"


def float_source(op: Operation, index: int) -> str:
    """A floating-point operand, with subnormals flushed when the opcode says so."""
    value = op.source(index)
    if op.type == "bf16":
        return f"(f64){value}"
    return f"flush({value})" if op.has("ftz") and op.type != "f64" else value


def float_result(op: Operation, expression: str) -> str:
    """Store a floating-point result after .sat, .ftz and .relu."""
    ctype = "f64" if op.type == "bf16" else c_type(op.type)
    expression = f"({ctype})({expression})"
    if op.has("sat"):
        expression = f"saturate({expression})"
    if op.has("ftz") and op.type in ("f16", "f32"):
        expression = f"flush({expression})"
    if op.has("relu"):
        expression = f"max_of<{ctype}>({expression}, 0)"
    return op.result(expression)


def _directed(op: Operation) -> str | None:
    mode = op.rounding()
    if mode and op.type not in ("f32", "f64"):
        raise op.unsupported("directed rounding of this type")
    return mode


@translates("add", "sub", modifiers=f"{ROUNDING} ftz sat cc")
def add_sub(op: Operation) -> str:
    sign = "+" if op.name == "add" else "-"
    if op.type in FLOAT_TYPES:
        a, b = float_source(op, 1), float_source(op, 2)
        mode = _directed(op)
        if mode:
            minus = "-" if op.name == "sub" else ""
            return float_result(op, f"add_rounded<{op.type}>({mode}, {a}, {minus}{b})")
        return float_result(op, f"{a} {sign} {b}")
    if op.has("cc"):
        return _add_with_carry(op)
    if op.has("sat"):
        if op.type != "s32":
            raise op.unsupported("saturation of this type")
        return op.result(f"clamp_int<s32>((s64){op.source(1)} {sign} (s64){op.source(2)})")
    unsigned = unsigned_c(op.type)
    return op.result(f"({unsigned}){op.source(1)} {sign} ({unsigned}){op.source(2)}")


@translates("addc", "subc", modifiers="cc")
def add_sub_with_carry_in(op: Operation) -> str:
    return _add_with_carry(op)


def _add_with_carry(op: Operation) -> str:
    """Subtraction adds the complement; the borrow is the inverted carry."""
    unsigned = unsigned_c(op.type)
    subtract = op.name.startswith("sub")
    carry_in = "0"
    if op.name.endswith("c"):
        op.reads[_CARRY] = "b32"
        carry_in = f"({_CARRY} & 1)"
    elif subtract:
        carry_in = "1"
    second = f"({unsigned}){'~' if subtract else ''}({unsigned}){op.source(2)}"
    return _carry_sum(op, f"({unsigned}){op.source(1)}", second, carry_in)


def _carry_sum(op: Operation, a: str, b: str, carry_in: str) -> str:
    width = BIT_WIDTH[op.type]
    code = f"{{ u128 sum = (u128)({a}) + (u128)({b}) + (u128){carry_in}; "
    code += op.result(f"(u{width})sum")
    if op.has("cc"):
        op.writes[_CARRY] = "b32"
        code += f" {_CARRY} = (u32)((sum >> {width}) & 1);"
    return code + " }"


def _integer_product(op: Operation) -> str:
    ctype, unsigned = c_type(op.type), unsigned_c(op.type)
    a, b = op.source(1), op.source(2)
    if op.has("hi"):
        return f"({unsigned})mul_high(({ctype}){a}, ({ctype}){b})"
    wide = f"u{max(32, BIT_WIDTH[op.type])}"
    return f"({unsigned})(({wide})({unsigned}){a} * ({unsigned}){b})"


@translates("mul", modifiers=f"{ROUNDING} ftz sat hi lo wide")
def mul(op: Operation) -> str:
    if op.type in FLOAT_TYPES:
        a, b = float_source(op, 1), float_source(op, 2)
        mode = _directed(op)
        product = f"mul_rounded<{op.type}>({mode}, {a}, {b})" if mode else f"{a} * {b}"
        return float_result(op, product)
    if op.has("wide"):
        return op.result(_wide_product(op), _doubled(op))
    return op.result(_integer_product(op))


def _doubled(op: Operation) -> str:
    return f"{'s' if is_signed(op.type) else 'u'}{2 * BIT_WIDTH[op.type]}"


def _wide_product(op: Operation) -> str:
    wide = _doubled(op)
    return f"({wide}){op.source(1)} * ({wide}){op.source(2)}"


@translates("mad", modifiers=f"{ROUNDING} ftz sat hi lo wide cc")
def mad(op: Operation) -> str:
    if op.type in FLOAT_TYPES:
        return fma(op)
    if op.has("sat"):
        raise op.unsupported("saturation")
    if op.has("wide"):
        wide = _doubled(op)
        unsigned = unsigned_c(wide)
        addend = op.source(3, wide)
        return op.result(f"({unsigned})({_wide_product(op)}) + ({unsigned}){addend}", wide)
    unsigned = unsigned_c(op.type)
    product, addend = _integer_product(op), f"({unsigned}){op.source(3)}"
    if op.has("cc"):
        return _carry_sum(op, product, addend, "0")
    return op.result(f"{product} + {addend}")


@translates("madc", modifiers="hi lo cc")
def mad_with_carry_in(op: Operation) -> str:
    op.reads[_CARRY] = "b32"
    addend = f"({unsigned_c(op.type)}){op.source(3)}"
    return _carry_sum(op, _integer_product(op), addend, f"({_CARRY} & 1)")


@translates("mul24", "mad24", modifiers="lo")
def mul24(op: Operation) -> str:
    ctype = c_type(op.type)
    low = [f"(u32)(({ctype})({op.source(i)} << 8) >> 8)" for i in (1, 2)]
    addend = f" + (u32){op.source(3)}" if op.name == "mad24" else ""
    return op.result(f"{low[0]} * {low[1]}{addend}")


@translates("fma", modifiers=f"{ROUNDING} ftz sat relu")
def fma(op: Operation) -> str:
    if op.type == "bf16":
        a, b, c = (op.source(i) for i in (1, 2, 3))
        return float_result(op, f"fused_bf16({a}, {b}, {c})")
    a, b, c = (float_source(op, i) for i in (1, 2, 3))
    mode = _directed(op)
    if mode:
        return float_result(op, f"fma_rounded<{op.type}>({mode}, {a}, {b}, {c})")
    return float_result(op, f"fused({a}, {b}, {c})")


@translates("div", modifiers=f"{ROUNDING} ftz approx full")
def div(op: Operation) -> str:
    ctype = c_type(op.type)
    if op.type not in FLOAT_TYPES:
        return op.result(f"divide<{ctype}>({op.source(1)}, {op.source(2)})")
    a, b = float_source(op, 1), float_source(op, 2)
    mode = _directed(op)
    quotient = f"div_rounded<{ctype}>({mode}, {a}, {b})" if mode else f"{a} / {b}"
    return float_result(op, quotient)


@translates("rem")
def rem(op: Operation) -> str:
    return op.result(f"remainder_of<{c_type(op.type)}>({op.source(1)}, {op.source(2)})")


@translates("min", "max", modifiers="ftz NaN relu")
def min_max(op: Operation) -> str:
    ctype = c_type(op.type)
    if op.type not in FLOAT_TYPES:
        if op.has("relu") or len(op.operands) > 3:
            raise op.unsupported()
        return op.result(f"{op.name}_of<{ctype}>({op.source(1)}, {op.source(2)})")
    if op.type == "bf16":
        ctype = "f64"
    function = f"{op.name}_{'nan' if op.has('NaN') else 'of'}<{ctype}>"
    expression = float_source(op, 1)
    for index in range(2, len(op.operands)):
        expression = f"{function}({expression}, {float_source(op, index)})"
    return float_result(op, expression)


@translates("abs", modifiers="ftz")
def absolute(op: Operation) -> str:
    if op.type in FLOAT_TYPES:
        value = float_source(op, 1)
        if op.type == "f16":
            return float_result(op, f"as_f16(bits({value}) & 0x7fff)")
        return float_result(op, f"std::fabs({value})")
    value = op.source(1)
    return op.result(f"({value} < 0 ? 0 - ({unsigned_c(op.type)}){value} : {value})")


@translates("neg", modifiers="ftz")
def neg(op: Operation) -> str:
    if op.type in FLOAT_TYPES:
        return float_result(op, f"-({float_source(op, 1)})")
    unsigned = unsigned_c(op.type)
    return op.result(f"({unsigned})0 - ({unsigned}){op.source(1)}")


@translates("sad")
def sad(op: Operation) -> str:
    a, b = op.source(1), op.source(2)
    unsigned = unsigned_c(op.type)
    a_bits, b_bits = f"({unsigned}){a}", f"({unsigned}){b}"
    difference = f"({a} < {b} ? {b_bits} - {a_bits} : {a_bits} - {b_bits})"
    return op.result(f"{difference} + ({unsigned}){op.source(3)}")


@translates("dp4a")
def dp4a(op: Operation) -> str:
    if len(op.types) != 2:
        raise op.unsupported()
    a, b = (f"{t[0]}8" for t in op.types)
    terms = [
        f"(s32)({a})({op.source(1, 'u32')} >> {s}) * (s32)({b})({op.source(2, 'u32')} >> {s})" for s in (0, 8, 16, 24)
    ]
    return op.result(f"(u32){op.source(3, 'u32')} + (u32)({' + '.join(terms)})", "b32")


# The hardware approximations are replaced by the correctly computed function.
_FUNCTIONS = {
    "rcp": "1.0 / (f64){}",
    "sqrt": "std::sqrt((f64){})",
    "rsqrt": "1.0 / std::sqrt((f64){})",
    "sin": "std::sin((f64){})",
    "cos": "std::cos((f64){})",
    "lg2": "std::log2((f64){})",
    "ex2": "std::exp2((f64){})",
    "tanh": "std::tanh((f64){})",
}


@translates(*_FUNCTIONS, modifiers=f"{ROUNDING} ftz approx")
def function(op: Operation) -> str:
    value = float_source(op, 1)
    mode = _directed(op)
    if mode and op.name == "sqrt":
        return float_result(op, f"sqrt_rounded<{op.type}>({mode}, {value})")
    if mode and op.name == "rcp":
        return float_result(op, f"div_rounded<{op.type}>({mode}, 1, {value})")
    if mode:
        raise op.unsupported("directed rounding")
    return float_result(op, _FUNCTIONS[op.name].format(value))


@translates("copysign")
def copysign(op: Operation) -> str:
    return op.result(f"std::copysign({op.source(2)}, {op.source(1)})")


_CLASSES = {
    "finite": "std::isfinite({})",
    "infinite": "std::isinf({})",
    "number": "!std::isnan({})",
    "notanumber": "std::isnan({})",
    "normal": "std::isnormal({})",
    "subnormal": "(std::fpclassify({}) == FP_SUBNORMAL)",
}


@translates("testp", modifiers=" ".join(_CLASSES))
def testp(op: Operation) -> str:
    return op.result(_CLASSES[op.one_of(*_CLASSES)].format(op.source(1)), "pred")
