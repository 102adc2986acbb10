"""Whether an engine that lives still does something: it is asked now and then, and answers between two steps."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import zmq.asyncio

from engine.heartbeat import Heartbeat
from engine.protocol import StatsQuery, encode
from engine.zmq_connection import ZmqConnection

TIMEOUT_S = 300.0
"""Far longer than the longest step of a large model on a small machine."""
INTERVAL_S = 10.0


async def until_hung(
    address: str,
    *,
    timeout_s: float = TIMEOUT_S,
    interval_s: float = INTERVAL_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Returns when the engine at `address`, once it could be reached, has answered nothing for `timeout_s`.

    An engine that is being started, or that has gone, is not hung. For one life of it.
    """
    context = zmq.asyncio.Context(io_threads=1)
    try:
        with ZmqConnection(context, address) as connection:
            await connection.connected()
            heartbeat = Heartbeat(timeout_s, interval_s, clock())
            listening = asyncio.create_task(connection.receive(lambda _: heartbeat.beat()), name="heartbeat")
            try:
                is_hung = False
                while not is_hung:
                    connection.send(encode(StatsQuery(0)))
                    await sleep(interval_s)
                    is_hung = heartbeat.look(clock())
            finally:
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)
    finally:
        context.destroy(0)
