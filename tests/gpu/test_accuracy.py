"""The compiled kernels err no more than those of the CPU do."""

import accuracy
import pytest

from lrd_kernels import testing

FLOAT32 = 2.0**-24


@pytest.mark.parametrize(
    ("family", "hardness", "R"),
    [pytest.param(*c, marks=() if c[2] == 16 else pytest.mark.slow, id="-".join(map(str, c))) for c in accuracy.CASES],
)
def test_auto_is_as_accurate_as_on_the_cpu(family, hardness, R):
    inputs = testing.hard_inputs(family, hardness, accuracy.ROWS, R)
    on_gpu, on_cpu = accuracy.emulated(inputs, "auto"), accuracy.on_cpu(inputs, "auto")
    for ours, theirs in zip(on_gpu, on_cpu, strict=True):
        assert ours <= 2 * theirs + 4 * FLOAT32


@pytest.mark.parametrize("R", [32, pytest.param(64, marks=pytest.mark.slow)])
def test_products_on_tensor_cores_are_float32_products(R):
    """Three tf32 products, not one: that would err a thousand times as much."""
    inputs = testing.hard_inputs("diagonal", 1.0, accuracy.ROWS, R)
    log_p, gradients = accuracy.emulated(inputs, "float32")
    assert log_p <= 16 * FLOAT32
    assert gradients <= 64 * FLOAT32
