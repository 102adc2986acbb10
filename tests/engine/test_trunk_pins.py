"""What a client wants pinned, through all lives of its engine."""

import asyncio

import pytest

from engine.errors import EngineDeadError
from engine.protocol import END, PinTrunk, Scope, TrunkPin, TrunkState, UnpinTrunk
from engine.trunk_pins import TrunkPins

SCOPES = [Scope(END, b"")]
PIN = PinTrunk("t", [1, 2], SCOPES)
PINNED, FAILED = TrunkState("t", TrunkPin.PINNED, 2, 1), TrunkState("t", TrunkPin.FAILED, 0, 0)


class Sent(list[PinTrunk | UnpinTrunk]):
    pass


async def asked(pins: TrunkPins) -> asyncio.Task[TrunkState]:
    task = asyncio.create_task(pins.pin("t", [1, 2], SCOPES))
    await asyncio.sleep(0)
    return task


async def test_a_pin_is_answered_and_sent_again_to_the_next_engine() -> None:
    sent = Sent()
    pins = TrunkPins(sent.append)
    task = await asked(pins)
    pins.take(PINNED)
    assert await task == PINNED
    pins.resend()
    assert sent == [PIN, PIN]
    pins.unpin("t")
    pins.unpin("t")
    pins.resend()
    assert sent == [PIN, PIN, UnpinTrunk("t")]
    assert len(pins) == 0


async def test_a_pin_waits_for_an_engine_that_answers() -> None:
    sent = Sent()
    pins = TrunkPins(sent.append)
    task = await asked(pins)
    pins.resend()
    pins.take(TrunkState("another", TrunkPin.PINNED, 1, 1))
    assert not task.done()
    pins.take(PINNED)
    assert await task == PINNED


async def test_what_fails_is_given_up_and_what_is_lost_later_is_asked_for_again() -> None:
    sent = Sent()
    pins = TrunkPins(sent.append)
    task = await asked(pins)
    pins.take(PINNED)
    await task
    pins.take(FAILED)  # a lease that ended
    assert sent == [PIN, PIN]
    pins.take(FAILED)
    pins.resend()
    assert sent == [PIN, PIN]
    task = await asked(pins)
    pins.take(FAILED)
    assert await task == FAILED


async def test_who_waits_for_what_is_taken_back_hears_that_it_failed() -> None:
    pins = TrunkPins(Sent().append)
    task = await asked(pins)
    pins.unpin("t")
    assert await task == FAILED


async def test_closing_fails_who_waits_and_takes_everything_back() -> None:
    sent = Sent()
    pins = TrunkPins(sent.append)
    task = await asked(pins)
    pins.close("it is over")
    with pytest.raises(EngineDeadError, match="it is over"):
        await task
    with pytest.raises(EngineDeadError, match="it is over"):
        await pins.pin("t", [1, 2], SCOPES)
    assert sent == [PIN, UnpinTrunk("t")]
