"""What the packaging tests share: fresh processes, and the files that belong to the project."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import lrd_kernels

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def root():
    """The top of the source tree."""
    return ROOT


@pytest.fixture(scope="session")
def project_files():
    """Every file that is tracked or could be, relative to the top: what is ignored does not count."""
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).stdout
    return sorted(path for name in set(listed.split("\0")) - {""} if (ROOT / (path := Path(name))).is_file())


@pytest.fixture(scope="session")
def run_command():
    """`run`, for tests: a command that must succeed, with its output captured."""
    return run


@pytest.fixture
def run_python(tmp_path):
    """Runs a fresh interpreter elsewhere, with the package of `folder` (this one's, unless told) on its path.

    Without `site` (-S): an editable install would add the modules that `folder` lacks.
    """

    def run_it(*arguments, folder=Path(lrd_kernels.__file__).parents[1], **environment):
        path = os.pathsep.join([str(folder), sysconfig.get_path("purelib")])
        environment = {**os.environ, "PYTHONPATH": path, **environment}
        return run(sys.executable, "-S", *arguments, cwd=tmp_path, env=environment)

    return run_it


def run(*command, **options):
    """Output of a command, as text; where it fails, what it said is the test's message."""
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)
    said = f"{result.stdout[-4000:]}\n{result.stderr[-4000:]}"
    assert result.returncode == 0, f"{' '.join(map(str, command))} ended with {result.returncode}\n{said}"
    return result
