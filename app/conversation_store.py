"""Conversations in Redis: what was said in them, by whoever added it, and which response is being made in them.

    {s:<root>}:c   hash: tenant, created_at, metadata, `running` (a response's id), and the turns, each under the id of
                   its response or of its first item: its place in the order, a space, the turn

A response adds its turn when it ends, see app/sessions.py. An id is never a credential: each call names the tenant, and
what belongs to another one is not there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from app.conversation_turns import ADD_TURN, conversation_key
from app.errors import BadRequest, Conflict, NotFound
from app.events import Item
from app.ids import ConversationId, try_parse_conversation_id, try_parse_response_id
from app.redis_commands import RedisCommands
from app.redis_keys import lease_key, recipe_key
from app.response_node import HistoryMessage, ResponseNode, Turn
from app.sessions import LEASE_MS, NODE_TTL_S

OWN_FIELDS = ("tenant", "created_at", "metadata", "running", "next")

_FIND = """
if redis.call('HGET', KEYS[1], 'tenant') ~= ARGV[1] then return false end
redis.call('EXPIRE', KEYS[1], ARGV[2])
return redis.call('HGETALL', KEYS[1])
"""
_ADD = ADD_TURN + "return add_turn(KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4])"
_UPDATE = """
if redis.call('HGET', KEYS[1], 'tenant') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'metadata', ARGV[2])
return 1
"""
_DELETE = """
if redis.call('HGET', KEYS[1], 'tenant') ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""
# Only while the turn is as it was read; without a new form of it, it goes.
_REPLACE = """
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
if ARGV[3] == '' then redis.call('HDEL', KEYS[1], ARGV[1]) else redis.call('HSET', KEYS[1], ARGV[1], ARGV[3]) end
return 1
"""
# The lease is taken here, so that there is no moment in which the response runs and is not seen to. One whose gateway
# has gone runs too, as long as another one may go on with it.
_ENTER = """
if redis.call('HGET', KEYS[1], 'tenant') ~= ARGV[1] then return 'unknown' end
local running = redis.call('HGET', KEYS[1], 'running') or ''
if running ~= ARGV[2] and running ~= ARGV[3] then return 'again' end
if running ~= '' and running ~= ARGV[3] and redis.call('EXISTS', KEYS[2], KEYS[4]) > 0 then return 'locked' end
redis.call('HSET', KEYS[1], 'running', ARGV[3])
redis.call('SET', KEYS[3], ARGV[4], 'PX', ARGV[5])
return 'entered'
"""


@dataclass(frozen=True, slots=True)
class StoredConversation:
    id: ConversationId
    created_at: int
    metadata: dict[str, str]
    running: str
    """The response that was started last; empty if none was."""
    turns: Mapping[str, tuple[bytes, Turn]]
    """By the id of the response or the first item, in order; each also as it is stored."""

    @property
    def items(self) -> list[Item]:
        return [item for _, turn in self.turns.values() for item in (*turn.input, *turn.output)]

    @property
    def messages(self) -> tuple[HistoryMessage, ...]:
        return tuple(message for _, turn in self.turns.values() for message in turn.messages)

    def messages_to(self, response_id: str) -> tuple[HistoryMessage, ...] | None:
        """Everything up to the end of this response; None if it is not here (any more)."""
        said: list[HistoryMessage] = []
        for key, (_, turn) in self.turns.items():
            said += turn.messages
            if key == response_id:
                return tuple(said)
        return None


