"""Trunks of assistants in the engine's cache."""

import asyncio
from pathlib import Path

import pytest

from app import prefill
from app.config import FileConfig
from app.prefill import Prefill
from tests.app.serving import make_services
from tests.scripted_engine import Fail, ScriptedEngineClient

CONFIG = FileConfig.model_validate(
    {
        "tenants": [{"id": "a", "key": "key-of-a-123"}],
        "assistants": [
            {"id": "support", "tenant": "a", "instructions": "Be kind."},
            {"id": "all", "shared": True, "instructions": "Be there."},
        ],
    }
)


async def start(path: Path, engine: ScriptedEngineClient) -> asyncio.Task[None]:
    services = make_services(path, engine, CONFIG)
    return asyncio.create_task(Prefill(engine, services.tokenizer, services.prompts, services.assistants).run())


async def stop(task: asyncio.Task[None], engine: ScriptedEngineClient) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await engine.close()


async def test_each_trunk_once_in_its_scope(tmp_path: Path) -> None:
    engine = ScriptedEngineClient()
    task = await start(tmp_path, engine)
    await engine.wait_submitted(2)
    await engine.wait_idle()
    await stop(task, engine)
    prompts = [bytes(t for t in r.prompt_ids if t < 256) for r in engine.requests]
    assert prompts == [b"system\nBe kind.\nuser\n", b"system\nBe there.\nuser\n"]
    assert [(r.tenant, r.params.max_tokens, len(r.scopes)) for r in engine.requests] == [("a", 1, 1), ("", 1, 1)]
    assert engine.requests[0].scopes != engine.requests[1].scopes


async def test_again_in_each_life_of_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "ENGINE_CHECK_S", 0)
    engine = ScriptedEngineClient(ready=False)
    task = await start(tmp_path, engine)
    for life in (1, 2):
        engine.revive()
        await engine.wait_submitted(2 * life)
        await engine.wait_idle()
        engine.die()
        for _ in range(10):
            await asyncio.sleep(0)  # it is noticed
    await stop(task, engine)


async def test_a_failure_is_not_the_end(tmp_path: Path) -> None:
    engine = ScriptedEngineClient(script=lambda r: [Fail()])
    task = await start(tmp_path, engine)
    await engine.wait_submitted(2)
    await engine.wait_idle()
    assert not task.done()
    await stop(task, engine)
