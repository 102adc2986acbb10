"""Liveness, readiness, counters, and who may read them."""

import asyncio
from pathlib import Path

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from app.admin import Admin
from app.config import FileConfig
from app.errors import EngineUnavailable
from engine.protocol import EngineStats
from tests.app.serving import CHAT, chat_body, make_services, serving
from tests.scripted_engine import Pause, ScriptedEngineClient, say

KEYED = FileConfig.model_validate({"admin_key": "the-admin-key", "tenants": [{"id": "a", "key": "key-of-a-123"}]})


async def test_stats_idle_and_while_one_runs(tmp_path: Path) -> None:
    engine = ScriptedEngineClient(script=lambda r: [Pause(), b"x"])
    async with serving(tmp_path, engine) as gateway:
        idle = (await gateway.client.get("/admin/stats")).json()
        assert idle["requests"] == {"running": 0, "waiting": 0}
        assert idle["blocks"] == {"total": 1024, "free": 1024, "cached": 0, "referenced": 0, "pinned": 0}
        assert idle["prefix_cache"] == {"query_tokens": 0, "hit_tokens": 0}
        chat = asyncio.create_task(gateway.chat())
        await engine.wait_paused()
        busy = (await gateway.client.get("/admin/stats")).json()
        assert (busy["requests"]["running"], busy["blocks"]["referenced"]) == (1, 1)
        assert "trunkline_requests_running 1.0" in (await gateway.client.get("/metrics")).text
        engine.release()
        await chat
        assert "trunkline_requests_running 0.0" in (await gateway.client.get("/metrics")).text


async def test_stats_say_what_is_shared(tmp_path: Path) -> None:
    engine = ScriptedEngineClient(script=say("x"), num_cached_tokens=9)
    async with serving(tmp_path, engine, KEYED) as gateway:
        admin = {"Authorization": "Bearer the-admin-key"}
        answer = await gateway.post(CHAT, chat_body("hi"), Authorization="Bearer key-of-a-123")
        assert answer.status_code == 200
        shown = (await gateway.client.get("/admin/stats", headers=admin)).json()
        assert shown["saved"] == [{"tenant": "a", "assistant": None, "prompt_tokens": 9, "prefill_seconds": 0.0}]
        assert shown["host"] == {"total": 0, "used": 0, "swapped_out": 0, "swapped_in": 0}
        assert shown["slots"] == {"allocated": 0, "used": 0, "ratio": 1.0}
        assert shown["kv_bytes_not_duplicated"] == shown["kv_bytes_not_read"] == 0
        assert shown["trunks"] == []
        assert [tenant["tenant"] for tenant in shown["tenants"]] in ([], ["a"])
        assert shown["engine"]["prefill_tokens_per_second"] is None


async def test_keys(tmp_path: Path) -> None:
    async with serving(tmp_path, file_config=KEYED) as gateway:
        for path in ("/admin/stats", "/metrics"):
            for key, status in ((None, 401), ("wrong", 401), ("key-of-a-123", 403), ("the-admin-key", 200)):
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                response = await gateway.client.get(path, headers=headers)
                assert response.status_code == status, (path, key)
        for path in ("/health", "/ready"):
            assert (await gateway.client.get(path)).status_code == 200


async def test_without_an_engine(tmp_path: Path) -> None:
    async with serving(tmp_path, ScriptedEngineClient(ready=False)) as gateway:
        assert (await gateway.client.get("/health")).status_code == 200
        for path in ("/ready", "/admin/stats"):
            response = await gateway.client.get(path)
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "engine_unavailable"
        metrics = await gateway.client.get("/metrics")
        assert metrics.status_code == 200
        assert "trunkline_engine_up 0.0" in metrics.text
        assert "trunkline_requests_running" not in metrics.text
        assert (await gateway.client.get("/v1/models")).status_code == 200


async def test_an_engine_that_does_not_answer_holds_up_nobody(tmp_path: Path) -> None:
    class Silent(ScriptedEngineClient):
        async def stats(self) -> EngineStats:
            return await asyncio.get_running_loop().create_future()

    services = make_services(tmp_path, Silent())
    app = Starlette(routes=Admin(services, stats_timeout_s=0.0).routes(), exception_handlers={EngineUnavailable: _told})
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert "trunkline_engine_up 0.0" in (await client.get("/metrics")).text
        assert (await client.get("/admin/stats")).status_code == 503
    services.prompts.close()


async def _told(request: Request, error: Exception) -> Response:
    return Response(status_code=503)
