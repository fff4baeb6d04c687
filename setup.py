"""Drives CMake for the native library and puts what it built beside the Python files. No source list here."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
BUILD = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"


class CMakeBuild(build_ext):
    """Configures once, then lets ninja rebuild only what changed."""

    def build_extension(self, ext: Extension) -> None:
        subprocess.run(
            [
                *("cmake", "-G", "Ninja", "-S", ROOT, "-B", BUILD),
                f"-DPython_EXECUTABLE={sys.executable}",
                *os.environ.get("CMAKE_ARGS", "").split(),
            ],
            check=True,
            env=_environment(),
        )
        subprocess.run(["cmake", "--build", BUILD], check=True, env=_environment())
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        library = BUILD / target.name
        if library.exists() or not ext.optional:
            shutil.copy2(library, target)

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".abi3.so"


def _environment() -> dict[str, str]:
    """The ninja that pip installed sits beside the interpreter, which need not be on PATH."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**os.environ, "PATH": path}


setup(
    ext_modules=[
        Extension("lrd_kernels._C", sources=[], py_limited_api=True),
        Extension("lrd_kernels._C_cuda", sources=[], py_limited_api=True, optional=True),  # where nvcc is found
    ],
    cmdclass={"build_ext": CMakeBuild},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
