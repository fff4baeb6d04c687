"""What the tests of the kernel package share: each differentiable function with its inputs, and its checks."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lrd_kernels as lrd
from lrd_kernels import reference, testing

# name -> (public function, reference function, which of Inputs it takes, in order)
FUNCTIONS = {
    "log_prob": (lrd.log_prob, reference.log_prob, ("value", "loc", "cov_factor", "cov_diag")),
    "mahalanobis": (lrd.mahalanobis, reference.mahalanobis, ("value", "cov_factor", "cov_diag")),
    "logdet": (lrd.logdet, reference.logdet, ("cov_factor", "cov_diag")),
    "entropy": (lrd.entropy, reference.entropy, ("cov_factor", "cov_diag")),
    "solve": (lrd.solve, reference.solve, ("value", "cov_factor", "cov_diag")),
    "matvec": (lrd.matvec, reference.matvec, ("value", "cov_factor", "cov_diag")),
}
SCALARS = ("log_prob", "mahalanobis", "logdet", "entropy")

# (batch, S, R): ragged, size 1, rank above S, no rank, whole and broken tiles, more than one block of rows
SHAPES = [
    ((), 1, 1),
    ((), 5, 1),
    ((3,), 1, 4),
    ((2,), 7, 20),
    ((2, 3), 33, 8),
    ((1,), 64, 16),
    ((), 100, 0),
    ((2,), 1031, 7),
    ((), 777, 65),
    ((), 4099, 12),
]


def covering(*axes: Sequence) -> list:
    """Every combination of the axes' values as parameters of a test. Those that cover all pairs of values are quick,
    the rest is marked slow."""
    rows = list(itertools.product(*axes))
    quick = all_pairs(rows)
    return [
        pytest.param(*row, marks=() if row in quick else pytest.mark.slow, id="-".join(map(str, row))) for row in rows
    ]


def all_pairs(rows: list[tuple]) -> list[tuple]:
    """Few rows in which each pair of values from two axes occurs, if it occurs in any row: the best row next."""

    def pairs(row):
        return set(itertools.combinations(enumerate(row), 2))

    missing = set().union(*map(pairs, rows))
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(pairs(row) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def arguments(name, inputs):
    return [getattr(inputs, field) for field in FUNCTIONS[name][2]]


def check(name, inputs, **options):
    """Value and gradients of one function within the error budget, and gradients in dtype and shape of their input."""
    function, truth_function, fields = FUNCTIONS[name]
    tensors = arguments(name, inputs)
    reference_options = {k: v for k, v in options.items() if k == "mask"}
    actual = testing.value_and_grads(lambda *a: function(*a, **options), tensors)
    truth = testing.value_and_grads(lambda *a: truth_function(*a, **reference_options), [t.double() for t in tensors])
    plain = testing.value_and_grads(
        lambda *a: truth_function(*a, dtype=torch.float32, **reference_options), [t.float() for t in tensors]
    )
    for what, a, t, p in zip((name, *fields), actual, truth, plain, strict=True):
        testing.assert_within_budget(a, t, p, what)
    for field, tensor, grad in zip(fields, tensors, actual[1:], strict=True):
        assert grad.dtype == tensor.dtype, field
        assert grad.shape == tensor.shape, field


class LargestResult(TorchDispatchMode):
    """Records the most elements of any tensor that an op newly allocated. Views do not count."""

    def __init__(self):
        super().__init__()
        self.numel = 0
        self.op = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        held = {t.untyped_storage().data_ptr() for t in torch.utils._pytree.tree_leaves((args, kwargs)) if _holds(t)}
        for tensor in torch.utils._pytree.tree_leaves(result):
            if _holds(tensor) and tensor.untyped_storage().data_ptr() not in held and tensor.numel() > self.numel:
                self.numel, self.op = tensor.numel(), str(func)
        return result


def _holds(tensor):
    return isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes() > 0
