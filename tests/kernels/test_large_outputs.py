"""Memory of large gradients stays for the next call: reused when free, never while in use, and only a little of it."""

import resource

import pytest
import torch

import lrd_kernels as lrd
from lrd_kernels import _ops, testing

pytestmark = pytest.mark.skipif(_ops.cpu_error is not None, reason=str(_ops.cpu_error))

KEEPS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 11)  # before, malloc serves


def gradient(S, R=8, seed=0):
    """The gradient for a factor of S * R * 4 bytes."""
    inputs = testing.make_inputs((), S, R, dtype=torch.float32, seed=seed)
    return testing.value_and_grads(lrd.log_prob, inputs)[3]


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not KEEPS, reason="torch before 2.11 takes no memory from outside")
def test_dropped_gradient_leaves_its_memory_to_the_next():
    first = gradient(2**18)
    address = first.data_ptr()
    expected = first.clone()
    del first
    again = gradient(2**18)
    assert again.data_ptr() == address
    assert torch.equal(again, expected)


def test_gradients_in_use_keep_their_memory():
    kept = [gradient(2**18, seed=seed) for seed in range(6)]
    expected = [g.clone() for g in kept]
    for seed in range(6, 9):
        gradient(2**18, seed=seed)
    assert len({g.data_ptr() for g in kept}) == len(kept)
    assert all(torch.equal(g, e) for g, e in zip(kept, expected, strict=True))


def test_few_pieces_are_kept():
    gradient(2**20)
    before = resident()
    sizes = [2**20 - 2**17 * i for i in range(8)]  # 32 MB and less: more than 150 MB together
    held = [gradient(S) for S in sizes]
    assert resident() - before > 100e6
    del held
    assert resident() - before < 120e6  # at most four pieces, the largest ones, of them one was there before


def test_a_kept_piece_is_not_wasted_on_much_smaller_outputs():
    large = gradient(2**20)
    address = large.data_ptr()
    del large
    small = gradient(2**18)
    assert small.data_ptr() != address


def test_kept_memory_can_be_released():
    gradient(2**21)
    before = resident()
    lrd.release_memory()
    assert not KEEPS or before - resident() > 50e6
