"""Every public name and method has a docstring with an example, and every example runs as printed."""

import doctest
import importlib
import inspect
import itertools
import pkgutil
import re

import pages
import pytest
import torch
import torch.distributed as dist

import lrd_kernels as lrd
import lrd_uq.evaluate
from lrd_kernels import swap

# Public classes and functions, by the module that users import them from.
PUBLIC = {
    "lrd_kernels": lrd.__all__,
    "lrd_kernels.distributed": lrd.distributed.__all__,
    "lrd_kernels.streaming": lrd.streaming.__all__,
    "lrd_kernels._methods": ["Aggregate", "Modes"],  # results of methods
    "lrd_kernels.ops.dispatch": ["BackendStatus"],  # entries of backends()
    "lrd_uq.evaluate": lrd_uq.evaluate.__all__,
}
TRAINING = re.findall(r"^::: (lrd_uq[\w.]+)\.(\w+)$", (pages.ROOT / "docs/api_training.md").read_text(), re.MULTILINE)
for module, names in itertools.groupby(TRAINING, key=lambda found: found[0]):
    PUBLIC.setdefault(module, [name for _, name in names])
NO_EXAMPLE = {
    "distributed": "a module, whose functions have examples",
    "streaming": "a module, whose functions have examples",
    "kl": "a module, which registers the divergences of torch.distributions.kl_divergence",
    "BackendStatus": "shown by backends()",
    "Calibration": "shown by calibration",
    "Difference": "shown by paired",
    "Evaluation": "shown by evaluate",
    "Losses": "shown by Objective",
    "Row": "shown by table",
    "collect": "a step of evaluate",
    "SemidefiniteNormal.log_prob": "only raises",
    "SemidefiniteNormal.entropy": "only raises",
}
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def modules(package):
    """The modules of a package with docstrings that users read; Triton's kernels are not among them."""
    names = [package.__name__, *(info.name for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."))]
    skipped = (".triton", "._C", ".__main__")
    return [importlib.import_module(name) for name in names if not any(part in name for part in skipped)]


def examples(package):
    finder = doctest.DocTestFinder(exclude_empty=True)
    tests = [
        test for module in modules(package) for test in finder.find(module, extraglobs={"torch": torch, "lrd": lrd})
    ]
    return [test for test in tests if test.examples]


def run(test):
    """The report of the failures of one docstring, empty if there are none."""
    said = []
    torch.manual_seed(0)
    doctest.DocTestRunner(optionflags=FLAGS, verbose=False).run(test, out=said.append)
    return "".join(said)


@pytest.fixture
def group_of_one():
    """The examples of `lrd_kernels.distributed` are those of a group with one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("package", [lrd, lrd_uq], ids=lambda package: package.__name__)
def test_examples_print_what_they_show(package, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tests = examples(package)
    assert len(tests) > 10
    with lrd.use_backend(None):  # what an example sets ends with the block
        failures = [report for report in map(run, tests) if report]
    assert not swap.patch_torch._active
    assert not failures, "\n".join(failures)


def test_a_wrong_example_fails():
    test = doctest.DocTestParser().get_doctest(
        ">>> lrd.logdet(torch.ones(3, 1), torch.ones(3))\ntensor(2.)", {"lrd": lrd, "torch": torch}, "wrong", None, 0
    )
    assert "tensor(1.3863)" in run(test)


def documented(module_name, names):
    """Qualified name -> object, for public names and the methods and properties that they define themselves."""
    module = importlib.import_module(module_name)
    for name in names:
        found = getattr(module, name)
        yield name, found
        if not inspect.isclass(found):
            continue
        own = [cls for cls in found.__mro__ if cls.__module__.startswith(("lrd_kernels", "lrd_uq"))]
        for method, value in {key: value for cls in reversed(own) for key, value in vars(cls).items()}.items():
            if (
                not method.startswith("_")
                and not method[0].isupper()
                and (callable(value) or hasattr(value, "__get__"))
            ):
                yield f"{name}.{method}", value


def is_field(value):
    """Whether a class attribute is a field of a named tuple."""
    return type(value).__name__ == "_tuplegetter"


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_have_docstrings_with_examples(module):
    missing = []
    for name, value in documented(module, PUBLIC[module]):
        if is_field(value):
            continue
        text = inspect.getdoc(value.__func__ if isinstance(value, classmethod) else value)
        is_property = not (
            inspect.isclass(value) or inspect.ismodule(value) or callable(getattr(value, "__func__", value))
        )
        is_enough = is_property or name in NO_EXAMPLE or (module.startswith("lrd_uq") and "." in name)
        if not text or not (">>>" in text or is_enough):
            missing.append(name)
    assert missing == []
