"""Which tests `make check` runs."""

import changed
import pytest


@pytest.mark.parametrize(
    ("names", "tests"),
    [
        ([], []),
        (["python/lrd_uq/heads.py", "README.md"], ["tests/docs", "tests/lrd_uq"]),
        (["lrd_kernels/joint.py", "tests/kernels/test_joint.py"], ["tests/docs/test_doctests.py", "tests/kernels"]),
        (["tests/kernels/test_joint.py", "tests/budget.py"], ["tests/kernels/test_joint.py"]),
        (["tests/kernels/contract.py"], ["tests/kernels"]),
        (["csrc/core/gram.h", "benchmarks/run.py"], ["tests/benchmarks", "tests/cpp", "tests/kernels"]),
        (["benchmarks/results/scaling.json", "tests/kernels/test_no_longer_there.py"], []),
    ],
)
def test_each_file_has_its_tests(names, tests):
    assert changed.chosen(names) == sorted([*tests, *changed.ALWAYS])


def test_every_folder_and_test_is_there():
    for folder, tests in changed.FOLDERS.items():
        assert (changed.ROOT / folder).exists()
        for test in tests:
            assert test == changed.INTERPRETED or (changed.ROOT / test).exists()


def test_triton_kernels_run_in_the_interpreter_too():
    assert changed.INTERPRETED in changed.chosen(["lrd_kernels/ops/triton/gram.py"])
