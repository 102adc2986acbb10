import asyncio

import pytest

from engine.errors import EngineDeadError
from engine.protocol import FinishReason, RequestOutput
from engine.token_stream import TokenStream


def output(*token_ids: int, end: FinishReason | None = None) -> RequestOutput:
    return RequestOutput(request_id="r", token_ids=list(token_ids), finish_reason=end)


def make() -> tuple[TokenStream, list[str]]:
    aborted: list[str] = []
    return TokenStream("r", aborted.append), aborted


async def test_what_nobody_fetched_is_merged_in_order() -> None:
    stream, _ = make()
    stream.put(output(1))
    stream.put(output(2, 3))
    stream.put(output(4, end=FinishReason.LENGTH))
    merged = await stream.next()
    assert (merged.token_ids, merged.finish_reason) == ([1, 2, 3, 4], FinishReason.LENGTH)
    with pytest.raises(StopAsyncIteration):
        await stream.next()


async def test_a_waiting_reader_is_woken() -> None:
    stream, _ = make()
    reader = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    stream.put(output(7))
    assert (await reader).token_ids == [7]


async def test_cancelling_a_read_loses_nothing() -> None:
    stream, _ = make()
    reader = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    stream.put(output(1))  # the reader is woken, and cancelled before it runs
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    stream.put(output(2, end=FinishReason.STOP))
    assert [o.token_ids async for o in stream] == [[1, 2]]


async def test_leaving_before_the_end_aborts_once() -> None:
    stream, aborted = make()
    with stream:
        stream.put(output(1))
    stream.close()
    stream.put(output(2))  # was on its way: dropped
    assert aborted == ["r"]
    with pytest.raises(StopAsyncIteration):
        await stream.next()


async def test_leaving_after_the_end_aborts_nothing() -> None:
    stream, aborted = make()
    with stream:
        stream.put(output(1, end=FinishReason.STOP))
        assert stream.is_finished
    assert aborted == []


async def test_death_of_the_engine_comes_after_what_had_arrived() -> None:
    stream, aborted = make()
    with stream:
        stream.put(output(1))
        stream.fail(EngineDeadError("gone"))
        assert (await stream.next()).token_ids == [1]
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="gone"):
                await stream.next()
    assert aborted == []


async def test_death_after_the_end_changes_nothing() -> None:
    stream, _ = make()
    stream.put(output(1, end=FinishReason.STOP))
    stream.fail(EngineDeadError("gone"))
    assert [o.token_ids async for o in stream] == [[1]]


async def test_closing_wakes_a_reader() -> None:
    stream, _ = make()
    reader = asyncio.create_task(anext(aiter(stream), None))
    await asyncio.sleep(0)
    stream.close()
    assert await reader is None


async def test_one_reader_hears_of_many_streams() -> None:
    streams = {name: TokenStream(name, lambda _: None) for name in "abc"}
    heard: list[str] = []
    streams["a"].put(RequestOutput(request_id="a", token_ids=[1]))
    for name, stream in streams.items():
        stream.notify(lambda name=name: heard.append(name))  # type: ignore[misc]
    assert heard == ["a"], "what was there before counts"
    streams["c"].put(RequestOutput(request_id="c", token_ids=[3]))
    streams["b"].fail(EngineDeadError("gone"))
    assert heard == ["a", "c", "b"]
    taken = {name: streams[name].try_take() for name in "ac"}
    assert {name: output and output.token_ids for name, output in taken.items()} == {"a": [1], "c": [3]}
    assert streams["a"].try_take() is None
    with pytest.raises(EngineDeadError):
        streams["b"].try_take()


async def test_misuse_is_named() -> None:
    stream, _ = make()
    with pytest.raises(ValueError, match="expected an output of 'r', got one of 'other'"):
        stream.put(RequestOutput(request_id="other"))
    reader = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="has a reader already"):
        await stream.next()
    stream.put(output(end=FinishReason.STOP))
    await reader
    with pytest.raises(ValueError, match="has ended"):
        stream.put(output(1))
