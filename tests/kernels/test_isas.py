"""The contract under every instruction set this machine has, each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lrd_kernels.ops import load

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize("isa", load.available_isas())
def test_contract(isa):
    if isa == load.cpu_isa():
        pytest.skip(f"{isa} is what the other tests run with")
    command = [sys.executable, "-m", "pytest", "-q", "-k", "not reference", "test_contract.py", "test_ops.py"]
    result = subprocess.run(
        command, cwd=HERE, env={**os.environ, "LRD_CPU_ISA": isa}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
