"""Conversations in a real server: what was acknowledged survives, and belongs to its tenant alone."""

import asyncio
import random

import pytest

from app.cache_report import CacheReport, FirstMiss, Reason
from app.cached_tokens import CachedTokens
from app.events import InputText, Item, OutputText, Prompt, ResponseError, ResponseObject, Usage
from app.ids import new_response_id
from app.response_node import HistoryMessage, ResponseNode
from app.sessions import Finished, Orphan, Renewed, Sessions, SessionsUnavailable, Untaken
from tests.app.session_store import SessionProxy, connected


@pytest.fixture
async def sessions(server):
    async with connected(server) as sessions:
        yield sessions


def item(role, text):
    part = OutputText(text=text) if role == "assistant" else InputText(text=text)
    return Item(id=f"msg_{text}", role=role, content=[part])


def node(text="Hi", *, parent=None, tenant="a", status="in_progress", **fields):
    response_id = parent.id.child() if parent else new_response_id()
    response = ResponseObject(
        id=str(response_id), created_at=1, status=status, model="m", metadata={"k": "x\u2028"}, prompt=Prompt(id="p")
    )
    ancestors = (*parent.ancestors, parent.id.node) if parent else ()
    return ResponseNode(
        id=response_id, tenant=tenant, ancestors=ancestors, input=(item("user", text),), response=response, **fields
    )


def answered(node, text="Hello", kept=(1, 2, 3), **changes):
    import msgspec

    response = msgspec.structs.replace(
        node.response,
        status=changes.pop("status", "completed"),
        output=[item("assistant", text)],
        usage=Usage.of(10, CachedTokens(trunk=4, history=1, host=2), 3),
        completed_at=2,
        **changes,
    )
    miss = FirstMiss(position=5, reason=Reason.EVICTED, expected_text=None, actual_text="H\u2028i")
    report = CacheReport(prompt_tokens=10, cached=CachedTokens(trunk=4, history=1, host=2), first_miss=miss)
    return node.ended(response, kept, report)


async def test_a_node_comes_back_as_it_was_stored(sessions):
    prefix = (HistoryMessage(role="assistant", content="before", token_ids=(7, 8)),)
    created = node(prefix=prefix, stream_id="lane")
    await sessions.create(created)
    assert await sessions.find("a", created.id) == created
    ended = answered(created, error=ResponseError(message="no"))
    assert await sessions.finish(ended)
    assert await sessions.find("a", created.id) == ended


async def test_a_chain_is_read_with_its_kept_ids(sessions):
    first = answered(node("one"), "eins", (1,))
    second = answered(node("two", parent=first), "zwei", (2, 2))
    third = node("three", parent=second)
    for n in (first, second, third):
        await sessions.create(n)
    turns = await sessions.find_history(third)
    assert [m for turn in turns for m in turn.messages] == [
        HistoryMessage(role="user", content="one"),
        HistoryMessage(role="assistant", content="eins", token_ids=(1,)),
        HistoryMessage(role="user", content="two"),
        HistoryMessage(role="assistant", content="zwei", token_ids=(2, 2)),
    ]
    assert await sessions.find_history(first) == []
    assert [m.content for m in third.turn.messages] == ["three"]


async def test_a_chain_with_a_deleted_link_is_no_chain(sessions):
    first = answered(node("one"))
    second = answered(node("two", parent=first))
    third = answered(node("three", parent=second))
    for n in (first, second, third):
        await sessions.create(n)
    assert await sessions.delete("a", second.id)
    assert await sessions.find_history(third) is None
    assert await sessions.find("a", third.id) is not None


async def test_every_key_has_a_ttl_that_use_renews(server, sessions):
    redis = sessions._redis
    first = node("one")
    second = node("two", parent=answered(first))
    await sessions.create(first)
    await sessions.create(second)
    keys = sorted(await redis.keys("*"))
    assert len(keys) == 8
    assert {key.split(b"}")[0] for key in keys} == {b"{s:" + first.id.root.encode()}
    assert all([0 < await redis.ttl(key) <= 30 * 24 * 3600 for key in keys])
    node_keys = [key for key in keys if b":r:" in key]

    async def age():
        for key in node_keys:
            await redis.expire(key, 1000)

    await age()
    await sessions.find_history(second)
    await sessions.find("a", second.id)
    assert all([await redis.ttl(key) > 1000 for key in node_keys])
    await age()
    await sessions.finish(answered(second))
    assert await redis.ttl(f"{{s:{second.id.root}}}:r:{second.id}") > 1000


