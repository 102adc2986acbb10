"""An engine core in this process that a test can hold before a step, and that says what it was asked."""

import threading
from types import TracebackType
from typing import Self

from engine.core import EngineCore, Runner
from engine.inproc_client import InprocEngineClient
from engine.protocol import AddRequest
from engine.scheduled_batch import ScheduledBatch, StepResult
from engine.token_stream import TokenStream


class HeldRunner:
    """Passes steps on to another runner; from `hold` on only so many until `release`."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._changed = threading.Condition()
        self._num_left: int | None = None
        self.batches: list[ScheduledBatch] = []

    def hold(self, num_steps: int) -> None:
        with self._changed:
            self._num_left = num_steps

    def release(self) -> None:
        with self._changed:
            self._num_left = None
            self._changed.notify_all()

    def execute(self, batch: ScheduledBatch) -> StepResult:
        with self._changed:
            self._changed.wait_for(lambda: self._num_left != 0)
            if self._num_left is not None:
                self._num_left -= 1
        self.batches.append(batch)
        return self._runner.execute(batch)

    @property
    def rows(self) -> list[list[tuple[str, int]]]:
        """For each step: request id and number of new tokens of each row."""
        return [[(s.sequence.request_id, s.num_new_tokens) for s in batch.sequences] for batch in self.batches]


class WatchedClient(InprocEngineClient):
    """One life of a gateway's connection to a core; the core and its cache stay when it is closed."""

    def __init__(self, core: EngineCore) -> None:
        super().__init__(core, core.info)
        self.core = core
        self.requests: list[AddRequest] = []

    def submit(self, request: AddRequest) -> TokenStream:
        stream = super().submit(request)
        self.requests.append(request)
        return stream

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Checks that nothing of what it asked for is left, unless there is an error already."""
        await self.close()
        if error is None:
            self.core.check_integrity()
            assert not self.core.has_work, self.core.stats()
