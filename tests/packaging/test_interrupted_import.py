"""Ctrl-C or a lack of memory in the middle of `import lrd_kernels`: the next import works."""

import pytest

# Raises in line number `at` of those that registration runs, in the module itself and in torch.library.
INTERRUPTED = """
import sys
import torch
from torch._library import fake_impl, simple_registry, utils

FILES = (torch.library.__file__, fake_impl.__file__, simple_registry.__file__, utils.__file__)

class Interrupt:
    def __init__(self, at):
        self.left = at

    def __call__(self, frame, event, argument):
        registry = frame.f_code.co_filename.endswith("lrd_kernels/ops/registry.py")
        if not registry and not (frame.f_code.co_filename in FILES):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self

def attempt(at):
    # Whether the import was interrupted.
    interrupt = Interrupt(at)
    sys.settrace(interrupt)
    try:
        import lrd_kernels
    except KeyboardInterrupt as error:
        HELD.append(error)  # as an interactive session holds the last one, and with it the frames
        return True
    finally:
        sys.settrace(None)
    return False

HELD = []
for at in range(FIRST, 10**6, STEP):
    if not attempt(at):
        break
print(len(HELD))
"""

USE = """
import lrd_kernels as lrd
from lrd_kernels import testing

inputs = testing.make_inputs((2,), 50, 3)
wanted = torch.distributions.LowRankMultivariateNormal(*inputs[1:]).log_prob(inputs.value)
for call in (lrd.log_prob, torch.compile(lrd.log_prob, backend="eager", fullgraph=True)):
    torch.testing.assert_close(call(*inputs, backend="cpu"), wanted)
"""


@pytest.mark.parametrize(("first", "step"), [(1, 29), pytest.param(1, 1, marks=pytest.mark.slow)])
def test_import_works_after_interrupted_ones(run_python, first, step):
    script = f"FIRST, STEP = {first}, {step}\n" + INTERRUPTED + USE
    interrupted = int(run_python("-c", script).stdout)
    assert interrupted > 600 / step
