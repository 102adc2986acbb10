"""Work that ends when its client goes.

A client's going shows only as `http.disconnect` on the receive channel, so somebody must wait there while the work
runs. The work runs in a task of its own and is cancelled; what it holds it gives back in its `with` blocks, before
the wait returns.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

T = TypeVar("T")


async def wait_for_disconnect(receive: Receive) -> None:
    """Returns when the client has gone. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns or raises. Raises ClientDisconnect, with `work` cancelled and ended, if the client goes."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return await task
        raise ClientDisconnect
    finally:
        await cancel_and_wait(task, gone)


async def cancel_and_wait(*tasks: asyncio.Task[Any]) -> None:
    """Cancels those that still run and returns when all have ended."""
    for task in tasks:
        task.cancel()
    # `gather` takes in what they raise; if this wait itself is cancelled, the tasks are cancelled all the same
    await asyncio.gather(*tasks, return_exceptions=True)
