"""What was refused, and is stored nevertheless, goes as soon as the store answers."""

import asyncio

import pytest

from app import refused
from app.ids import new_response_id
from app.refused import Refused
from app.sessions import SessionsUnavailable
from tests.app.session_store import session_server
from tests.app.stateful_gateway import body, running_gateway
from tests.scripted_engine import say


class Store:
    """Away for so many attempts."""

    def __init__(self, num_failures=0):
        self.deleted = []
        self._failures = iter(range(num_failures))

    async def delete(self, tenant, response_id):
        if next(self._failures, None) is not None:
            raise SessionsUnavailable("away")
        self.deleted.append((tenant, response_id))
        return False


async def none_waiting(names):
    async with asyncio.timeout(600):
        while names.num_waiting:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_they_are_deleted_once_the_store_answers(monkeypatch):
    monkeypatch.setattr(refused, "RETRY_S", 0.001)
    store, ids = Store(num_failures=3), [new_response_id(), new_response_id()]
    names = Refused(store)
    for tenant, response_id in zip("ab", ids, strict=True):
        names.add(tenant, response_id)
    await none_waiting(names)
    assert store.deleted == [("a", ids[0]), ("b", ids[1])]
    await names.close()


async def test_at_the_end_it_is_tried_once_more(caplog):
    for num_failures, deleted, said in ((1, ["a"], ""), (2, [], "1 refused responses may be stored: away")):
        store = Store(num_failures)
        names = Refused(store)
        names.add("a", new_response_id())
        await asyncio.sleep(0)
        await names.close()
        assert [tenant for tenant, _ in store.deleted] == deleted
        assert said in caplog.text


async def test_they_are_bounded(monkeypatch, caplog):
    monkeypatch.setattr(refused, "MAX_WAITING", 1)
    names = Refused(Store())
    for _ in range(2):
        names.add("a", new_response_id())
    assert names.num_waiting == 1
    assert "was refused and may be stored: 1 such wait already" in caplog.text
    await names.close()


@pytest.mark.parametrize("is_background", [False, True])
async def test_a_response_whose_storing_was_not_confirmed_leaves_nothing(monkeypatch, is_background):
    async with (
        session_server() as store,
        running_gateway(store, say("unheard")) as gateway,
        gateway.http() as http,
    ):
        create = gateway.sessions.create

        async def create_unconfirmed(*arguments):
            await create(*arguments)
            raise SessionsUnavailable("the reply was lost")

        monkeypatch.setattr(gateway.sessions, "create", create_unconfirmed)
        answer = await http.post("/v1/responses", json=body(background=is_background))
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "session_store_unavailable")
        async with asyncio.timeout(600):
            while await gateway.sessions._redis.keys("{s:*"):  # noqa: ASYNC110 another task deletes them
                await asyncio.sleep(0.005)
        assert gateway.engine.requests == []
