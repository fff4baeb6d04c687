"""What the emulator cannot do is refused by name, never guessed."""

import pytest
from ptx import ptx_kernel
from ptxemu import Unsupported


@pytest.mark.parametrize(
    "instruction",
    [
        "wgmma.fence.sync.aligned",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1}, %d2, %d3, 1, 1, 1, 0, 0",
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%r1], [%d2, {%r2, %r3}], [%r4]",
        "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32",
        "mbarrier.init.shared::cta.b64 [%r1], 1",
        "barrier.cluster.arrive.aligned",
        "cvt.rn.satfinite.e4m3x2.f32 %h1, %f1, %f2",
        "cvt.pack.sat.u8.s32.b32 %r1, %r2, %r3, %r4",
        "setp.eq.f16x2 %p1|%p2, %r1, %r2",
        "add.rn.f32.bf16 %f1, %h1, %f2",
        "min.xorsign.abs.f32 %f1, %f2, %f3",
        "lop3.or.b32 %r1|%p1, %r2, %r3, %r4, 0x3f, %p2",
        "mma.sp.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1,%f2,%f3,%f4}, {%r1,%r2},"
        " {%r3,%r4}, {%f1,%f2,%f3,%f4}, %r5, 0",
        "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%f1}, {%r1}, {%r2}, {%f1}",
        "tex.2d.v4.f32.s32 {%f1,%f2,%f3,%f4}, [%d2, {%r1,%r2}]",
        "atom.global.exch.b128 %q1, [%d1], %q2",
        "frobnicate.b32 %r1, %r2",
    ],
)
def test_refused_with_text_and_line(instruction):
    with pytest.raises(Unsupported) as refusal:
        ptx_kernel(f"    {instruction};")
    message = str(refusal.value)
    assert " ".join(instruction.split())[:20] in message
    assert "PTX line 13" in message


@pytest.mark.parametrize(
    "instruction, advice",
    [
        ("wgmma.fence.sync.aligned", "compile for capability 80"),
        ("mbarrier.init.shared::cta.b64 [%r1], 1", "compile for capability 80"),
        ("cp.async.bulk.commit_group", "TMA"),
        ("barrier.cluster.arrive.aligned", "clusters"),
    ],
)
def test_hardware_left_out_is_explained(instruction, advice):
    with pytest.raises(Unsupported, match=advice):
        ptx_kernel(f"    {instruction};")


def test_unknown_function():
    with pytest.raises(Unsupported, match="call of 'malloc'"):
        ptx_kernel("    call (%d2), malloc, (%d3);")


def test_unknown_label():
    with pytest.raises(Unsupported, match="unknown label"):
        ptx_kernel("    bra NOWHERE;")
