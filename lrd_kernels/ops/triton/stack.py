"""Loads a tile of a stack's columns: T blocks of R columns, then V vectors, scaled and centred."""

import triton
import triton.language as tl


@triton.jit
def load_stack(
    factors,
    vectors,
    mean,
    rows,
    columns,
    inside,
    split,
    total,
    R,
    factor_t,
    factor_s,
    factor_r,
    vector_v,
    vector_s,
    factor_scale,
    vector_scale,
    COMPUTE: tl.constexpr,
    HAS_VECTORS: tl.constexpr,
    CENTRE: tl.constexpr,
):
    """[rows, columns] in the compute type. Columns from `split` on are vectors; those from `total` on do not exist."""
    of_factors = inside[:, None] & (columns < split)[None, :]
    block = (columns.to(tl.int32) // R).to(tl.int64)  # 32-bit, because a 64-bit division is a function call
    where = (block * factor_t + (columns - block * R) * factor_r)[None, :] + rows[:, None] * factor_s
    tile = tl.load(factors + where, mask=of_factors, other=0.0).to(COMPUTE) * factor_scale.to(COMPUTE)
    if HAS_VECTORS:
        of_vectors = inside[:, None] & ((columns >= split) & (columns < total))[None, :]
        where = ((columns - split) * vector_v)[None, :] + rows[:, None] * vector_s
        more = tl.load(vectors + where, mask=of_vectors, other=0.0).to(tl.float64)
        if CENTRE:
            more -= tl.load(mean + rows, mask=inside, other=0.0)[:, None]
        tile = tl.where(of_vectors, (more * vector_scale).to(COMPUTE), tile)
    return tile
