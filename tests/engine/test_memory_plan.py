from typing import Any

import pytest

from engine.config import EngineConfig, ModelConfig, RopeConfig
from engine.errors import EngineError, ModelNotSupported, NotEnoughMemory
from engine.memory_plan import MemoryPlan, check_weights_fit, plan_memory

MIB, GIB = 2**20, 2**30
# 2 * 30 layers * 3 heads * 64 * 2 bytes = 23,040 bytes a token in bfloat16, 368,640 a block of 16
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


def plan(available_bytes: int, *, available_host_bytes: int = 0, on_gpu: bool = False, **config: Any) -> MemoryPlan:
    return plan_memory(
        SMOLLM2,
        EngineConfig(model_dir="", **config),
        kv_head_bytes={"int8": 64 + 2, "fp8": 64}.get(config.get("kv_dtype", "auto"), 64 * 2),
        weights_bytes=311 * MIB,
        available_bytes=available_bytes,
        available_host_bytes=available_host_bytes or available_bytes,
        on_gpu=on_gpu,
    )


def test_a_cpu_gives_a_quarter_and_at_most_4_gib() -> None:
    small = plan(4 * GIB)
    assert (small.num_blocks, small.kv_bytes) == (GIB // 368_640 - 1, GIB // 368_640 * 368_640)
    assert plan(100 * GIB).num_blocks == 4 * GIB // 368_640 - 1
    assert plan(100 * GIB, on_gpu=True).num_blocks == int(90 * GIB) // 368_640 - 1


def test_a_quantised_cache_has_about_twice_the_blocks() -> None:
    """A token of one head takes 128 bytes in bfloat16, 66 in int8 with its scale, 64 in fp8."""
    # 4 GiB / (2 * 30 * 3 * 16 * 128), / (... * 66), / (... * 64), the null block off
    assert plan(16 * GIB).num_blocks == 11_649
    assert plan(16 * GIB, kv_dtype="int8").num_blocks == 22_594
    assert plan(16 * GIB, kv_dtype="fp8").num_blocks == 23_300
    assert [plan(16 * GIB, kv_dtype=name).bytes_per_block for name in ("auto", "int8", "fp8")] == [
        368_640,
        190_080,
        184_320,
    ]
    host = plan(16 * GIB, kv_dtype="int8", host_cache_bytes=GIB)
    assert (host.num_host_blocks, host.host_bytes) == (5_648, 5_648 * 190_080)


def test_the_context_is_the_models_unless_a_shorter_one_was_asked_for_or_fits() -> None:
    assert plan(16 * GIB).max_model_len == 8192
    assert plan(16 * GIB, max_model_len=1000).max_model_len == 1000
    assert plan(16 * GIB, num_blocks=10).max_model_len == 160
    assert plan(16 * GIB, num_blocks=10, max_model_len=100).max_model_len == 100
    with pytest.raises(ModelNotSupported, match="a context of 9000 tokens was asked for, but the model has 8192"):
        plan(16 * GIB, max_model_len=9000)


def test_the_printed_plan() -> None:
    assert str(plan(16 * GIB, num_blocks=1000, kv_dtype="int8")) == (
        "weights 311 MiB, KV cache 181 MiB in int8: 1,000 blocks of 16 tokens, 16,000 tokens fit, context 8,192"
    )
    assert str(plan(16 * GIB, num_blocks=1000)) == (
        "weights 311 MiB, KV cache 352 MiB: 1,000 blocks of 16 tokens, 16,000 tokens fit, context 8,192"
    )


def test_blocks_that_were_asked_for_have_to_fit() -> None:
    with pytest.raises(NotEnoughMemory) as raised:
        plan(GIB, num_blocks=100_000)
    assert str(raised.value) == "a KV cache of 100000 blocks needs 35,157 MiB, but 1,024 MiB are available"
    assert (raised.value.needed_bytes, raised.value.available_bytes) == (100_001 * 368_640, GIB)


def test_a_context_that_was_asked_for_has_to_fit() -> None:
    with pytest.raises(NotEnoughMemory, match="a KV cache for 8192 tokens needs 180 MiB, but 128 MiB are available"):
        plan(512 * MIB, max_model_len=8192)
    with pytest.raises(NotEnoughMemory, match="a KV cache for 16 tokens needs 1 MiB, but 0 MiB are available"):
        plan(1 * MIB)


def test_the_host_tier_is_in_the_plan_and_has_to_fit() -> None:
    on_cpu = plan(4 * GIB, host_cache_bytes=GIB)
    assert (on_cpu.num_host_blocks, on_cpu.host_bytes) == (GIB // 368_640, GIB // 368_640 * 368_640)
    # what the host tier takes is not there for the pool
    assert on_cpu.num_blocks == int((4 * GIB - on_cpu.host_bytes) * 0.25) // 368_640 - 1
    on_gpu = plan(4 * GIB, available_host_bytes=2 * GIB, on_gpu=True, host_cache_bytes=2 * GIB)
    assert on_gpu.num_blocks == int(4 * GIB * 0.9) // 368_640 - 1
    assert str(plan(16 * GIB, num_blocks=1000, host_cache_bytes=GIB)).endswith(
        ", context 8,192, host tier 1,024 MiB: 2,912 blocks"
    )
    with pytest.raises(NotEnoughMemory, match="the host tier needs 3,072 MiB, but 2,048 MiB are available"):
        plan(4 * GIB, available_host_bytes=2 * GIB, on_gpu=True, host_cache_bytes=3 * GIB)
    with pytest.raises(NotEnoughMemory, match="a KV cache of 4000 blocks needs 1,407 MiB, but 1,024 MiB are available"):
        plan(2 * GIB, num_blocks=4000, host_cache_bytes=GIB)
    with pytest.raises(NotEnoughMemory, match="a host tier of one block needs 0 MiB, but 0 MiB are available"):
        plan(GIB, host_cache_bytes=368_639)
    with pytest.raises(EngineError, match="host_cache_bytes must be at least 0, got -1"):
        plan(GIB, host_cache_bytes=-1)


def test_weights_that_do_not_fit_are_refused_before_they_are_loaded() -> None:
    check_weights_fit(GIB, GIB)
    with pytest.raises(
        NotEnoughMemory, match="loading the model's weights needs 2,048 MiB, but 1,024 MiB are available"
    ):
        check_weights_fit(2 * GIB, GIB)
