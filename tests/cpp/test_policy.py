"""The numerical policy stands once in C++ and once in Python: both are the same."""

import importlib.util
import math
import re
from pathlib import Path

import pytest
import torch

from lrd_kernels import _policy

core = pytest.importorskip("_core_testing", reason="built with -DLRD_TESTING=ON (make build)")
ROOT = Path(__file__).parents[2]
HEADER = (ROOT / "csrc/core/policy.h").read_text()
# Of _policy, what C++ has no use for.
PYTHON_ALONE = {
    *("QR", "DUAL", "QR_GROWTH", "CHOLESKY_CONDITION", "GRADIENT_CONDITION", "FLOAT32_CONDITION"),
    *("EXPLAINED_LEVERAGE", "ROOT_LEVERAGE", "FLOAT32_RANGE", "FOLD_TOLERANCE", "DUAL_RANK", "DUAL_TRACE"),
}
PRECISIONS = {"automatic": "AUTO", "float64": "FLOAT64", "float32": "FLOAT32", "declining": "DECLINING_AUTO"}


def twin(name):
    """The Python name of a constant of the header: kFlushRows is FLUSH_ROWS."""
    return "LOG_2PI" if name == "kLog2Pi" else re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name[1:]).upper()


def test_every_number_of_the_header_is_compared():
    assert set(re.findall(r"\b(k[A-Z]\w+) = ", HEADER)) == set(core.policy())
    assert set(re.findall(r"(\w+) = \d[,\s]", HEADER.partition("enum class Precision")[2].partition(";")[0])) == set(
        core.precisions()
    )


@pytest.mark.parametrize("name", core.policy())
def test_number(name):
    assert getattr(_policy, twin(name)) == core.policy()[name]


def test_python_has_no_other_numbers():
    numbers = {name for name, number in vars(_policy).items() if name.isupper() and isinstance(number, (int, float))}
    assert numbers == {twin(name) for name in core.policy()} | PYTHON_ALONE | set(PRECISIONS.values())


def test_precisions():
    assert {PRECISIONS[name]: number for name, number in core.precisions().items()} == {
        name: getattr(_policy, name) for name in PRECISIONS.values()
    }
    assert _policy.OP_PRECISIONS == {"auto": _policy.AUTO, "float64": _policy.FLOAT64, "float32": _policy.FLOAT32}
    assert _policy.QR not in core.precisions().values()


def test_limits_of_the_exponential():
    numbers = core.policy()
    for dtype, name in zip(
        (torch.float64, torch.float32, torch.bfloat16, torch.float16),
        ("Float64", "Float32", "BFloat16", "Float16"),
        strict=True,
    ):
        limit = _policy.exp_limit(dtype)
        assert limit == numbers[f"kExpLimit{name}"]
        assert math.exp(limit) < torch.finfo(dtype).max
        assert math.isfinite(math.exp(limit) ** 2)


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


@needs_triton
def test_triton_judges_alike():
    """Random sums around the edge of the certificate, judged by the kernels' functions and by the Triton backend's."""
    from lrd_kernels.ops.triton.log_prob_fwd import _judge

    generator = torch.Generator().manual_seed(0)
    B, N, R, S = 500, 1, 3, 1000

    def spread(*shape, low, high):
        return 10 ** (low + (high - low) * torch.rand(*shape, generator=generator, dtype=torch.float64))

    gram = torch.diag_embed(spread(B, R, low=-4, high=2))
    quad, maha = spread(B, N, low=2, high=4), spread(B, N, low=1, high=4)
    z, logdet, growth = spread(B, N, R, low=-2, high=2), -S * spread(B, low=-1, high=1), spread(B, low=0, high=2)
    growth[:3] = torch.tensor([8.0, math.inf, math.nan])
    imprecise, cancels = _judge((gram, None, quad, None), (None, None, z, maha, logdet, growth), S)
    weighted = (z.square() * gram.diagonal(dim1=-2, dim2=-1)[:, None]).sum(-1)
    error = _policy.FLOAT32_SUM_ERROR
    for b in range(B):
        assert bool(imprecise[b]) != core.certified(growth[b])
        numbers = (error, weighted[b, 0], quad[b, 0], maha[b, 0], logdet[b], S)
        assert bool(cancels[b]) != core.tolerable(*numbers)
    for found in (imprecise, cancels):
        assert 0.1 < found.double().mean() < 0.9


@needs_triton
def test_triton_flushes_as_often():
    """A block of rows of the Gram pass is what float32 sums before it goes to float64."""
    from lrd_kernels.ops.triton.configs_table import TABLE

    blocks = [
        entry[0]
        for (op, architecture, compute, _), entries in TABLE.items()
        if "gram" in op and architecture != "interpreter" and compute != "float64"
        for entry in entries.values()
    ]
    assert blocks
    assert max(blocks) <= _policy.FLUSH_ROWS
