"""A kernel as none should be, and the same as it should be, for the test that looks for such."""

import triton
import triton.language as tl


@triton.jit
def doubles(values):
    places = tl.arange(0, 16)
    tl.store(values + places, tl.load(values + places) * 2.0)


@triton.jit
def doubles_widened(values):
    places = tl.arange(0, 16)
    wide = tl.load(values + places).to(tl.float32)
    tl.store(values + places, (wide * 2.0).to(values.dtype.element_ty))
