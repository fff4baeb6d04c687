"""Tensors right before and right after pages that cannot be touched: no kernel reads or writes beyond an end."""

import os
import signal
import subprocess
import sys

import pytest

from benchmarks.stress import guard
from lrd_kernels.ops import load

pytestmark = pytest.mark.skipif(load.cpu_error is not None, reason=str(load.cpu_error))


@pytest.fixture(scope="module")
def fence(tmp_path_factory):
    made = guard.fence(tmp_path_factory.mktemp("fence"))
    if made is None:
        pytest.skip("needs a C compiler")
    return made


def run(code, **environment):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


CASES = """
from benchmarks.stress import runner
outcome = runner.run("guard_pages", 7, range({first}, {count}, {step}))
assert outcome.failures == [], outcome.failures
assert sum(outcome.counts.values()) >= 40
"""


@pytest.mark.parametrize(
    ("isa", "where"), [*((isa, "end") for isa in load.available_isas()), (load.cpu_isa(), "begin")]
)
def test_no_kernel_goes_beyond_an_end(fence, isa, where):
    first = 0 if where == "begin" else 1 + load.available_isas().index(isa)
    code = CASES.format(first=first, count=164, step=4)
    result = run(code, LRD_CPU_ISA=isa, FENCE=where, LD_PRELOAD=str(fence))
    assert result.returncode == 0, result.stderr[-2000:]


TOUCH = """
import ctypes, torch
from benchmarks.stress import guard
x = {tensor}
size = x.numel() * x.itemsize
ctypes.memset(x.data_ptr(), 0, size)
print("inside", flush=True)
{mistake}
print("outside")
"""
GUARDED = {where: f"guard.guarded(torch.ones(33), {where == 'end'})" for where in ("begin", "end")}
BEYOND = {"begin": "x.data_ptr() - 1", "end": "x.data_ptr() + size"}


@pytest.mark.parametrize("where", ["begin", "end"])
def test_a_touch_beyond_an_input_ends_the_process(where):
    result = run(TOUCH.format(tensor=GUARDED[where], mistake=f"ctypes.string_at({BEYOND[where]}, 1)"))
    assert result.returncode == -signal.SIGSEGV
    assert result.stdout == "inside\n"


@pytest.mark.parametrize("where", ["begin", "end", "freed"])
def test_a_touch_beyond_an_output_ends_the_process(fence, where):
    address = "(x.data_ptr(), globals().__delitem__('x'))[0]" if where == "freed" else BEYOND[where]
    code = TOUCH.format(tensor="torch.empty(34)", mistake=f"ctypes.memset({address}, 0, 1)")
    result = run(code, LD_PRELOAD=str(fence), FENCE="begin" if where == "begin" else "end")
    assert result.returncode == -signal.SIGSEGV
    assert result.stdout == "inside\n"
