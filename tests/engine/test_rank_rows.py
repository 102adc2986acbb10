"""What the other ranks take from the first one's messages is what the first one computes itself, step by step."""

import socket
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from engine.batch_tensors import BatchTensors
from engine.forest import SharedNode
from engine.rank_messages import Channel, RankAdvance, RankStep, encode, read_transfers
from engine.rank_rows import KnownRows, ToldRows
from engine.sampling_params import SamplingParams
from engine.scheduled_batch import BlockCopy, ScheduledBatch, ScheduledSequence, StepResult, Transfers
from engine.sequence import Sequence
from kernels.batch import AttentionBatch
from tests.engine.fake_runner import Bench, ids

SIZE = 8


class Ranks:
    """Both ends of a channel; `step` compares what arrives with what was meant."""

    def __init__(self) -> None:
        own, other = socket.socketpair()
        self._leader, self._follower = Channel(own), Channel(other)
        self._told, self._known = ToldRows(SIZE), KnownRows(SIZE)
        self.messages: list[RankStep | RankAdvance] = []

    def close(self) -> None:
        self._leader.close()
        self._follower.close()

    def step(self, batch: ScheduledBatch) -> None:
        tensors = BatchTensors.build(batch, SIZE) if batch.sequences else None
        self._leader.send(encode(self._told.tell(batch, tensors)))
        message = self._follower.receive_order()
        assert isinstance(message, RankStep | RankAdvance)
        self.messages.append(message)
        assert read_transfers(message) == batch.transfers
        if tensors is None:
            assert message.token_ids == b""
            return
        *numbers, attention = self._known.take(message)
        for ours, theirs in zip(
            (*numbers, attention.slots), (tensors.token_ids, tensors.positions, tensors.slots), strict=True
        ):
            assert isinstance(ours, np.ndarray)
            assert (ours.tolist(), ours.dtype) == (theirs.tolist(), np.int32)
        assert plain(attention) == plain(tensors.attention)

    @property
    def num_advances(self) -> int:
        return sum(isinstance(message, RankAdvance) for message in self.messages)


def plain(attention: AttentionBatch) -> list[object]:
    tails = [(list(tail.block_ids), tail.num_tokens) for tail in attention.tails]
    nodes = [(list(node.block_ids), list(node.rows)) for node in attention.nodes]
    return [tails, nodes, [(e.num_rows, e.num_context_tokens, list(e.block_ids)) for e in attention.extends]]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.close()


def row(block_table: list[int], num_tokens: int) -> Sequence:
    """Its last token is the next one to compute."""
    made = Sequence("a", list(range(num_tokens)), SamplingParams(), (), 0, 100)
    made.block_table, made.num_computed_tokens = block_table, num_tokens - 1
    return made


def go_on(rows: list[Sequence]) -> None:
    """Each draws the number of its tokens."""
    for sequence in rows:
        sequence.num_computed_tokens += 1
        sequence.token_ids.append(sequence.num_tokens)


def batch_of(*rows: Sequence) -> ScheduledBatch:
    return ScheduledBatch(tuple(ScheduledSequence(r, 1, True) for r in rows), len(rows))


def numbers(*values: int) -> bytes:
    return np.array(values, dtype=np.int32).tobytes()


def test_rows_that_go_on_are_told_by_their_tokens_and_new_blocks(ranks: Ranks) -> None:
    rows = [row([1, 2], 15), row([3], 5)]
    batch = batch_of(*rows)
    ranks.step(batch)
    go_on(rows)
    ranks.step(batch)
    go_on(rows)
    rows[0].block_table.append(9)
    copies = (BlockCopy(5, 6),)
    ranks.step(replace(batch, transfers=Transfers(copies=copies)))
    assert isinstance(ranks.messages[0], RankStep)
    assert ranks.messages[1:] == [
        RankAdvance([], [], [], numbers(15, 5), []),
        RankAdvance([], [], [*copies], numbers(16, 6), [(0, 9)]),
    ]


def test_32_rows_of_8000_tokens_go_on_in_a_few_hundred_bytes(ranks: Ranks) -> None:
    rows = [row([*range(1000 * i, 1000 * (i + 1))], 7999) for i in range(1, 33)]
    batch = batch_of(*rows)
    ranks.step(batch)
    go_on(rows)
    ranks.step(batch)
    whole, advance = (len(encode(message)) for message in ranks.messages)
    assert whole > 90_000
    assert advance < 160


def joined(rows: list[Sequence], batch: ScheduledBatch) -> ScheduledBatch:
    return batch_of(*rows, row([5], 3))


def made_anew(rows: list[Sequence], batch: ScheduledBatch) -> ScheduledBatch:
    return batch_of(*rows)


def in_a_node(rows: list[Sequence], batch: ScheduledBatch) -> ScheduledBatch:
    return replace(batch, nodes=(SharedNode((1,), (0, 1)),))


def set_back(rows: list[Sequence], batch: ScheduledBatch) -> ScheduledBatch:
    rows[1].num_computed_tokens -= 2
    return batch


def with_its_own_copy(rows: list[Sequence], batch: ScheduledBatch) -> ScheduledBatch:
    rows[1].block_table[1] = 7
    return batch


@pytest.mark.parametrize("change", [joined, made_anew, in_a_node, set_back, with_its_own_copy])
def test_rows_that_changed_are_told_whole(
    ranks: Ranks, change: Callable[[list[Sequence], ScheduledBatch], ScheduledBatch]
) -> None:
    rows = [row([1, 2], 11), row([1, 3], 13)]
    batch = batch_of(*rows)
    ranks.step(batch)
    go_on(rows)
    ranks.step(batch)
    go_on(rows)
    ranks.step(change(rows, batch))
    assert [type(message) for message in ranks.messages] == [RankStep, RankAdvance, RankStep]


def test_prompts_are_told_whole(ranks: Ranks) -> None:
    """Also if the very same rows come again."""
    prompt = row([1, 2], 16)
    prompt.num_computed_tokens = 0
    batch = ScheduledBatch((ScheduledSequence(prompt, 1, False),), 0)
    ranks.step(batch)
    prompt.num_computed_tokens = 1
    ranks.step(batch)
    assert ranks.num_advances == 0


@pytest.mark.parametrize("num_host_blocks", [0, 30])
def test_whatever_the_scheduler_does(ranks: Ranks, num_host_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices that fork, chunks of prompts, preempted and swapped ones, aborted ones, steps of moves alone."""
    bench = Bench(24, max_num_batched_tokens=16, num_host_blocks=num_host_blocks)
    execute = bench.runner.execute

    def told(batch: ScheduledBatch) -> StepResult:
        ranks.step(batch)
        return execute(batch)

    monkeypatch.setattr(bench.runner, "execute", told)
    for i in range(12):
        for choice in range(1 + i % 3):
            bench.add(f"{i} {choice}", ids(0, 20) if i % 2 else ids(50 * i, 3 + 5 * i), 30, choice=choice)
        bench.step(9)
    bench.core.abort(["9 0", "11 1"])
    bench.run()
    stats = bench.core.stats()
    assert stats.preemptions > 0
    assert (stats.host.swapped_in > 0) == (num_host_blocks > 0)
    assert len(ranks.messages) / 3 < ranks.num_advances < len(ranks.messages)
