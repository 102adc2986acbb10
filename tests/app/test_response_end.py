"""How the end of a response is stored while the store, or the ledger in it, does not answer."""

import asyncio

import pytest

from app import response_end
from app.events import InputText, Item, ResponseObject
from app.ids import new_response_id
from app.response_end import NOT_STORED, STORE_END_PAUSES_S, store_end
from app.response_node import ResponseNode
from app.response_run import TakenOver
from app.sessions import Finished, SessionsUnavailable

UNAVAILABLE = SessionsUnavailable("away")


class Store:
    """Answers as it is told to, one after another, and writes down what was asked of it."""

    def __init__(self, *, ends=(), usages=()):
        self.asked = []
        self._ends, self._usages = iter(ends), iter(usages)

    async def finish(self, node):
        self.asked.append("end")
        answer = next(self._ends)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def flush_usage(self):
        self.asked.append("usage")
        return next(self._usages)


@pytest.fixture(autouse=True)
def pauses(monkeypatch):
    made = []

    async def sleep(seconds):
        made.append(seconds)

    monkeypatch.setattr(response_end.asyncio, "sleep", sleep)
    return made


def node(**fields):
    response_id = new_response_id()
    response = ResponseObject(id=str(response_id), created_at=1, status="completed", model="m", **fields)
    item = Item(id="msg_1", role="user", content=[InputText(text="Hi")])
    return ResponseNode(id=response_id, tenant="a", input=(item,), response=response)


def end(stage, **fields):
    return asyncio.run(store_end(stage, node(**fields), stage.flush_usage))


def test_usage_is_recorded_before_the_end_is_stored(pauses):
    store = Store(ends=[Finished.STORED], usages=[True])
    assert end(store) is None
    assert (store.asked, pauses) == (["usage", "end"], [])


def test_an_answer_that_is_not_stored_asks_for_nothing():
    store = Store()
    assert end(store, store=False) is None
    assert store.asked == []


def test_while_usage_cannot_be_recorded_the_end_waits(pauses):
    store = Store(ends=[UNAVAILABLE, Finished.STORED], usages=[False, True, False, True])
    assert end(store) is None
    assert store.asked == ["usage", "usage", "end", "usage", "usage", "end"]
    assert pauses == [0.1, 0.2, 0.4]


def test_an_end_whose_usage_is_never_recorded_is_stored_at_last(pauses):
    attempts = len(STORE_END_PAUSES_S) + 1
    store = Store(ends=[Finished.STORED], usages=[False] * attempts)
    assert end(store) is None
    assert (store.asked, pauses) == (["usage"] * attempts + ["end"], list(STORE_END_PAUSES_S))


def test_an_end_that_is_never_stored_is_told():
    attempts = len(STORE_END_PAUSES_S) + 1
    store = Store(ends=[UNAVAILABLE] * attempts, usages=[True] * attempts)
    assert end(store) is NOT_STORED


def test_an_answer_of_another_gateway_is_given_up():
    with pytest.raises(TakenOver):
        end(Store(ends=[Finished.TAKEN], usages=[True]))