async def test_the_end_gives_up_the_lease_and_a_deleted_node_stays_deleted(sessions):
    n = node()
    await sessions.create(n)
    assert await sessions.delete("a", n.id)
    assert await sessions.finish(answered(n)) is Finished.DELETED
    assert await sessions.find("a", n.id) is None
    assert await sessions._redis.keys("*") == []


async def test_b42_another_tenants_node_is_not_there(sessions):
    """Neither read, nor deleted, nor ended, nor kept alive by others."""
    mine = answered(node("My secret is 42."))
    await sessions.create(mine)
    key = f"{{s:{mine.id.root}}}:r:{mine.id}"
    await sessions._redis.expire(key, 1000)
    assert await sessions.find("b", mine.id) is None
    assert not await sessions.delete("b", mine.id)
    stolen = ResponseNode(id=mine.id, tenant="b", input=(), response=mine.response)
    assert await sessions.finish(stolen) is Finished.DELETED
    assert await sessions._redis.ttl(key) <= 1000
    child = node("x", parent=mine, tenant="b")
    assert await sessions.find_history(child) is None
    assert await sessions.find("a", mine.id) == mine


def lease(n):
    return f"{{s:{n.id.root}}}:o:{n.id}"


async def test_an_orphan_belongs_to_whoever_takes_it_first(server, sessions):
    async with connected(server, owner="gateway-2") as second, connected(server, owner="gateway-3") as third:
        n = node()
        await sessions.create(n)
        assert await second.find_without_lease([n.id]) == []
        assert await second.try_take(n.id) is Untaken.HELD
        await sessions._redis.delete(lease(n))
        assert await second.find_without_lease([n.id]) == [n.id]
        assert await second.try_take(n.id) == Orphan(1, 0, True, b"")
        assert await third.try_take(n.id) is Untaken.HELD
        # the first one was slow, not dead: what it says now does not count
        assert (await sessions.renew_leases([n.id])).lost == [n.id]
        assert await sessions.finish(answered(n, "mine")) is Finished.TAKEN
        assert (await sessions.find("a", n.id)).response.status == "in_progress"
        assert await second.finish(answered(n)) is Finished.STORED
        assert await sessions.finish(answered(n, "mine")) is Finished.TAKEN
        assert (await sessions.renew_leases([n.id])).lost == [n.id]
        assert await third.try_take(n.id) is Untaken.ENDED
        assert await sessions.find("a", n.id) == answered(n)
        assert await sessions._redis.exists(lease(n)) == 0


async def test_a_lease_that_was_lost_and_not_taken_comes_back(sessions):
    """As after Redis was away for longer than a lease."""
    n = node()
    await sessions.create(n)
    await sessions._redis.delete(lease(n))
    assert await sessions.renew_leases([n.id]) == Renewed([], [], set())
    await sessions.ask_to_stop(n.id)
    assert await sessions.renew_leases([n.id]) == Renewed([], [n.id], set())
    assert await sessions._redis.get(lease(n)) == b"gateway-1"
    await sessions._redis.delete(lease(n))
    assert await sessions.finish(answered(n)) is Finished.STORED


async def test_leases_are_renewed(server):
    async with connected(server, lease_ms=60_000) as sessions:
        nodes = [node(), node()]
        for n in nodes:
            await sessions.create(n)
        keys = [f"{{s:{n.id.root}}}:o:{n.id}" for n in nodes]
        for key in keys:
            await sessions._redis.pexpire(key, 1000)
        await sessions.renew_leases([n.id for n in nodes])
        assert all([await sessions._redis.pttl(key) > 1000 for key in keys])
        assert await sessions._redis.get(keys[0]) == b"gateway-1"


async def test_a_gateway_learns_of_readers_at_others_for_as_long_as_they_say_so(server):
    async with connected(server) as sessions, connected(server, owner="gateway-2", lease_ms=60_000) as other:
        read, unread = node(), node()
        for n in (read, unread):
            await sessions.create(n)
        both = [read.id, unread.id]
        listening = sessions._redis.pubsub()
        await listening.subscribe(sessions.channel)
        assert (await listening.get_message(timeout=10))["type"] == "subscribe"
        await other.say_read([read.id])
        assert (await listening.get_message(timeout=10))["type"] == "message"
        await listening.aclose()
        assert await sessions.renew_leases(both) == Renewed([], [], {read.id})
        await other.ask_to_stop(read.id)
        assert await sessions.renew_leases(both) == Renewed([], [read.id], {read.id})
        key = f"{{s:{read.id.root}}}:w:{read.id}"
        assert 0 < await sessions._redis.pttl(key) <= 60_000
        await sessions._redis.delete(key)  # as when that time is over
        assert await sessions.renew_leases(both) == Renewed([], [read.id], set())
        await other.say_read([])
        assert await sessions.finish(answered(unread)) is Finished.STORED
        await other.say_read([unread.id])  # nobody runs it, nobody is told
        assert await sessions.renew_leases([unread.id]) == Renewed([unread.id], [], set())


