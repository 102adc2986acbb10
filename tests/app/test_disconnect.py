"""Work that ends when its client goes."""

import asyncio
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from app.disconnect import cancel_and_wait, until_disconnect


class Client:
    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.messages: list[Any] = [{"type": "http.request", "body": b"", "more_body": False}]

    async def __call__(self) -> Any:
        if self.messages:
            return self.messages.pop()
        await self.gone.wait()
        return {"type": "http.disconnect"}


@pytest.fixture(autouse=True)
async def no_task_is_left() -> Any:
    yield
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_the_result_and_the_error_of_the_work() -> None:
    async def work(value: int) -> int:
        await asyncio.sleep(0)
        return 10 // value

    assert await until_disconnect(Client(), work(5)) == 2
    with pytest.raises(ZeroDivisionError):
        await until_disconnect(Client(), work(0))


async def test_b12_the_work_is_cancelled_once_and_has_ended() -> None:
    client, events = Client(), []

    async def work() -> None:
        client.gone.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            events.append("finally")

    with pytest.raises(ClientDisconnect):
        await until_disconnect(client, work())
    assert events == ["finally"]


async def test_b12_a_cancel_from_outside_is_passed_on() -> None:
    begun = asyncio.Event()

    async def work() -> None:
        begun.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(until_disconnect(Client(), work()))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_waiting_takes_in_what_tasks_raise() -> None:
    async def fail() -> None:
        raise ValueError

    failed = asyncio.create_task(fail())
    endless = asyncio.create_task(asyncio.Event().wait())
    await asyncio.sleep(0)
    await cancel_and_wait(failed, endless)
    assert endless.cancelled()
