"""`python -m lrd_kernels.info`: versions, available backends (and why one is missing), and a short self-test.

`--self-test` runs a longer self-test on a device of your choice. It measures accuracy, determinism and times compared
with torch's class, prints a table and writes a JSON file, to read or to send with a report.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

import lrd_kernels as lrd
from lrd_kernels import functional, reference, testing
from lrd_kernels.ops import dispatch, load

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
# The largest allowed error of a gradient, relative to its largest entry. Results are float32 or float64.
GRADIENT_ERROR = {"float32": 2e-5, "float64": 1e-10, "bfloat16": 1e-2, "float16": 2e-3}
RESULT_ERROR = {"float32": 1e-6, "float64": 1e-12, "bfloat16": 1e-6, "float16": 1e-6}
SHAPES = ((1, 1000, 7), (3, 513, 16), (2, 2000, 64), (1, 700, 130))  # batch, outputs, rank
TIMED = ((8, 65536, 8), (1, 1048576, 8), (1, 262144, 64))
NAMES = ("log_prob", "grad_value", "grad_loc", "grad_factor", "grad_diag")


def report() -> list[str]:
    """Versions, backends, instruction sets and threads, one per line."""
    lines = [
        f"lrd-kernels {lrd.__version__}",
        f"python {platform.python_version()}, torch {torch.__version__}, numpy {numpy.__version__}",
        f"machine: {platform.machine()}, {torch.get_num_threads()} threads",
        "backends:",
    ]
    for name, status in lrd.backends().items():
        lines.append(f"  {name:<10} {'yes' if status.available else 'no '}  {status.detail}")
    if isas := load.available_isas():
        lines.append(f"available instruction sets: {', '.join(isas)}; in use: {load.cpu_isa()}")
    return lines


def cpu_model() -> str:
    """The name of the CPU, as reported by the operating system."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def short_test(seconds: float = 5.0) -> list[str]:
    """Compares every available backend with the reference, for at most `seconds`, and returns the failures."""

    def plain_log_prob(*inputs: torch.Tensor) -> torch.Tensor:
        return reference.log_prob(*inputs, dtype=torch.float32)

    failures = []
    start = time.monotonic()
    names = [name for name, status in lrd.backends().items() if status.available and name != "reference"]
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
        own = [t.to(dispatch.device_of(name)) for t in inputs]
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


def accuracy(device: torch.device, backend: str | None) -> list[dict[str, Any]]:
    """Compares log p and its gradients with the reference in float64, for both layouts and four dtypes."""
    rows = []
    for name, dtype in DTYPES.items():
        for layout in ("row", "rank"):
            for B, S, R in SHAPES:
                inputs = testing.make_inputs((B,), S, R, dtype=dtype, layout=layout)
                exact = testing.value_and_grads(reference_log_prob, inputs)
                moved = type(inputs)(*(t.to(device) for t in inputs))

                def log_prob(*tensors: Tensor) -> Tensor:
                    return lrd.log_prob(*tensors, backend=backend, on_failure="nan")

                found = testing.value_and_grads(log_prob, moved)
                errors = [
                    testing.relative_error(a.cpu().double(), b.double()) for a, b in zip(found, exact, strict=True)
                ]
                limits = [RESULT_ERROR[name], *[GRADIENT_ERROR[name]] * 4]
                rows.append(
                    {
                        "dtype": name,
                        "layout": layout,
                        "shape": [B, S, R],
                        "errors": dict(zip(NAMES, errors, strict=True)),
                        "ok": all(e <= limit for e, limit in zip(errors, limits, strict=True)),
                    }
                )
    return rows


def reference_log_prob(value: Tensor, loc: Tensor, cov_factor: Tensor, cov_diag: Tensor) -> Tensor:
    wide = [t.double() for t in (value, loc, cov_factor, cov_diag)]
    return lrd.log_prob(*wide, backend="reference")


