"""One log, numbered once: whatever is cut, merged, slow or expired, readers see the same events or are told so."""

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.event_log import CursorLost, EventsNotHeld, MemoryEventLog
from app.event_writer import MERGED_TOGETHER, EventWriter, LogCursor, Mailbox, Waiter
from app.events import Completed, Created, LoggedEvent, ResponseObject, TextDelta, number_and_encode
from tests.app.clock import Clock

RESPONSE = ResponseObject(id="resp_1", created_at=1, status="in_progress", model="m")


def make_log(**bounds):
    return MemoryEventLog(clock=bounds.pop("clock", Clock()), **bounds)


def numbered(*texts, start=0, end=False):
    """Deltas with these texts, and the end of the answer if asked for."""
    made = [TextDelta(item_id="m", delta=text) for text in texts] + ([Completed(response=RESPONSE)] if end else [])
    return [number_and_encode(event, start + i) for i, event in enumerate(made)]


def text_of(events):
    return "".join(json.loads(e.data).get("delta", "") for e in events)


# ---- the log


async def test_a_cursor_reads_what_follows_its_number():
    log = make_log()
    await log.open("a")
    events = numbered("x", "y", "z", end=True)
    await log.append([("a", events[:2])])
    assert await log.read("a", -1, 1) == (events[:1], False)
    assert await log.read("a", 0, 10) == (events[1:2], False)
    assert await log.read("a", 1, 10) == ([], False)
    await log.append([("a", events[2:])])
    assert await log.read("a", 1, 1) == (events[2:3], False)
    assert await log.read("a", 1, 10) == (events[2:], True)
    assert await log.read("a", 3, 10) == ([], True)
    assert await log.read("a", 99_999, 10) == ([], True)


async def test_numbers_have_no_gap_and_nothing_follows_the_end():
    log = make_log()
    await log.open("a")
    with pytest.raises(ValueError, match="event 0 is next, got 1"):
        await log.append([("a", numbered("x", start=1))])
    await log.append([("a", numbered("x", end=True))])
    with pytest.raises(ValueError, match="has ended"):
        await log.append([("a", numbered("y", start=2))])


async def test_what_leaves_the_window_is_lost_to_a_slow_cursor_only():
    log = make_log(window_events=3)
    await log.open("a")
    events = numbered(*"abcdefghi")
    await log.append([("a", events[:8])])
    await log.append([("a", events[8:])])
    with pytest.raises(CursorLost) as lost:
        await log.read("a", 3, 10)
    assert (lost.value.after, lost.value.first_held) == (3, 5)
    assert await log.read("a", 4, 10) == (events[5:], False)


@pytest.mark.parametrize("bounds", [{"window_events": 2}, {"window_bytes": 1000}, {"total_bytes": 1000}])
async def test_a_reader_that_keeps_up_loses_nothing_however_large_the_end_is(bounds):
    """The last events of an answer hold its text and log-probabilities again and again, and come in one append."""
    log = make_log(**bounds)
    await log.open("other")
    await log.append([("other", numbered("x", end=True))])
    await log.open("a")
    cursor, seen = LogCursor(log, "a", -1), []

    async def read():
        events, ended = await cursor.read(100)
        seen.extend(events)
        return ended

    events = numbered("x", *["y" * 2000] * 5, end=True)
    for batch in (events[:1], events[1:4], events[4:]):
        await log.append([("a", batch)])
        ended = await read()
    assert (seen, ended) == (events, True)


async def test_answers_that_end_in_one_append_are_all_held_until_the_next_one():
    log = make_log(total_bytes=1000)
    for name in "abc":
        await log.open(name)
    events = numbered("x" * 2000, end=True)
    await log.append([("a", events), ("b", events)])
    assert [await log.read(name, -1, 10) for name in "ab"] == [(events, True)] * 2
    await log.append([("c", events)])
    for name in "ab":
        with pytest.raises(EventsNotHeld):
            await log.read(name, -1, 10)


async def test_a_window_has_a_limit_in_bytes_too():
    log = make_log(window_bytes=2000)
    await log.open("a")
    await log.append([("a", numbered(*["x" * 500] * 10))])
    await log.append([("a", numbered("x", start=10))])
    assert log.num_bytes <= 2000 + 300
    with pytest.raises(CursorLost):
        await log.read("a", -1, 10)


async def test_an_ended_answer_is_replayed_for_ten_minutes():
    clock = Clock()
    log = make_log(clock=clock)
    for name in ("a", "b"):
        await log.open(name)
    events = numbered("x", end=True)
    await log.append([("a", events)])
    clock.now += 599
    assert await log.read("a", -1, 10) == (events, True)
    await log.append([("b", numbered("y"))])
    clock.now += 1
    with pytest.raises(EventsNotHeld):
        await log.read("a", -1, 10)
    clock.now += 10_000
    assert (await log.read("b", -1, 10))[1] is False, "a running answer does not expire"
    assert log.num_answers == 1


