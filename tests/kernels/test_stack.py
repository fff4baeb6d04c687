"""Columns met where the samples lie, against the same columns put side by side in float64."""

import pytest
import torch

from lrd_kernels import testing
from lrd_kernels.linalg.stack import Pull, Stack
from lrd_kernels.testing import relative_error

DTYPES = {torch.float32: 2e-6, torch.float64: 1e-13, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def stack(T=3, S=67, R=5, V=4, batch=(2,), dtype=torch.float64, layout="row", centre=True):
    inputs = testing.make_inputs((T, *batch), S, R, dtype=dtype, layout=layout, seed=1)
    vectors = 3 + torch.randn(V, *batch, S, generator=torch.Generator().manual_seed(2)).to(dtype)
    return Stack((*batch, S), inputs.cov_factor, vectors, 0.5, 2.0, centre), inputs.cov_diag[0]


def side_by_side(columns):
    wide = Stack(columns.shape, columns.factors.double(), columns.vectors.double(), *(0.5, 2.0), centre=columns.centre)
    return wide.dense()


@pytest.mark.parametrize("layout", ["row", "rank"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "sizes", [(3, 67, 5, 4), (2, 300, 8, 3), (1, 9, 1, 0), (0, 20, 3, 6), (4, 1, 2, 2), (2, 0, 3, 2)]
)
@pytest.mark.parametrize("centre", [True, False])
def test_gram_and_projection(layout, dtype, sizes, centre):
    columns, diag = stack(*sizes, dtype=dtype, layout=layout, centre=centre) if sizes[0] else (None, None)
    if columns is None:  # vectors alone
        columns, diag = stack(1, *sizes[1:], dtype=dtype, layout=layout, centre=centre)
        columns = columns.only_vectors
    X = side_by_side(columns)
    for precision in ("float64", "float32"):
        tolerance = 1e-12 if precision == "float64" else 2e-6
        assert relative_error(columns.gram(precision=precision), X.mT @ X) <= tolerance
    basis = torch.linalg.qr(torch.randn(X.shape[-1], X.shape[-1], dtype=torch.float64)).Q[:, :3].expand(2, -1, -1)
    for rank_major in (True, False):
        projected, folded = columns.project_fold(diag, basis, True, rank_major=rank_major)
        assert projected.stride(-2) == 1 or not rank_major or 1 in projected.shape
        assert projected.dtype == folded.dtype == dtype
        assert relative_error(projected.double(), X @ basis) <= DTYPES[dtype]
        variance = diag.double() + X.square().sum(-1)
        assert relative_error(folded.double() + projected.double().square().sum(-1), variance) <= DTYPES[dtype]
        _, same = columns.project_fold(diag, basis, False, rank_major=rank_major)
        assert torch.equal(same, diag)


def pull_of(columns, basis, layout="row"):
    """Gradients of a projection on this basis [..., T R + V, K]."""
    generator = torch.Generator().manual_seed(3)
    (*batch, S), dtype, K = columns.shape, columns.vectors.dtype, basis.shape[-1]
    projected = (side_by_side(columns) @ basis).to(dtype)
    grad_factor = torch.randn(*batch, K, S, generator=generator).to(dtype).mT
    grad_factor = grad_factor if layout == "rank" else grad_factor.contiguous()
    return Pull(projected, grad_factor, torch.randn(*batch, S, generator=generator).to(dtype))


@pytest.mark.parametrize("layout", ["row", "rank", "strided"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("sizes", "K"),
    [
        ((3, 67, 5, 4), 4),
        ((2, 300, 8, 3), 13),
        ((1, 9, 1, 0), 1),
        ((0, 20, 3, 6), 4),
        ((4, 1, 2, 2), 4),
        ((2, 0, 3, 2), 1),
        ((1, 2100, 17, 2), 1),
        ((2, 70, 4, 3), 0),
    ],
)
def test_gradients_of_the_projection(layout, dtype, sizes, K):
    """Beside those that torch finds in float64."""
    T, *rest = sizes
    columns, _ = stack(T or 1, *rest, dtype=dtype, layout=layout, centre=K != 4)
    columns = columns if T else columns.only_vectors
    generator = torch.Generator().manual_seed(4)
    basis, turn = torch.randn(2, 2, columns.columns, K, dtype=torch.float64, generator=generator)
    pull = pull_of(columns, basis, layout)
    pull = pull if K != 13 else pull._replace(grad_diag=None)
    wide = [tensor.double().clone().requires_grad_() for tensor in (columns.factors, columns.vectors)]
    X = Stack(columns.shape, *wide, 0.5, 2.0, columns.centre).dense()
    Q = basis.clone().requires_grad_()
    pulled = pull.grad_factor.double()
    moved = ((X.mT @ X) * (basis @ turn.mT)).sum()
    if pull.grad_diag is not None:
        pulled = pulled - 2 * pull.grad_diag[..., None].double() * pull.projected.double()
        moved = moved + (pull.grad_diag[..., None] * X.square()).sum()
    moved = moved + (X @ Q * pulled).sum()
    *wanted, wanted_basis = torch.autograd.grad(moved, (*wide, Q), materialize_grads=True)
    assert relative_error(columns.project_basis_bwd(pull), wanted_basis) <= 1e-12
    grads = columns.project_fold_bwd(basis, turn, pull, True, True)
    for grad, other, expected, like in zip(
        grads,
        columns.project_fold_bwd(basis, turn, pull, True, True, backend="reference"),
        wanted,
        (columns.factors, columns.vectors),
        strict=True,
    ):
        assert (grad.shape, grad.dtype) == (like.shape, dtype)
        assert relative_error(grad.double(), expected) <= DTYPES[dtype]
        assert relative_error(other.double(), expected) <= DTYPES[dtype]
    assert columns.project_fold_bwd(basis, turn, pull, True, False)[1] is None
    alone = columns.project_fold_bwd(basis, turn, pull, False, True)
    assert alone[0] is None
    assert torch.equal(alone[1], grads[1])
    if layout == "rank" and T and rest[0] > 1:
        assert grads[0].stride(-2) == 1


def test_parts_of_the_batch_may_be_shared_and_backends_agree():
    columns, diag = stack(batch=(2, 3))
    shared = Stack(columns.shape, columns.factors[:, :1], columns.vectors, 0.5, 2.0, True)
    basis = torch.eye(19, dtype=torch.float64)[:, :7].expand(2, 3, -1, -1)
    X = shared.dense()
    torch.testing.assert_close(shared.gram(), X.mT @ X)
    torch.testing.assert_close(shared.gram(backend="reference"), shared.gram())
    ours = shared.project_fold(diag, basis, True, rank_major=False)
    torch.testing.assert_close(ours, shared.project_fold(diag, basis, True, rank_major=False, backend="reference"))


def test_deviations_of_a_large_mean_keep_their_digits():
    """Centred before they are narrowed: 1e4 + x in float32 has x to 1e-3, and its square must not be worse."""
    vectors = (1e4 + torch.randn(8, 1000, generator=torch.Generator().manual_seed(0))).float()
    columns = Stack.of(vectors[0], None, vectors, centre=True)
    exact = vectors.double() - vectors.double().mean(0)
    assert relative_error(columns.gram(precision="float32"), exact @ exact.mT) <= 1e-6


@pytest.mark.alone
@pytest.mark.parametrize("layout", ["row", "rank"])
def test_same_bits_for_any_number_of_threads(layout):
    columns, diag = stack(3, 9000, 8, 5, batch=(), dtype=torch.float32, layout=layout)
    basis = torch.randn(29, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    results = []
    for threads in (1, 2, 3, 8):
        torch.set_num_threads(threads)
        gram = columns.gram(precision="float32")
        pull = pull_of(columns, basis)
        grads = columns.project_fold_bwd(basis, basis, pull, True, True)
        own = columns.project_fold(diag, basis, True, rank_major=False)
        results.append((gram, *own, columns.project_basis_bwd(pull), *grads))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_wrong_tensors_are_refused():
    factors, vectors = torch.ones(1, 2, 5, 3), torch.ones(1, 4, 6)
    with pytest.raises(RuntimeError, match=r"vectors must be \[B, V, S\]"):
        torch.ops.lrd.joint_gram_fwd(factors, vectors, 1.0, 1.0, True, 1)
    with pytest.raises(RuntimeError, match="dtype"):
        torch.ops.lrd.joint_gram_fwd(factors, vectors[..., :5].double(), 1.0, 1.0, True, 1)
    with pytest.raises(RuntimeError, match=r"basis must be contiguous float64"):
        torch.ops.lrd.project_fold_fwd(
            *(factors, None, 1.0, 1.0, True, torch.ones(1, 5)), torch.ones(1, 6, 2), True, False
        )
    given, pull = (factors, None, 1.0, 1.0, True), torch.ones(1, 5, 2)
    with pytest.raises(RuntimeError, match="must have the columns of projected"):
        torch.ops.lrd.project_basis_bwd(*given, pull, pull[..., :1], None)
    with pytest.raises(RuntimeError, match=r"projected and grad_factor must be \[B, S, K\]"):
        torch.ops.lrd.project_basis_bwd(*given, pull[:, :4], pull, None)
    with pytest.raises(RuntimeError, match=r"grad_diag must be \[B, S\]"):
        torch.ops.lrd.project_basis_bwd(*given, pull, pull, pull)
    basis = torch.ones(1, 6, 2).double()
    with pytest.raises(RuntimeError, match="basis and turn must be contiguous float64"):
        torch.ops.lrd.project_fold_bwd(*given, basis, basis[..., :1], pull, pull, None, True, True)
