"""Events in a real server: numbered once, whoever appends, however often, and in whatever order gateways go."""

import pytest

from app.announcements import Announcements
from app.event_log import CursorLost, EventsNotHeld
from app.events import Completed, InputText, Item, ResponseObject, TextDelta, number_and_encode
from app.ids import new_response_id
from app.redis_commands import RedisCommands
from app.redis_log import Append, Outcome, RedisEventLog
from app.response_node import ResponseNode
from app.sessions import Sessions
from tests.app.session_store import SessionProxy

LOGGED, TAKEN, LOST = Outcome.LOGGED, Outcome.TAKEN, Outcome.LOST


class Stage:
    """One gateway's part in a store, and an answer that it has created."""

    def __init__(self, url, owner):
        self.commands = RedisCommands.connect(url)
        self.announcements = Announcements(self.commands.redis)
        self.sessions = Sessions(self.commands, owner=owner)
        self.log = RedisEventLog(self.commands, self.announcements, owner=owner)
        self.response_id = new_response_id()
        self.id = str(self.response_id)

    async def __aenter__(self):
        response = ResponseObject(id=self.id, created_at=1, status="in_progress", model="m")
        item = Item(id="msg_1", role="user", content=[InputText(text="Hi")])
        self.node = ResponseNode(id=self.response_id, tenant="a", input=(item,), response=response)
        await self.sessions.create(self.node)
        return self

    async def __aexit__(self, *exc):
        await self.announcements.close()
        await self.commands.close()

    def deltas(self, *texts, start=0, end=False):
        made = [TextDelta(item_id="m", delta=text) for text in texts]
        made += [Completed(response=self.node.response)] if end else []
        return [number_and_encode(event, start + i) for i, event in enumerate(made)]

    async def append(self, events, first_held=0, response_id=None):
        (outcome,) = await self.log.append([Append(response_id or self.id, events, first_held)])
        return outcome

    @property
    def lease(self):
        return f"{{s:{self.response_id.root}}}:o:{self.id}"


@pytest.fixture
async def first(server):
    async with Stage(server.url, "gateway-1") as stage:
        yield stage


@pytest.fixture
async def second(server):
    async with Stage(server.url, "gateway-2") as stage:
        yield stage


async def test_every_gateway_reads_what_one_appended(first, second):
    assert await second.log.read(first.id, -1, 10) == ([], False), "no event yet is not the same as none any more"
    events = first.deltas("x", "ü\u2028", "z", end=True)
    assert await first.append(events[:2]) is LOGGED
    assert await second.log.read(first.id, -1, 1) == (events[:1], False)
    assert await second.log.read(first.id, 0, 10) == (events[1:2], False)
    assert await second.log.read(first.id, 1, 10) == ([], False)
    assert await second.log.read(first.id, -1, 0) == ([], False)
    assert await first.append(events[2:]) is LOGGED
    assert await second.log.read(first.id, -1, 10) == (events, True)
    assert await second.log.read(first.id, 3, 10) == ([], True)
    assert await second.log.read(first.id, 2**64, 10) == ([], True)
    assert await second.log.read_all(first.id) == events
    assert 590_000 < await first.commands.redis.pttl(f"{{s:{first.response_id.root}}}:e:{first.id}") <= 600_000


async def test_the_same_append_again_changes_nothing(server, first):
    """As when its reply was lost."""
    async with SessionProxy(server).running() as proxy, Stage(proxy.url, "gateway-1") as stage:
        events = stage.deltas("a", "b", "c", "d")
        assert await stage.append(events[:2]) is LOGGED
        proxy.loses_next_reply = True
        assert await stage.append(events[2:]) is LOGGED
        assert not proxy.loses_next_reply
        assert await stage.append(events[2:]) is LOGGED
        assert await stage.log.read_all(stage.id) == events


async def test_only_the_owner_of_the_lease_appends(first, second):
    events = first.deltas("a", "b")
    assert await first.append(events[:1]) is LOGGED
    assert await second.append(events[1:], response_id=first.id) is TAKEN
    await first.commands.redis.delete(first.lease)
    assert await first.append(events[1:]) is LOGGED, "nobody has taken it"
    await first.commands.redis.set(first.lease, "gateway-2")
    assert await first.append(first.deltas("c", start=2)) is TAKEN
    assert await first.log.read_all(first.id) == events


async def test_who_was_taken_over_meanwhile_cannot_append_though_nobody_holds_the_lease_now(first, second):
    assert await first.append(first.deltas("a")) is LOGGED
    await first.commands.redis.set(first.lease, "gateway-2")
    theirs = second.deltas("b", start=1)
    assert await second.append(theirs, response_id=first.id) is LOGGED
    for holder in (None, "gateway-1"):
        await first.commands.redis.delete(first.lease)
        if holder is not None:
            await first.commands.redis.set(first.lease, holder)
        assert await first.append(first.deltas("mine", start=1)) is TAKEN
        assert await first.append(first.deltas("mine", "again", start=1)) is TAKEN
    assert await first.log.read(first.id, 0, 10) == (theirs, False)


async def test_a_log_that_is_not_there_any_more_is_lost_and_nothing_is_appended_to_it(first):
    assert await first.append(first.deltas("a")) is LOGGED
    await first.commands.redis.delete(f"{{s:{first.response_id.root}}}:e:{first.id}")
    assert await first.append(first.deltas("b", start=1)) is LOST
    with pytest.raises(EventsNotHeld):
        await first.log.read(first.id, -1, 10)
    with pytest.raises(EventsNotHeld):
        await first.log.read_all(first.id)
    assert await first.sessions.delete("a", first.response_id)
    assert await first.append(first.deltas("b", start=1)) is TAKEN, "deleted"


async def test_what_left_the_window_is_lost_to_a_cursor_before_it(first):
    await first.append(first.deltas("a", "b", "c"))
    await first.append(first.deltas("d", start=3), first_held=2)
    with pytest.raises(CursorLost) as lost:
        await first.log.read(first.id, 0, 10)
    assert (lost.value.after, lost.value.first_held) == (0, 2)
    events, _ = await first.log.read(first.id, 1, 10)
    assert [event.number for event in events] == [2, 3]


async def test_one_pipeline_carries_many_answers_also_after_redis_has_forgotten_the_script(server, first):
    async with Stage(server.url, "gateway-1") as other:
        for start in (0, 1):
            batch = [Append(s.id, s.deltas(f"text {start}", start=start)) for s in (first, other)]
            assert await first.log.append(batch) == [LOGGED, LOGGED]
            await first.commands.redis.script_flush()
        for stage in (first, other):
            assert await first.log.read_all(stage.id) == stage.deltas("text 0", "text 1")


async def test_b40_the_keys_of_one_append_lie_in_one_slot(first):
    await first.append(first.deltas("a"))
    keys = [key for key in await first.commands.redis.keys("*") if first.id.encode() in key]
    assert len(keys) == 4
    assert {key[: key.index(b"}") + 1] for key in keys} == {b"{s:" + first.response_id.root.encode() + b"}"}
