"""Routes of the operator: liveness, readiness, metrics, and the engine's counters."""

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.accounting import kv_bytes_not_duplicated, kv_bytes_not_read, slot_usage_ratio, trunk_uses
from app.errors import EngineUnavailable
from app.generation import UNAVAILABLE
from app.metrics import CONTENT_TYPE
from app.models import json_response
from app.services import Services
from engine.errors import EngineDeadError
from engine.protocol import EngineInfo, EngineStats

STATS_TIMEOUT_S = 2.0
"""An engine that is in a long step, or stuck, must not hold up who watches it."""


class Admin:
    def __init__(self, services: Services, *, stats_timeout_s: float = STATS_TIMEOUT_S) -> None:
        self._services = services
        self._stats_timeout_s = stats_timeout_s

    def routes(self) -> list[Route]:
        return [
            Route("/health", self.health, methods=["GET"]),
            Route("/ready", self.ready, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/admin/stats", self.stats, methods=["GET"]),
        ]

    async def health(self, request: Request) -> Response:
        """This process answers."""
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """The engine takes requests, and this process has not been told to end. Neither the session store nor the
        assistants' prefill is asked about."""
        self._services.drain.check()
        if not self._services.engine.is_ready:
            raise EngineUnavailable(UNAVAILABLE)
        return json_response({"status": "ready", "model": self._services.model_name})

    async def metrics(self, request: Request) -> Response:
        """Without an engine that answers the gateway's own numbers are still there."""
        self._authorize(request)
        await self._try_see()
        return Response(self._services.metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def stats(self, request: Request) -> Response:
        self._authorize(request)
        seen = await self._try_see()
        if seen is None:
            raise EngineUnavailable(UNAVAILABLE)
        return json_response({**stats_object(*seen), "saved": self._services.metrics.savings.rows()})

    def _authorize(self, request: Request) -> None:
        self._services.current.tenants.authorize_admin(request.headers.get("authorization"))

    async def _try_see(self) -> tuple[EngineStats, EngineInfo] | None:
        """The engine's numbers, which the metrics see too; None if none is there, or it does not answer in time."""
        engine = self._services.engine
        seen = None
        try:
            async with asyncio.timeout(self._stats_timeout_s):
                seen = await engine.stats(), engine.info
        except (EngineDeadError, TimeoutError):
            pass
        self._services.metrics.see(seen)
        return seen


def stats_object(stats: EngineStats, info: EngineInfo) -> dict[str, Any]:
    """free + referenced = total; idle means referenced = pinned."""
    blocks = stats.blocks
    return {
        "blocks": {
            "total": blocks.total,
            "free": blocks.free,
            "cached": blocks.cached,
            "referenced": blocks.referenced,
            "pinned": blocks.pinned,
        },
        "requests": {"running": stats.running, "waiting": stats.waiting},
        "prefix_cache": {"query_tokens": stats.query_tokens, "hit_tokens": stats.hit_tokens},
        "engine": {
            "prefill_tokens": stats.prompt_tokens_computed,
            "generation_tokens": stats.generation_tokens,
            "preemptions": stats.preemptions,
            "steps": stats.steps,
            "prefill_tokens_per_second": stats.prefill_tokens_per_s,
        },
        "slots": {
            "allocated": stats.slots_allocated,
            "used": stats.slots_used,
            "ratio": slot_usage_ratio(stats),
        },
        "kv_bytes_not_duplicated": kv_bytes_not_duplicated(stats, info),
        "kv_bytes_not_read": kv_bytes_not_read(stats, info),
        "host": msgspec.structs.asdict(stats.host),
        "trunks": [
            {
                "assistant": use.assistant,
                "version": use.version,
                "state": use.state,
                "tokens": use.num_tokens,
                "blocks": use.num_blocks,
                "readers": use.readers,
                "kv_bytes_not_duplicated": use.kv_bytes_not_duplicated,
            }
            for use in trunk_uses(stats, info)
        ],
        "tenants": [msgspec.structs.asdict(tenant) for tenant in stats.tenants],
    }
