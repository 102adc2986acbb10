"""The responses that run on this gateway: started, or gone on with after another one; kept by their leases, told to
end, waited for."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from app import recipe as recipes
from app.announcements import Announcements
from app.cache_report import Explainer
from app.conversation_store import ConversationStore
from app.errors import ShuttingDown
from app.event_writer import EventSink, EventWriter, Mailbox, Unread
from app.events import ResponseError
from app.grace import GraceRules
from app.ids import ResponseId
from app.leases import Leases
from app.limits import Limits
from app.logged_answer import LoggedAnswer
from app.logprobs import logprob_writer
from app.rate_limits import Reservation
from app.readers import Readers
from app.recipe import Recipe
from app.refused import Refused
from app.response_end import store_end
from app.response_node import ResponseNode
from app.response_plan import Plan, or_unavailable
from app.response_run import ResponseRun
from app.running_index import RunningIndex
from app.services import Services
from app.sessions import Sessions, SessionsUnavailable
from app.shared_log import SharedEventLog

logger = logging.getLogger(__name__)


class CannotGoOn(Exception):
    """This gateway cannot go on with what another one has begun."""


class Runs:
    """Owns them. `now` gives seconds since 1970."""

    def __init__(
        self,
        services: Services,
        sessions: Sessions,
        log: SharedEventLog,
        announcements: Announcements,
        conversations: ConversationStore,
        index: RunningIndex,
        readers: Readers,
        now: Callable[[], float],
    ) -> None:
        self._services = services
        self._sessions = sessions
        self._conversations = conversations
        self._log = log
        self._index = index
        self._ended: set[str] = set()
        """That the index still has."""
        self._clearing: asyncio.Task[None] | None = None
        self._left: set[str] = set()
        """When this gateway ended; there the index has them for the others."""
        self._now = now
        self._to_logprob = logprob_writer(services.tokenizer)
        self._writer = EventWriter(log)
        self._runs: dict[str, ResponseRun] = {}
        self._starting: set[asyncio.Task[ResponseRun]] = set()
        self._refused = Refused(sessions)
        self._readers = readers
        self._leases = Leases(sessions, announcements, log, readers)
        self._is_closing = False

    @property
    def ids(self) -> list[str]:
        return list(self._runs)

    @property
    def num_running(self) -> int:
        return len(self._runs)

    @property
    def is_closing(self) -> bool:
        """Nobody waits for what would start now."""
        return self._is_closing

    def can_take(self, response_id: ResponseId) -> bool:
        """Whether this gateway may go on with it: it takes something at all, and this does not run here already."""
        return not (self._is_closing or self._services.drain.is_draining or str(response_id) in self._runs)

    def find(self, tenant_id: str, response_id: str) -> ResponseRun | None:
        """None where none of this tenant runs here, or another gateway has it now."""
        run = self._runs.get(response_id)
        return run if run is not None and run.tenant == tenant_id and not run.is_abandoned else None

    async def finish(self, grace_s: float) -> None:
        """Takes nothing new; running responses have `grace_s` to end. Then they are left to other gateways, or to this
        one's next life; so are paused ones at once. What nobody could go on with ends as failed."""
        self._is_closing = True
        if self._starting:
            await asyncio.wait(self._starting)
        runs = list(self._runs.values())
        ends = [asyncio.ensure_future(run.wait()) for run in runs]
        for run in runs:
            if self._readers.is_paused(str(run.node.id)):
                self._leave(run)
        if ends:
            await asyncio.wait(ends, timeout=grace_s)
            for run in list(self._runs.values()):
                self._leave(run)
            await asyncio.wait(ends)
        await self._writer.flush()  # what is logged after the lease is given up would be refused
        if left := [run.node.id for run in runs if run.is_abandoned and str(run.node.id) in self._left]:
            await self._leases.settle()
            try:
                await self._sessions.give_up_leases(left)
            except SessionsUnavailable as e:
                logger.warning("%d responses are left to who finds them without a lease: %s", len(left), e.reason)

    def _leave(self, run: ResponseRun) -> None:
        if run.is_stored and self._log.is_shared(str(run.node.id)):
            self._left.add(str(run.node.id))
            run.abandon()
        else:
            run.stop("shutdown")

    def look_at_leases(self) -> None:
        """Learns now what is not this gateway's any more, and what was cancelled elsewhere."""
        self._leases.look()

    async def close(self) -> None:
        """When nothing runs any more."""
        await self.flush()
        await self._refused.close()

    async def flush(self) -> None:
        """Returns when the log holds all events there have been, and the index nothing that has ended."""
        await self._writer.flush()
        if self._clearing is not None:
            await asyncio.wait({self._clearing})

    def start_unstored(self, plan: Plan, reservation: Reservation, events: Mailbox | Unread) -> ResponseRun:
        run = self._make_run(plan, events)
        self._launch(run, reservation)
        return run

    async def start_stored(self, plan: Plan, reservation: Reservation, limits: Limits) -> ResponseRun:
        """When it returns the response runs, and stands in the session store. Raises ApiError, and then neither is so.

        In a task of its own: between the node in the store and the run that ends it nobody may be cancelled."""
        starting = asyncio.create_task(self._start_stored(plan, reservation, limits))
        self._starting.add(starting)
        starting.add_done_callback(self._starting_ended)
        return await asyncio.shield(starting)

    def _starting_ended(self, task: asyncio.Task[ResponseRun]) -> None:
        self._starting.discard(task)
        if not task.cancelled():
            task.exception()  # the caller has it, unless it was cancelled

    async def _start_stored(self, plan: Plan, reservation: Reservation, limits: Limits) -> ResponseRun:
        response_id = str(plan.node.id)
        try:
            if plan.node.response.conversation is not None:
                await or_unavailable(self._conversations.enter(plan.node))
            await or_unavailable(self._create(plan.node, self._recipe(plan, reservation)))
            run = self._make_run(plan, await self._writer.open(response_id, lambda: self._abandon(response_id)))
        except BaseException:
            reservation.settle(0)
            raise
        self._launch(run, reservation)
        self._keep(run, limits)
        return run

    def _keep(self, run: ResponseRun, limits: Limits) -> None:
        self._leases.keep(run)
        if not run.response.background:
            self._readers.keep(run, GraceRules.of(limits))

    async def _create(self, node: ResponseNode, recipe: bytes) -> None:
        """Both at once: nobody has been told of it before both are done. Raises SessionsUnavailable: then what may be
        there of it goes again."""
        entry, stored = self._index.add(str(node.id), node.tenant), self._sessions.create(node, recipe)
        for error in await asyncio.gather(entry, stored, return_exceptions=True):
            if error is not None:
                self._refused.add(node.tenant, node.id)
                raise error

    def _recipe(self, plan: Plan, reservation: Reservation) -> bytes:
        recipe = Recipe.of(
            plan.prompt,
            plan.params,
            fingerprint=self._services.model.manifest.fingerprint,
            priority=plan.priority,
            block_size=plan.generation.block_size,
            created_at=plan.created_at,
            num_reserved_tokens=reservation.num_tokens,
            reserved_day=reservation.day,
        )
        return recipes.to_bytes(recipe)

    async def go_on(self, node: ResponseNode, recipe: Recipe, logged: LoggedAnswer, takeovers: int) -> None:
        """With a response of which this gateway has taken the lease: where its log ends, so that readers see one
        answer. It counts as let in. Raises CannotGoOn, and then nothing has changed."""
        services, response_id = self._services, str(node.id)
        if recipe.fingerprint != services.model.manifest.fingerprint:
            raise CannotGoOn(f"{response_id} was begun with the model {recipe.fingerprint}, which is not the one here")
        if self._log.is_near(response_id):
            raise CannotGoOn(f"more of {response_id} was seen here than is logged")
        midway = logged.midway(block_size=recipe.block_size, age_s=max(0.0, self._now() - recipe.created_at))
        if midway is None:
            raise CannotGoOn(f"the log of {response_id} does not say what its text stands for, or is closed")
        tenant, prompt = services.current.tenants.of_id(node.tenant), recipe.prompt
        try:
            generation = services.generation(
                prompt,
                recipe.params,
                tenant,
                priority=recipe.priority,
                answer_id=response_id,
                created_at=recipe.created_at,
                midway=midway,
                takeovers=takeovers,
            )
        except (ValueError, ShuttingDown) as e:
            raise CannotGoOn(f"{response_id}: {e}") from e
        plan = Plan(node, generation, prompt, recipe.params, recipe.priority, recipe.created_at)
        await self._index.add(response_id, node.tenant)
        sink = await self._writer.open(response_id, lambda: self._abandon(response_id), logged.events)
        reservation = services.rate_limits.adopt(tenant, recipe.num_reserved_tokens, recipe.reserved_day)
        run = self._make_run(plan, sink, logged)
        self._launch(run, reservation)
        self._keep(run, services.current.limits)
        self._leases.look()

    def _make_run(self, plan: Plan, sink: EventSink, logged: LoggedAnswer | None = None) -> ResponseRun:
        async def end(node: ResponseNode) -> ResponseError | None:
            # clients may also keep the conversation themselves and send the answer back as text
            for item in node.response.output:
                self._services.prompts.remember(plan.prompt, item.text, node.kept_ids)
            return await store_end(self._sessions, node, self._services.flush_usage)

        return ResponseRun(
            plan.node,
            plan.generation,
            sink,
            store_end=end,
            now=lambda: int(self._now()),
            to_logprob=self._to_logprob,
            # without an id to come back to nobody could ask
            explainer=self._explainer(plan) if plan.node.response.store else None,
            logged=logged,
        )

    def _explainer(self, plan: Plan) -> Explainer:
        decode = partial(self._services.tokenizer.decode, skip_special_tokens=False)
        return Explainer(self._services.history, plan.node.tenant, plan.prompt, plan.generation.block_size, decode)

    def _launch(self, run: ResponseRun, reservation: Reservation) -> None:
        response_id = str(run.node.id)
        self._runs[response_id] = run
        run.start().add_done_callback(lambda task: self._run_ended(response_id, task, reservation))

    def _abandon(self, response_id: str) -> None:
        """Another gateway has it. Nothing, if it has ended here."""
        if (run := self._runs.get(response_id)) is not None:
            run.abandon()

    def _run_ended(self, response_id: str, task: asyncio.Task[None], reservation: Reservation) -> None:
        run = self._runs.pop(response_id)
        used = run.response.usage.total_tokens if run.response.usage is not None else 0
        reservation.settle(None if run.is_abandoned else used)
        if run.is_stored:
            self._leases.release(run)
            self._readers.release(run)
            if not (run.is_abandoned and response_id in self._left):
                self._ended.add(response_id)
            if self._ended and self._clearing is None:
                self._clearing = asyncio.create_task(self._clear_index(), name="index of what runs")
        if run.is_abandoned:
            self._writer.forget(response_id)
            self._log.give_up(response_id)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("response %s failed", response_id, exc_info=error)

    async def _clear_index(self) -> None:
        """All that end meanwhile together. What Redis does not hear does no harm there."""
        try:
            while self._ended:
                ended, self._ended = self._ended, set()
                await self._index.remove(list(ended))
        except SessionsUnavailable as e:
            logger.warning("the index of what runs is not cleared: %s", e.reason)
        finally:
            self._clearing = None
