"""`python -m lrd_kernels.info`: what is installed, which backends serve and why not, and a short self-test."""

from __future__ import annotations

import argparse
import platform
import sys
import time
from pathlib import Path

import numpy
import torch

import lrd_kernels
from lrd_kernels import _dispatch, _load, functional, reference, testing


def report() -> list[str]:
    """Versions, backends, instruction sets and threads, a line each."""
    lines = [
        f"lrd-kernels {lrd_kernels.__version__}",
        f"python {platform.python_version()}, torch {torch.__version__}, numpy {numpy.__version__}",
        f"machine: {platform.machine()}, {torch.get_num_threads()} threads",
        "backends:",
    ]
    for name, status in lrd_kernels.backends().items():
        lines.append(f"  {name:<10} {'yes' if status.available else 'no '}  {status.detail}")
    if isas := _load.available_isas():
        lines.append(f"instruction sets here: {', '.join(isas)}; in use: {_load.cpu_isa()}")
    return lines


def cpu_model() -> str:
    """The name of the CPU, as the operating system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def self_test(seconds: float = 5.0) -> list[str]:
    """Values and gradients of every available backend beside the reference, for at most `seconds`. Lists failures."""

    def plain_log_prob(*inputs: torch.Tensor) -> torch.Tensor:
        return reference.log_prob(*inputs, dtype=torch.float32)

    failures = []
    start = time.monotonic()
    names = [name for name, status in lrd_kernels.backends().items() if status.available and name != "reference"]
    cases = [
        (name, dtype, layout, S, R)
        for S, R in ((64, 1), (1000, 8), (4097, 20), (333, 65))
        for dtype in testing.DTYPES
        for layout in testing.LAYOUTS
        for name in names
    ]
    for name, dtype, layout, S, R in cases:
        if time.monotonic() - start > seconds:
            break
        inputs = testing.make_inputs((2,), S, R, dtype=dtype, layout=layout)
        own = [t.to(_dispatch.device_of(name)) for t in inputs]
        actual = testing.value_and_grads(lambda *a, name=name: functional.log_prob(*a, backend=name), own)
        wide = [t.double() for t in inputs]
        truth = testing.value_and_grads(reference.log_prob, wide)
        plain = testing.value_and_grads(plain_log_prob, [t.float() for t in inputs])
        for what, a, t, p in zip(("log_prob", *testing.Inputs._fields), actual, truth, plain, strict=True):
            try:
                testing.assert_within_budget(a.cpu(), t, p, what)
            except AssertionError as error:
                failures.append(f"{name}, {dtype}, {layout}, S={S}, R={R}: {error}")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lrd_kernels.info", description=__doc__)
    parser.parse_args()
    print("\n".join(report()))
    start = time.monotonic()
    failures = self_test()
    if lrd_kernels.backends()["cpu"].available:
        verdict = "passed" if not failures else f"FAILED in {len(failures)} places"
        print(f"self-test against the reference: {verdict} ({time.monotonic() - start:.1f} s)")
    else:
        print("self-test: only the reference is here, nothing to compare")
    print("\n".join(failures), end="\n" if failures else "")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
