"""Responses of all tenants on this gateway: created, followed, found, cancelled, deleted.

HTTP routes and websockets are thin shells over this. Each call names the tenant; what belongs to another one is
answered exactly as what does not exist, before any work.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from app.cache_report import Explainer
from app.conversation_store import ConversationStore
from app.errors import Conflict, NotFound
from app.event_log import CursorLost, EventLog, EventsNotHeld
from app.event_writer import EventSink, EventSource, EventWriter, LogCursor, Mailbox, Unread
from app.events import Item, Logprob, ResponseError, ResponseObject, TopLogprob
from app.ids import ResponseId, try_parse_response_id
from app.live_config import Configured
from app.logprobs import finite
from app.rate_limits import Reservation
from app.response_node import HistoryMessage, ResponseNode
from app.response_plan import Parent, Plan, ResponsePlanner, StoreUnavailable, or_unavailable
from app.response_run import ResponseRun
from app.services import Services
from app.sessions import Sessions, SessionsUnavailable
from app.tenants import Tenant
from engine.protocol import TokenLogprobs
from engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

LEASE_RETRY_S = 0.25
"""Between attempts to renew leases while Redis is away: once it is back, they must not be missing for long."""
STORE_END_PAUSES_S = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
"""Between attempts to store an answer's end while Redis is away."""
NOT_STORED = ResponseError(message="The answer could not be stored: the session store does not answer.")


@dataclass(frozen=True, slots=True)
class Started:
    """A response under way and all its events."""

    run: ResponseRun
    source: EventSource
    history: tuple[HistoryMessage, ...]
    """Everything said before its own input."""
    headers: Mapping[str, str]
    """Of the limits that it was let in under."""

    def as_parent(self) -> Parent:
        """For children on the socket that asked for it. The response has to be at its end."""
        return Parent(self.run.node, (*self.history, *self.run.node.turn.messages))


@dataclass(frozen=True, slots=True)
class Followed:
    source: EventSource
    stream_id: str | None
    """The websocket lane that asked for the response."""


