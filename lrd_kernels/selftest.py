"""Checks a backend on this machine, on its own device: numbers, gradients, accuracy, times beside torch's class.

`python -m lrd_kernels.selftest --device cuda` prints a table and writes one JSON file, to look at or to send back.
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

import torch
from torch import Tensor

import lrd_kernels as lrd
from lrd_kernels import testing

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
# What a gradient in a dtype may be off by, as a share of its largest entry; results are never narrower than float32.
GRADIENT_ERROR = {"float32": 2e-5, "float64": 1e-10, "bfloat16": 1e-2, "float16": 2e-3}
RESULT_ERROR = {"float32": 1e-6, "float64": 1e-12, "bfloat16": 1e-6, "float16": 1e-6}
SHAPES = ((1, 1000, 7), (3, 513, 16), (2, 2000, 64), (1, 700, 130))  # batch, outputs, rank
TIMED = ((8, 65536, 8), (1, 1048576, 8), (1, 262144, 64))
NAMES = ("log_prob", "grad_value", "grad_loc", "grad_factor", "grad_diag")


def accuracy(device: torch.device, backend: str | None) -> list[dict[str, Any]]:
    """log p and its gradients beside the reference in float64, in both layouts and four dtypes."""
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
    """Forward plus backward in milliseconds, the least of some, beside torch's class."""
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


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lrd_kernels.selftest", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", choices=sorted(lrd.backends()), help="(default: the device's own)")
    parser.add_argument("--repeats", type=int, default=10, help="of each timing; 0 for none (default: 10)")
    parser.add_argument("--output", type=Path, default=Path("lrd_selftest.json"))
    options = parser.parse_args(argv)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("torch finds no GPU here")
    device = torch.device(options.device)
    document: dict[str, Any] = {
        "lrd_kernels": lrd.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "backends": {name: status._asdict() for name, status in lrd.backends().items()},
        "backend": options.backend,
        "accuracy": accuracy(device, options.backend),
        "deterministic": deterministic(device, options.backend),
        "times": times(device, options.backend, options.repeats) if options.repeats else [],
    }
    for row in document["accuracy"]:
        shape = "x".join(map(str, row["shape"]))
        worst = max(row["errors"].items(), key=lambda item: item[1])
        print(
            f"{row['dtype']:9} {row['layout']:5} {shape:12} {'ok' if row['ok'] else 'WRONG':6}{worst[0]} {worst[1]:.1e}"
        )
    print(f"same bits in a second run: {document['deterministic']}")
    for row in document["times"]:
        shape = "x".join(map(str, row["shape"]))
        print(f"{shape:12} {row['lrd_ms']:9.3f} ms, torch's class {row['torch_ms']:9.3f} ms")
    options.output.write_text(json.dumps(document, indent=1) + "\n")
    print(f"written to {options.output}")
    return 0 if document["deterministic"] and all(row["ok"] for row in document["accuracy"]) else 1


if __name__ == "__main__":
    sys.exit(main())
