"""By the instructions of their machine code, the CUDA kernels wait for memory, and not memory for them."""

import cost
import emulated_cuda
import pytest
import sass

if reason := emulated_cuda.why_not() or (None if sass.find_nvdisasm() else "nvdisasm is not installed"):
    pytest.skip(reason, allow_module_level=True)

# Clocks of the busiest pipe, over those of DRAM for one pass: the forward pass (up to rank 16 with the second pass of
# values drawn from the model) and the backward pass.
LIMITS = {8: (1.0, 1.0), 16: (1.0, 1.0), 32: (1.2, 1.2), 64: (1.5, 2.0)}
# Where a limit is missed, by issue slots (loads of single numbers take more of them) and by loads from shared memory.
MISSED = {
    ("forward", 16, "rank", 90): 1.35,
    ("first", 32, "rank", 90): 1.4,
    ("first", 64, "rank", 90): 1.7,
    **{("backward", 32, layout, 90): 1.4 for layout in ("row", "rank")},
    **{("backward", 64, layout, 90): 2.05 for layout in ("row", "rank")},
}
QUICK = {(8, "row", 75), (8, "rank", 90), (16, "row", 80), (64, "row", 80)}
CASES = [(R, layout, a) for R in LIMITS for layout in ("row", "rank") for a in sass.CARDS]


@pytest.mark.parametrize(
    ("R", "layout", "architecture"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_memory_is_the_bound(R, layout, architecture):
    for which, limit in zip(("forward" if R <= 16 else "first", "backward"), LIMITS[R], strict=True):
        found = cost.ratios(R, layout, architecture, which)
        worst = max(found, key=found.get)
        assert found[worst] <= MISSED.get((which, R, layout, architecture), limit), (which, worst, found)


def test_pipes():
    names = ("FFMA.FTZ", "DADD", "F2F.F64.F32", "MUFU.RCP", "LDS.128", "IMAD.WIDE", "FSETP.GE", "LDC.64", "UIADD3")
    assert [sass.pipe_of(name) for name in names] == [
        *("fp32", "fp64", "convert64", "special", "memory", "integer", "integer", None, None),
    ]
    assert [sass.bytes_of(name) for name in ("LDG.E.128", "LDS.64", "STG.E", "LDG.E.U16")] == [16, 8, 4, 2]


TEXT = """.text.kernel:
        /*0000*/                   MOV R1, R2 ;
.L_1:
        /*0010*/                   FFMA R1, R2, R3, R4 ;
.L_2:
        /*0020*/                   LDS.128 R1, [R2] ;
        /*0030*/               @P0 BRA `(.L_2) ;
        /*0040*/                   DADD R1, R2, R3 ;
        /*0050*/              @!P1 BRA `(.L_1) ;
        /*0060*/                   EXIT ;
.L_3:
        /*0070*/                   BRA `(.L_3);
"""


def test_loops_inside_the_main_loop_run_as_often_as_they_are_said_to():
    counts = sass.count(TEXT, (4,))
    assert (counts["fp32"], counts["fp64"], counts["memory"], counts["LDS 16"]) == (1, 1, 4, 4)
    assert counts["issue"] == 1 + 2 * 4 + 2
    with pytest.raises(ValueError, match="1 loops"):
        sass.count(TEXT, ())


def test_what_a_card_takes():
    counts = cost.Counter(issue=128, fp32=64, convert64=4, wavefronts=32)
    turing, ampere = (sass.CARDS[a].clocks(counts) for a in (75, 80))
    assert (turing["issue"], turing["fp32"], turing["fp64"], turing["special"], turing["memory"]) == (1, 1, 2, 0, 1)
    assert (ampere["fp64"], ampere["special"]) == (0, 0.25)