async def test_the_total_is_bounded_and_ended_answers_go_first():
    log = make_log(total_bytes=5000)
    for name in ("first", "running", "second"):
        await log.open(name)
    await log.append([("first", numbered("x" * 1000, end=True)), ("running", numbered("r"))])
    await log.append([("second", numbered("x" * 3000, end=True))])
    await log.append([("running", numbered("r", start=1))])
    assert log.num_bytes <= 5000 + 300
    with pytest.raises(EventsNotHeld):
        await log.read("first", -1, 10)
    assert len((await log.read("running", -1, 10))[0]) == 2


async def test_a_watcher_is_woken_by_its_answer_until_it_stops():
    log = make_log()
    await log.open("a")
    await log.open("b")
    woken = []
    stop = log.watch("a", lambda: woken.append("a"))
    await log.append([("a", numbered("x")), ("b", numbered("x"))])
    assert woken == ["a"]
    stop()
    stop()
    await log.append([("a", numbered("y", start=1))])
    assert woken == ["a"]


async def test_a_dropped_answer_is_not_held_and_its_readers_are_woken():
    log = make_log()
    await log.open("a")
    woken = []
    log.watch("a", lambda: woken.append("a"))
    await log.append([("a", numbered("x"))])
    await log.drop("a")
    assert woken == ["a", "a"]
    assert (log.num_bytes, log.num_answers) == (0, 0)
    with pytest.raises(EventsNotHeld):
        await log.read("a", -1, 10)
    await log.append([("a", numbered("late"))])
    assert log.num_answers == 0


# ---- the writer


class SlowLog(MemoryEventLog):
    """Appends wait until they are let through, as they would on their way to another machine."""

    def __init__(self):
        super().__init__(clock=Clock())
        self.appends = []
        self.gate = asyncio.Semaphore(0)

    async def append(self, batch):
        self.appends.append([(name, len(events)) for name, events in batch])
        await self.gate.acquire()
        return await super().append(batch)


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


async def test_deltas_merge_while_an_append_is_in_flight_and_only_then():
    log = SlowLog()
    writer = EventWriter(log)
    a, b = await writer.open("a"), await writer.open("b")
    a.put(Created(response=RESPONSE))
    await settle()
    for character in "Hello":
        a.put(TextDelta(item_id="m", delta=character))
    b.put(TextDelta(item_id="m", delta="other"))
    await settle()
    assert log.appends == [[("a", 1)]], "one append is in flight at most"
    assert await log.read("a", -1, 10) == ([], False), "no event is seen before the log holds it"
    log.gate.release()
    await settle()
    assert log.appends == [[("a", 1)], [("a", 1), ("b", 1)]], "all answers go together"
    a.put(TextDelta(item_id="m", delta="!"))
    a.put(Completed(response=RESPONSE))
    for _ in range(2):
        log.gate.release()
    await writer.flush()
    events, ended = await log.read("a", -1, 10)
    assert [e.type.removeprefix("response.") for e in events] == [
        "created", "output_text.delta", "output_text.delta", "completed",
    ]  # fmt: skip
    assert [e.number for e in events] == [0, 1, 2, 3]
    assert text_of(events) == "Hello!"
    assert ended


async def test_an_idle_system_does_not_merge():
    log = make_log()
    writer = EventWriter(log)
    sink = await writer.open("a")
    for character in "abc":
        sink.put(TextDelta(item_id="m", delta=character))
        await writer.flush()
    assert len((await log.read("a", -1, 10))[0]) == 3


async def test_a_failed_append_is_told_to_whoever_writes():
    class BrokenLog(MemoryEventLog):
        async def append(self, batch):
            raise ConnectionResetError("gone")

    writer = EventWriter(BrokenLog(clock=Clock()))
    sink = await writer.open("a")
    sink.put(TextDelta(item_id="m", delta="x"))
    with pytest.raises(ConnectionResetError):
        await writer.flush()
    with pytest.raises(ConnectionResetError):
        sink.put(TextDelta(item_id="m", delta="y"))


async def test_what_waits_for_a_slow_reader_is_few_objects_however_many_tokens_it_has():
    mailbox = Mailbox()
    texts = [f"{i} " for i in range(10 * MERGED_TOGETHER + 3)]
    for text in texts:
        mailbox.put(TextDelta(item_id="m", delta=text))
        assert sum(len(group.events) for group in mailbox._pending._groups) < MERGED_TOGETHER
    (event,), _ = await mailbox.read(8)
    assert json.loads(event.data)["delta"] == "".join(texts)


