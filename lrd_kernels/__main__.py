"""`python -m lrd_kernels`: the version, the available backends, and three lines to try."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

import lrd_kernels as lrd

LINES = """\
import torch, lrd_kernels as lrd
d = lrd.LowRankMultivariateNormal(torch.zeros(10_000), 0.1 * torch.randn(10_000, 4), torch.ones(10_000))
print(d.log_prob(d.sample()), d.aggregate(torch.ones(1, 10_000)).stddev)
"""


def tour() -> str:
    """What the command prints."""
    backends = lrd.backends()
    width = max(map(len, backends))
    status = [f"  {name:<{width}}  {'yes' if s.available else 'no '}  {s.detail}" for name, s in backends.items()]
    return "\n".join(
        [
            f"lrd-kernels {lrd.__version__}, torch {torch.__version__}",
            "backends:",
            *status,
            "",
            "Three lines to try: a Gaussian over 10,000 outputs, the density of a sample, the error bar of a sum.",
            "",
            *(f"  {line}" for line in LINES.splitlines()),
            "",
            "Next: help(lrd), python -m lrd_kernels.info for a self-test, and the README.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(prog="python -m lrd_kernels", description=__doc__).parse_args(argv)
    print(tour())
    return 0


if __name__ == "__main__":
    sys.exit(main())
