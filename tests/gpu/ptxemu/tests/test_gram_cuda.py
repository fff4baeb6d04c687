"""A two-stage Gram matrix in CUDA C++: shared memory, warp shuffles, double precision."""

import numpy as np
import pytest

ROWS, TILE = 64, 8


NAMES = ["P", "d", "partial", "S", "R", "stride_s", "stride_r"]


def _gram(kernel, P, d):
    S, R = P.shape
    splits, tiles = -(-S // ROWS), -(-R // TILE)
    partial, G = np.full((splits, R, R), np.nan), np.full((R, R), np.nan)
    strides = [stride // P.itemsize for stride in P.strides]
    args = [P, d, partial, S, R, *strides]
    first = kernel("gram.cu", "gram_partial", race=True, stats=True).launch(
        (splits, tiles, tiles), 32 * TILE, args, readonly=(0, 1), names=NAMES
    )
    kernel("gram.cu", "gram_reduce", race=True).launch(-(-R * R // 128), 128, [partial, G, splits, R * R])
    return G, first.stats


@pytest.mark.parametrize("R", [8, 64, 130])
@pytest.mark.parametrize("layout", ["row-major", "rank-major"])
def test_gram(cuda_kernel, rng, R, layout):
    S = 203 if R < 100 else 70
    if layout == "row-major":
        P = rng.standard_normal((S, R + 3))[:, :R]
    else:
        P = rng.standard_normal((R, S + 5))[:, :S].T
    d = rng.random(S) + 0.5
    G, stats = _gram(cuda_kernel, P, d)
    expected = P.T @ (P / d[:, None])
    np.testing.assert_allclose(G, expected, rtol=0, atol=1e-13 * np.abs(expected).max())
    traffic = stats.buffers["P"]
    tiles = -(-R // TILE)
    assert traffic.unique_bytes_read == S * R * 8
    # Each tile of G loads its left columns, and its right columns unless they are the same.
    assert traffic.bytes_read == S * R * 8 * (2 * tiles - 1)


def test_forgotten_barrier_is_a_race(cuda_kernel, rng):
    P, d = rng.standard_normal((64, 8)), np.ones(64)
    kernel = cuda_kernel("gram.cu", "gram_partial", "NO_BARRIER", race=True)
    args = [P, d, np.zeros((1, 8, 8)), 64, 8, 8, 1]
    result = kernel.launch(1, 32 * TILE, args, check=False)
    assert "shared memory race" in result.kinds()
