"""Responses of all tenants on this gateway: created, followed, found, cancelled, deleted.

HTTP routes and websockets are thin shells over this. Each call names the tenant; what belongs to another one is
answered exactly as what does not exist, before any work.
"""

import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from app.conversation_store import ConversationStore
from app.errors import Conflict, NotFound, ShuttingDown
from app.event_log import CursorLost, EventsNotHeld
from app.event_writer import LogCursor, Mailbox, Unread, Waiter
from app.events import Item, ResponseObject
from app.follows import Follows
from app.ids import try_parse_response_id
from app.live_config import Configured
from app.lookup_errors import events_not_held, parse_known, unknown_response
from app.readers import Readers
from app.recovery import Recovery
from app.response_node import ResponseNode
from app.response_plan import Parent, ResponsePlanner, or_unavailable
from app.response_run import ResponseRun
from app.runs import Runs
from app.services import Services
from app.sessions import Sessions
from app.shared_log import SharedEventLog
from app.started import Followed, Started
from app.tenants import Tenant

AFTER_ALL = 2**62
"""A place in a log that no event has."""


class ResponseService:
    """`now` gives seconds since 1970, `readers` know of those that run here."""

    def __init__(
        self,
        services: Services,
        sessions: Sessions,
        log: SharedEventLog,
        runs: Runs,
        recovery: Recovery,
        conversations: ConversationStore,
        readers: Readers,
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._services = services
        self._sessions = sessions
        self._log = log
        self._recovery = recovery
        self._planner = ResponsePlanner(services, sessions, conversations, now, self._try_find)
        self._readers = readers
        self._follows = Follows(sessions, log, recovery)
        self.runs = runs

    @property
    def num_running(self) -> int:
        return self.runs.num_running

    async def finish(self, grace_s: float) -> None:
        """Takes nothing new; running responses have `grace_s` to end, then `Runs.finish` says what becomes of them."""
        await self.runs.finish(grace_s)

    async def close(self, grace_s: float = 0.0) -> None:
        await self.finish(grace_s)
        await self._readers.close()
        await self._follows.close()
        await self._recovery.close()
        await self.runs.close()

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
        plan = await self._planner.plan(configured, tenant, body, stream_id=stream_id, unstored=unstored or {})
        reservation = await self._services.rate_limits.reserve(tenant, plan.generation.num_wanted_tokens)
        try:
            if before_start is not None:
                await before_start(plan.node)
            if self.runs.is_closing:  # nobody waits for what would start now
                raise ShuttingDown
        except BaseException:
            reservation.settle(0)
            raise
        if not plan.node.response.store:
            events = Mailbox() if wants_events else Unread()
            run = self.runs.start_unstored(plan, reservation, events)
            return Started(run, events, plan.history, reservation.headers)
        run = await self.runs.start_stored(plan, reservation, configured.limits)
        return Started(run, self._cursor(str(plan.node.id), -1), plan.history, reservation.headers)

    def _cursor(self, response_id: str, after: int) -> LogCursor:
        return LogCursor(self._log, response_id, after, self._readers.enter)

    # ---- responses that exist

    async def count_input_tokens(self, configured: Configured, tenant: Tenant, body: Mapping[str, Any]) -> int:
        """How many tokens the prompt of such a response would have. Raises ApiError."""
        return await self._planner.count_input_tokens(configured, tenant, body)

    async def get(self, tenant: Tenant, response_id: str) -> ResponseObject:
        """As it is now; to ask counts as reading: whoever waits in this way asks again. Raises ApiError: 404 for what
        this tenant has not stored."""
        node = await self._find(tenant, response_id)
        run = self.runs.find(tenant.id, response_id)  # looked for now: it may run here since
        if run is not None and run.is_stored:
            self._readers.touch(response_id)
            return run.response
        if node.response.is_running:
            await or_unavailable(self._sessions.say_read([node.id]))
        return node.response

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
        """Its events after a number, up to its end, whichever gateway runs it. Raises ApiError: 404 also when the
        events have expired."""
        node = await self._find(tenant, response_id)
        try:
            _, has_ended = await or_unavailable(self._log.read(response_id, after, 0))
            if not has_ended and not self._log.is_near(response_id):
                if not node.response.is_running:
                    await or_unavailable(self._recovery.close_log(node))
                else:
                    await or_unavailable(self._sessions.say_read([node.id]))
                self._follows.add(tenant.id, node.id)
        except EventsNotHeld:
            raise events_not_held(response_id) from None
        except CursorLost as e:
            raise NotFound(
                f"The events of response '{response_id}' before {e.first_held} are not held any more.",
                code="response_not_found",
                param="starting_after",
            ) from None
        return Followed(self._cursor(response_id, after), node.stream_id)

    async def wait(self, tenant: Tenant, run: ResponseRun) -> ResponseObject:
        """The response at its end, also where another gateway has taken it over. Raises ApiError: what made it fail."""
        with self._readers.reading(str(run.node.id)):
            response = await run.wait()
        if run.error is not None:
            raise run.error
        if run.is_abandoned and self.runs.is_closing:
            raise ShuttingDown(f"The server is shutting down; the response '{response.id}' goes on elsewhere.")
        return response if not run.is_abandoned else await self._wait_elsewhere(tenant, response.id)

    async def _wait_elsewhere(self, tenant: Tenant, response_id: str) -> ResponseObject:
        followed = await self.follow(tenant, response_id, AFTER_ALL)
        with Waiter(followed.source) as waiter:
            async for _ in waiter:
                pass
        return await self.get(tenant, response_id)

    async def cancel(self, tenant: Tenant, response_id: str) -> ResponseObject:
        """Ends a running response, whichever gateway runs it, and waits for that; one at its end stays as it is.
        Raises ApiError."""
        run = self.runs.find(tenant.id, response_id)
        if run is None:
            node = await self._find(tenant, response_id)
            run = self.runs.find(tenant.id, response_id)  # it may run here since
            if run is None:
                if not node.response.is_running:
                    return node.response
                await or_unavailable(self._sessions.ask_to_stop(node.id))
                return await self._wait_elsewhere(tenant, response_id)
        run.stop()
        response = await run.wait()
        return response if not run.is_abandoned else await self._wait_elsewhere(tenant, response_id)

    async def delete(self, tenant: Tenant, response_id: str) -> None:
        """Forgets a response; one that runs, wherever it does, is ended first. Raises ApiError."""
        parsed, run = parse_known(response_id), self.runs.find(tenant.id, response_id)
        if run is not None and not run.is_stored:
            raise unknown_response(response_id)
        with suppress(NotFound):  # of its events, which may have been lost
            await self.cancel(tenant, response_id)
        if not await or_unavailable(self._sessions.delete(tenant.id, parsed)):
            raise unknown_response(response_id)
        await self.runs.flush()
        await or_unavailable(self._log.drop(response_id))

    async def _find(self, tenant: Tenant, response_id: str) -> ResponseNode:
        node = await self._try_find(tenant, response_id)
        if node is None:
            raise unknown_response(response_id)
        return node

    async def _try_find(self, tenant: Tenant, response_id: str) -> ResponseNode | None:
        run = self.runs.find(tenant.id, response_id)
        if run is not None and run.is_stored:
            # to the store it may look left behind: while Redis was away, nobody could renew its lease
            return run.node
        parsed = try_parse_response_id(response_id)
        node = None if parsed is None else await or_unavailable(self._sessions.find(tenant.id, parsed))
        if node is None or not node.response.is_running:
            return node
        return await or_unavailable(self._recovery.recover(node))
