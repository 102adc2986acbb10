"""The bytes and operations of a step, by hand for SmolLM2-135M."""

import msgspec
import pytest

from benchmarks.step_work import DecodeShape, Work, decode_work, num_parameters, prefill_work
from benchmarks.workloads import WORKLOADS
from engine.config import ModelConfig, RopeConfig

SMOLLM2 = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    max_position_embeddings=8192,
    rope=RopeConfig(),
    tie_word_embeddings=True,
)
KV_BYTES = 23040
"""A token's, in bfloat16."""
LOGITS_BYTES = 4 * 49152


def test_parameters_and_weight_bytes() -> None:
    assert num_parameters(SMOLLM2) == 134_515_008
    one = decode_work(SMOLLM2, 2, DecodeShape(1, 0, 1, num_trunks=0))
    assert one.weight_bytes == 269_030_016
    assert one.trunk_bytes == one.own_bytes == 0
    assert one.written_bytes == KV_BYTES + LOGITS_BYTES
    untied = num_parameters(msgspec.structs.replace(SMOLLM2, tie_word_embeddings=False))
    assert untied == 134_515_008 + 49152 * 576


def test_a_trunk_is_read_once_and_a_tail_once_a_row() -> None:
    alone = decode_work(SMOLLM2, 2, DecodeShape(1, 1000, 105))
    many = decode_work(SMOLLM2, 2, DecodeShape(32, 1000, 105))
    assert alone.trunk_bytes == many.trunk_bytes == 1000 * KV_BYTES
    assert many.own_bytes == 32 * alone.own_bytes == 32 * 104 * KV_BYTES
    assert decode_work(SMOLLM2, 2, DecodeShape(32, 500, 105, 8)).trunk_bytes == 8 * 500 * KV_BYTES
    assert decode_work(SMOLLM2, 4, DecodeShape(32, 1000, 105)).trunk_bytes == 2 * many.trunk_bytes


def test_operations_count_every_row_even_where_bytes_are_shared() -> None:
    one, two = (decode_work(SMOLLM2, 2, DecodeShape(n, 1000, 105)).flops for n in (1, 2))
    assert two == 2 * one
    assert one == 2 * 134_515_008 + 4 * 30 * 9 * 64 * 1105


def test_chunks_read_weights_again_and_the_head_once() -> None:
    whole = prefill_work(SMOLLM2, 2, [1000])
    chunked = prefill_work(SMOLLM2, 2, [512, 488])
    assert whole.flops == chunked.flops
    assert whole.flops == pytest.approx(2 * 106.2e6 * 1000 + 4 * 30 * 576 * 500_500 + 2 * 28.3e6, rel=1e-3)
    assert chunked.weight_bytes - whole.weight_bytes == 2 * 30 * 3_540_096
    assert (whole.own_bytes, chunked.own_bytes) == (0, 512 * KV_BYTES)
    assert whole.written_bytes == 1000 * KV_BYTES + LOGITS_BYTES


def test_the_floor_is_what_takes_longer() -> None:
    work = Work(300, 100, 50, 50, 1000)
    assert work.floor_s(bytes_per_s=50, flops_per_s=1000) == 10
    assert work.floor_s(bytes_per_s=500, flops_per_s=100) == 10


def test_workloads_come_to_the_steps_that_they_run() -> None:
    assert WORKLOADS["W1"].decode_shape() == DecodeShape(32, 1000, 72)
    assert WORKLOADS["W2"].decode_shape() == DecodeShape(32, 500, 72, 8)
    assert WORKLOADS["W3"].decode_shape() == DecodeShape(16, 500, 3 * 88 // 2 + 64)
    assert WORKLOADS["W4"].decode_shape() == DecodeShape(1, 1000, 104)
    assert WORKLOADS["W5"].decode_shape() == DecodeShape(16, 0, 572, num_trunks=0)


def test_workloads_are_driven_as_they_are_named() -> None:
    arguments = WORKLOADS["W3"].arguments
    assert arguments == "--tenants 1 --system-tokens 500 --concurrency 16 --requests 16 --max-tokens 48 --turns 4"
    assert WORKLOADS["W5"].arguments.endswith("--concurrency 16 --requests 32 --max-tokens 64 --ignore-eos")
