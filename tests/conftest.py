"""Settings of all tests. Scratch memory of the kernels is poisoned with NaN before the library is loaded."""

import os
from pathlib import Path

os.environ.setdefault("LRD_POISON_SCRATCH", "1")
# What is compiled for the tests is kept between runs, by a hash of its text.
os.environ.setdefault("PTXEMU_CACHE", str(Path(__file__).parents[1] / "build/ptxemu"))
os.environ.setdefault("TRITON_CACHE_DIR", str(Path(__file__).parents[1] / "build/triton"))
# One thread in each process: workers share the cores. Tests about threads set their own number.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from budget import Budget
from hypothesis import HealthCheck, settings

import lrd_kernels as lrd

settings.register_profile(
    "lrd", deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("lrd")


def pytest_configure(config):
    config.pluginmanager.register(Budget(), "budget")


@pytest.fixture(params=sorted(lrd.backends()))
def backend(request):
    """Every backend by name; one that is not here is skipped with its reason."""
    status = lrd.backends()[request.param]
    if not status.available:
        pytest.skip(f"{request.param}: {status.detail}")
    return request.param


@pytest.fixture(autouse=True)
def _threads():
    """A test may change the number of threads; the next one must not notice."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
