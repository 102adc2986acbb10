"""`cache_salt`, `prompt_cache_key`, `user` and `safety_identifier` at each door: what they do and what is refused."""

import contextlib

import pytest

from app.config import FileConfig, TenantConfig, hash_key
from app.scopes import Narrowing, Scopes
from app.tenants import Tenant
from tests.app.session_store import session_server
from tests.app.stateful_gateway import KEY_A, KEY_B, body, create, receive_until, running_gateway, send
from tests.scripted_engine import say

DOORS = ("chat", "completions", "responses", "websocket")
CONFIG = FileConfig(
    tenants=(
        TenantConfig(id="a", key_hashes=(hash_key(KEY_A),), scope="user"),
        TenantConfig(id="b", key_hashes=(hash_key(KEY_B),)),
    )
)


@pytest.fixture
async def gateway():
    async with session_server() as store, running_gateway(store, say("Yes."), file_config=CONFIG) as gateway:
        yield gateway


class Asker:
    """Asks the same at any door; gives what the answer says of an error, None for none."""

    def __init__(self, gateway, http, ws):
        self._gateway, self._http, self._ws = gateway, http, ws

    async def ask(self, door, **fields):
        if door == "websocket":
            await send(self._ws, type="response.create", **body("Hi", **fields))
            last = (await receive_until(self._ws))[-1]
            return last["error"] | {"status": last["status"]} if last["type"] == "error" else None
        path, content = {
            "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
            "completions": ("/v1/completions", {"prompt": "Hi"}),
            "responses": ("/v1/responses", {"input": "Hi"}),
        }[door]
        answer = await self._http.post(path, json={"model": "byte-model", **content, **fields})
        return answer.json()["error"] | {"status": answer.status_code} if answer.is_error else None

    async def scope(self, door, **fields):
        assert await self.ask(door, **fields) is None
        return self._gateway.engine.requests[-1].scopes[-1].key


@contextlib.asynccontextmanager
async def asker(gateway, key):
    async with gateway.http(key) as http, gateway.socket(key) as ws:
        yield Asker(gateway, http, ws)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": 7}, "cache_salt"),
        ({"cache_salt": ["s"]}, "cache_salt"),
        ({"cache_salt": "s" * 1025}, "cache_salt"),
        ({"prompt_cache_key": {"k": 1}}, "prompt_cache_key"),
        ({"prompt_cache_key": "k" * 1025}, "prompt_cache_key"),
        ({"user": 7}, "user"),
        ({"user": "u" * 1025}, "user"),
        ({"safety_identifier": True}, "safety_identifier"),
        ({"safety_identifier": "u" * 1025}, "safety_identifier"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_malformed_ones_are_a_400_that_names_them(gateway, door, fields, param):
    async with asker(gateway, KEY_A) as a:
        error = await a.ask(door, **fields)
        assert (error["status"], error["param"]) == (400, param)
        assert gateway.engine.requests == []
        assert await a.ask(door, **{param: "fine"}) is None


@pytest.mark.parametrize("door", DOORS)
async def test_each_end_user_has_a_scope_where_the_tenant_is_told_so(gateway, door):
    async with asker(gateway, KEY_A) as a, asker(gateway, KEY_B) as b:
        scopes = [
            await a.scope(door),
            await a.scope(door, user="ada"),
            await a.scope(door, user="bob"),
            await a.scope(door, user=""),
            await a.scope(door, user="ada", cache_salt="s"),
            await a.scope(door, cache_salt="ada"),
            await a.scope(door, prompt_cache_key="ada"),
            await b.scope(door, user="ada"),
        ]
        assert len(set(scopes)) == len(scopes)
        assert await a.scope(door) == scopes[0], "those who name no user have one scope in common"
        assert await a.scope(door, safety_identifier="ada") == scopes[1]
        assert await a.scope(door, safety_identifier="ada", user="bob") == scopes[1], "the newer field counts"
        assert await b.scope(door, user="bob") == await b.scope(door) == scopes[-1], "tenant b is one scope"


async def test_the_doors_share_a_scope(gateway):
    async with asker(gateway, KEY_A) as a:
        assert len({await a.scope(door, user="ada") for door in DOORS}) == 1


async def test_a_child_does_not_inherit_its_parents_user(gateway):
    """Who asks says so each time: what nobody vouches for stays out of a user's scope."""
    async with gateway.http() as http:
        first = await create(http, "Hi", user="ada")
        await create(http, "And?", previous_response_id=first["id"])
        await create(http, "And?", previous_response_id=first["id"], user="ada")
    of_ada, of_nobody, again = [request.scopes[-1].key for request in gateway.engine.requests]
    assert of_ada == again != of_nobody


async def test_keys_are_of_the_servers_secret(gateway):
    async with asker(gateway, KEY_B) as b:
        guessed = Scopes(b"\0" * 32).private_key(Tenant("b"), Narrowing("s"))
        assert await b.scope("chat", cache_salt="s") != guessed
