"""Steps that the benchmarks build, on a tiny model."""

import pytest

from benchmarks.decode_step import variant
from benchmarks.step_bench import StepBench
from benchmarks.step_work import DecodeShape
from engine.config import EngineConfig
from engine.models.prepare import prepare
from engine.shared_attention import SharedAttention
from tests.tiny_model import make_tiny


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> StepBench:
    folder = tmp_path_factory.mktemp("bench")
    model = prepare(str(make_tiny(folder / "hf")), folder, "float32", lambda *_: None)
    config = EngineConfig(model_dir=str(model.path), dtype="float32", num_blocks=60, kernels="reference", device="cpu")
    return StepBench(model, config)


def test_rows_of_a_trunk_share_its_full_blocks_and_nothing_else(bench: StepBench) -> None:
    bench.free_all()
    rows = bench.sequences.rows(DecodeShape(5, 70, 12, 2))
    assert [row.num_tokens for row in rows] == [82] * 5
    assert {row.num_uncomputed_tokens for row in rows} == {1}
    shared = [set(a.block_table) & set(b.block_table) for a, b in ((rows[0], rows[2]), (rows[0], rows[1]))]
    assert [len(blocks) for blocks in shared] == [4, 0], "70 tokens fill 4 blocks of 16"
    assert rows[0].token_ids[:70] == rows[2].token_ids[:70] != rows[1].token_ids[:70]
    assert rows[0].token_ids[70:] != rows[2].token_ids[70:]
    nodes = bench.sequences.batch(rows, SharedAttention("always")).nodes
    assert sorted(node.rows for node in nodes) == [(0, 2, 4), (1, 3)]
    assert bench.sequences.batch(rows, SharedAttention("never")).nodes == ()


def test_nothing_is_shared_without_a_trunk(bench: StepBench) -> None:
    bench.free_all()
    rows = bench.sequences.rows(DecodeShape(3, 500, 80, num_trunks=0))
    assert [row.num_tokens for row in rows] == [80] * 3
    assert len({block for row in rows for block in row.block_table}) == sum(len(row.block_table) for row in rows)
    with pytest.raises(RuntimeError, match="blocks are needed, there are 60"):
        bench.sequences.rows(DecodeShape(10, 0, 80, num_trunks=0))


def test_a_step_runs_as_often_as_is_asked(bench: StepBench) -> None:
    bench.free_all()
    decode = bench.decode(DecodeShape(4, 70, 12))
    assert decode().tokens == decode().tokens
    assert len(decode().tokens) == 4
    bench.prefill(100, chunk_tokens=64)()


def test_variants_are_settings_of_the_engine() -> None:
    plain = EngineConfig(model_dir="m")
    assert variant(plain, "{}") == plain
    assert variant(plain, '{"threads": 1, "max_isa": "none"}') == plain.replace(threads=1, max_isa="none")
    with pytest.raises(ValueError, match="has no thread"):
        variant(plain, '{"thread": 1}')
