"""Products of tiles, the only place where a kernel multiplies matrices."""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether kernels are interpreted in Python on a CPU; set by TRITON_INTERPRET=1 before triton is imported."""


@triton.jit
def dot(a, b):
    """a [M, K] times b [K, N] of one dtype: fp32 [M, N]; fp32 is multiplied as fp32, not as TF32."""
    if INTERPRETED:
        # the interpreter holds bf16 as the integers of its bits, and would multiply those
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision="ieee")
