"""Claims of keys: what a key stands for, and who has it."""

import pytest

from app.errors import BadRequest, Conflict, Unprocessable
from app.idempotency import ABANDONED_MS, Claim, Held, IdempotencyKeys, find_key
from app.redis_commands import RedisCommands
from tests.app.session_store import session_server

BODY = {"model": "m", "input": "Hi", "metadata": {"a": "1", "b": "2"}}


def test_without_a_key_there_is_nothing_to_claim():
    assert find_key(None, BODY) is None
    assert find_key(None, BODY | {"client_message_id": None}) is None


def test_a_key_is_the_same_in_the_header_and_in_the_body():
    by_header, by_field = find_key("k", BODY), find_key(None, BODY | {"client_message_id": "k"})
    assert (by_header.key, by_header.fingerprint) == (by_field.key, by_field.fingerprint)
    assert find_key("k", BODY | {"client_message_id": "k"}).key == by_field.key
    assert "k" != by_header.key != find_key("K", BODY).key


def test_how_it_is_delivered_and_the_order_of_names_make_no_other_message():
    sent = find_key("k", BODY)
    other_order = {"metadata": {"b": "2", "a": "1"}, "input": "Hi", "model": "m"}
    for body in (other_order, BODY | {"stream": True}, BODY | {"background": True}, BODY | {"user": None}):
        assert find_key("k", body).fingerprint == sent.fingerprint
    for body in (BODY | {"input": "Ho"}, BODY | {"temperature": 0.5}, {**BODY, "metadata": {}}):
        assert find_key("k", body).fingerprint != sent.fingerprint


@pytest.mark.parametrize(
    ("header", "body"),
    [
        ("", {}),
        ("x" * 256, {}),
        (None, {"client_message_id": ""}),
        (None, {"client_message_id": 1}),
        (None, {"client_message_id": ["k"]}),
        ("one", {"client_message_id": "two"}),
        ("one", {"store": False}),
    ],
)
def test_what_is_no_key_is_refused(header, body):
    with pytest.raises(BadRequest):
        find_key(header, BODY | body)


def test_another_message_under_the_key_is_422_and_a_fresh_claim_is_409():
    sent = find_key("k", BODY)
    with pytest.raises(Unprocessable):
        Held(Claim("another", "resp_1"), 0).check(sent)
    own = Held(Claim(sent.fingerprint, "resp_1"), ABANDONED_MS - 1)
    own.check(sent)
    with pytest.raises(Conflict) as refused:
        own.check_abandoned(sent)
    assert refused.value.headers == {"Retry-After": "1"}
    Held(own.claim, ABANDONED_MS).check_abandoned(sent)


async def test_the_first_claim_holds_until_it_is_given_up_or_replaced():
    one, two, three = (Claim("f", f"resp_{i}") for i in range(3))
    async with session_server() as server:
        commands = RedisCommands.connect(server.url)
        keys = IdempotencyKeys(commands)
        assert await keys.find("a", "k") is None
        assert await keys.try_claim("a", "k", one) is None
        assert await keys.try_claim("a", "k", one) is None  # as when its reply was lost
        assert (await keys.try_claim("a", "k", two)).claim == one
        assert (await keys.find("a", "k")).claim == one
        assert await keys.find("b", "k") is None  # of another tenant
        await keys.release("a", "k", two)  # not its own
        assert (await keys.find("a", "k")).claim == one
        assert await keys.try_claim("a", "k", two, abandoned=one) is None
        assert (await keys.try_claim("a", "k", three, abandoned=one)).claim == two
        await keys.release("a", "k", two)
        assert await keys.try_claim("a", "k", three) is None
        held = await keys.find("a", "k")
        assert 0 <= held.age_ms < ABANDONED_MS
        assert 0 < await commands.redis.pttl("{t:a}:i:k") <= 24 * 3600 * 1000
        await commands.close()
