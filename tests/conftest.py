"""Settings of all tests. Scratch memory of the kernels is poisoned with NaN before the library is loaded."""

import os

os.environ.setdefault("LRD_POISON_SCRATCH", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

import lrd_kernels as lrd

settings.register_profile(
    "lrd", deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("lrd")


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
