"""The installation of the README, as printed, in an environment of its own: from the first line to a first result."""

import re
import shlex
import shutil
import subprocess
import sys
import sysconfig

import pages
import pytest

pytestmark = pytest.mark.slow


def test_installs_as_printed(tmp_path):
    """torch and the other requirements are this environment's, so nothing is downloaded; no CUDA kernels, for time."""
    tree = tmp_path / "tree"
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=pages.ROOT)
    for name in set(listed.split("\0")) - {""}:
        if (pages.ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(pages.ROOT / name, tree / name)
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env")
    python = tmp_path / "env/bin/python"
    (site,) = (tmp_path / "env/lib").glob("python*/site-packages")
    (site / "of_the_tests.pth").write_text(sysconfig.get_path("purelib") + "\n")

    (block,) = (block for block in pages.blocks(pages.ROOT / "README.md") if "pip install torch" in block.code)
    for line in block.code.splitlines():
        program, *words = shlex.split(line, comments=True)
        start = [python] if program == "python" else [python, "-m", "pip"]
        said = run(*start, *words, cwd=tree if program == "pip" else tmp_path, CMAKE_ARGS="-DLRD_CUDA=OFF")
    assert re.search(r"^ *cpu +yes", said, re.MULTILINE)

    first, *_ = (block for block in pages.blocks(pages.ROOT / "README.md") if block.language == "python")
    where = "import lrd_kernels, sys; print(lrd_kernels.__file__, file=sys.stderr)\n"
    printed = run(python, "-c", where + first.code, cwd=tmp_path)
    assert printed.split(":")[0] == first.output.split(":")[0]


def run(*command, cwd=None, **environment):
    import os

    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    env["PATH"] = f"{sysconfig.get_path('scripts')}:{env['PATH']}"
    result = subprocess.run(
        [str(word) for word in command], cwd=cwd, env={**env, **environment}, capture_output=True, text=True
    )
    assert result.returncode == 0, f"{shlex.join(map(str, command))}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
    return result.stdout
