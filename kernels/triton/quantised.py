"""Values of a quantised cache, as `kernels.kv_format` has them, in registers.

fp8 is read and written as bits, by operations on whole numbers: for sm_80 there is no instruction, and where there is
one it need not treat what is too large or not finite as the format does.
"""

import triton
import triton.language as tl

from kernels.triton.arithmetic import round_to_bf16, round_to_whole

INFINITY_BITS = tl.constexpr(0x7F800000)
LEAST_NORMAL = tl.constexpr(2.0**-126)
"""Of fp32, and of bfloat16."""


@triton.jit
def as_operand(loaded, dtype: tl.constexpr, QUANTISATION: tl.constexpr):
    """What a cache holds to what products take; exact in both formats, int8 without its scale."""
    if QUANTISATION is None:
        return loaded
    elif QUANTISATION == "int8":
        return loaded.to(tl.float32).to(dtype)
    else:
        return from_fp8(loaded).to(dtype)


@triton.jit
def from_fp8(codes):
    """uint8, bits of e4m3fn: fp32. Exponent and mantissa moved to where fp32 has them make a number that is too small
    by the difference of the biases, those below the least normal one too."""
    bits = codes.to(tl.int32)
    size = bits & 0x7F
    moved = ((bits & 0x80) << 24) | (size << 20)
    return tl.where(size == 0x7F, float("nan"), moved.to(tl.float32, bitcast=True) * 2.0**120)


@triton.jit
def to_fp8(x):
    """fp32 to the bits of e4m3fn, uint8: the nearest one, ties to even, at most 448; NaN for what is not finite."""
    bits = x.to(tl.int32, bitcast=True)
    size_bits = bits & 0x7FFFFFFF
    size = tl.minimum(size_bits.to(tl.float32, bitcast=True), 448.0)
    # 20 of 23 bits of mantissa go; 120 is the difference of the biases
    kept = size.to(tl.int32, bitcast=True)
    normal = ((kept + 0x7FFFF + ((kept >> 20) & 1)) >> 20) - (120 << 3)
    # below the least normal one there are multiples of 2**-9 only, the eighth being that one
    small = round_to_whole(size * 512.0).to(tl.int32)
    code = tl.where(size < 2.0**-6, small, normal)
    code = tl.where(size_bits < INFINITY_BITS, code | ((bits >> 24) & 0x80), 0x7F)
    return code.to(tl.uint8)


@triton.jit
def int8_scale(left, right):
    """The scale of each row, whose values are in fp32 left [rows, values] and right [rows, values]: fp32 [rows], but a
    value of bfloat16; NaN if something in the row is not finite."""
    # as whole numbers, bits of magnitudes are in order, with infinity and NaN behind all others
    left_bits = left.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    right_bits = right.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest_bits = tl.max(tl.maximum(left_bits, right_bits), 1)
    is_finite = largest_bits < INFINITY_BITS
    largest = tl.where(is_finite, largest_bits, 0).to(tl.float32, bitcast=True)
    scale = round_to_bf16(tl.div_rn(largest, 127.0))
    return tl.where(is_finite, tl.where(scale < LEAST_NORMAL, 0.0, scale), float("nan"))


@triton.jit
def to_int8(x, scale):
    """fp32 x [rows, values] in steps of scale [rows]; zeros where the scale is 0 or NaN."""
    is_scaled = (scale > 0.0)[:, None]
    steps = tl.div_rn(x, tl.where(scale > 0.0, scale, 1.0)[:, None] + tl.zeros_like(x))
    steps = tl.minimum(tl.maximum(round_to_whole(steps), -127.0), 127.0)
    return tl.where(is_scaled, steps, 0.0).to(tl.int8)