def times(device: torch.device, backend: str | None, repeats: int) -> list[dict[str, Any]]:
    """Minimum time of forward plus backward in milliseconds, compared with torch's class."""
    rows = []
    for B, S, R in TIMED:
        inputs = [t.to(device).requires_grad_() for t in testing.make_inputs((B,), S, R, dtype=torch.float32)]

        def ours(value: Tensor, loc: Tensor, factor: Tensor, diag: Tensor) -> Tensor:
            return lrd.log_prob(value, loc, factor, diag, backend=backend, on_failure="nan")

        def theirs(value: Tensor, loc: Tensor, factor: Tensor, diag: Tensor) -> Tensor:
            model = torch.distributions.LowRankMultivariateNormal(loc, factor, diag, validate_args=False)
            return model.log_prob(value)

        rows.append(
            {"shape": [B, S, R], "lrd_ms": _time(ours, inputs, repeats), "torch_ms": _time(theirs, inputs, repeats)}
        )
    return rows


def _time(function: Callable[..., Tensor], inputs: list[Tensor], repeats: int) -> float:
    least = float("inf")
    for _ in range(repeats + 1):  # the first one compiles
        _wait(inputs[0])
        start = time.perf_counter()
        torch.autograd.grad(function(*inputs).sum(), inputs)
        _wait(inputs[0])
        least = min(least, time.perf_counter() - start)
    return 1e3 * least


def _wait(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def deterministic(device: torch.device, backend: str | None) -> bool:
    """Whether a second run gives the same bits."""
    inputs = testing.make_inputs((2,), 5000, 33, dtype=torch.float32)
    moved = type(inputs)(*(t.to(device) for t in inputs))

    def log_prob(*tensors: Tensor) -> Tensor:
        return lrd.log_prob(*tensors, backend=backend, on_failure="nan")

    runs = [testing.value_and_grads(log_prob, moved) for _ in range(2)]
    return all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def self_test(device: torch.device, backend: str | None, repeats: int, output: Path) -> int:
    """Prints the table, writes the file and returns 0 if all tests pass."""
    document: dict[str, Any] = {
        "lrd_kernels": lrd.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "backends": {name: status._asdict() for name, status in lrd.backends().items()},
        "backend": backend,
        "accuracy": accuracy(device, backend),
        "deterministic": deterministic(device, backend),
        "times": times(device, backend, repeats) if repeats else [],
    }
    for row in document["accuracy"]:
        shape = "x".join(map(str, row["shape"]))
        worst = max(row["errors"].items(), key=lambda item: item[1])
        print(
            f"{row['dtype']:9} {row['layout']:5} {shape:12} {'ok' if row['ok'] else 'WRONG':6}{worst[0]} {worst[1]:.1e}"
        )
    print(f"bitwise identical in a second run: {document['deterministic']}")
    for row in document["times"]:
        shape = "x".join(map(str, row["shape"]))
        print(f"{shape:12} {row['lrd_ms']:9.3f} ms, torch's class {row['torch_ms']:9.3f} ms")
    output.write_text(json.dumps(document, indent=1) + "\n")
    print(f"written to {output}")
    return 0 if document["deterministic"] and all(row["ok"] for row in document["accuracy"]) else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lrd_kernels.info", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--self-test", action="store_true", help="run the longer self-test, with the other options")
    parser.add_argument("--device", help="device to test (default: cuda if there is a GPU, else cpu)")
    parser.add_argument(
        "--backend", choices=sorted(lrd.backends()), help="backend to test (default: the best for the device)"
    )
    parser.add_argument("--repeats", type=int, help="repeats of each timing; 0 skips the timings (default: 10)")
    parser.add_argument("--output", type=Path, help="JSON file to write (default: lrd_selftest.json)")
    options = parser.parse_args(argv)
    given = [name for name in ("device", "backend", "repeats", "output") if getattr(options, name) is not None]
    if given and not options.self_test:
        parser.error(f"--{given[0]} requires --self-test")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("no GPU is available to torch")
    if options.self_test:
        repeats = 10 if options.repeats is None else options.repeats
        return self_test(torch.device(device), options.backend, repeats, options.output or Path("lrd_selftest.json"))
    print("\n".join(report()))
    start = time.monotonic()
    failures = short_test()
    if lrd.backends()["cpu"].available:
        verdict = "passed" if not failures else f"FAILED in {len(failures)} places"
        print(f"self-test against the reference: {verdict} ({time.monotonic() - start:.1f} s)")
    else:
        print("self-test skipped: only the reference backend is available")
    print("\n".join(failures), end="\n" if failures else "")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
