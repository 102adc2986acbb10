"""The C++ decoder over quantised caches: the bytes it writes are those of `kernels.kv_format`, and attention reads them
as they are said to read, against float64."""

import itertools
import math

import numpy as np
import pytest
import torch

from kernels.batch import AttentionBatch, Extend, KVQuantisation, Tail
from kernels.cpu.build import Isa
from kernels.cpu.native import LAYER_WEIGHTS, NativeDecoder, StepArrays
from kernels.kv_format import find_format
from tests.kernels.attention_cases import QUANTISATIONS, NodesCase
from tests.kernels.libraries import KINDS, decoder
from tests.kernels.pool import Pool, assert_near, exact
from tests.kernels.test_native_attention import NODE_LAYOUTS, attend, decoder_for

EMBEDDED = [1.0, 1.0, 0.0, 1e-25, 3e-37, 1e-37, 1e-38, math.nan, math.inf, 1e4, 1.0]
"""What the tokens' embeddings are multiplied by."""


class Layer:
    """One layer over random weights, of which some features of V are a thousand times as large; head sizes of 40 are
    no multiple of any vector."""

    HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 48, 2, 2, 40

    def __init__(self, dtype: torch.dtype) -> None:
        random = torch.Generator().manual_seed(5)
        sizes = dict.fromkeys(LAYER_WEIGHTS, (self.HIDDEN, self.HIDDEN))
        sizes |= dict.fromkeys(("q", "k", "v"), (self.KV_HEADS * self.HEAD_DIM, self.HIDDEN))
        sizes["o"] = (self.HIDDEN, self.HEADS * self.HEAD_DIM)
        self.weights = {name: torch.randn(size, generator=random).to(dtype) for name, size in sizes.items()}
        self.weights["v"][::7] *= 1000
        scales = torch.tensor(EMBEDDED)[:, None]
        self.embedding = (torch.randn(len(EMBEDDED), self.HIDDEN, generator=random) * scales).to(dtype)
        angles = torch.rand(len(EMBEDDED), self.HEAD_DIM // 2, generator=random) * 6
        self.cosines = angles.cos().repeat(1, 2)
        self.sines = torch.cat((-angles.sin(), angles.sin()), 1)
        self.norm = torch.ones(self.HIDDEN)

    def write(self, native: NativeDecoder, kv: torch.Tensor, slots: list[int]) -> None:
        outer = (self.embedding, self.embedding, self.norm, self.cosines, self.sines)
        native.set_outer(*(tensor.data_ptr() for tensor in outer), num_positions=len(EMBEDDED))
        addresses = {name: tensor.data_ptr() for name, tensor in self.weights.items()}
        norms = dict.fromkeys(("input_norm", "post_attention_norm"), self.norm.data_ptr())
        native.set_layer(0, addresses | norms)
        ids = np.arange(len(EMBEDDED), dtype=np.int32)
        residual = np.empty((len(EMBEDDED), self.HIDDEN), dtype=np.float32)
        # each a sequence of its own
        arrays = StepArrays.of(AttentionBatch(slots, [Tail([slot // 8], slot % 8 + 1) for slot in slots]))
        native.forward(ids, ids, arrays, kv.data_ptr(), kv.shape[1], residual.ctypes.data)


@pytest.mark.parametrize("quantisation", QUANTISATIONS)
@pytest.mark.parametrize(("dtype", "isa"), KINDS, ids=str)
def test_the_bytes_that_are_written(dtype: torch.dtype, isa: Isa, quantisation: KVQuantisation) -> None:
    layer, slots = Layer(dtype), [8, 15, 47, 23, 20, 21, 22, 31, 30, 40, 41]
    pools = [
        Pool(num_blocks=6, kv_heads=2, block_size=8, head_dim=40, dtype=dtype, quantisation=q)
        for q in (None, quantisation)
    ]
    for pool in pools:
        native = decoder(
            dtype, isa, hidden_size=48, num_heads=2, num_kv_heads=2, head_dim=40, intermediate_size=48, block_size=8,
            vocab_size=len(EMBEDDED), quantisation=pool.shape.quantisation,
        )  # fmt: skip
        before, plain = pool.kv.clone(), pools[0].kv
        layer.write(native, pool.kv, slots)
    quantised = find_format(quantisation)
    assert quantised is not None
    block, offset = torch.tensor(slots) // 8, torch.tensor(slots) % 8
    written = plain[:, block, :, offset]
    assert written.abs().nan_to_num().max() > 448
    new_values, new_scales = quantised.quantise(written)
    values, scales = quantised.split(before, 40)
    values[:, block, :, offset] = new_values
    if scales is not None and new_scales is not None:
        assert (new_scales == 0).any()
        assert ((new_scales > 0) & (new_scales < 1e-36)).any()
        scales[:, block, :, offset] = new_scales
    assert torch.equal(pools[1].kv, before)


@pytest.mark.parametrize("quantisation", QUANTISATIONS)
@pytest.mark.parametrize(("dtype", "isa"), KINDS, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"), [(9, 3, 64, 16), (7, 1, 40, 8), (2, 2, 96, 8)]
)
def test_attention_over_quantised_keys_and_values(
    dtype: torch.dtype,
    isa: Isa,
    quantisation: KVQuantisation,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
) -> None:
    pool = Pool(kv_heads=kv_heads, block_size=block_size, head_dim=head_dim, dtype=dtype, quantisation=quantisation)
    native = decoder_for(pool, heads, isa, 2)
    case = NodesCase.of(pool, heads, NODE_LAYOUTS["two levels"])
    grouped = attend(native, pool, case.q, case.grouped)
    assert_near(grouped, case.expected)
    if dtype == torch.float32:
        assert (attend(native, pool, case.q, case.flat) - grouped).abs().max() <= 2e-6

    table, tail = pool.blocks(270), pool.blocks(21)
    q = pool.random(21, heads, head_dim)
    expected = torch.cat((exact(q[:1], pool.tokens(tail, 21), 20), exact(q[1:], pool.tokens(table, 270), 250)))
    batch = AttentionBatch([0] * 21, [Tail(tail, 21)], (), [Extend(20, 250, [*table, 0])])
    assert_near(attend(native, pool, q, batch), expected)


@pytest.mark.parametrize("quantisation", QUANTISATIONS)
@pytest.mark.parametrize(("dtype", "isa"), KINDS, ids=str)
def test_a_token_has_the_same_bits_alone_in_company_and_in_any_chunk(
    dtype: torch.dtype, isa: Isa, quantisation: KVQuantisation
) -> None:
    pool = Pool(kv_heads=3, block_size=16, head_dim=64, dtype=dtype, quantisation=quantisation)
    table, q = pool.blocks(300), pool.random(300, 9, 64)
    native = decoder_for(pool, 9, isa)
    whole = attend(native, pool, q, AttentionBatch([0] * 300, (), (), [Extend(300, 0, table)]))
    for start, end in itertools.pairwise([0, 1, 18, 255, 257, 300]):
        batch = AttentionBatch([0] * (end - start), (), (), [Extend(end - start, start, table)])
        assert torch.equal(attend(native, pool, q[start:end].contiguous(), batch), whole[start:end]), (start, end)
    positions = [0, 16, 255, 256, 299]
    batch = AttentionBatch([0] * 5, [Tail(table[: p // 16 + 1], p + 1) for p in positions])
    assert torch.equal(attend(native, pool, q[positions].contiguous(), batch), whole[positions])


@pytest.mark.parametrize("quantisation", QUANTISATIONS)
@pytest.mark.parametrize(("dtype", "isa"), KINDS, ids=str)
def test_every_byte_is_read_as_what_it_stands_for(dtype: torch.dtype, isa: Isa, quantisation: KVQuantisation) -> None:
    """One token's value is its attention; each of the 256 bytes is in one of its features or those of other heads."""
    pool = Pool(num_blocks=2, kv_heads=4, block_size=8, head_dim=64, dtype=dtype, quantisation=quantisation)
    pool.kv.zero_()
    assert pool.quantised is not None
    values, scales = pool.quantised.split(pool.kv[:, 1], 64)
    values[1, :, 0] = torch.arange(256).view(4, 64).to(torch.uint8)
    if scales is not None:
        scales[1, :, 0] = torch.tensor([1.0, 0.0078125, 3.0, math.nan])
    out = attend(
        decoder_for(pool, 4, isa), pool, torch.zeros(1, 4, 64, dtype=dtype), AttentionBatch([0], [Tail([1], 1)])
    )
    read = pool.quantised.dequantise(*(x if x is None else x[1, :, 0] for x in (values, scales)))
    expected = torch.where(read.isnan(), torch.nan, read).to(dtype)
    torch.testing.assert_close(out[0], expected, rtol=0, atol=0, equal_nan=True)
