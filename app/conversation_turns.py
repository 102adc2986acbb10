"""Where a conversation lies in Redis, and how a turn is added to it: by its own store, and by the end of a response."""

import msgspec

from app.response_node import ResponseNode, Turn


def conversation_key(root: str) -> str:
    return f"{{s:{root}}}:c"


ADD_TURN = """
local function add_turn(conversation, tenant, ttl_s, name, turn)
    if redis.call('HGET', conversation, 'tenant') ~= tenant then return 0 end
    local held = redis.call('HGET', conversation, name)
    local place = held and string.match(held, '^%d+') or redis.call('HINCRBY', conversation, 'next', 1)
    redis.call('HSET', conversation, name, place .. ' ' .. turn)
    redis.call('EXPIRE', conversation, ttl_s)
    return 1
end
"""
"""Lua. The same turn once more takes its own place again. 0 where this tenant has no such conversation (any more)."""


def turn_to_add(node: ResponseNode) -> bytes:
    """What a response at its end adds to its conversation; empty where it has none, or failed, or has no answer."""
    response = node.response
    if response.conversation is None or response.status == "failed" or not response.output:
        return b""
    return msgspec.json.encode(Turn(input=node.input, output=tuple(response.output), kept_ids=node.kept_ids))
