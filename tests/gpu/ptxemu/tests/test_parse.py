"""PTX text is split into the right pieces."""

import pytest
from ptxemu.errors import Unsupported
from ptxemu.parse import Immediate, Module, parse_immediate, split_operands, split_vector

PTX = """
.version 8.0
.target sm_80
.address_size 64
.file 1 "kernel.cu"
.global .align 4 .u32 table[3] = {1, 0x10, 7};
.const .f32 scale = 0f3F800000;
.extern .shared .align 16 .b8 dynamic[];
/* a comment with { braces } */
.func (.param .b32 result) helper(.param .b32 a) { ret; }
.visible .entry first(
    .param .u64 .ptr .global .align 16 p, .param .align 8 .b8 s[24], .param .f32 f)
{
    .reg .b32 %r<3>;
    .loc 1 12 5
    mov.u32 %r1, %tid.x; // a comment
$L_1:
    { .reg .pred q; @q bra $L_1; }
    ret;
}
.visible .entry second() { ret; }
"""


@pytest.mark.parametrize(
    "text, expected",
    [
        ("42", Immediate("int", 42)),
        ("-0x10", Immediate("int", -16)),
        ("017", Immediate("int", 15)),
        ("0b101", Immediate("int", 5)),
        ("5U", Immediate("int", 5)),
        ("0f3F800000", Immediate("f32", 0x3F800000)),
        ("0d3FF0000000000000", Immediate("f64", 0x3FF0000000000000)),
        ("1.5e3", Immediate("decimal", 1500.0)),
        ("%r1", None),
    ],
)
def test_immediates(text, expected):
    assert parse_immediate(text) == expected


def test_operands():
    assert split_operands("{%a, %b}, [%c+4], (x, y)") == ["{%a, %b}", "[%c+4]", "(x, y)"]
    assert split_vector("{%a, %b}") == ["%a", "%b"]
    assert split_vector("%a") == ["%a"]


def test_module():
    module = Module(PTX)
    assert module.variables["table"].data == bytes([1, 0, 0, 0, 16, 0, 0, 0, 7, 0, 0, 0])
    assert module.variables["dynamic"].size is None
    first = module.functions["first"]
    assert [(p.name, p.type, p.size, p.align) for p in first.params] == [
        ("p", "u64", 8, 8),
        ("s", "b8", 24, 8),
        ("f", "f32", 4, 4),
    ]
    kinds = [statement.kind for statement in first.body]
    assert kinds.count("open") == kinds.count("close") == kinds.count("label") == 1
    move = next(s for s in first.body if s.text.startswith("mov"))
    assert module.lines[move.line - 1].strip().startswith("mov.u32")
    assert module.source_line(move.line) == "kernel.cu:12"


def test_kernel_lookup():
    module = Module(PTX)
    assert module.kernel_name("first") == "first"
    assert module.kernel_name("sec") == "second"
    with pytest.raises(ValueError, match="more than one"):
        module.kernel_name(None)
    with pytest.raises(ValueError, match="no kernel"):
        module.kernel_name("third")


def test_unknown_declaration():
    with pytest.raises(Unsupported, match="PTX line 1"):
        Module(".tex .u64 image;")
