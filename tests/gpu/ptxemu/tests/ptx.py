"""Helpers for tests written in PTX."""

import re

import numpy as np
from ptxemu import Kernel

_HEADER = ".version 8.6\n.target sm_100\n.address_size 64\n"


def ptx_kernel(body: str, **options) -> Kernel:
    """A kernel k(in, out) with ``body`` and the usual registers."""
    text = f"""{_HEADER}
.visible .entry k(.param .u64 in, .param .u64 out)
{{
    .reg .pred %p<9>; .reg .b16 %h<9>; .reg .b32 %r<40>; .reg .f32 %f<9>;
    .reg .b64 %d<40>; .reg .b128 %q<4>;
    .shared .align 16 .b8 buffer[256];
    ld.param.u64 %d0, [in];
    ld.param.u64 %d1, [out];
    mov.u32 %r0, %tid.x;
{body}
    ret;
}}
"""
    return Kernel(text, "k", **options)


def each_lane(cases: list[tuple[list, str, str, str]]) -> tuple[str, int]:
    """PTX that evaluates many one-instruction cases.

    A case is (source literals, source width, instruction with {d} {0} {1}..., result width).
    """
    lines = []
    for index, (sources, width, instruction, result) in enumerate(cases):
        prefix = {"16": "%h", "32": "%r", "64": "%d"}
        operands = [f"{prefix[width]}{k + 2}" for k in range(len(sources))]
        for operand, value in zip(operands, sources, strict=True):
            lines.append(f"    mov.b{width} {operand}, {value};")
        target = f"{prefix[result]}8"
        lines.append("    " + re.sub(r"\{d\}", target, instruction).format(*operands) + ";")
        lines.append(f"    st.global.b{result} [%d1+{8 * index}], {target};")
    return "\n".join(lines), len(cases)


def evaluate(cases) -> np.ndarray:
    """Results of :func:`each_lane` as 64-bit words, zero-extended."""
    body, count = each_lane(cases)
    out = np.zeros(count, np.uint64)
    ptx_kernel(body).launch(1, 1, [None, out])
    return out