class ResponseService:
    """Owns the running responses. `now` gives seconds since 1970."""

    def __init__(
        self,
        services: Services,
        sessions: Sessions,
        log: EventLog,
        conversations: ConversationStore,
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._services = services
        self._sessions = sessions
        self._conversations = conversations
        self._log = log
        self._now = now
        self._prompts = services.prompts
        self._planner = ResponsePlanner(services, sessions, conversations, now, self._find_running)
        self._to_logprob = _logprob_writer(services.tokenizer)
        self._writer = EventWriter(log)
        self._runs: dict[str, ResponseRun] = {}
        self._starting: set[asyncio.Task[Started]] = set()
        self._renewing: asyncio.Task[None] | None = None
        self._is_closing = False

    @property
    def num_running(self) -> int:
        return len(self._runs)

    async def close(self, grace_s: float = 0.0) -> None:
        """Takes nothing new; running responses have `grace_s` to end, then they end as failed."""
        self._is_closing = True
        if self._starting:
            await asyncio.wait(self._starting)
        ends = [asyncio.ensure_future(run.wait()) for run in self._runs.values()]
        if ends:
            _, late = await asyncio.wait(ends, timeout=grace_s)
            for run in list(self._runs.values()):
                run.stop("shutdown")
            if late:
                await asyncio.wait(late)
        await self._writer.flush()

    async def create(
        self,
        configured: Configured,
        tenant: Tenant,
        body: Mapping[str, Any],
        *,
        stream_id: str | None = None,
        unstored: Mapping[str, Parent] | None = None,
        wants_events: bool = True,
        before_start: Callable[[ResponseNode], Awaitable[None]] | None = None,
    ) -> Started:
        """Starts a response, under the configuration with which its request began. `unstored` are parents that only
        this caller may hang children on. Without `wants_events` the events of a response that is not stored are not
        kept. `before_start` sees the node when nothing can be refused any more; if it raises, nothing is started.

        When it returns the response runs, and if it is stored, it stands in the session store. Raises ApiError, and
        then nothing has been stored or started. If the caller is cancelled, a stored response may run nevertheless.
        """
        if self._is_closing:
            raise StoreUnavailable("The server is shutting down.", code="shutting_down")
        plan = await self._planner.plan(configured, tenant, body, stream_id=stream_id, unstored=unstored or {})
        reservation = await self._services.rate_limits.reserve(tenant, plan.generation.num_wanted_tokens)
        if before_start is not None:
            try:
                await before_start(plan.node)
            except BaseException:
                reservation.settle(0)
                raise
        if not plan.node.response.store:
            return self._start_unstored(plan, reservation, Mailbox() if wants_events else Unread())
        # A task of its own: between the node in the store and the run that ends it nobody may be cancelled.
        starting = asyncio.create_task(self._start_stored(plan, reservation))
        self._starting.add(starting)
        starting.add_done_callback(self._starting_ended)
        return await asyncio.shield(starting)

    def _starting_ended(self, task: asyncio.Task[Started]) -> None:
        self._starting.discard(task)
        if not task.cancelled():
            task.exception()  # the caller has it, unless it was cancelled

    def _start_unstored(self, plan: Plan, reservation: Reservation, events: Mailbox | Unread) -> Started:
        run = self._make_run(plan, events)
        self._launch(run, reservation)
        return Started(run, events, plan.history, reservation.headers)

    async def _start_stored(self, plan: Plan, reservation: Reservation) -> Started:
        response_id = str(plan.node.id)
        try:
            if plan.node.response.conversation is not None:
                await or_unavailable(self._conversations.enter(plan.node))
            await or_unavailable(self._sessions.create(plan.node))
            run = self._make_run(plan, await self._writer.open(response_id))
        except BaseException:
            reservation.settle(0)
            raise
        self._launch(run, reservation)
        if self._renewing is None:
            self._renewing = asyncio.create_task(self._renew_leases(), name="lease renewal")
        return Started(run, LogCursor(self._log, response_id, -1), plan.history, reservation.headers)

    def _make_run(self, plan: Plan, sink: EventSink) -> ResponseRun:
        async def store_end(node: ResponseNode) -> ResponseError | None:
            # clients may also keep the conversation themselves and send the answer back as text
            for item in node.response.output:
                self._prompts.remember(plan.prompt, item.text, node.kept_ids)
            return await self._store_end(node)

        return ResponseRun(
            plan.node,
            plan.generation,
            sink,
            store_end=store_end,
            now=lambda: int(self._now()),
            to_logprob=self._to_logprob,
            # without an id to come back to nobody could ask
            explainer=self._explainer(plan) if plan.node.response.store else None,
        )

    def _explainer(self, plan: Plan) -> Explainer:
        decode = partial(self._services.tokenizer.decode, skip_special_tokens=False)
        history, tenant_id = self._services.history, plan.node.tenant
        return Explainer(history, tenant_id, plan.prompt, plan.generation.block_size, decode)

    def _launch(self, run: ResponseRun, reservation: Reservation) -> None:
        response_id = str(run.node.id)
        self._runs[response_id] = run
        run.start().add_done_callback(lambda task: self._run_ended(response_id, task, reservation))

    def _run_ended(self, response_id: str, task: asyncio.Task[None], reservation: Reservation) -> None:
        usage = self._runs.pop(response_id).response.usage
        reservation.settle(0 if usage is None else usage.total_tokens)
        if self._renewing is not None and not any(run.is_stored for run in self._runs.values()):
            self._renewing.cancel()
            self._renewing = None
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("response %s failed", response_id, exc_info=error)

    async def _store_end(self, node: ResponseNode) -> ResponseError | None:
        if not node.response.store:
            return None
        for pause_s in (*STORE_END_PAUSES_S, None):
            try:
                await self._sessions.finish(node)
            except SessionsUnavailable as e:
                logger.warning("the end of %s is not stored yet: %s", node.id, e.reason)
            else:
                return None
            if pause_s is not None:
                await asyncio.sleep(pause_s)
        return NOT_STORED

    async def _renew_leases(self) -> None:
        """Lives while stored responses run."""
        pause_s = self._sessions.lease_s / 3
        while True:
            await asyncio.sleep(pause_s)
            try:
                await self._sessions.renew_leases([run.node.id for run in self._runs.values() if run.is_stored])
            except SessionsUnavailable as e:
                logger.warning("leases are not renewed: %s", e.reason)
                pause_s = LEASE_RETRY_S
            else:
                pause_s = self._sessions.lease_s / 3

    # ---- responses that exist

    async def count_input_tokens(self, configured: Configured, tenant: Tenant, body: Mapping[str, Any]) -> int:
        """How many tokens the prompt of such a response would have. Raises ApiError."""
        return await self._planner.count_input_tokens(configured, tenant, body)

    async def get(self, tenant: Tenant, response_id: str) -> ResponseObject:
        """As it is now. Raises ApiError: 404 for what this tenant has not stored."""
        run = self._find_run(tenant, response_id)
        if run is not None and run.is_stored:
            return run.response
        return (await self._find(tenant, response_id)).response

    async def input_items(self, tenant: Tenant, response_id: str) -> tuple[Item, ...]:
        """Its own input, in the order in which it was given. Raises ApiError."""
        return (await self._find(tenant, response_id)).input

    async def cache_report(self, tenant: Tenant, response_id: str) -> dict[str, Any]:
        """How much of its prompt was cached, and why no more. Raises ApiError: 409 while it runs, 404 for one that
        ended before its first token."""
        node = await self._find(tenant, response_id)
        if node.response.is_running:
            raise Conflict(f"The response {response_id} is still running.", code="response_in_progress")
        if node.cache is None:
            raise NotFound(
                f"The response '{response_id}' has no cache report: it ended before its first token.",
                code="cache_report_not_found",
            )
        return node.cache.to_wire(response_id)

    async def follow(self, tenant: Tenant, response_id: str, after: int) -> Followed:
        """Its events after a number, up to its end. Raises ApiError: 404 also when the events have expired."""
        node = await self._find(tenant, response_id)
        try:
            await self._log.read(response_id, after, 0)
        except EventsNotHeld:
            raise events_not_held(response_id) from None
        except CursorLost as e:
            raise NotFound(
                f"The events of response '{response_id}' before {e.first_held} are not held any more.",
                code="response_not_found",
                param="starting_after",
            ) from None
        return Followed(LogCursor(self._log, response_id, after), node.stream_id)

    async def cancel(self, tenant: Tenant, response_id: str) -> ResponseObject:
        """Ends a running response and waits for that; one at its end stays as it is. Raises ApiError."""
        run = self._find_run(tenant, response_id)
        if run is None:
            return (await self._find(tenant, response_id)).response
        run.stop()
        return await run.wait()

    async def delete(self, tenant: Tenant, response_id: str) -> None:
        """Forgets a response; one that runs is ended first. Raises ApiError."""
        run = self._find_run(tenant, response_id)
        if run is not None and run.is_stored:
            run.stop()
            await run.wait()
        parsed = _parse(response_id)
        if not await or_unavailable(self._sessions.delete(tenant.id, parsed)):
            raise unknown_response(response_id)
        await self._writer.flush()
        await self._log.drop(response_id)

    def _find_run(self, tenant: Tenant, response_id: str) -> ResponseRun | None:
        run = self._runs.get(response_id)
        return run if run is not None and run.tenant == tenant.id else None

    def _find_running(self, tenant: Tenant, response_id: str) -> ResponseNode | None:
        """The node of a stored response that runs here. To the store it may look left behind: while Redis was away,
        nobody could renew its lease."""
        run = self._find_run(tenant, response_id)
        return run.node if run is not None and run.is_stored else None

    async def _find(self, tenant: Tenant, response_id: str) -> ResponseNode:
        running = self._find_running(tenant, response_id)
        if running is not None:
            return running
        node = await or_unavailable(self._sessions.find(tenant.id, _parse(response_id)))
        if node is None:
            raise unknown_response(response_id)
        return node


def unknown_response(response_id: str) -> NotFound:
    """The one answer for ids that do not exist and for those of other tenants."""
    return NotFound(f"Response with id '{response_id}' not found.", code="response_not_found")


def events_not_held(response_id: str) -> NotFound:
    """They have expired, or the response was deleted."""
    return NotFound(
        f"The events of response '{response_id}' are not held any more; get it without 'stream'.",
        code="response_not_found",
    )


def _parse(response_id: str) -> ResponseId:
    parsed = try_parse_response_id(response_id)
    if parsed is None:
        raise unknown_response(response_id)
    return parsed


def _logprob_writer(tokenizer: Tokenizer) -> Callable[[TokenLogprobs], Logprob]:
    def one(token_id: int, logprob: float) -> TopLogprob:
        data = list(tokenizer.token_bytes(token_id))
        return TopLogprob(token=tokenizer.token_text(token_id), logprob=finite(logprob), bytes=data)

    def write(entry: TokenLogprobs) -> Logprob:
        drawn = one(entry.token_id, entry.logprob)
        top = [one(token_id, logprob) for token_id, logprob in entry.top]
        return Logprob(token=drawn.token, logprob=drawn.logprob, bytes=drawn.bytes, top_logprobs=top)

    return write
