"""Answers whose gateway has gone: whoever notices takes the lease and goes on with them where their log ends. What
nobody can go on with is ended, so that every reader is told."""

import asyncio
import logging

import msgspec

from app import recipe as recipes
from app.cached_tokens import CachedTokens
from app.event_log import EventsNotHeld
from app.events import IncompleteDetails, ResponseError, ResponseObject, Usage
from app.ids import ResponseId
from app.logged_answer import NOTHING, LoggedAnswer, LogLost
from app.progress import Progress
from app.recipe import Recipe
from app.redis_log import Append, RedisEventLog
from app.response_node import ResponseNode
from app.runs import CannotGoOn, Runs
from app.services import Services
from app.sessions import Finished, Orphan, Sessions, Untaken
from app.usage_record import Outcome, UsageRecord, iso_time

logger = logging.getLogger(__name__)

MAX_STALLED = 3
"""A response is given up when so many gateways, one after the other, went without having added anything to it."""
ORPHANED = ResponseError(message="The server that ran this response ended before it was finished.")
GIVEN_UP = ResponseError(
    message="One server after the other ended while it ran this response: it is not tried any more."
)


class Recovery:
    """Everything here can be done by several gateways at once, and again after a crash at any place: an answer is gone
    on with by whom the lease belongs to, an end is stored once, and the events up to it follow from it and from what is
    logged."""

    def __init__(self, services: Services, sessions: Sessions, log: RedisEventLog, runs: Runs) -> None:
        self._services = services
        self._sessions = sessions
        self._log = log
        self._runs = runs
        self._taking: dict[ResponseId, asyncio.Task[ResponseNode]] = {}

    async def recover(self, node: ResponseNode) -> ResponseNode:
        """The node as it is now: what looks as if it ran is left alone where a gateway holds its lease; else it runs
        here from now on, or is ended. Raises SessionsUnavailable."""
        if not node.response.is_running:
            await self.close_log(node)
            return node
        taking = self._taking.get(node.id)
        if taking is None:
            if not (self._sessions.may_judge and self._runs.can_take(node.id)):
                return node
            # a task of its own: once the lease is taken, it must not matter whether somebody waits for the rest
            taking = asyncio.create_task(self._try_take(node), name=f"takeover of {node.id}")
            self._taking[node.id] = taking
            taking.add_done_callback(lambda task: self._taken(node.id, task))
        return await asyncio.shield(taking)

    def has_taken(self, node: ResponseNode) -> bool:
        """Whether it runs here."""
        return self._runs.find(node.tenant, str(node.id)) is not None

    def _taken(self, response_id: ResponseId, task: asyncio.Task[ResponseNode]) -> None:
        del self._taking[response_id]
        if not task.cancelled():
            task.exception()  # the callers have it, unless they were cancelled

    async def close(self) -> None:
        """Lets those end that are under way."""
        if self._taking:
            await asyncio.wait(self._taking.values())

    async def _try_take(self, node: ResponseNode) -> ResponseNode:
        orphan = await self._sessions.try_take(node.id)
        if orphan is Untaken.HELD:
            return node
        if isinstance(orphan, Orphan):
            logger.warning("the gateway of %s has gone", node.id)
            await self._take_over(node, orphan)
        found = await self._sessions.find(node.tenant, node.id)
        if found is None:
            return node  # deleted meanwhile: so the caller would have seen it a moment earlier
        if not found.response.is_running:
            await self.close_log(found)
        return found

    async def _take_over(self, node: ResponseNode, orphan: Orphan) -> None:
        recipe = _try_read(orphan.recipe)
        try:
            logged = LoggedAnswer.of(await self._log.read_all(str(node.id)))
        except (EventsNotHeld, LogLost):
            logged = None
        if logged is None or not orphan.is_whole:
            await self._log.drop_own(str(node.id))  # readers are told that the events are not held
            details = IncompleteDetails(reason="log_lost")
            response = msgspec.structs.replace(node.response, status="incomplete", incomplete_details=details)
            await self._end(node, response, logged or LoggedAnswer(), recipe, orphan, "aborted")
            return
        error = ORPHANED if orphan.num_stalled < MAX_STALLED else GIVEN_UP
        if recipe is not None and error is not GIVEN_UP:
            try:
                await self._runs.go_on(node, recipe, logged, orphan.takeovers)
            except CannotGoOn as e:
                logger.error("a response is not gone on with: %s", e)
            else:
                return
        response = msgspec.structs.replace(node.response, status="failed", error=error)
        await self._end(node, response, logged, recipe, orphan, "failed")

    async def _end(
        self,
        node: ResponseNode,
        response: ResponseObject,
        logged: LoggedAnswer,
        recipe: Recipe | None,
        orphan: Orphan,
        outcome: Outcome,
    ) -> None:
        """With the text that is logged. What the gateway that has gone had reserved is settled with what is known to be
        used."""
        item, so_far = logged.item("incomplete"), logged.so_far or NOTHING
        response = msgspec.structs.replace(response, output=[item] if item is not None else [])
        if recipe is None:
            await self._sessions.finish(node.ended(response, ()))
            return
        cached = so_far.first.cached if so_far.first is not None else CachedTokens()
        usage = Usage.of(recipe.num_prompt_tokens, cached, len(so_far.token_ids))
        if self._services.ledger is not None:
            record = self._record(node, recipe, so_far, cached, takeovers=orphan.takeovers, outcome=outcome)
            self._services.ledger.add(record)
            await self._services.flush_usage()  # once the end is stored, nobody would record it any more
        ended = node.ended(msgspec.structs.replace(response, usage=usage), ())
        if await self._sessions.finish(ended) is Finished.STORED:
            tenant = self._services.current.tenants.of_id(node.tenant)
            limits = self._services.rate_limits
            limits.adopt(tenant, recipe.num_reserved_tokens, recipe.reserved_day).settle(usage.total_tokens)

    def _record(
        self,
        node: ResponseNode,
        recipe: Recipe,
        so_far: Progress,
        cached: CachedTokens,
        *,
        takeovers: int,
        outcome: Outcome,
    ) -> UsageRecord:
        return UsageRecord(
            id=str(node.id),
            created_at=iso_time(recipe.created_at),
            tenant=node.tenant,
            assistant=recipe.assistant_id,
            model=self._services.model_name,
            outcome=outcome,
            prompt_tokens=recipe.num_prompt_tokens,
            trunk_tokens=cached.trunk,
            history_tokens=cached.history,
            computed_tokens=recipe.num_prompt_tokens - cached.total,
            output_tokens=len(so_far.token_ids),
            queue_ms=so_far.first.queue_ms if so_far.first is not None else 0.0,
            prefill_ms=so_far.first.prefill_ms if so_far.first is not None else 0.0,
            decode_ms=0.0,
            takeovers=takeovers,
        )

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


def _try_read(recipe: bytes) -> Recipe | None:
    """None where it is gone, or was written by a server of another version."""
    try:
        return recipes.from_bytes(recipe) if recipe else None
    except msgspec.MsgspecError as e:
        logger.error("how to submit a response again cannot be read: %s", e)
        return None