async def test_a_lease_that_is_given_up_belongs_to_whoever_takes_it(server):
    async with connected(server) as sessions, connected(server, owner="gateway-2") as other:
        mine, taken = node(), node()
        for n in (mine, taken):
            await sessions.create(n)
        await sessions._redis.set(lease(taken), "gateway-2")
        await sessions.give_up_leases([mine.id, taken.id])
        await sessions.give_up_leases([mine.id])
        assert await sessions._redis.get(lease(taken)) == b"gateway-2"
        assert (await sessions.find("a", mine.id)).response.status == "in_progress"
        orphan = await other.try_take(mine.id)
        assert isinstance(orphan, Orphan)
        assert orphan.num_stalled == 0
        await sessions.give_up_leases([mine.id])
        assert await other.finish(answered(mine)) is Finished.STORED


async def test_what_was_acknowledged_survives_kill_9(server):
    """Every node whose `create` or `finish` returned is there after the server was killed and started again."""
    async with connected(server) as sessions:
        created = [node(str(i)) for i in range(20)]
        await asyncio.gather(*(sessions.create(n) for n in created))
        ended = [answered(n) for n in created[:10]]
        await asyncio.gather(*(sessions.finish(n) for n in ended))
        await server.kill()
        await server.start()
        assert [await sessions.find("a", n.id) for n in ended] == ended
    async with connected(server, owner="gateway-2") as sessions:
        found = [await sessions.find("a", n.id) for n in created[10:]]
        assert [f.input for f in found] == [n.input for n in created[10:]]


async def test_b39_connections_that_a_restart_has_closed_are_made_anew_and_nobody_sees_it(server):
    """Ten connections are in use when the server dies; the ten commands after its restart all succeed, also those
    whose connection was still taken for a good one."""
    async with connected(server, max_connections=10) as sessions:
        nodes = [answered(node(str(i))) for i in range(10)]
        for n in nodes:
            await sessions.create(n)
        for _ in range(2):
            assert await asyncio.gather(*(sessions.find("a", n.id) for n in nodes)) == nodes
            assert len(await sessions._redis.client_list()) == 10
            await server.kill()
            await server.start()
        assert await asyncio.gather(*(sessions.find("a", n.id) for n in nodes)) == nodes


async def test_b39_without_a_server_the_answer_is_unavailable_and_it_recovers(server):
    async with connected(server) as sessions:
        n = node()
        await sessions.create(n)
        await server.kill()
        with pytest.raises(SessionsUnavailable, match="does not answer"):
            await sessions.find("a", n.id)
        await server.start()
        assert (await sessions.find("a", n.id)).input == n.input


@pytest.fixture
async def proxy(server):
    async with SessionProxy(server).running() as proxy:
        yield proxy


async def test_a_delete_whose_reply_was_lost_has_deleted(proxy):
    async with connected(proxy) as sessions:
        first, second = answered(node("one")), answered(node("two"))
        for n in (first, second):
            await sessions.create(n)
        assert await sessions.delete("a", first.id)
        sessions._delete = losing_a_reply(proxy, sessions._delete)
        assert await sessions.delete("a", second.id)
        assert not proxy.loses_next_reply
        assert not await sessions.delete("a", second.id)
        assert await sessions._redis.keys("*") == []


async def test_an_end_and_a_takeover_whose_replies_were_lost_have_happened(proxy):
    async with connected(proxy) as sessions:
        for n in (node("one"), node("two")):
            await sessions.create(n)
            await sessions._redis.delete(lease(n))
            assert await sessions.try_take(n.id) == Orphan(1, 0, True, b"")
            assert await sessions.finish(answered(n)) is Finished.STORED
            assert await sessions.find("a", n.id) == answered(n)
            sessions._take = losing_a_reply(proxy, sessions._take)
            sessions._finish = losing_a_reply(proxy, sessions._finish)
        assert not proxy.loses_next_reply


