"""Products of tiles, the only place where a kernel multiplies matrices."""

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
