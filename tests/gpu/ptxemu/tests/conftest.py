"""Shared fixtures."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
from ptxemu import Kernel, cuda

SOURCES = Path(__file__).parent / "kernels"


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@functools.cache
def _compiled(source: str, arch: str, defines: tuple[str, ...]) -> str:
    return cuda.compile(SOURCES / source, arch=arch, defines=dict.fromkeys(defines))


@pytest.fixture
def cuda_kernel():
    """Builds a kernel of tests/kernels; skips when there is no nvcc."""
    if cuda.find_nvcc() is None:
        pytest.skip("nvcc is not installed")

    def build(source: str, name: str, *defines: str, arch: str = "compute_80", **options) -> Kernel:
        return Kernel(_compiled(source, arch, defines), name, **options)

    return build
