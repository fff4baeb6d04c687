"""Runs the quick tests of what changed since the last commit: `make check`.

FOLDERS maps the beginning of a path to the tests that look at it; the longest match counts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
ALWAYS = ("tests/packaging/test_import_rules.py", "tests/packaging/test_tree.py")
INTERPRETED = "tests/kernels -k triton"  # in Triton's interpreter
FOLDERS = {
    "benchmarks": ("tests/benchmarks",),
    "benchmarks/gpu": ("tests/gpu/test_choose.py",),
    "benchmarks/results": (),
    "csrc": ("tests/cpp", "tests/kernels"),
    "csrc/cuda": ("tests/gpu/test_cuda_code.py", "tests/gpu/test_cuda_build.py"),
    "docs": ("tests/docs",),
    "lrd_kernels": ("tests/kernels", "tests/docs/test_doctests.py"),
    "lrd_kernels/ops/triton": (INTERPRETED, "tests/gpu/test_compiled_code.py"),
    "python/lrd_uq": ("tests/lrd_uq", "tests/docs/test_doctests.py"),
    "README.md": ("tests/docs",),
    "CONTRIBUTING.md": ("tests/docs/test_links.py",),
    "mkdocs.yml": ("tests/docs/test_links.py",),
    "CMakeLists.txt": ("tests/cpp", "tests/packaging"),
    "pyproject.toml": ("tests/packaging",),
    "setup.py": ("tests/packaging",),
}


def changed() -> list[str]:
    """Files that differ from the last commit, new ones included."""
    commands = (["git", "diff", "--name-only", "HEAD"], ["git", "ls-files", "--others", "--exclude-standard"])
    return [
        name
        for command in commands
        for name in subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    ]


def tests_of(name: str) -> tuple[str, ...]:
    """What to run for one file: a test runs itself, what tests share runs their folder."""
    path = Path(name)
    if path.parts[0] == "tests":
        own = path.name.startswith("test_") or len(path.parts) == 2
        return ((name if own else str(path.parent)),) if path.suffix == ".py" and path.name != "conftest.py" else ()
    matches = [folder for folder in FOLDERS if path.is_relative_to(folder)]
    return FOLDERS[max(matches, key=len)] if matches else ()


def chosen(names: Iterable[str]) -> list[str]:
    """The tests of some files, each once: none that lies in a folder which runs as a whole."""
    found = {test for name in names for test in tests_of(name)} | set(ALWAYS)
    found = {test for test in found if test == INTERPRETED or ((ROOT / test).exists() and _holds_tests(ROOT / test))}
    return sorted(test for test in found if not any(str(parent) in found for parent in Path(test).parents))


def _holds_tests(path: Path) -> bool:
    return path.is_dir() or path.name.startswith("test_")


def main() -> int:
    tests = chosen(changed())
    parallel = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", "-m", "not slow and not alone"]
    codes = []
    if INTERPRETED in tests:
        tests.remove(INTERPRETED)
        command = [*parallel, *INTERPRETED.split()]
        codes.append(subprocess.run(command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}).returncode)
    codes.append(subprocess.run([*parallel, *tests], cwd=ROOT).returncode)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
