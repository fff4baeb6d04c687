"""`import lrd_kernels` in fresh processes: without optional packages, without the compiled library, and its cost."""

import re
import shutil
from pathlib import Path

import pytest

import lrd_kernels
from lrd_kernels.ops import load

PACKAGE = Path(lrd_kernels.__file__).parent
BUILT_SETS = re.findall(r"^\s*add_isa\((\w+)", (Path(__file__).parents[2] / "CMakeLists.txt").read_text(), re.MULTILINE)

# Makes the packages look as if they were not installed, also to code that only asks whether they are.
HIDE = """
import sys

class Hiding:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else self.finder.find_spec(name, path, target)

HIDDEN = {"triton", "matplotlib", "mlxtend", "pyro", "scipy", "pandas", "sklearn", "hypothesis", "pytest", "lrd_uq"}
HIDDEN |= {"lightning", "pytorch_lightning", "monai", "torchmetrics", "jsonargparse", "safetensors"}
sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
"""

USE = """
import torch
import lrd_kernels as lrd
from lrd_kernels import testing

inputs = testing.make_inputs((2,), 50, 3)
wanted = torch.distributions.LowRankMultivariateNormal(*inputs[1:]).log_prob(inputs.value)
torch.testing.assert_close(lrd.log_prob(*inputs), wanted)
"""


@pytest.fixture
def bare_package(tmp_path):
    """A copy of the Python files alone."""
    folder = tmp_path / "bare"
    shutil.copytree(PACKAGE, folder / PACKAGE.name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return folder


def test_needs_no_optional_package(run_python):
    check = "print(sorted(HIDDEN & {name.partition('.')[0] for name in sys.modules}), lrd.backends()['cpu'].available)"
    assert run_python("-c", HIDE + USE + check).stdout.split() == ["[]", "True"]


def test_imports_nothing_beside_torch_and_numpy_and_costs_little(run_python):
    script = """
import sys, time, numpy
start = time.process_time()
import torch
between = time.process_time()
before = set(sys.modules)
import lrd_kernels
print((time.process_time() - between) / (between - start))
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(new - set(sys.stdlib_module_names) - {"numpy", "torch"}))
print("triton" in sys.modules)
"""
    beside_torch, new, triton = run_python("-c", script).stdout.splitlines()
    assert new == "lrd_kernels"
    assert triton == "False"
    assert float(beside_torch) < 0.25


# The report of `python -m lrd_kernels.info`, in the process that is there.
INFO = "import runpy; runpy.run_module('lrd_kernels.info', run_name='__main__')\n"


@pytest.mark.parametrize("library", ["missing", "broken"])
def test_works_without_the_compiled_library(run_python, bare_package, library):
    if library == "broken":
        (bare_package / PACKAGE.name / "_C.abi3.so").write_bytes(b"not a library")
    show = "print(lrd.__file__); print(lrd.backends()['cpu'])\n"
    ask = "try: lrd.log_prob(*inputs, backend='cpu')\nexcept RuntimeError as error: print(error)\n"
    where, status, said, *report = run_python("-c", USE + show + ask + INFO, folder=bare_package).stdout.splitlines()
    assert Path(where).is_relative_to(bare_package)
    assert "available=False" in status
    assert "_C.abi3.so did not load: " in status
    assert "backend 'cpu' is not available: the compiled library lrd_kernels/_C.abi3.so did not load" in said
    report = "\n".join(report)
    assert "cpu        no   the compiled library lrd_kernels/_C.abi3.so did not load: " in report
    assert "self-test skipped: only the reference backend is available" in report


# Warns at the first call that the reference serves, and never again: in a graph without a break, or in a plain call.
WARN = """
import os, warnings
import torch

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import lrd_kernels as lrd
    from lrd_kernels import testing

    inputs = testing.make_inputs((2,), 50, 3)
    with lrd.use_backend("reference"):
        lrd.log_prob(*inputs)
    print(len(caught))
    first = torch.compile(lrd.log_prob, backend="eager", fullgraph=True) if COMPILED else lrd.log_prob
    expected = first(*inputs)
    torch.testing.assert_close(lrd.log_prob(*inputs), expected)
    child = os.fork()
    if child == 0:
        lrd.log_prob(*inputs)
        os._exit(len(caught) - 1)
    assert os.waitpid(child, 0)[1] == 0
    ours = [w for w in caught if "lrd_kernels" in str(w.message)]
    print(len(ours), ours[0].category.__name__, ours[0].message)
"""


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("cause", ["missing", "isa"])
def test_reference_in_place_of_kernels_is_told_once(run_python, bare_package, cause, compiled):
    environment = {"LRD_CPU_ISA": "no_such_set"} if cause == "isa" else {"folder": bare_package}
    before, told = run_python("-c", f"COMPILED = {compiled}\n{WARN}", **environment).stdout.splitlines()
    assert before == "0"
    assert told.startswith("1 RuntimeWarning lrd_kernels uses its slow reference in plain torch, because ")
    assert ("LRD_CPU_ISA names an unknown" if cause == "isa" else "_C.abi3.so did not load") in told
    assert "Reinstall" in told


def test_unknown_instruction_set_leaves_the_reference(run_python):
    show = "print(lrd.backends()['cpu'])\n"
    status, *report = run_python("-c", USE + show + INFO, LRD_CPU_ISA="no_such_set").stdout.splitlines()
    assert "available=False" in status
    assert "LRD_CPU_ISA names an unknown instruction set" in status
    assert "LRD_CPU_ISA names" in "\n".join(report)


@pytest.mark.parametrize("isa", BUILT_SETS)
def test_every_instruction_set_serves_or_declines(run_python, isa):
    report = run_python("-m", "lrd_kernels.info", LRD_CPU_ISA=isa).stdout
    if isa in load.available_isas():
        assert f"in use: {isa}\n" in report
        assert "self-test against the reference: passed" in report
    else:
        assert "LRD_CPU_ISA names an instruction set that this CPU or operating system does not offer" in report


def test_training_layer_names_its_extra(run_python, root):
    """`import lrd_uq` and its heads need torch alone; what needs lightning says where to get it."""
    use = f"sys.path.insert(0, {str(root / 'python')!r})\nHIDDEN.discard('lrd_uq')\n"
    use += "import lrd_uq, lrd_uq.heads, lrd_uq.nets, lrd_uq.bayes, lrd_uq.objectives, lrd_uq.evaluate\n"
    use += "print(sorted(HIDDEN & {name.partition('.')[0] for name in sys.modules}))\n"
    use += "from lrd_uq import cli\nprint(cli.main(['fit', '--config', 'digits_dropout']))\nimport lrd_uq.module"
    script = HIDE + "import traceback\ntry:\n" + "".join(f"    {line}\n" for line in use.splitlines())
    script += "except ImportError as error: print(error)"
    none, code, said = run_python("-c", script).stdout.splitlines()
    assert (none, code) == ("[]", "1")
    assert said == "the training layer needs lightning: pip install 'lrd-kernels[train]'"
