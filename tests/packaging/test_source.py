"""The source distribution: it has all that a build needs, and a build of it with isolation serves."""

import os
import re
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="module")
def source(project_files, root, run_command, tmp_path_factory):
    """The archive, made from a copy of what belongs to the project."""
    folder = tmp_path_factory.mktemp("source")
    for file in project_files:
        (folder / "tree" / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / file, folder / "tree" / file)
    run_command(sys.executable, "-m", "build", "-s", "--no-isolation", "-o", folder / "dist", folder / "tree")
    (archive,) = (folder / "dist").iterdir()
    return archive


def test_source_has_what_a_build_needs(source, project_files):
    with tarfile.open(source) as archive:
        held = {name.partition("/")[2] for name in archive.getnames() if archive.getmember(name).isfile()}
    ours = r"csrc/.*|lrd_kernels/.*|python/lrd_uq/.*|[^/]*\.(toml|in|py|txt|cff)|CHANGELOG.md|README.md|LICENSE"
    wanted = {str(file) for file in project_files if re.fullmatch(ours, str(file))}
    made = {name for name in held if name in ("PKG-INFO", "setup.cfg") or ".egg-info/" in name}
    assert held - made == wanted
    assert {"CMakeLists.txt", "csrc/core/policy.h", "python/lrd_uq/configs/base.yaml"} < held


def test_old_compiler_is_named_before_anything_is_built(root, run_command, tmp_path):
    if not (compiler := shutil.which("g++")):
        pytest.skip("g++ is not installed")
    old = tmp_path / "g++-old"
    old.write_text(f'#!/bin/sh\nexec {compiler} "$@" -U__GNUC__ -D__GNUC__=11\n')
    old.chmod(0o755)
    cmake = [
        Path(sys.executable).with_name("cmake"),
        "-S",
        root,
        "-B",
        tmp_path / "build",
        f"-DCMAKE_CXX_COMPILER={old}",
    ]
    with pytest.raises(AssertionError) as failed:
        run_command(*cmake, f"-DPython_EXECUTABLE={sys.executable}")
    said = " ".join(str(failed.value).split())  # cmake breaks lines
    assert f"needs GCC 12 or Clang 15, or later; {old} is GNU 11." in said
    assert not (tmp_path / "build" / "build.ninja").exists()


@pytest.mark.slow
def test_wheel_is_built_from_it_with_isolation(source, run_command, tmp_path):
    """As the documentation says: a constraint keeps pip from fetching a torch with CUDA for the build alone."""
    constraint = tmp_path / "build.txt"
    constraint.write_text(f"torch=={torch.__version__}\n")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-cache-dir", "-w", tmp_path / "dist"]
    environment = {**os.environ, "CMAKE_ARGS": "-DLRD_CUDA=OFF"}
    run_command(*command, "--build-constraint", constraint, source, cwd=tmp_path, env=environment)
    (wheel,) = (tmp_path / "dist").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "unpacked")
    script = "import lrd_kernels as lrd; print(lrd.__file__, lrd.backends()['cpu'].available)"
    environment["PYTHONPATH"] = str(tmp_path / "unpacked")
    said = run_command(sys.executable, "-c", script, cwd=tmp_path, env=environment).stdout.split()
    assert Path(said[0]).is_relative_to(tmp_path)
    assert said[1] == "True"
