"""RMSNorm, with and without the residual that is added before it, and the product of SwiGLU."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_rows(
    x,
    delta,
    weight,
    out,
    summed,
    num_rows,
    eps,
    outer_stride,
    INNER: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    ADDS: tl.constexpr,
):
    """Grid (tiles of ROWS rows). x: rows of SIZE values, INNER of them one after the other, such groups
    `outer_stride` apart. If ADDS, `delta` [rows, SIZE] is added first, and the sum, rounded, goes to `summed` and is
    what is normed."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    is_there = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    sources = (rows // INNER).to(tl.int64) * outer_stride + (rows % INNER) * SIZE
    targets = rows.to(tl.int64)[:, None] * SIZE + columns[None, :]
    wide = tl.load(x + sources[:, None] + columns[None, :], mask=is_there, other=0.0).to(tl.float32)
    if ADDS:
        wide += tl.load(delta + targets, mask=is_there, other=0.0).to(tl.float32)
        rounded = wide.to(summed.dtype.element_ty)
        tl.store(summed + targets, rounded, mask=is_there)
        wide = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / SIZE + eps)
    weights = tl.load(weight + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    tl.store(out + targets, (wide * scale[:, None] * weights[None, :]).to(out.dtype.element_ty), mask=is_there)


@triton.jit(do_not_specialize=["num_values"])
def silu_and_multiply(gate, up, out, num_values, TILE: tl.constexpr):
    """Grid (tiles of TILE values): silu(gate) * up, in fp32."""
    places = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    is_there = places < num_values
    wide = tl.load(gate + places, mask=is_there, other=0.0).to(tl.float32)
    other = tl.load(up + places, mask=is_there, other=0.0).to(tl.float32)
    tl.store(out + places, (wide / (1.0 + tl.exp(-wide)) * other).to(out.dtype.element_ty), mask=is_there)
