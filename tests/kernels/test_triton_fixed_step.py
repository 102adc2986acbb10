"""Steps that are written where launches look for them: the numbers of any step, always at the same places."""

import numpy as np
import pytest
import torch

from kernels.attention_rule import FULL
from kernels.batch import AttentionBatch, DrawBatch, KVShape, Node, Tail
from kernels.fixed_step import StepForm, StepLimits
from tests.interpreted.child import need_triton

need_triton()

from kernels.triton.fixed_step import TritonFixedStep  # noqa: E402
from kernels.triton.plan import TritonPlan, find_tile_rows, number_plan  # noqa: E402
from kernels.triton.tiles import Tiles  # noqa: E402

SHAPE = KVShape(num_blocks=4000, num_kv_heads=2, block_size=8, head_dim=16)
TILES = Tiles(piece_tokens=32, tile_tokens=16, max_node_rows=32)
LIMITS = StepLimits(num_rows=8, row_tokens=(32, 96), max_tokens=256)
GROUP, VOCABULARY = 3, 50


def make() -> TritonFixedStep:
    return TritonFixedStep(LIMITS, SHAPE, TILES, FULL, torch.device("cpu"), group=GROUP, vocab_size=VOCABULARY)


def draws(num_rows: int) -> DrawBatch:
    """Rows' numbers differ, from row to row and kind to kind."""
    rows = np.arange(num_rows)
    return DrawBatch(
        temperatures=(rows / 8 + 0.5).astype(np.float32),
        top_ks=(rows * 10).astype(np.int32),
        top_ps=1 - rows / 100,
        min_ps=rows / 1000,
        seeds=rows.astype(np.int64) + 2**60,
        choices=rows.astype(np.int32) + 7,
        positions=rows.astype(np.int64) + 2**40,
    )


def write(step: TritonFixedStep, batch: AttentionBatch) -> StepForm | None:
    rows = np.arange(batch.num_decodes, dtype=np.int32)
    return step.try_write(rows + 10, rows + 20, batch, draws(batch.num_decodes))


