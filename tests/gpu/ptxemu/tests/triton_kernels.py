"""Triton kernels of the tests."""

import triton
import triton.language as tl


@triton.jit
def gram_partial_kernel(
    P, D, OUT, S, R, stride_s, stride_r,
    SPLIT: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_R: tl.constexpr,
    ONE_TILE: tl.constexpr, USE_DOT: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """P^T diag(1/d) P over one split of rows, one BLOCK_R x BLOCK_R tile per program."""
    split, tile_i, tile_j = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i = tile_i * BLOCK_R + tl.arange(0, BLOCK_R)
    j = tile_j * BLOCK_R + tl.arange(0, BLOCK_R)
    acc = tl.zeros((BLOCK_R, BLOCK_R), DTYPE)
    for start in range(0, SPLIT, BLOCK_S):
        rows = split * SPLIT + start + tl.arange(0, BLOCK_S)
        base = P + rows[:, None].to(tl.int64) * stride_s
        inside = rows[:, None] < S
        p = tl.load(base + i[None, :].to(tl.int64) * stride_r, inside & (i[None, :] < R), other=0.0)
        if ONE_TILE:
            q = p
        else:
            q = tl.load(base + j[None, :].to(tl.int64) * stride_r, inside & (j[None, :] < R), other=0.0)
        d = tl.load(D + rows, mask=rows < S, other=1.0)
        weighted = p / d[:, None]
        if USE_DOT:
            acc = tl.dot(tl.trans(weighted), q, acc, input_precision="ieee", out_dtype=DTYPE)
        else:
            acc += tl.sum(weighted[:, :, None] * q[:, None, :], axis=0)
    out = OUT + split.to(tl.int64) * R * R + i[:, None] * R + j[None, :]
    tl.store(out, acc, mask=(i[:, None] < R) & (j[None, :] < R))


@triton.jit
def gram_reduce_kernel(PARTIAL, G, COUNT, SPLITS, BLOCK: tl.constexpr):
    """The sum of the partial matrices, in a fixed order."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), G.dtype.element_ty)
    for split in range(SPLITS):
        acc += tl.load(PARTIAL + split.to(tl.int64) * COUNT + index, mask=index < COUNT, other=0.0)
    tl.store(G + index, acc, mask=index < COUNT)


@triton.jit
def softmax_kernel(X, Y, n, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x = tl.load(X + row * stride + cols, mask=cols < n, other=-float("inf"))
    e = tl.exp(x - tl.max(x, 0))
    tl.store(Y + row * stride + cols, e / tl.sum(e, 0), mask=cols < n)


@triton.jit
def matmul_kernel(
    A, B, C, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), ACC)
    for k in range(0, K, BK):
        a = tl.load(A + rows[:, None] * K + (k + inner)[None, :])
        b = tl.load(B + (k + inner)[:, None] * N + cols[None, :])
        acc = tl.dot(a, b, acc, out_dtype=ACC, input_precision=PRECISION)
    tl.store(C + rows[:, None] * N + cols[None, :], acc)


@triton.jit
def attention_kernel(
    Q, K, V, OUT, n, scale,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Causal flash attention of one head (program 1) and one tile of queries (program 0)."""
    head = tl.program_id(1).to(tl.int64) * n * D
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    q = tl.load(Q + head + rows[:, None] * D + d[None, :], mask=rows[:, None] < n, other=0.0)
    high = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    for start in range(0, n, BN):
        cols = start + tl.arange(0, BN)
        k = tl.load(K + head + cols[None, :] * D + d[:, None], mask=cols[None, :] < n, other=0.0)
        v = tl.load(V + head + cols[:, None] * D + d[None, :], mask=cols[:, None] < n, other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        visible = (cols[None, :] < n) & (rows[:, None] >= cols[None, :])
        scores = tl.where(visible, scores, -float("inf"))
        higher = tl.maximum(high, tl.max(scores, 1))
        p = tl.exp(scores - higher[:, None])
        shrink = tl.exp(high - higher)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p.to(DTYPE), v, input_precision="ieee")
        high = higher
    out = (acc / total[:, None]).to(DTYPE)
    tl.store(OUT + head + rows[:, None] * D + d[None, :], out, mask=rows[:, None] < n)


@triton.jit
def scan_kernel(X, SUMS, SORTED, INFO, n, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    x = tl.load(X + index, mask=index < n, other=0.0)
    tl.store(SUMS + index, tl.cumsum(x, 0), mask=index < n)
    tl.store(SORTED + index, tl.sort(x))
    tl.store(INFO, tl.argmax(x, 0))
    tl.atomic_max(INFO + 1 + 0 * index, (x * 1000).to(tl.int32))
    counts = tl.histogram(tl.abs(x * 4).to(tl.int32) % 16, 16)
    tl.store(INFO + 2, tl.sum(counts, 0))


@triton.jit
def scalars_kernel(OUT, BIAS, scale, shift, flag, wide, FACTOR: tl.constexpr):
    """Scalars of every kind, a pointer that may be None, and a grid of three dimensions."""
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    index = (z * tl.num_programs(1) + y) * tl.num_programs(0) + x
    value = index.to(tl.float32) * scale + shift
    if flag:
        value += FACTOR
    if BIAS is not None:
        value += tl.load(BIAS + x)
    tl.store(OUT + index, value + (wide % 1000).to(tl.float32))


@triton.heuristics({"BLOCK": lambda args: triton.next_power_of_2(args["n"])})
@triton.jit
def heuristic_kernel(X, Y, n, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(Y + index, tl.load(X + index, mask=index < n) * BLOCK, mask=index < n)


@triton.jit
def tuple_kernel(pointers, shape, OUT):
    index = tl.arange(0, 4)
    x, y = tl.load(pointers[0] + index), tl.load(pointers[1] + index)
    tl.store(OUT + index, (x + y) * shape[0] + shape[1])


@triton.jit
def unmasked_kernel(X, Y, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + index, tl.load(X + index) + 1.0)


@triton.jit
def racy_kernel(X, TOTAL, BLOCK: tl.constexpr):
    """Every program adds to TOTAL without an atomic."""
    x = tl.load(X + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))
    tl.store(TOTAL, tl.load(TOTAL) + tl.sum(x, 0))
