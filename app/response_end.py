"""How the end of a response gets into the session store, which may be away just then."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from app.events import ResponseError
from app.response_node import ResponseNode
from app.response_run import TakenOver
from app.sessions import Finished, Sessions, SessionsUnavailable

logger = logging.getLogger(__name__)

STORE_END_PAUSES_S = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
"""Between attempts to store an answer's end while Redis is away."""
NOT_STORED = ResponseError(message="The answer could not be stored: the session store does not answer.")


async def store_end(
    sessions: Sessions, node: ResponseNode, flush_usage: Callable[[], Awaitable[bool]]
) -> ResponseError | None:
    """None where it is stored, or need not be. Raises TakenOver.

    What it used is recorded first: if this gateway is killed after its end is stored, nobody records it any more. Only
    the last attempt stores an end whose usage is not recorded yet.
    """
    if not node.response.store:
        return None
    for pause_s in (*STORE_END_PAUSES_S, None):
        if await flush_usage() or pause_s is None:
            try:
                finished = await sessions.finish(node)
            except SessionsUnavailable as e:
                logger.warning("the end of %s is not stored yet: %s", node.id, e.reason)
            else:
                if finished is Finished.TAKEN:
                    raise TakenOver
                return None
        if pause_s is not None:
            await asyncio.sleep(pause_s)
    return NOT_STORED
