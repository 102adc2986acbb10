"""What the interpreter and a device would compute differently, each in one place: products of tiles, and rounding."""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether kernels are interpreted in Python on a CPU; set by TRITON_INTERPRET=1 before triton is imported."""


@triton.jit
def dot(a, b):
    """a [M, K] times b [K, N] of one dtype: fp32 [M, N]; fp32 is multiplied as fp32, not as TF32."""
    if INTERPRETED:
        # the interpreter holds bf16 as the integers of its bits, and would multiply those; and in fp32 the processor's
        # library sums a row in an order that depends on where in the tile it lies
        return tl.dot(a.to(tl.float32).to(tl.float64), b.to(tl.float32).to(tl.float64), out_dtype=tl.float64).to(
            tl.float32
        )
    else:
        return tl.dot(a, b, input_precision="ieee")


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """fp32 x to the nearest value of dtype, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        # the interpreter would cut the bits off
        return tl.where(x == x, round_to_bf16(x), x).to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def round_to_bf16(x):
    """fp32 x, finite, to the nearest value of bfloat16, ties to even; still fp32."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def round_to_whole(x):
    """fp32 x below 2**22 in magnitude to the nearest whole number, ties to even: beyond 2**23 there are no others."""
    return (x + 12582912.0) - 12582912.0
