"""Every Python snippet of the pages runs as printed, in the order of the page, and prints what the page shows."""

import ast
import contextlib
import io
import re
import warnings

import matplotlib
import pages
import pytest
import torch

import lrd_kernels as lrd
import lrd_uq
from lrd_kernels import swap

matplotlib.use("Agg")
NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:e[-+]?\d+)?")


def python_blocks(page):
    return [block for block in pages.blocks(page) if block.language == "python"]


@pytest.fixture
def clean(tmp_path, monkeypatch):
    """Snippets may write files, patch torch's class and choose a backend."""
    monkeypatch.chdir(tmp_path)
    with lrd.use_backend(None):  # what a snippet sets ends with the block
        yield
    for patch in list(swap.patch_torch._active):
        patch.undo()


@pytest.mark.parametrize("page", [page for page in pages.PAGES if python_blocks(page)], ids=pages.name_of)
def test_snippets_of_the_page_run(page, clean):
    torch.manual_seed(0)
    namespace = {"__name__": "__main__"}
    for block in python_blocks(page):
        where = f"{pages.name_of(page)}:{block.line}"
        code = compile("\n" * (block.line - 1) + block.code, where.partition(":")[0], "exec")
        if block.not_run:
            check_names(block.code, where)
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)
            exec(code, namespace)
        compare(printed.getvalue(), block.output, where, block.varies)


def test_own_network_and_data_take_forty_lines():
    """The first snippet of its page trains and scores a user's own module and data set."""
    page = next(page for page in pages.PAGES if pages.name_of(page) == "docs/own_network.md")
    code = python_blocks(page)[0].code
    assert len(code.splitlines()) <= 40
    assert all(word in code for word in ("(nn.Module)", "(Dataset)", ".fit(", "evaluate(", "predict_joint("))


def compare(printed, shown, where, varies=False):
    """Fails unless the output is as shown: the same words, and numbers that agree in all but the last digit shown."""
    if shown is None:
        assert not printed, f"{where} prints, and the page does not show it:\n{printed}"
        return
    got, wanted = ([NUMBER.sub("#", line).split() for line in text.rstrip().splitlines()] for text in (printed, shown))
    message = f"{where} prints\n{printed}\nbut the page shows\n{shown}"
    assert got == wanted, message
    for a, b in () if varies else zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=True):
        assert abs(value(a) - value(b)) <= 1.5 * last_digit(b) + 1e-4 * abs(value(b)), message


def value(number):
    return float(number.replace(",", ""))


def last_digit(number):
    """What the last digit of a number counts; 0 for an integer, which must agree."""
    digits, _, exponent = number.partition("e")
    decimals = len(digits.partition(".")[2])
    return 10.0 ** (int(exponent or 0) - decimals) if decimals or exponent else 0.0


def check_names(code, where):
    """The names of this project in a snippet that is not run exist."""
    modules = {"lrd": lrd, "lrd_uq": lrd_uq}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            assert hasattr(modules[node.value.id], node.attr), f"{where}: {node.value.id} has no {node.attr}"


def test_output_is_compared():
    compare("a 1.234\n", "a 1.235\n", "here")
    compare("12,345 of 3\n", "12,345 of 3\n", "here")
    compare("12 ms\n", "345 ms\n", "here", varies=True)
    for printed, shown in (("a 1.23", "a 1.26"), ("a 3", "a 4"), ("a 1", "b 1"), ("a 1", None), ("", "a")):
        with pytest.raises(AssertionError):
            compare(printed, shown, "here")


def test_missing_names_are_found():
    check_names("lrd.log_prob(x)", "here")
    with pytest.raises(AssertionError, match="no_such_function"):
        check_names("lrd.no_such_function(x)", "here")
