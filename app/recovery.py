"""Answers whose gateway has gone: whoever notices takes the lease, and ends them so that every reader is told."""

import logging

import msgspec

from app.event_log import EventsNotHeld
from app.events import IncompleteDetails, ResponseError, ResponseObject
from app.logged_answer import LoggedAnswer, LogLost
from app.redis_log import Append, RedisEventLog
from app.response_node import ResponseNode
from app.sessions import Sessions, Taken

logger = logging.getLogger(__name__)

ORPHANED = ResponseError(message="The server that ran this response ended before it was finished.")


class Recovery:
    """Everything here can be done by several gateways at once, and again after a crash at any place: an end is stored
    once, by whom the lease belongs to, and the events up to it follow from it and from what is logged."""

    def __init__(self, sessions: Sessions, log: RedisEventLog) -> None:
        self._sessions = sessions
        self._log = log

    async def recover(self, node: ResponseNode) -> ResponseNode:
        """The node as it is now: what looks as if it ran is left alone where a gateway holds its lease, else ended.

        Not for a response that runs here. Raises SessionsUnavailable."""
        if node.response.is_running:
            match await self._sessions.try_take(node.id):
                case Taken.HELD:
                    return node
                case Taken.TAKEN:
                    logger.warning("the gateway of %s has gone", node.id)
                    await self._sessions.finish(await self._ended(node))
            ended = await self._sessions.find(node.tenant, node.id)
            if ended is None:
                return node  # deleted meanwhile: so the caller would have seen it a moment earlier
            node = ended
        if not node.response.is_running:
            await self.close_log(node)
        return node

    async def close_log(self, node: ResponseNode) -> None:
        """Appends what the log lacks of an answer that has ended: its gateway may have gone just then."""
        try:
            logged = LoggedAnswer.of(await self._log.read_all(str(node.id)))
        except EventsNotHeld:
            return
        except LogLost:
            await self._log.drop(str(node.id))  # readers are told that the events are not held
            return
        if missing := logged.closing_events(node.response):
            await self._log.append([Append(str(node.id), missing)])

    async def _ended(self, node: ResponseNode) -> ResponseNode:
        try:
            logged = LoggedAnswer.of(await self._log.read_all(str(node.id)))
        except (EventsNotHeld, LogLost):
            return node.ended(_log_lost(node.response), ())
        item = logged.item("incomplete")
        response = msgspec.structs.replace(
            node.response, status="failed", error=ORPHANED, output=[item] if item is not None else []
        )
        return node.ended(response, ())


def _log_lost(response: ResponseObject) -> ResponseObject:
    details = IncompleteDetails(reason="log_lost")
    return msgspec.structs.replace(response, status="incomplete", incomplete_details=details)