def losing_a_reply(proxy, script):
    """The script's next command is carried out, and its reply lost."""

    async def run(keys, args):
        proxy.loses_next_reply = True
        return await script(keys, args)

    return run


async def test_a_store_that_hangs_is_unavailable_and_replies_that_come_late_go_to_nobody(proxy):
    """Each command gives up at its deadline, also those that wait for a connection, and leaves nothing behind."""
    async with connected(proxy, max_connections=2, timeout_s=0.2) as impatient, connected(proxy) as sessions:
        nodes = [answered(node(f"text {i}")) for i in range(6)]
        for n in nodes:
            await sessions.create(n)
        proxy.lets_replies_through.clear()
        finding = [asyncio.create_task(impatient.find("a", n.id)) for n in nodes]
        for command in finding:
            with pytest.raises(SessionsUnavailable, match=r"no reply within 0\.2 s"):
                await command
        assert impatient._commands.num_under_way == 0
        proxy.lets_replies_through.set()
        impatient._commands.timeout_s = 30
        assert await asyncio.gather(*(impatient.find("a", n.id) for n in nodes)) == nodes


async def test_b38_cancelled_readers_never_mix_up_replies(server):
    """300 reads, most of them cancelled at a random moment: each later read still gets its own answer."""
    rnd = random.Random(38)
    async with connected(server, max_connections=3) as sessions:
        nodes = [answered(node(f"text {i}", tenant=f"t{i % 3}"), f"answer {i}") for i in range(30)]
        for n in nodes:
            await sessions.create(n)

        async def read(n):
            found = await sessions.find(n.tenant, n.id)
            assert found == n
            assert await sessions.find_history(node("x", parent=n, tenant=n.tenant)) == [n.turn]

        for _ in range(10):
            readers = [asyncio.create_task(read(n)) for n in nodes]
            for reader in rnd.sample(readers, 20):
                for _ in range(rnd.randrange(4)):
                    await asyncio.sleep(0)
                reader.cancel()
            results = await asyncio.gather(*readers, return_exceptions=True)
            assert {type(r) for r in results} <= {type(None), asyncio.CancelledError}
        await asyncio.gather(*(read(n) for n in nodes))


async def test_closing_waits_for_commands_whose_callers_were_cancelled(server):
    sessions = Sessions.connect(server.url, owner="gateway-1")
    n = node()
    creating = asyncio.create_task(sessions.create(n))
    await asyncio.sleep(0)
    creating.cancel()
    await asyncio.gather(creating, return_exceptions=True)
    await sessions.close()
    async with connected(server) as again:
        assert await again.find("a", n.id) is not None


async def test_how_often_it_was_taken_over_and_whether_that_was_of_use(server, sessions):
    async with connected(server, owner="gateway-2") as second:
        n, redis = node(), sessions._redis
        await sessions.create(n, b"recipe")
        log = f"{{s:{n.id.root}}}:e:{n.id}"
        for expected in ((1, 0), (2, 1), (3, 2)):
            await redis.delete(lease(n))
            assert await second.try_take(n.id) == Orphan(*expected, True, b"recipe")
            assert await second.try_take(n.id) == Orphan(*expected, True, b"recipe"), "it is its own already"
        await redis.xadd(log, {"t": "x"}, id="1-0")
        await redis.delete(lease(n))
        assert await second.try_take(n.id) == Orphan(4, 0, True, b"recipe")
        await second.finish(answered(n))
        assert await redis.keys("*:q:*") == []


async def test_after_the_server_was_started_again_a_log_is_whole_once_its_gateway_says_so(server):
    life = "one"
    async with connected(server, server_life=lambda: life) as sessions, connected(server, owner="2") as second:
        n, redis = node(), sessions._redis
        life = (await redis.info("server"))["run_id"]
        await sessions.create(n)
        await redis.delete(lease(n))
        assert (await second.try_take(n.id)).is_whole
        life = "of an earlier server"
        await redis.delete(lease(n))
        await sessions.renew_leases([n.id])
        await redis.delete(lease(n))
        assert not (await second.try_take(n.id)).is_whole
        life = (await redis.info("server"))["run_id"]
        await redis.delete(lease(n))
        await sessions.renew_leases([n.id], broken=[n.id])
        await redis.delete(lease(n))
        assert not (await second.try_take(n.id)).is_whole
        await redis.delete(lease(n))
        await sessions.renew_leases([n.id])
        await redis.delete(lease(n))
        assert (await second.try_take(n.id)).is_whole
