"""Runs a function in a fresh Python process and returns its result.

Memory, thread pools and compiled code of earlier measurements cannot influence such a measurement. The arguments and
the result travel as JSON: `python -m benchmarks.fresh MODULE FUNCTION ARGUMENTS` prints the result on its last line.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OUT_OF_MEMORY = "out of memory"
KILLED = -9  # exit code of a process that the kernel ends when memory runs out


class Failed(RuntimeError):
    """The process ended with an error. The message is the last line that it wrote to stderr."""

    def __init__(self, message: str, out_of_memory: bool) -> None:
        super().__init__(message)
        self.out_of_memory = out_of_memory


def call(function: Callable[..., Any], *arguments: Any, timeout: float | None = None) -> Any:
    """`function(*arguments)`, evaluated in a fresh process. `function` must be a module-level function.

    Raises `Failed` if the process fails, and `subprocess.TimeoutExpired` after `timeout` seconds.
    """
    command = [sys.executable, "-m", "benchmarks.fresh", module_of(function), function.__name__, json.dumps(arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
    if done.returncode != 0:
        message = (done.stderr.strip().splitlines() or [f"ended with exit code {done.returncode}"])[-1]
        raise Failed(message[:500], OUT_OF_MEMORY in message or done.returncode == KILLED)
    return json.loads(done.stdout.splitlines()[-1])


def module_of(function: Callable[..., Any]) -> str:
    """The name by which the module of a function can be imported, even if it is being run as `__main__`."""
    if function.__module__ == "__main__":
        return sys.modules["__main__"].__spec__.name
    return function.__module__


def main(argv: Sequence[str]) -> None:
    module, name, arguments = argv
    function = getattr(importlib.import_module(module), name)
    try:
        result = function(*json.loads(arguments))
    except Exception as error:
        if isinstance(error, MemoryError) or OUT_OF_MEMORY in str(error):
            sys.exit(f"{OUT_OF_MEMORY}: {' '.join(str(error).split())}")
        raise
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
