"""A two-stage tall-skinny Gram matrix in Triton, its accuracy, races and traffic."""

import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from ptxemu import KernelFault  # noqa: E402
from ptxemu.triton_driver import emulated_gpu  # noqa: E402
from triton_kernels import gram_partial_kernel, gram_reduce_kernel  # noqa: E402

TRITON_TYPE = {torch.float32: tl.float32, torch.float64: tl.float64}


def gram(P, d, *, block_r, use_dot, split=64, num_warps=4):
    """G = P^T diag(1/d) P, as a project's launcher would write it."""
    S, R = P.shape
    splits, tiles = triton.cdiv(S, split), triton.cdiv(R, block_r)
    partial = torch.full((splits, R, R), float("nan"), dtype=P.dtype)
    G = torch.full((R, R), float("nan"), dtype=P.dtype)
    gram_partial_kernel[(splits, tiles, tiles)](
        P, d, partial, S, R, P.stride(0), P.stride(1),
        SPLIT=split, BLOCK_S=32 if use_dot else 16, BLOCK_R=block_r, ONE_TILE=tiles == 1,
        USE_DOT=use_dot, DTYPE=TRITON_TYPE[P.dtype], num_warps=num_warps,
    )  # fmt: skip
    gram_reduce_kernel[(triton.cdiv(R * R, 256),)](partial, G, R * R, splits, BLOCK=256)
    return G


def make_inputs(S, R, dtype, layout):
    torch.manual_seed(R)
    if layout == "row-major":
        P = torch.randn(S, R, dtype=dtype)
    else:
        P = torch.randn(R, S + 5, dtype=dtype)[:, :S].T  # rank-major with padded rows
    return P, torch.rand(S, dtype=dtype) + 0.5


def check(P, d, G):
    """The error is at most twice what NumPy makes in the same precision, plus rounding."""
    wider = np.float64 if P.dtype == torch.float32 else np.longdouble
    exact_P, exact_d = P.numpy().astype(wider), d.numpy().astype(wider)
    exact = exact_P.T @ (exact_P / exact_d[:, None])
    plain = P.numpy().T @ (P.numpy() / d.numpy()[:, None])
    magnitude = abs(exact_P).T @ (abs(exact_P) / exact_d[:, None])
    rounding = 4 * torch.finfo(P.dtype).eps * magnitude
    assert (abs(G.numpy() - exact) <= 2 * abs(plain - exact).max() + rounding).all()


def _combinations():
    """Every combination; those after the first of a (rank, type, method) are slow."""
    for R, dtype, use_dot in itertools.product([8, 64], TRITON_TYPE, [True, False]):
        name = f"{R}-{str(dtype)[6:]}-{'dot' if use_dot else 'fma'}"
        first = "row-major" if use_dot == (dtype == torch.float32) else "rank-major"
        for layout in ("row-major", "rank-major"):
            marks = () if layout == first else pytest.mark.slow
            yield pytest.param(R, dtype, use_dot, layout, id=f"{name}-{layout}", marks=marks)


@pytest.mark.parametrize("R, dtype, use_dot, layout", list(_combinations()))
def test_gram(R, dtype, use_dot, layout):
    P, d = make_inputs(203, R, dtype, layout)
    with emulated_gpu(80, race=True, stats=True) as gpu:
        G = gram(P, d, block_r=max(16, R), use_dot=use_dot)
    check(P, d, G)
    traffic = gpu.last("gram_partial_kernel").buffer("P")
    wanted = P.numel() * P.element_size()
    assert traffic.bytes_read == traffic.unique_bytes_read == wanted  # each element exactly once
    assert traffic.bytes_written == 0
    loaded, stored = gpu.bytes_by_kernel()["gram_reduce_kernel"]
    assert (loaded, stored) == (4 * R * R * P.element_size(), R * R * P.element_size())


@pytest.mark.parametrize("dtype, layout", [(torch.float32, "rank-major"), (torch.float64, "row-major")])
def test_gram_in_tiles(dtype, layout):
    P, d = make_inputs(100, 130, dtype, layout)
    with emulated_gpu(80, race=True, stats=True) as gpu:
        G = gram(P, d, block_r=64, use_dot=True)
    check(P, d, G)
    traffic = gpu.last("gram_partial_kernel").buffer("P")
    # Three column tiles: each is loaded as the left and as the right factor of three tiles of G.
    assert traffic.bytes_read == 6 * P.numel() * P.element_size()
    assert traffic.unique_bytes_read == P.numel() * P.element_size()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
def test_gram_of_rank_130_in_one_tile(dtype):
    P, d = make_inputs(203, 130, dtype, "row-major")
    with emulated_gpu(80, race=True, stats=True) as gpu:
        G = gram(P, d, block_r=256, use_dot=True, num_warps=16)
    check(P, d, G)
    traffic = gpu.last("gram_partial_kernel").buffer("P")
    assert traffic.bytes_read == traffic.unique_bytes_read == P.numel() * P.element_size()


def test_gram_on_blackwell():
    P, d = make_inputs(100, 64, torch.float32, "row-major")
    with emulated_gpu(100, race=True) as gpu:
        G = gram(P, d, block_r=64, use_dot=True)
    assert "f32x2" in gpu.last("gram_partial_kernel").ptx
    check(P, d, G)


def test_missing_mask_is_caught():
    """Strides that claim more columns than P has make the loads leave its storage."""
    P, d = make_inputs(64, 16, torch.float32, "row-major")
    with emulated_gpu(80), pytest.raises(KernelFault, match="after the end of P"):
        gram_partial_kernel[(1, 1, 1)](
            P, d, torch.zeros(16, 16), 65, 16, 16, 1, 64 + 32, 32, 16, True, True, tl.float32
        )
