"""On the compiled code: each element of P is loaded once forward and once backward, and its gradient stored once."""

import pytest
import traffic

from benchmarks.gpu import bounds

QUICK = [(8, "row"), (32, "rank")]
SLOW = [(8, "rank"), (16, "row"), (16, "rank"), (32, "row")]


@pytest.mark.parametrize(("R", "layout"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)])
def test_every_element_once(R, layout):
    found = traffic.count(300, R, layout)
    assert found.read_forward == found.read_backward == found.written == 1.0
    # 300 rows are no whole number of sectors in rank-major memory. A thread that loads its row of eight or sixteen
    # columns by parts asks for every sector twice, the second time from the first-level cache.
    assert found.excess_forward <= (1.9 if layout == "row" and R in (8, 16) else 1.3)
    assert found.excess_backward <= 1.3


def test_larger_ranks_in_tiles():
    found = traffic.count(70, 130, "row")
    assert found.written == 1.0
    assert found.read_forward > 1.0


def test_bounds_are_those_of_the_bandwidth():
    assert bounds.least_seconds(1048576, 8, 672e9) == pytest.approx(4 * 1048576 * 30 / 672e9)
