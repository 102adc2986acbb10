"""Quantised records: every bit of what is written, and how far what is read is from what was meant."""

import math

import pytest
import torch

from kernels.batch import KVShape
from kernels.kv_format import FP8, INT8, KVFormat, cache_dtype, find_format, layer_sizes, token_bytes

FORMATS = [INT8, FP8]
TINY = 2.0**-126
"""The least normal number."""


def ids(quantised: KVFormat) -> str:
    return quantised.name


def test_int8_values_are_steps_of_the_largest_one() -> None:
    values, scales = INT8.quantise(
        torch.tensor([[127.0, -127.0, 0.5, 1.5, -2.5, 0.4], [0.0, 254.0, -1.0, 3.0, 1.0, 0.0]])
    )
    assert values.view(torch.int8).tolist() == [[127, -127, 0, 2, -2, 0], [0, 127, 0, 2, 0, 0]]  # ties to even
    assert scales is not None
    assert scales.tolist() == [1.0, 2.0]


def test_an_int8_row_of_zeros_and_one_of_next_to_nothing_read_as_zeros() -> None:
    values, scales = INT8.quantise(torch.tensor([[0.0, -0.0], [126 * TINY, -1e-45], [127 * TINY, 0.0]]))
    assert values.view(torch.int8).tolist() == [[0, 0], [0, 0], [127, 0]]
    assert scales is not None
    assert scales.tolist() == [0.0, 0.0, TINY]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_int8_row_that_is_not_finite_reads_as_nan_and_its_neighbours_do_not(bad: float) -> None:
    values, scales = INT8.quantise(torch.tensor([[1.0, bad], [127.0, 0.0]]))
    assert scales is not None
    assert (values.tolist(), scales.view(torch.int16).tolist()) == ([[0, 0], [127, 0]], [0x7FC0, 0x3F80])
    read = INT8.dequantise(values, scales)
    assert read[0].isnan().all()
    assert read[1].tolist() == [127.0, 0.0]


def test_fp8_values_are_rounded_to_the_nearest_and_saturate() -> None:
    numbers = [0.0, -0.0, 1.0, 17.0, 19.0, 447.0, 448.0, 464.0, 1e30, -1e30, 2**-9, 2**-10, 3 * 2**-10, -(2**-11)]
    values, scales = FP8.quantise(torch.tensor([numbers]))
    assert scales is None
    expected = [0x00, 0x80, 0x38, 0x58, 0x5A, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x01, 0x00, 0x02, 0x80]
    assert values.tolist() == [expected]


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_an_fp8_value_that_is_not_finite_is_the_one_nan(bad: float) -> None:
    values, scales = FP8.quantise(torch.tensor([[1.0, bad]]))
    assert values.tolist() == [[0x38, 0x7F]]
    assert FP8.dequantise(values, scales)[0, 1].isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_int8_is_off_by_half_a_step_at_most(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = (torch.randn(2000, 64, generator=generator) * 10 ** (torch.rand(2000, 1, generator=generator) * 60 - 30)).to(
        dtype
    )
    values, scales = INT8.quantise(rows)
    assert scales is not None
    assert (values.view(torch.int8).abs().amax(-1) >= 126).all()
    error = (INT8.dequantise(values, scales).double() - rows.double()).abs().amax(-1)
    assert (error <= scales.double() * 0.5000001).all()


def test_fp8_is_off_by_a_sixteenth_at_most() -> None:
    rows = torch.randn(500, 64, generator=torch.Generator().manual_seed(1)) * 20
    read = FP8.dequantise(*FP8.quantise(rows))
    assert ((read - rows).abs() <= torch.maximum(rows.abs() / 16, torch.tensor(2.0**-10))).all()


@pytest.mark.parametrize("quantised", FORMATS, ids=ids)
def test_what_was_read_is_kept_as_it_is(quantised: KVFormat) -> None:
    read = quantised.dequantise(*quantised.quantise(torch.randn(500, 64, generator=torch.Generator().manual_seed(2))))
    again = quantised.dequantise(*quantised.quantise(read))
    torch.testing.assert_close(again, read, rtol=2**-8 if quantised.has_scales else 0, atol=0)


def test_a_record_is_values_by_token_and_scales_behind_them() -> None:
    shape = KVShape(num_blocks=2, num_kv_heads=1, block_size=8, head_dim=2, quantisation="int8")
    assert layer_sizes(shape) == (2, 2, 1, 32)
    assert cache_dtype(shape, torch.bfloat16) == torch.uint8
    kv = torch.zeros(layer_sizes(shape), dtype=torch.uint8)
    # token 3 of block 1 of V
    INT8.write(kv, torch.tensor([(1 * 2 + 1) * 8 + 3]), torch.tensor([[127.0, -1.0]]))
    record = [0] * 32
    record[6:8] = [127, 255]
    record[16 + 6 : 16 + 8] = [0x80, 0x3F]  # 1 in bf16, the low byte first
    assert kv.view(4, 32).tolist() == [[0] * 32, [0] * 32, [0] * 32, record]


@pytest.mark.parametrize("quantised", FORMATS, ids=ids)
def test_what_is_written_to_a_token_is_read_there_and_nowhere_else(quantised: KVFormat) -> None:
    shape = KVShape(num_blocks=5, num_kv_heads=3, block_size=8, head_dim=10, quantisation=quantised.name)
    kv = torch.full(layer_sizes(shape), 0xFF, dtype=torch.uint8)
    rows = torch.randn(4, 10, generator=torch.Generator().manual_seed(3))
    tokens = [0, 9, 119, 239]  # the last one of K, and of V
    quantised.write(kv, torch.tensor(tokens), rows)
    read = quantised.read(kv, 10).view(-1, 10)
    assert torch.equal(read[tokens], quantised.dequantise(*quantised.quantise(rows)))
    read[tokens] = math.nan
    assert read.isnan().all()


@pytest.mark.parametrize("quantised", FORMATS, ids=ids)
def test_packed_blocks_are_what_writes_of_their_tokens_make(quantised: KVFormat) -> None:
    shape = KVShape(num_blocks=5, num_kv_heads=3, block_size=8, head_dim=10, quantisation=quantised.name)
    blocks = torch.randn(2, 5, 3, 8, 10, generator=torch.Generator().manual_seed(4))
    kv = torch.full(layer_sizes(shape), 0xFF, dtype=torch.uint8)
    quantised.write(kv, torch.arange(240), blocks.view(240, 10))
    assert torch.equal(quantised.pack(blocks), kv)


def test_sizes() -> None:
    assert (INT8.block_bytes(16, 64), FP8.block_bytes(16, 64)) == (1056, 1024)
    assert token_bytes(None, 64, torch.bfloat16) == 128
    assert (token_bytes("int8", 64, torch.bfloat16), token_bytes("fp8", 64, torch.float32)) == (66, 64)
    plain = KVShape(num_blocks=2, num_kv_heads=3, block_size=8, head_dim=10)
    assert layer_sizes(plain) == (2, 2, 3, 8, 10)
    assert cache_dtype(plain, torch.float16) == torch.float16
    assert (find_format(None), find_format("fp8")) == (None, FP8)
