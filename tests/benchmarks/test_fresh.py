"""Functions called in fresh processes: results, errors, time limits, and modules that are run as a program."""

import math
import os
import signal
import subprocess
import sys
import time

import pytest

from benchmarks import fresh


def test_result_comes_from_another_process():
    assert fresh.call(math.hypot, 3, 4) == 5.0
    assert fresh.call(os.getpid) != os.getpid()


def test_error_message_is_the_last_line():
    with pytest.raises(fresh.Failed, match=r"^ValueError: ") as caught:
        fresh.call(math.sqrt, -1)
    assert not caught.value.out_of_memory


def test_out_of_memory_is_recognised():
    with pytest.raises(fresh.Failed, match="out of memory") as caught:
        fresh.call(bytearray, 1 << 62)
    assert caught.value.out_of_memory


def test_killed_process_is_out_of_memory():
    with pytest.raises(fresh.Failed, match="exit code -9") as caught:
        fresh.call(signal.raise_signal, signal.SIGKILL)
    assert caught.value.out_of_memory


def test_time_limit():
    with pytest.raises(subprocess.TimeoutExpired):
        fresh.call(time.sleep, 600, timeout=0.2)


def test_function_of_a_module_that_runs_as_a_program(tmp_path):
    module = tmp_path / "a_benchmark.py"
    module.write_text(
        "from benchmarks import fresh\n"
        "def double(x):\n    return 2 * x\n"
        "if __name__ == '__main__':\n    print(fresh.call(double, 21))\n"
    )
    path = os.pathsep.join([str(fresh.ROOT), str(tmp_path)])
    command = [sys.executable, "-m", "a_benchmark"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.stdout == "42\n", done.stderr
