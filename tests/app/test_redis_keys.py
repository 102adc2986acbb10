"""Keys that are used together lie in one slot, so that nothing has to be changed for a cluster."""

from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.crc import key_slot
from redis.exceptions import ResponseError

from app.config import FileConfig
from app.ids import try_parse_response_id
from app.redis_keys import lease_key, log_key, node_key, readers_key
from tests.app.session_store import session_server
from tests.app.stateful_gateway import (
    KEY_A,
    KEY_B,
    create,
    receive_until,
    resume,
    running_gateway,
    send_create,
    stream,
)
from tests.scripted_engine import Pause

LIMITED = {"requests_per_minute": 1000, "tokens_per_day": 10**6, "max_connections": 10, "max_answers": 10}
CONFIG = FileConfig.model_validate(
    {"tenants": [{"id": "a", "key": KEY_A, **LIMITED}, {"id": "b", "key": KEY_B, **LIMITED}]}
)
WITHOUT_KEYS = {"MULTI", "EXEC", "SCRIPT", "PUBLISH", "SUBSCRIBE", "UNSUBSCRIBE", "HELLO", "CLIENT", "PING"}


def test_all_keys_of_a_response_share_its_roots_tag():
    parsed = try_parse_response_id("resp_" + "0" * 22 + "1" * 22)
    assert parsed is not None
    keys = [node_key(parsed), lease_key(parsed), log_key(parsed), readers_key(parsed)]
    assert len(set(keys)) == 4
    assert {key.partition("}")[0] for key in keys} == {"{s:" + parsed.root}


async def test_b40_whatever_is_asked_of_the_gateways_no_command_and_no_transaction_spans_slots(monkeypatch):
    """Every command that two gateways send while all routes that keep state are used, as the server sees its keys."""
    sent = []
    pack_command, pack_commands = AbstractConnection.pack_command, AbstractConnection.pack_commands

    def one(self, *command):
        sent.append([command])
        return pack_command(self, *command)

    def many(self, commands):
        commands = [tuple(command) for command in commands]
        sent.append(commands)
        return pack_commands(self, commands)

    monkeypatch.setattr(AbstractConnection, "pack_command", one)
    monkeypatch.setattr(AbstractConnection, "pack_commands", many)
    async with session_server() as store:
        async with (
            running_gateway(
                store, lambda request: [b"a", Pause(), b"b"], owner="gateway-1", file_config=CONFIG
            ) as first,
            running_gateway(store, lambda request: b"ab", owner="gateway-2", file_config=CONFIG) as second,
        ):
            await use_everything(first, second)
        monkeypatch.undo()
        async with Redis.from_url(store.url) as redis:
            together = [keys async for keys in keys_used_together(redis, sent)]
    spanning = [keys for keys in together if len({key_slot(key.encode()) for key in keys}) > 1]
    assert spanning == []
    kinds = {kind(key) for keys in together for key in keys}
    assert kinds == {
        *("s:r", "s:o", "s:e", "s:w", "s:q", "s:c"),
        *("t:i", "t:limits", "t:held", "t:ticket", "t:usage"),
        *("g:runs", "gateways"),
    }, "all kinds of keys were used"
    assert max(len(keys) for keys in together) > 2


def kind(key):
    """Whose it is, and what of theirs: of `{s:<root>}:r:<id>` it is `s:r`."""
    owner, _, what = key.partition("}")
    return ":".join([owner.removeprefix("{").split(":")[0], *what.split(":")[1:2]])


async def use_everything(first, second):
    async with first.http() as http, second.http() as there, second.http(KEY_B) as other, first.socket() as ws:
        running = await create(http, background=True, metadata={"a": "b"})
        await first.engine.wait_paused()
        await there.get(f"/v1/responses/{running['id']}")
        await there.post(f"/v1/responses/{running['id']}/cancel")
        await resume(there, running["id"], -1)
        conversation = (await there.post("/v1/conversations", json={"metadata": {"a": "b"}})).json()["id"]
        url = f"/v1/conversations/{conversation}"
        added = await there.post(f"{url}/items", json={"items": [{"type": "message", "role": "user", "content": "x"}]})
        said = await create(there, conversation=conversation, client_message_id="m-1")
        await create(there, conversation=conversation, client_message_id="m-1")
        await create(there, "Go on.", conversation=conversation)
        await stream(there, "A branch.", previous_response_id=said["id"])
        await there.post(url, json={"metadata": {}})
        await there.get(f"{url}/items")
        await there.delete(f"{url}/items/{added.json()['data'][0]['id']}")
        await there.get(f"/v1/responses/{said['id']}/input_items")
        await there.get(f"/v1/responses/{said['id']}/cache")
        await other.get(f"/v1/responses/{said['id']}")
        await there.delete(f"/v1/responses/{said['id']}")
        await there.delete(url)
        ticket = (await there.post("/v1/tickets")).json()["ticket"]
        async with second.socket(None, subprotocols=["trunkline", ticket]) as by_ticket:
            await send_create(by_ticket, store=False)
            await receive_until(by_ticket)
        await send_create(ws, stream_id="lane")
        await first.engine.wait_paused()
        first.engine.release()
        await receive_until(ws)
        for gateway in (first, second):
            await gateway.wait_no_runs()
            await gateway.services.flush_usage()


async def keys_used_together(redis, sent):
    """Of each command, and of each transaction."""
    for commands in sent:
        is_transaction = commands[0][0] == "MULTI"
        keys = []
        for command in commands:
            # "SCRIPT LOAD" is one word to the client
            if str(command[0]).split()[0] in WITHOUT_KEYS:
                continue
            try:
                found = await redis.command_getkeys(*(part for part in command))
            except ResponseError as e:
                raise AssertionError(f"what are the keys of {command}?") from e
            if is_transaction:
                keys += found
            else:
                yield found
        if is_transaction:
            yield keys