class ConversationStore:
    """Each method raises SessionsUnavailable, and NotFound for what this tenant has not got. `owner` names this
    gateway's life, as for `Sessions`."""

    def __init__(
        self, commands: RedisCommands, *, owner: str, ttl_s: int = NODE_TTL_S, lease_ms: int = LEASE_MS
    ) -> None:
        self._commands = commands
        self._owner = owner
        self._ttl_s = ttl_s
        self._lease_ms = lease_ms
        redis = commands.redis
        self._find = redis.register_script(_FIND)
        self._add = redis.register_script(_ADD)
        self._update = redis.register_script(_UPDATE)
        self._delete = redis.register_script(_DELETE)
        self._replace = redis.register_script(_REPLACE)
        self._enter = redis.register_script(_ENTER)

    async def create(self, tenant: str, conversation: StoredConversation) -> None:
        async def run() -> None:
            key = conversation_key(conversation.id.root)
            fields: dict[Any, Any] = {
                "tenant": tenant,
                "created_at": conversation.created_at,
                "metadata": msgspec.json.encode(conversation.metadata),
                "next": len(conversation.turns),
            }
            fields |= {name: stored for name, (stored, _) in conversation.turns.items()}
            async with self._commands.redis.pipeline(transaction=True) as pipe:
                pipe.hset(key, mapping=fields)
                pipe.expire(key, self._ttl_s)
                await pipe.execute()

        await self._commands.run(run())

    async def find(self, tenant: str, conversation_id: str) -> StoredConversation:
        parsed = _parse(conversation_id)
        values = await self._commands.run(self._find([conversation_key(parsed.root)], [tenant, self._ttl_s]))
        if not values:
            raise unknown_conversation(conversation_id)
        return _from_fields(parsed, dict(zip(values[::2], values[1::2], strict=True)))

    async def add(self, tenant: str, conversation_id: str, items: Sequence[Item]) -> None:
        """At the end, and all together: at least one."""
        key, turn = conversation_key(_parse(conversation_id).root), Turn(input=tuple(items))
        said: list[Any] = [tenant, self._ttl_s, items[0].id, msgspec.json.encode(turn)]
        if not await self._commands.run(self._add([key], said)):
            raise unknown_conversation(conversation_id)

    async def update(self, tenant: str, conversation_id: str, metadata: Mapping[str, str]) -> None:
        key = conversation_key(_parse(conversation_id).root)
        if not await self._commands.run(self._update([key], [tenant, msgspec.json.encode(metadata)])):
            raise unknown_conversation(conversation_id)

    async def delete(self, tenant: str, conversation_id: str) -> None:
        """Its responses stay."""
        found = await self.find(tenant, conversation_id)
        # what the delete itself says is about its last attempt only
        await self._commands.run(self._delete([conversation_key(found.id.root)], [tenant]))

    async def delete_item(self, tenant: str, conversation_id: str, item_id: str) -> StoredConversation:
        """The conversation without it. Raises NotFound for an unknown item too."""
        while True:
            found = await self.find(tenant, conversation_id)
            key, stored, turn = _turn_with(found, item_id)
            place = stored.partition(b" ")[0]
            rest = _without(turn, item_id)
            new = b"" if rest is None else place + b" " + msgspec.json.encode(rest)
            said: list[Any] = [key, stored, new]
            await self._commands.run(self._replace([conversation_key(found.id.root)], said))
            after = await self.find(tenant, conversation_id)
            if all(item.id != item_id for item in after.items):
                return after

    async def enter(self, node: ResponseNode) -> None:
        """Lets a response start in its conversation, and takes this gateway's lease on it.

        Raises Conflict while another one runs there."""
        assert node.response.conversation is not None, node.id
        conversation_id = node.response.conversation.id
        while True:
            running = (await self.find(node.tenant, conversation_id)).running
            other = try_parse_response_id(running) or node.id
            keys = [conversation_key(node.id.root), lease_key(other), lease_key(node.id), recipe_key(other)]
            said: list[Any] = [node.tenant, running, str(node.id), self._owner, self._lease_ms]
            outcome = await self._commands.run(self._enter(keys, said))
            if outcome == b"entered":
                return
            if outcome == b"unknown":
                raise unknown_conversation(conversation_id)
            if outcome == b"locked":
                raise Conflict(
                    f"Another response is being made in the conversation {conversation_id}.",
                    code="conversation_locked",
                    param="conversation",
                )


def new_conversation(
    conversation_id: ConversationId, created_at: int, metadata: Mapping[str, str], items: Sequence[Item]
) -> StoredConversation:
    turn = Turn(input=tuple(items))
    turns = {items[0].id: (b"0 " + msgspec.json.encode(turn), turn)} if items else {}
    return StoredConversation(conversation_id, created_at, dict(metadata), "", turns)


def check_room(num_items: int, most: int) -> None:
    """Raises BadRequest for a conversation that would be too long to be read each time."""
    if num_items > most:
        raise BadRequest(
            f"A conversation may have {most} items, it would have {num_items}.",
            code="conversation_too_long",
            param="conversation",
        )


def unknown_conversation(conversation_id: str) -> NotFound:
    """The one answer for ids that do not exist and for those of other tenants."""
    return NotFound(
        f"Conversation with id '{conversation_id[:80]}' not found.", code="conversation_not_found", param="conversation"
    )


def unknown_item(item_id: str) -> NotFound:
    return NotFound(f"Item with id '{item_id[:80]}' not found.", code="item_not_found")


def _parse(conversation_id: str) -> ConversationId:
    parsed = try_parse_conversation_id(conversation_id)
    if parsed is None:
        raise unknown_conversation(conversation_id)
    return parsed


def _from_fields(conversation_id: ConversationId, fields: Mapping[bytes, bytes]) -> StoredConversation:
    turns = []
    for name, value in fields.items():
        if name.decode() not in OWN_FIELDS:
            place, _, turn = value.partition(b" ")
            turns.append((int(place), name.decode(), (value, msgspec.json.decode(turn, type=Turn))))
    return StoredConversation(
        conversation_id,
        int(fields[b"created_at"]),
        msgspec.json.decode(fields[b"metadata"], type=dict[str, str]),
        fields.get(b"running", b"").decode(),
        {name: turn for _, name, turn in sorted(turns, key=lambda t: t[0])},
    )


def _turn_with(conversation: StoredConversation, item_id: str) -> tuple[str, bytes, Turn]:
    for key, (stored, turn) in conversation.turns.items():
        if any(item.id == item_id for item in (*turn.input, *turn.output)):
            return key, stored, turn
    raise unknown_item(item_id)


def _without(turn: Turn, item_id: str) -> Turn | None:
    """None where nothing is left."""
    asked = tuple(item for item in turn.input if item.id != item_id)
    answered = tuple(item for item in turn.output if item.id != item_id)
    return Turn(input=asked, output=answered, kept_ids=turn.kept_ids) if asked or answered else None