def random_batch(rng: np.random.Generator, max_tokens: int = 96) -> AttentionBatch:
    """One to eight rows, some of them behind one of two nodes."""
    num_rows = int(rng.integers(1, 9))
    blocks = iter(rng.permutation(np.arange(1, SHAPE.num_blocks, dtype=np.int32)).tolist())

    def table(num_tokens: int) -> list[int]:
        return [next(blocks) for _ in range(-(-num_tokens // SHAPE.block_size))]

    tails = [Tail(table(num), num) for num in rng.integers(1, max_tokens + 1, num_rows).tolist()]
    places = rng.integers(0, 3, num_rows)
    readers = [np.flatnonzero(places == node).tolist() for node in (1, 2)]
    nodes = [Node(table(8 * int(rng.integers(1, 9))), rows) for rows in readers if len(rows) > 1]
    return AttentionBatch([tail.block_ids[-1] * SHAPE.block_size for tail in tails], tails, nodes)


def arrays_of(plan: TritonPlan) -> dict[str, torch.Tensor]:
    found = {"step slots": plan.slots, "step blocks": plan.blocks}
    for group in ("nodes", "tails"):
        part = getattr(plan, group)
        found |= {f"{group} {name}": getattr(part, name) for name in part.__dataclass_fields__ if "_" in name}
    return {name: array for name, array in found.items() if isinstance(array, torch.Tensor)}


def test_two_hundred_steps_of_changing_rows_lie_where_the_first_one_lay() -> None:
    step, rng = make(), np.random.default_rng(3)
    plan = step.plan(StepForm(32, has_nodes=True))
    arrays = {**arrays_of(plan), "token ids": step.token_ids, "positions": step.positions}
    arrays |= {f"draw {name}": array for name, array in step._draw_arrays._asdict().items()}
    places = {name: (array.data_ptr(), array.shape) for name, array in arrays.items()}
    forms = set()
    for _ in range(200):
        batch = random_batch(rng)
        num_rows = batch.num_decodes
        form = write(step, batch)
        forms.add(form)
        tile_rows = find_tile_rows(LIMITS.num_rows * GROUP, TILES)
        numbers = number_plan(batch, SHAPE, GROUP, TILES, FULL, tile_rows)
        assert form is not None
        assert form.has_nodes == bool(batch.nodes)
        assert form.num_items >= max(numbers.num_items("tails"), numbers.num_items("nodes"))
        for group in ("step", "nodes", "tails"):
            for name, values in numbers.arrays[group].items():
                written = arrays[f"{group} {name}"]
                assert written[: len(values)].tolist() == list(values), name
        # the rows that nobody has write nothing, read nothing and take the largest logit
        assert arrays["step slots"][num_rows:].tolist() == [-1] * (8 - num_rows)
        assert set(arrays["tails row_parts"][num_rows:].tolist()) == {numbers.num_parts("tails")}
        assert arrays["token ids"].tolist() == [*range(10, 10 + num_rows), *[0] * (8 - num_rows)]
        assert arrays["positions"].tolist() == [*range(20, 20 + num_rows), *[0] * (8 - num_rows)]
        assert arrays["draw temperatures"][num_rows:].tolist() == [0.0] * (8 - num_rows)
    assert {name: (array.data_ptr(), array.shape) for name, array in arrays.items()} == places
    assert forms == set(step.forms)


def test_what_rows_draw_with_is_beside_their_plan() -> None:
    """A filter that lets through as many tokens as there are is none."""
    step = make()
    write(step, AttentionBatch(range(0, 64, 8), [Tail([1], 1)] * 8))
    found = {name: array.tolist() for name, array in step._draw_arrays._asdict().items()}
    expected = {name: getattr(draws(8), name).tolist() for name in found}
    assert expected["top_ks"] == [0, 10, 20, 30, 40, 50, 60, 70]
    assert found == {**expected, "top_ks": [0, 10, 20, 30, 40, 0, 0, 0]}


def test_there_is_a_form_for_short_tails_and_one_for_long_ones() -> None:
    """Of pieces of 32 tokens: eight rows of 32 tokens; eight of 96, and one of 256 beside them."""
    assert make().forms == [StepForm(8, False), StepForm(8, True), StepForm(32, False), StepForm(32, True)]


@pytest.mark.parametrize(
    ("lengths", "form"),
    [
        ([32] * 8, StepForm(8, has_nodes=False)),
        ([33, *[32] * 7], StepForm(32, has_nodes=False)),
        ([256, *[96] * 7], StepForm(32, has_nodes=False)),
        ([256, 256, *[96] * 6], None),
        ([8] * 9, None),
    ],
    ids=["short", "long", "one as long as can be", "too long", "too many rows"],
)
def test_the_smallest_form_that_holds_a_step(lengths: list[int], form: StepForm | None) -> None:
    step = make()
    tables = [list(range(1 + 40 * row, 1 + 40 * row + -(-length // 8))) for row, length in enumerate(lengths)]
    tails = [Tail(table, length) for table, length in zip(tables, lengths, strict=True)]
    assert write(step, AttentionBatch([table[-1] * 8 for table in tables], tails)) == form


def test_a_step_that_no_form_holds_leaves_what_was_written() -> None:
    step = make()
    write(step, AttentionBatch([8, 16], [Tail([1], 1), Tail([2], 1)]))
    before = step.plan(step.forms[0]).slots.tolist()
    tables = [list(range(1 + 40 * row, 33 + 40 * row)) for row in range(8)]
    assert write(step, AttentionBatch(range(0, 64, 8), [Tail(table, 256) for table in tables])) is None
    assert step.plan(step.forms[0]).slots.tolist() == before == [8, 16, *[-1] * 6]
