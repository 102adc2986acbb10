"""One response from its first event to its last: a generation is turned into events, and its end is stored.

It runs in a task of its own, which no client's connection holds. Only `stop` ends it early; and `abandon`, which leaves
its end to another gateway. While it is paused no engine works for it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal

import msgspec

from app.cache_report import CacheReport, Explainer
from app.errors import ApiError
from app.event_writer import EventSink
from app.events import (
    Completed,
    ContentPartAdded,
    Created,
    Event,
    Failed,
    Incomplete,
    IncompleteDetails,
    InProgress,
    Item,
    ItemStatus,
    Logprob,
    OutputItemAdded,
    OutputText,
    ResponseError,
    ResponseObject,
    Status,
    TextDelta,
    Usage,
    ends_of_item,
)
from app.generation import ChoiceDelta, Generation
from app.ids import new_message_id
from app.logged_answer import LoggedAnswer
from app.response_node import ResponseNode
from engine.protocol import TokenLogprobs

SHUT_DOWN = ResponseError(message="The server was shut down while it answered.")
INTERNAL = ResponseError(message="The server failed while it answered.")

StoreEnd = Callable[[ResponseNode], Awaitable[ResponseError | None]]
"""Stores the end of a response; gives an error where it could not be stored. Raises TakenOver."""


class TakenOver(Exception):
    """Another gateway has the response now."""


class ResponseRun:
    """`node` is what was stored at the start. The run owns the generation; `sink` gets every event, in order.

    `logged`: of a response that another gateway has begun, with a generation that goes on from there. None of it is
    said again."""

    def __init__(
        self,
        node: ResponseNode,
        generation: Generation,
        sink: EventSink,
        *,
        store_end: StoreEnd,
        now: Callable[[], int],
        to_logprob: Callable[[TokenLogprobs], Logprob],
        explainer: Explainer | None = None,
        logged: LoggedAnswer | None = None,
    ) -> None:
        logged = logged or LoggedAnswer()
        self._node = node
        self._generation = generation
        self._sink = sink
        self._store_end = store_end
        self._now = now
        self._to_logprob = to_logprob
        self._explainer = explainer
        self._said_types = logged.types
        self._item_id = logged.item_id or new_message_id()
        self._texts: list[str] = [logged.text]
        self._logprobs: list[Logprob] = list(logged.logprobs)
        self._logprobs_without_text: list[Logprob] = []
        self._has_item = logged.item_id is not None
        self._has_choice = False
        self._is_generating = False
        self._stopped_by: Literal["cancel", "shutdown", "not_resumed", "takeover"] | None = None
        self._is_abandoned = False
        self._finish_reason = logged.so_far.finish_reason if logged.so_far is not None else None
        self._error: ApiError | None = None
        self._on_tokens: Callable[[], None] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def node(self) -> ResponseNode:
        """As it was at the start, and with its answer after the end."""
        return self._node

    @property
    def tenant(self) -> str:
        return self._node.tenant

    @property
    def is_stored(self) -> bool:
        return self._node.response.store

    @property
    def is_stopped(self) -> bool:
        """Whether it was told to end early; it may still be about to."""
        return self._stopped_by is not None

    @property
    def is_abandoned(self) -> bool:
        """Whether another gateway has it: it ended here without an end, or is about to."""
        return self._is_abandoned

    @property
    def error(self) -> ApiError | None:
        """What made it fail."""
        return self._error

    @property
    def response(self) -> ResponseObject:
        """As it is now: with the text so far while it runs."""
        response = self._node.response
        if not response.is_running or not self._has_item:
            return response
        return msgspec.structs.replace(response, output=[self._item("in_progress")])

    def start(self) -> asyncio.Task[None]:
        """Puts the first events and starts the work. Once only."""
        if self._task is not None:
            raise RuntimeError(f"{self._node.id} has been started")
        response = self._node.response
        for opening in (Created(response=response), InProgress(response=response)):
            if opening.__struct_config__.tag not in self._said_types:
                self._put(opening)
        self._task = asyncio.create_task(self._run(), name=f"response {self._node.id}")
        return self._task

    @property
    def num_output_tokens(self) -> int:
        return self._generation.num_output_tokens

    def watch_tokens(self, on_tokens: Callable[[], None] | None) -> None:
        """Has it called whenever tokens have come; None: no more."""
        self._on_tokens = on_tokens

    def pause(self) -> bool:
        """Nothing more comes of it until `go_on`. False, and nothing changes, before the work and from its end on."""
        if self._is_generating and not self.is_stopped:
            self._generation.pause()
        return self._is_generating and not self.is_stopped

    def go_on(self) -> None:
        if self._is_generating and not self.is_stopped:
            self._generation.go_on()

    def stop(self, by: Literal["cancel", "shutdown", "not_resumed"] = "cancel") -> None:
        """Ends the work within one step of the engine; the text so far is kept. After the end it does nothing."""
        if self._stopped_by is None and self._task is not None and self._finish_reason is None:
            self._stopped_by = by
            if self._is_generating:
                self._task.cancel()

    def abandon(self) -> None:
        """Ends the work here, and says nothing more: another gateway has the response. While the end is being stored,
        that decides."""
        if self._stopped_by is None and self._task is not None and self._finish_reason is None:
            self._is_abandoned = True
            self._generation.disown()
            self._stopped_by = "takeover"
            if self._is_generating:
                self._task.cancel()

    async def wait(self) -> ResponseObject:
        """The response as it ended. Cancelling the caller leaves the run alone."""
        assert self._task is not None, "not started"
        await asyncio.shield(self._task)
        return self._node.response

    async def _run(self) -> None:
        has_ended = False
        try:
            if not self.is_stopped:
                await self._generate()
            await self._end()
            has_ended = True
        finally:
            if not has_ended:
                # a fault of ours: readers must not hang, and without a lease the node is soon found failed
                self._put(Failed(response=self._ended("failed", error=INTERNAL)))

    async def _generate(self) -> None:
        self._is_generating = True
        try:
            with self._generation as generation:
                self._has_choice = True
                if self._explainer is not None:
                    self._explainer.compare()
                await generation.run(self._take)
        except ApiError as e:
            self._error = e
        except asyncio.CancelledError:
            if not self.is_stopped:
                raise
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
        finally:
            self._is_generating = False

    def _take(self, delta: ChoiceDelta) -> None:
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason
        if delta.logprobs:
            self._logprobs_without_text += map(self._to_logprob, delta.logprobs)
        if delta.text:
            self._ensure_item()
            self._texts.append(delta.text)
            event = TextDelta(item_id=self._item_id, delta=delta.text)
            if self._logprobs_without_text:
                event.logprobs, self._logprobs_without_text = self._logprobs_without_text, []
                self._logprobs += event.logprobs
            self._sink.put(event, self._generation.take_progress() if self.is_stored else None)
        if self._on_tokens is not None:
            self._on_tokens()

    async def _end(self) -> None:
        if self._stopped_by == "takeover":
            return
        if self._error is not None:
            message = ResponseError(message=self._error.message)
            await self._end_as("failed", Failed, error=message)
        elif self._stopped_by == "shutdown":
            await self._end_as("failed", Failed, error=SHUT_DOWN)
        elif self._stopped_by == "cancel":
            await self._end_as("cancelled", Incomplete)
        elif self._stopped_by == "not_resumed":
            details = IncompleteDetails(reason="not_resumed")
            await self._end_as("incomplete", Incomplete, incomplete_details=details)
        elif self._finish_reason == "length":
            self._ensure_item()
            details = IncompleteDetails(reason="max_output_tokens")
            await self._end_as("incomplete", Incomplete, incomplete_details=details)
        else:
            self._ensure_item()
            await self._end_as("completed", Completed)

    async def _end_as(
        self,
        status: Status,
        event: type[Completed] | type[Incomplete] | type[Failed],
        *,
        error: ResponseError | None = None,
        incomplete_details: IncompleteDetails | None = None,
    ) -> None:
        """The last events, all together: the end is stored before anybody is told of any of it, so that until then
        another gateway could go on with the text."""
        response = self._ended(status, error=error, incomplete_details=incomplete_details)
        kept_ids = tuple(self._generation.kept_ids()) if self._has_item else ()
        node = self._node.ended(response, kept_ids, self._cache_report())
        try:
            lost = await self._store_end(node)
        except TakenOver:
            self._is_abandoned = True
            return
        if lost is not None:
            response = self._ended("failed", error=lost)
            node, event = node.ended(response, kept_ids, node.cache), Failed
        self._node = node
        for item in response.output:
            for closing in ends_of_item(item):
                self._put(closing)
        self._put(event(response=response))

    def _cache_report(self) -> CacheReport | None:
        if self._explainer is None or not self._generation.is_computed:
            return None
        return self._explainer.report(self._generation.cached)

    def _ended(
        self,
        status: Status,
        *,
        error: ResponseError | None = None,
        incomplete_details: IncompleteDetails | None = None,
    ) -> ResponseObject:
        generation = self._generation
        usage = (
            Usage.of(generation.num_prompt_tokens, generation.cached, generation.num_output_tokens)
            if self._has_choice
            else None
        )
        return msgspec.structs.replace(
            self._node.response,
            status=status,
            output=[self._item("completed" if status == "completed" else "incomplete")] if self._has_item else [],
            usage=usage,
            error=error,
            incomplete_details=incomplete_details,
            completed_at=self._now() if status == "completed" else None,
        )

    def _ensure_item(self) -> None:
        """The events that open the answer, before its first text."""
        if self._has_item:
            return
        self._has_item = True
        opened = Item(id=self._item_id, role="assistant", content=[], status="in_progress")
        self._put(OutputItemAdded(item=opened))
        self._put(ContentPartAdded(item_id=self._item_id, part=OutputText(text="")))

    def _item(self, status: ItemStatus) -> Item:
        part = OutputText(text="".join(self._texts), logprobs=list(self._logprobs))
        return Item(id=self._item_id, role="assistant", content=[part], status=status)

    def _put(self, event: Event) -> None:
        self._sink.put(event)
