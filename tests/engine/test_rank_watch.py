"""Which rank ended, and why. The ranks here are processes that end by themselves at once."""

import itertools
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from engine.errors import EngineDeadError
from engine.rank_messages import Channel, RankBeat, RankFailed, RankLoaded, encode
from engine.rank_watch import FollowingRank, RankWatch

KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
FAILED = "raise SystemExit(1)"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def ended(stack: ExitStack, rank: int, program: str, *said: RankFailed | RankLoaded) -> FollowingRank:
    """A rank of three that has said this and ends."""
    own, other = socket.socketpair()
    channel, end = Channel(own), Channel(other)
    stack.callback(channel.close)
    for message in said:
        end.send(encode(message))
    end.close()
    process = subprocess.Popen([sys.executable, "-S", "-c", program])
    stack.callback(process.wait)
    return FollowingRank(rank, 3, process, channel)


def test_the_first_end_is_the_reason(stack: ExitStack) -> None:
    watch = RankWatch()
    watch.check()
    watch.watch(ended(stack, 2, KILLED))
    watch.watch(ended(stack, 1, FAILED))
    with pytest.raises(EngineDeadError) as raised:
        watch.check()
    assert str(raised.value) == "rank 2 of 3 was killed by SIGKILL"
    assert raised.value.is_crash


def test_last_words_are_part_of_the_reason(stack: ExitStack) -> None:
    watch = RankWatch()
    watch.watch(ended(stack, 1, FAILED, RankLoaded(), RankFailed("RuntimeError: out of memory")))
    assert watch.wait_for_reason(0) == "rank 1 of 3 ended with exit code 1: RuntimeError: out of memory"


def test_a_rank_that_lost_another_is_not_the_reason(stack: ExitStack) -> None:
    watch = RankWatch()
    watch.watch(ended(stack, 1, FAILED, RankFailed("rank 1 of 3 lost another rank", is_victim=True)))
    watch.watch(ended(stack, 2, KILLED))
    with pytest.raises(EngineDeadError, match=r"^rank 2 of 3 was killed by SIGKILL$"):
        watch.check()


def test_it_is_the_reason_if_there_is_no_other(stack: ExitStack) -> None:
    watch = RankWatch()
    watch.watch(ended(stack, 1, FAILED, RankFailed("lost", is_victim=True)))
    assert watch.wait_for_reason(0) == "rank 1 of 3 ended with exit code 1: lost"


def test_a_rank_that_says_nothing_any_more_is_killed(stack: ExitStack) -> None:
    """It runs on and its connection holds. By this clock a look comes every 0.1 s at least."""
    own, other = socket.socketpair()
    channel, end = Channel(own), Channel(other)
    stack.callback(channel.close)
    stack.callback(end.close)
    for _ in range(50):
        end.send(encode(RankBeat()))
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"])
    stack.callback(process.wait)
    stack.callback(process.kill)
    seconds = itertools.count()
    watch, told = RankWatch(beat_s=0.05, silence_s=0.25, clock=lambda: float(next(seconds))), []
    watch.listen(told.append)
    watch.watch(FollowingRank(1, 3, process, channel))
    assert [str(failure) for failure in told] == ["rank 1 of 3 said nothing for 0.25 s and was killed"]
    assert process.wait() == -signal.SIGKILL
    assert next(seconds) == 1 + 50 + 3


@pytest.mark.parametrize("is_late", [True, False])
def test_who_listens_is_told_once(stack: ExitStack, is_late: bool) -> None:
    watch, told = RankWatch(), []
    if not is_late:
        watch.listen(told.append)
    watch.watch(ended(stack, 2, KILLED))
    if is_late:
        watch.listen(told.append)
    watch.watch(ended(stack, 1, FAILED))
    assert [str(failure) for failure in told] == ["rank 2 of 3 was killed by SIGKILL"]


def test_the_ends_of_a_group_that_closes_are_no_news(stack: ExitStack) -> None:
    watch, told = RankWatch(), []
    watch.listen(told.append)
    watch.is_closing = True
    watch.watch(ended(stack, 1, "pass"))
    assert told == []


def test_the_first_rank_may_be_the_reason() -> None:
    watch = RankWatch()
    watch.say("rank 0 of 3 failed: it is a test")
    with pytest.raises(EngineDeadError, match=r"^rank 0 of 3 failed: it is a test$"):
        watch.check()
