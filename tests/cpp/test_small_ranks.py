"""The kernels of small ranks beside plain loops: every rank, every edge of a block, every instruction set.

Memory ends at a page that must not be touched, so that a read or write behind it ends the process.
"""

import pytest

core = pytest.importorskip("_core_testing", reason="built with -DLRD_TESTING=ON (make build)")


@pytest.mark.parametrize("isa", core.available_isas())
@pytest.mark.parametrize("R", range(1, 18))
def test_every_dtype_layout_and_precision(isa, R):
    for S, N in [(1, 1), (2, 0), (15, 1), (16, 2), (17, 1), (33, 1), (47, 5)]:
        assert core.wrong_numbers(isa, S, R, N) == 0, f"S = {S}, N = {N}"


@pytest.mark.parametrize("isa", core.available_isas())
@pytest.mark.parametrize("R", range(1, 18))
def test_the_edges_of_blocks(isa, R):
    for block in sorted(set(core.block_rows(R, 1))):
        for S in (block - 1, block, block + 1, 2 * block + 15):
            assert core.wrong_numbers(isa, S, R, 1) == 0, f"S = {S}"


@pytest.mark.parametrize("isa", core.available_isas())
def test_many_values(isa):
    for R, N in [(1, 16), (8, 16), (16, 15), (5, 17), (16, 33)]:
        assert core.wrong_numbers(isa, 70, R, N) == 0, f"R = {R}, N = {N}"


@pytest.mark.parametrize("isa", core.available_isas())
def test_columns_a_power_of_two_apart(isa):
    """They share lines of the first-level cache, and go through a buffer."""
    for R in (5, 8, 9, 16):
        assert core.wrong_numbers(isa, 1024, R, 1) == 0, f"R = {R}"
