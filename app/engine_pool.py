"""Several engines as one: each request goes to the engine that `app/routing.py` chooses, and stays there."""

import asyncio
import logging
from collections.abc import Mapping, Sequence

import msgspec

from app.disconnect import cancel_and_wait
from app.engine_totals import total_stats
from app.routing import CHUNK_TOKENS, Candidate, HeldPrefixes, RoutedPrompt, choose, homes_of
from engine.client import EngineClient
from engine.errors import EngineDeadError
from engine.protocol import AddRequest, EngineInfo, EngineStats, Scope, TenantShare, TrunkPin, TrunkState
from engine.token_stream import TokenStream

NUM_PINNED = 2
"""Engines that keep a trunk, so that it is still there when one of them is not."""

logger = logging.getLogger(__name__)


class EnginePool:
    """An `EngineClient` over others. It is ready while one of them is; those that are not get nothing."""

    def __init__(self, engines: Mapping[str, EngineClient]) -> None:
        """By name, such as the address, which must be the same in every gateway. All have to serve one model."""
        if not engines:
            raise ValueError("expected at least one engine, got none")
        self._engines = dict(engines)
        self._held: dict[str, HeldPrefixes] = {}
        """Of engines that were ready when they were last looked at."""
        self._pinning: dict[str, list[asyncio.Task[TrunkState]]] = {}
        """By trunk."""

    # ---- EngineClient

    @property
    def info(self) -> EngineInfo:
        """What every engine that is ready can serve: of their limits the lowest."""
        infos = [engine.info for engine in self._ready().values()]
        if not infos:
            raise EngineDeadError("no engine is ready")
        return msgspec.structs.replace(
            infos[0],
            max_model_len=min(info.max_model_len for info in infos),
            num_blocks=min(info.num_blocks for info in infos),
        )

    @property
    def is_ready(self) -> bool:
        return bool(self._ready())

    @property
    def num_ready(self) -> int:
        return len(self._ready())

    @property
    def num_engines(self) -> int:
        return len(self._engines)

    @property
    def num_running(self) -> int:
        return sum(engine.num_running for engine in self._engines.values())

    async def wait_ready(self) -> None:
        waits = [asyncio.create_task(engine.wait_ready()) for engine in self._engines.values()]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_and_wait(*waits)

    def submit(self, request: AddRequest) -> TokenStream:
        if len(self._engines) == 1:
            (engine,) = self._engines.values()
            return engine.submit(request)
        candidates = self._candidates()
        if not candidates:
            raise EngineDeadError("no engine is ready")
        prompt = RoutedPrompt.of(request.prompt_ids, request.scopes)
        chosen = choose(prompt, candidates)
        stream = self._engines[chosen.name].submit(request)
        chosen.held.use(prompt.chunks)
        return stream

    async def pin(self, trunk_id: str, token_ids: list[int], scopes: list[Scope]) -> TrunkState:
        """On the first of the trunk's homes; returns when the first of them has answered."""
        await self._end_pinning(trunk_id)
        prompt = RoutedPrompt.of(token_ids, scopes)
        homes = homes_of(prompt.key, tuple(self._engines))[:NUM_PINNED]
        tasks = [
            asyncio.create_task(self._pin_on(home, prompt, trunk_id, token_ids, scopes), name=f"pin {trunk_id}")
            for home in homes
        ]
        self._pinning[trunk_id] = tasks
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self._end_pinning(trunk_id)
            raise
        return done.pop().result()

    async def _pin_on(
        self, name: str, prompt: RoutedPrompt, trunk_id: str, token_ids: list[int], scopes: list[Scope]
    ) -> TrunkState:
        state = await self._engines[name].pin(trunk_id, token_ids, scopes)
        if state.state is TrunkPin.PINNED and name in self._held:
            self._held[name].use(prompt.chunks)
        return state

    async def unpin(self, trunk_id: str) -> None:
        await self._end_pinning(trunk_id)
        await asyncio.gather(*(engine.unpin(trunk_id) for engine in self._engines.values()))

    async def _end_pinning(self, trunk_id: str) -> None:
        await cancel_and_wait(*self._pinning.pop(trunk_id, []))

    def set_tenants(self, shares: Sequence[TenantShare]) -> None:
        """Each engine goes by them for itself."""
        for engine in self._engines.values():
            engine.set_tenants(shares)

    async def stats(self) -> EngineStats:
        """Of all that are ready, together."""
        answers = await asyncio.gather(*(engine.stats() for engine in self._ready().values()), return_exceptions=True)
        stats = []
        for answer in answers:
            if isinstance(answer, EngineStats):
                stats.append(answer)
            elif not isinstance(answer, EngineDeadError):
                raise answer
        if not stats:
            raise EngineDeadError("no engine is ready")
        return total_stats(stats)

    async def close(self) -> None:
        for trunk_id in list(self._pinning):
            await self._end_pinning(trunk_id)
        await asyncio.gather(*(engine.close() for engine in self._engines.values()))

    # ---- inside

    def _ready(self) -> dict[str, EngineClient]:
        return {name: engine for name, engine in self._engines.items() if engine.is_ready}

    def _candidates(self) -> list[Candidate]:
        ready = self._ready()
        for name in self._held.keys() - ready.keys():
            del self._held[name]  # what it held went with it
        for name in ready.keys() - self._held.keys():
            self._held[name] = HeldPrefixes(max(1, ready[name].info.max_tokens_in_pool // CHUNK_TOKENS))
        return [Candidate(name, engine.num_running, self._held[name]) for name, engine in ready.items()]
