"""What goes between the ranks arrives as it was sent."""

import socket
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from engine.batch_tensors import BatchTensors
from engine.config import EngineConfig
from engine.forest import SharedNode
from engine.rank_messages import (
    Channel,
    FromRank,
    RankBeat,
    RankFailed,
    RankHere,
    RankLoad,
    RankLoaded,
    RankMemory,
    RankStart,
    RankStep,
    ToRank,
    encode,
    read_array,
    read_transfers,
)
from engine.sampling_params import SamplingParams
from engine.scheduled_batch import BlockCopy, ScheduledBatch, ScheduledSequence, SwapIn, SwapOut, Transfers
from engine.sequence import Sequence


@pytest.fixture
def channels() -> Iterator[tuple[Channel, Channel]]:
    pair = tuple(Channel(end) for end in socket.socketpair())
    yield pair
    for channel in pair:
        channel.close()


def sequence(token_ids: list[int], block_table: list[int], num_computed_tokens: int) -> Sequence:
    made = Sequence("a", token_ids, SamplingParams(), (), 0, 100)
    made.block_table, made.num_computed_tokens = block_table, num_computed_tokens
    return made


def test_a_step_arrives_whole(channels: tuple[Channel, Channel]) -> None:
    """Two rows that share a block of 8 tokens and two new tokens of a prompt, after moves of all three kinds."""
    rows = [sequence([*range(9), token], [1, block], 9) for token, block in ((300, 2), (301, 3))]
    prompt = sequence([5, 6, 7], [4], 1)
    transfers = Transfers((SwapOut(5, 0), SwapOut(6, 1)), (SwapIn(2, 7),), (BlockCopy(2, 3),))
    batch = ScheduledBatch(
        tuple(ScheduledSequence(*row) for row in ((rows[0], 1, True), (rows[1], 1, True), (prompt, 2, True))),
        2,
        transfers,
        (SharedNode((1,), (0, 1)),),
    )
    leader, follower = channels
    leader.send(encode(RankStep.of(transfers, BatchTensors.build(batch, 8))))
    step = follower.receive_order()
    assert isinstance(step, RankStep)
    assert read_transfers(step) == transfers
    token_ids, positions = read_array(step.token_ids), read_array(step.positions)
    assert (token_ids.tolist(), positions.tolist()) == ([300, 301, 6, 7], [9, 9, 1, 2])
    assert token_ids.dtype == positions.dtype == np.int32
    assert token_ids.flags.writeable
    assert read_array(step.slots).tolist() == [17, 25, 33, 34]
    assert step.tails == [([2], 2), ([3], 2)]
    assert step.nodes == [([1], [0, 1])]
    assert step.extends == [(2, 1, [4])]


def test_a_step_of_moves_alone(channels: tuple[Channel, Channel]) -> None:
    transfers = Transfers(copies=(BlockCopy(1, 2),))
    channels[0].send(encode(RankStep.of(transfers)))
    step = channels[1].receive_order()
    assert isinstance(step, RankStep)
    assert (read_transfers(step), step.token_ids) == (transfers, b"")


START = RankStart(
    rank=1,
    size=2,
    model_dir="/m",
    dtype="float32",
    device="cpu",
    store_path="/s",
    config=EngineConfig(model_dir="/m", tensor_parallel=2),
)


@pytest.mark.parametrize("order", [START, RankLoad(num_blocks=9, num_host_blocks=0, max_model_len=72)])
def test_orders(channels: tuple[Channel, Channel], order: ToRank) -> None:
    channels[0].send(encode(order))
    assert channels[1].receive_order() == order


@pytest.mark.parametrize(
    "answer", [RankHere(), RankMemory(2**40), RankLoaded(), RankBeat(), RankFailed("why", False, True)]
)
def test_answers(channels: tuple[Channel, Channel], answer: FromRank) -> None:
    channels[1].send(encode(answer))
    assert channels[0].receive_answer() == answer


@pytest.mark.parametrize("rest", [b"", b"\1\0\0", encode(RankHere())[:-1]])
def test_an_end_that_is_gone_has_no_more_to_say(channels: tuple[Channel, Channel], rest: bytes) -> None:
    channels[1].send(encode(RankHere()) + rest)
    channels[1].shut_down()
    assert channels[0].receive_answer() == RankHere()
    assert channels[0].receive_answer() is None


def test_to_shut_down_twice_is_no_error(channels: tuple[Channel, Channel]) -> None:
    channels[0].shut_down()
    channels[1].shut_down()
    channels[0].shut_down()
    assert channels[0].receive_order() is None


def test_what_is_no_message_is_an_error(channels: tuple[Channel, Channel]) -> None:
    channels[1].send(encode(RankHere()))
    with pytest.raises(msgspec.ValidationError):
        channels[0].receive_order()
