"""Tickets: for one key, for a short time, once."""

import asyncio
import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.config import FileConfig, hash_key
from app.errors import Unauthorized
from app.tenants import Tenants
from app.tickets import MAX_SKEW_S, TICKET_BYTES, TICKET_S, Tickets
from tests.app.clock import NOW, Clock

SECRET = b"s" * 32
ONE, TWO = "key-a-one", "key-a-two"


def tenants(*keys: str) -> Tenants:
    return Tenants(FileConfig.model_validate({"tenants": [{"id": "a", "keys": list(keys)}]}))


@pytest.fixture
def tickets(clock: Clock) -> Tickets:
    return Tickets(SECRET, None, now=clock)


async def refusal(tickets: Tickets, text: str, known: Tenants) -> str:
    with pytest.raises(Unauthorized) as caught:
        await tickets.redeem(text, known)
    assert caught.value.code == "invalid_ticket"
    return caught.value.message


async def test_a_ticket_stands_for_its_key_once(tickets: Tickets) -> None:
    ticket = tickets.issue(hash_key(TWO))
    assert ticket.expires_at == NOW + TICKET_S
    assert await tickets.redeem(ticket.text, tenants(ONE, TWO)) == hash_key(TWO)
    assert "has been used" in await refusal(tickets, ticket.text, tenants(ONE, TWO))


async def test_any_gateway_with_the_secret_takes_it_and_no_other(tickets: Tickets, clock: Clock) -> None:
    text = tickets.issue(hash_key(ONE)).text
    stranger = Tickets(b"x" * 32, None, now=clock)
    assert "none of this server's" in await refusal(stranger, text, tenants(ONE))
    assert await Tickets(SECRET, None, now=clock).redeem(text, tenants(ONE)) == hash_key(ONE)


async def test_a_revoked_key_takes_its_tickets_with_it(tickets: Tickets) -> None:
    text = tickets.issue(hash_key(ONE)).text
    assert "not valid any more" in await refusal(tickets, text, tenants(TWO))
    assert await tickets.redeem(text, tenants(ONE, TWO)) == hash_key(ONE), "a refused ticket is not used up"


async def test_an_open_server_gives_and_takes_tickets_without_a_key(tickets: Tickets) -> None:
    text = tickets.issue(None).text
    assert "not valid any more" in await refusal(tickets, text, tenants(ONE))
    assert await tickets.redeem(text, Tenants(FileConfig())) is None


@pytest.mark.parametrize(
    ("shift_s", "is_valid"),
    [(0, True), (TICKET_S - 1, True), (TICKET_S, False), (1e6, False), (-MAX_SKEW_S, True), (-MAX_SKEW_S - 1, False)],
)
async def test_it_is_valid_for_a_short_time(tickets: Tickets, clock: Clock, shift_s: float, is_valid: bool) -> None:
    """Also where the clock was put back after it was given: then it is soon from the future, and not taken."""
    text = tickets.issue(hash_key(ONE)).text
    clock.now = NOW + shift_s
    if is_valid:
        assert await tickets.redeem(text, tenants(ONE)) == hash_key(ONE)
    else:
        assert "has expired" in await refusal(tickets, text, tenants(ONE))


async def test_a_used_ticket_stays_used_when_the_clock_is_put_back(tickets: Tickets, clock: Clock) -> None:
    text = tickets.issue(hash_key(ONE)).text
    await tickets.redeem(text, tenants(ONE))
    clock.now = NOW + 10 * TICKET_S
    assert "has expired" in await refusal(tickets, text, tenants(ONE))
    clock.now = NOW + 1
    assert "has been used" in await refusal(tickets, text, tenants(ONE))


CLOCK_STEPS = st.sampled_from([0, 0.5, 7, 59, 60, 3600, -0.5, -4, -6, -3600])


@given(st.lists(st.tuples(CLOCK_STEPS, st.integers(0, 5)), max_size=60))
def test_a_ticket_is_good_once_while_it_is_young_whichever_way_the_clock_goes(steps: list[tuple[float, int]]) -> None:
    """Each step moves the clock, gives a new ticket and brings an earlier one."""

    async def walk() -> None:
        clock = Clock()
        tickets = Tickets(SECRET, None, now=clock)
        given_at: list[int] = []
        texts: list[str] = []
        used: set[int] = set()
        for step_s, back in steps:
            clock.now += step_s
            given_at.append(int(clock.now))
            texts.append(tickets.issue(hash_key(ONE)).text)
            which = max(0, len(texts) - 1 - back)
            is_young = -MAX_SKEW_S <= clock.now - given_at[which] < TICKET_S
            if is_young and which not in used:
                assert await tickets.redeem(texts[which], tenants(ONE)) == hash_key(ONE)
                used.add(which)
            else:
                why = "has been used" if is_young else "has expired"
                assert why in await refusal(tickets, texts[which], tenants(ONE))

    asyncio.run(walk())


async def test_the_used_ones_that_are_known_are_bounded(tickets: Tickets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.tickets.MAX_KNOWN_USES", 2)
    texts = [tickets.issue(hash_key(ONE)).text for _ in range(3)]
    for text in texts:
        await tickets.redeem(text, tenants(ONE))
    assert "has been used" in await refusal(tickets, texts[2], tenants(ONE))
    assert await tickets.redeem(texts[0], tenants(ONE)) == hash_key(ONE), "without a store the oldest is forgotten"


@given(
    st.one_of(st.text(max_size=200), st.binary(max_size=100).map(lambda raw: base64.urlsafe_b64encode(raw).decode()))
)
def test_nothing_else_is_a_ticket(text: str) -> None:
    with pytest.raises(Unauthorized):
        Tickets(SECRET, None, now=Clock()).check(text, [hash_key(ONE), None])


@given(st.integers(0, TICKET_BYTES * 8 - 1))
def test_no_bit_of_it_can_be_changed(bit: int) -> None:
    tickets = Tickets(SECRET, None, now=Clock())
    raw = bytearray(base64.urlsafe_b64decode(tickets.issue(hash_key(ONE)).text))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Unauthorized, match="none of this server's"):
        tickets.check(base64.urlsafe_b64encode(raw).decode(), [hash_key(ONE)])


def test_it_tells_nothing_of_the_key_and_can_be_a_subprotocol(tickets: Tickets) -> None:
    text = tickets.issue(hash_key(ONE)).text
    raw = base64.urlsafe_b64decode(text)
    assert hash_key(ONE) not in raw
    assert ONE.encode() not in raw
    assert all(character.isalnum() or character in "-_" for character in text)
