"""A client's side of pinned trunks: what it wants pinned, through all lives of its engine. asyncio, no torch."""

import asyncio
from collections.abc import Callable

from engine.errors import EngineDeadError
from engine.protocol import PinTrunk, Scope, TrunkPin, TrunkState, UnpinTrunk

Send = Callable[[PinTrunk | UnpinTrunk], None]
"""Gives a message to the engine, or drops it if there is none: `resend` is called when there is one again."""


class TrunkPins:
    def __init__(self, send: Send) -> None:
        self._send = send
        self._wanted: dict[str, PinTrunk] = {}
        self._asked: set[str] = set()
        """Sent to this life of the engine, and not answered yet."""
        self._answers: dict[str, list[asyncio.Future[TrunkState]]] = {}
        self._closed: EngineDeadError | None = None

    def __len__(self) -> int:
        return len(self._wanted)

    async def pin(self, trunk_id: str, token_ids: list[int], scopes: list[Scope]) -> TrunkState:
        """Waits until an engine has answered. Raises EngineDeadError if the client is closed meanwhile."""
        if self._closed is not None:
            raise self._closed
        message = PinTrunk(trunk_id, token_ids, scopes)
        answer: asyncio.Future[TrunkState] = asyncio.get_running_loop().create_future()
        answers = self._answers.setdefault(trunk_id, [])
        answers.append(answer)
        try:
            self._wanted[trunk_id] = message
            self._ask(message)
            return await answer
        finally:
            answers.remove(answer)
            if not answers:
                self._answers.pop(trunk_id, None)

    def unpin(self, trunk_id: str) -> None:
        """Whoever still waits for its answer hears that it failed. No error if it is not wanted."""
        if self._wanted.pop(trunk_id, None) is not None:
            self._asked.discard(trunk_id)
            self._send(UnpinTrunk(trunk_id))
            self._answer(TrunkState(trunk_id, TrunkPin.FAILED, 0, 0))

    def resend(self) -> None:
        """There is a new engine, or a new connection to it."""
        self._asked.clear()
        for message in list(self._wanted.values()):
            self._ask(message)

    def take(self, state: TrunkState) -> None:
        """One that fails when it is asked for is given up; one that is lost later is asked for again."""
        message = self._wanted.get(state.trunk_id)
        if message is None:
            return
        was_asked = state.trunk_id in self._asked
        self._asked.discard(state.trunk_id)
        if state.state is TrunkPin.FAILED:
            if not was_asked:
                self._ask(message)
                return
            del self._wanted[state.trunk_id]
        self._answer(state)

    def close(self, reason: str) -> None:
        """No engine will ever answer; one that is there still is told that nothing is wanted any more."""
        for trunk_id in self._wanted:
            self._send(UnpinTrunk(trunk_id))
        self._wanted.clear()
        self._closed = EngineDeadError(f"the engine is gone: {reason}")
        for answers in self._answers.values():
            for answer in answers:
                if not answer.done():
                    answer.set_exception(self._closed)

    def _ask(self, message: PinTrunk) -> None:
        self._asked.add(message.trunk_id)
        self._send(message)

    def _answer(self, state: TrunkState) -> None:
        for answer in self._answers.get(state.trunk_id, []):
            if not answer.done():
                answer.set_result(state)