async def test_a_mailbox_merges_what_its_reader_did_not_fetch_and_numbers_on_reading():
    box = Mailbox()
    woken = []
    box.watch(lambda: woken.append(1))
    box.put(Created(response=RESPONSE))
    assert [e.number for e in (await box.read(10))[0]] == [0]
    for _ in range(1000):
        box.put(TextDelta(item_id="m", delta="x"))
    box.put(Completed(response=RESPONSE))
    events, ended = await box.read(1)
    assert (len(events), text_of(events), ended) == (1, "x" * 1000, False)
    events, ended = await box.read(1)
    assert (events[0].number, ended) == (2, True)
    assert len(woken) == 1002
    with pytest.raises(ValueError, match="one reader"):
        box.watch(lambda: None)


async def test_a_waiter_can_be_interrupted_and_gives_first_what_is_there():
    log = make_log()
    await log.open("a")
    await log.append([("a", numbered("x"))])
    with Waiter(LogCursor(log, "a", -1)) as waiter:
        assert len(await anext(waiter)) > 0
        waiting = asyncio.create_task(anext(waiter))
        await settle()
        waiter.interrupt(KeyError("now"))
        with pytest.raises(KeyError):
            await waiting
        await log.append([("a", numbered("y", start=1))])
        assert len(await anext(waiter)) == 1


async def test_who_reads_is_told_of_while_it_is_watched():
    log, told = make_log(), []
    await log.open("a")

    def enter(response_id):
        told.append(f"{response_id} in")
        return lambda: told.append(f"{response_id} out")

    cursor = LogCursor(log, "a", -1, enter)
    await cursor.read(10)
    assert told == []
    stop = cursor.watch(lambda: None)
    assert told == ["a in"]
    stop()
    assert told == ["a in", "a out"]


async def test_a_waiter_follows_live_to_the_end():
    log = make_log()
    writer = EventWriter(log)
    sink = await writer.open("a")
    seen = []

    async def follow():
        with Waiter(LogCursor(log, "a", -1)) as waiter:
            async for events in waiter:
                seen.extend(events)

    reader = asyncio.create_task(follow())
    await settle()
    sink.put(TextDelta(item_id="m", delta="x"))
    await settle()
    assert len(seen) == 1
    sink.put(Completed(response=RESPONSE))
    await asyncio.wait_for(reader, 10)
    assert [e.number for e in seen] == [0, 1]


# ---- properties


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text(min_size=1, max_size=4), max_size=40),
    st.lists(st.booleans(), max_size=40),
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 7)), min_size=1, max_size=12),
)
def test_b36_any_cuts_and_resumes_give_the_text_once_and_exactly(pieces, flushes, cuts):
    """Readers that come and go at any place, while deltas merge at any place, all see one sequence of events."""

    async def run():
        log = make_log()
        writer = EventWriter(log)
        sink = await writer.open("a")
        sink.put(Created(response=RESPONSE))
        seen: list[LoggedEvent] = []
        turns = iter(cuts * 50)

        async def read_some():
            """A new connection that reads `most` events in pages of `page` and is cut."""
            most, page = next(turns)
            cursor = LogCursor(log, "a", seen[-1].number if seen else -1)
            for _ in range(most):
                events, ended = await cursor.read(page)
                seen.extend(events)
                if ended or not events:
                    return ended
            return False

        for piece, flush in zip(pieces, flushes + [False] * len(pieces), strict=False):
            sink.put(TextDelta(item_id="m", delta=piece))
            if flush:
                await writer.flush()
                await read_some()
        sink.put(Completed(response=RESPONSE))
        await writer.flush()
        while not await read_some():
            pass
        whole, ended = await log.read("a", -1, 1000)
        assert ended
        assert seen == whole
        assert [e.number for e in seen] == list(range(len(seen)))
        assert text_of(seen) == "".join(pieces)

    asyncio.run(run())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5), st.booleans(), st.integers(0, 300)), max_size=60))
def test_bounds_hold_after_every_append(operations):
    """Whatever is appended, ends and expires: the bytes counted are those held, no bound is passed by more than one
    append, and what was appended last is there."""

    async def run():
        clock = Clock()
        log = make_log(clock=clock, window_events=7, window_bytes=3000, total_bytes=6000)
        next_number: dict[str, int] = {}
        life = dict.fromkeys("abc", 0)
        for name, count, end, seconds in operations:
            clock.now += seconds
            key = f"{name}{life[name]}"
            if key not in next_number:
                await log.open(key)
                next_number[key] = 0
            events = numbered(*["x" * 100] * count, start=next_number[key], end=end)
            await log.append([(key, events)])
            assert await log.read(key, next_number[key] - 1, 100) == (events, end)
            next_number[key] += len(events)
            if end:
                life[name] += 1
            held = 0
            for known in next_number:
                try:
                    page, _ = await log.read(known, -1, 100)
                except EventsNotHeld:
                    continue
                except CursorLost as e:
                    page, _ = await log.read(known, e.first_held - 1, 100)
                assert len(page) <= 7 + 6
                held += sum(len(e.data) for e in page)
            assert held <= log.num_bytes <= 6000 + 3000

    asyncio.run(run())
