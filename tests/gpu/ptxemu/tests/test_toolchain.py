"""Finding compilers, the build cache, and importing without optional packages."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from ptx import ptx_kernel
from ptxemu import BuildError, Kernel, build, cuda

needs_nvcc = pytest.mark.skipif(cuda.find_nvcc() is None, reason="nvcc is not installed")


@needs_nvcc
def test_include_directories_and_defines(tmp_path):
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "factor.h").write_text("constexpr int FACTOR = 6;\n")
    source = tmp_path / "k.cu"
    source.write_text(
        '#include "factor.h"\n'
        "#ifdef ENABLED\n"
        "template <class T> __global__ void scale(T* x) { x[threadIdx.x] *= FACTOR * EXTRA; }\n"
        "template __global__ void scale<double>(double*);\n"
        "#endif\n"
    )
    ptx = cuda.compile(
        source,
        arch="sm_90",
        include_dirs=[tmp_path / "include"],
        defines={"EXTRA": 7, "ENABLED": None},
    )
    assert ".target sm_90" in ptx
    x = np.ones(32)
    Kernel(ptx, "scale").launch(1, 32, [x])
    assert (x == 42).all()


@needs_nvcc
def test_nvcc_error_is_shown(tmp_path):
    source = tmp_path / "bad.cu"
    source.write_text("this is no C++\n")
    with pytest.raises(BuildError, match="bad.cu"):
        cuda.compile(source)


def test_missing_nvcc(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    with pytest.raises(BuildError, match="nvcc was not found"):
        cuda.compile("k.cu")


def test_cuda_home(monkeypatch, tmp_path):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert cuda.find_nvcc() == str(nvcc)


def test_cache_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("PTXEMU_CACHE", str(tmp_path / "mine"))
    body = "    st.global.b32 [%d1], 123;"
    out = np.zeros(1, np.uint32)
    ptx_kernel(body).launch(1, 1, [None, out])
    built = sorted(path.suffix for path in (tmp_path / "mine").iterdir() if path.is_file())  # beside the prelude
    assert built == [".cpp", ".so"] and out[0] == 123
    monkeypatch.delenv("PTXEMU_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.cache_directory() == tmp_path / "ptxemu"


def test_import_needs_neither_torch_nor_triton():
    check = "import sys, ptxemu; sys.exit('torch' in sys.modules or 'triton' in sys.modules)"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", check], cwd=root, check=False).returncode == 0
