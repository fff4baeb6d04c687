"""Memory of large gradients stays for the next call: reused when free, never while in use, and only a little of it."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lrd_kernels as lrd
from lrd_kernels import testing
from lrd_kernels.ops import load

pytestmark = [pytest.mark.alone, pytest.mark.skipif(load.cpu_error is not None, reason=str(load.cpu_error))]

KEEPS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 11)  # before, malloc serves


def gradient(S, R=8, seed=0):
    """The gradient for a factor of S * R * 4 bytes."""
    inputs = testing.make_inputs((), S, R, dtype=torch.float32, seed=seed)
    return testing.value_and_grads(lrd.log_prob, inputs)[3]


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


def test_a_kept_piece_is_not_wasted_on_much_smaller_outputs():
    large = gradient(2**20)
    address = large.data_ptr()
    del large
    small = gradient(2**18)
    assert small.data_ptr() != address


@pytest.mark.skipif(not KEEPS, reason="torch before 2.11 takes no memory from outside")
def test_large_gradients_can_shrink_and_not_grow():
    """As all tensors on memory that torch did not allocate: docs/safety.md."""
    large = gradient(2**18)
    expected = large.flatten()[:10].clone()
    assert torch.equal(large.resize_(10), expected)
    with pytest.raises(RuntimeError, match="not resizable"):
        large.resize_(2**22)
    assert gradient(2**10).resize_(2**22).shape == (2**22,)  # a small one grows as torch's own


MEASURED = """
import ctypes, resource, sys
sys.path.insert(0, {folder!r})
from test_large_outputs import gradient, lrd

def resident():
    ctypes.CDLL(None).malloc_trim(0)  # what malloc keeps is not the question
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

gradient(2**20)
before = resident()
held = [gradient(2**20 - 2**17 * i) for i in range(8)]  # 32 MB and less: more than 150 MB together
all_held = resident() - before
del held
kept = resident() - before
lrd.release_memory()
print(all_held, kept, resident() - before)
"""


@pytest.mark.skipif(not KEEPS, reason="torch before 2.11 takes no memory from outside")
def test_few_pieces_are_kept_and_can_be_released():
    script = MEASURED.format(folder=str(Path(__file__).parent))  # in a process of its own, whose memory is this alone
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    held, kept, released = map(int, done.stdout.split())
    assert held > 100e6
    assert 20e6 < kept < 120e6  # four pieces, of which one was there before
    assert released < kept - 50e6
