"""Tickets over real sockets: a browser's way in, and what is said to those who have none."""

import logging

import pytest
from websockets.exceptions import InvalidStatus

from app.config import FileConfig, TenantConfig, hash_key
from tests.app.stateful_gateway import (
    FILE_CONFIG,
    KEY_A,
    KEY_B,
    create,
    receive,
    receive_until,
    receive_until_closed,
    running_gateway,
    send_create,
)
from tests.scripted_engine import say


@pytest.fixture
async def gateway(store):
    async with running_gateway(store, say("Hello.")) as gateway:
        yield gateway


async def get_ticket(gateway, key=KEY_A):
    async with gateway.http(key) as http:
        answer = await http.post("/v1/tickets")
    assert answer.status_code == 200, answer.text
    assert answer.headers["cache-control"] == "no-store"
    body = answer.json()
    assert (body["object"], body["subprotocol"], body["expires_in"]) == ("ticket", "trunkline", 60)
    return body["ticket"]


async def refused(gateway, *protocols):
    with pytest.raises(InvalidStatus) as caught:
        async with gateway.socket(None, subprotocols=protocols or None):
            pass
    response = caught.value.response
    return response.status_code, response.body.decode()


async def test_a_ticket_opens_one_socket_of_its_tenant(gateway):
    ticket = await get_ticket(gateway)
    async with gateway.socket(None, subprotocols=["trunkline", ticket]) as ws, gateway.http(KEY_A) as http:
        assert ws.subprotocol == "trunkline", "the ticket is not repeated"
        await send_create(ws)
        done = (await receive_until(ws))[-1]
        assert done["type"] == "response.completed"
        assert (await http.get(f"/v1/responses/{done['response']['id']}")).status_code == 200
        async with gateway.http(KEY_B) as other:
            assert (await other.get(f"/v1/responses/{done['response']['id']}")).status_code == 404
    status, said = await refused(gateway, "trunkline", ticket)
    assert status == 401
    assert "invalid_ticket" in said
    assert ticket not in said


@pytest.mark.parametrize("protocols", [(), ("trunkline",), ("trunkline", "nonsense"), ("other", "TICKET")])
async def test_without_a_ticket_or_key_nobody_gets_in(gateway, protocols):
    ticket = await get_ticket(gateway)
    status, _ = await refused(gateway, *(ticket if p == "TICKET" else p for p in protocols))
    assert status == 401


async def test_a_key_in_the_header_needs_no_ticket(gateway):
    async with gateway.socket(KEY_A, subprotocols=["trunkline", "nonsense"]) as ws:
        assert ws.subprotocol == "trunkline"
        await send_create(ws)
        assert (await receive_until(ws))[-1]["type"] == "response.completed"


async def test_a_ticket_is_given_for_a_valid_key_only(gateway):
    for key in (None, "not-a-known-key"):
        async with gateway.http(key) as http:
            answer = await http.post("/v1/tickets")
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


async def test_an_open_server_gives_tickets_to_everybody(store):
    async with running_gateway(store, say("Hello."), file_config=FileConfig()) as gateway:
        ticket = await get_ticket(gateway, None)
        async with gateway.socket(None, subprotocols=["trunkline", ticket]) as ws:
            await send_create(ws)
            assert (await receive_until(ws))[-1]["type"] == "response.completed"
        assert (await refused(gateway, "trunkline", ticket))[0] == 401
        async with gateway.socket(None) as ws:
            assert ws.subprotocol is None


async def test_revoking_the_key_ends_the_socket_of_its_ticket(gateway):
    """One of two keys goes by a reload: what the other one opened lives on."""
    live = gateway.services.live
    b = FILE_CONFIG.tenants[1]

    def with_keys(*keys):
        a = TenantConfig(id="a", key_hashes=tuple(map(hash_key, keys)))
        return live.build(FILE_CONFIG.model_copy(update={"tenants": (a, b)}))

    live.current = with_keys(KEY_A, "a-second-key")
    tickets = [await get_ticket(gateway, key) for key in (KEY_A, "a-second-key", "a-second-key")]
    first = gateway.socket(None, subprotocols=["trunkline", tickets[0]])
    second = gateway.socket(None, subprotocols=["trunkline", tickets[1]])
    async with first as first_ws, second as second_ws:
        for ws in (first_ws, second_ws):
            await send_create(ws)
            await receive_until(ws)
        live.current = with_keys(KEY_A)
        await send_create(first_ws)
        assert (await receive_until(first_ws))[-1]["type"] == "response.completed"
        await send_create(second_ws)
        error = await receive(second_ws)
        assert (error["type"], error["status"]) == ("error", 401)
        assert (await receive_until_closed(second_ws))[1] == 1008
    assert (await refused(gateway, "trunkline", tickets[2]))[0] == 401, "a ticket that was not used yet goes too"


async def test_no_ticket_or_key_in_the_log(gateway, caplog):
    caplog.set_level(logging.DEBUG)
    ticket = await get_ticket(gateway)
    async with gateway.socket(None, subprotocols=["trunkline", ticket]), gateway.http() as http:
        await create(http)
    await refused(gateway, "trunkline", ticket)
    ours = [record.getMessage() for record in caplog.records if not record.name.startswith(("websockets", "httpcore"))]
    assert ours
    for secret in (ticket, KEY_A):
        assert not any(secret in message for message in ours)
