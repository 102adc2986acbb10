"""Trunks of assistants in the engine's cache."""

import asyncio
import logging
from pathlib import Path

import pytest

from app.config import FileConfig
from app.prefill import Prefill
from engine.protocol import TrunkPin
from tests.app.serving import make_services
from tests.scripted_engine import ScriptedEngineClient

CONFIG = FileConfig.model_validate(
    {
        "tenants": [{"id": "a", "key": "key-of-a-123"}],
        "assistants": [
            {"id": "support", "tenant": "a", "instructions": "Be kind."},
            {"id": "all", "shared": True, "instructions": "Be there."},
        ],
    }
)


def make_prefill(path: Path, engine: ScriptedEngineClient) -> Prefill:
    services = make_services(path, engine, CONFIG)
    return Prefill(engine, services.prompts, services.current.assistants)


async def test_each_trunk_once_in_its_scope(tmp_path: Path) -> None:
    engine = ScriptedEngineClient()
    await make_prefill(tmp_path, engine).run()
    await make_prefill(tmp_path, engine).run()
    texts = [bytes(t for t in trunk.token_ids if t < 256) for trunk in engine.trunks]
    assert texts == [b"system\nBe kind.\nuser\n", b"system\nBe there.\nuser\n"]
    assert [len(trunk.scopes) for trunk in engine.trunks] == [1, 1]
    assert engine.trunks[0].scopes != engine.trunks[1].scopes
    assert [trunk.trunk_id.partition("@")[0] for trunk in engine.trunks] == ["support", "all"]
    assert engine.requests == []
    await engine.close()


async def test_again_in_each_life_of_the_engine(tmp_path: Path) -> None:
    engine = ScriptedEngineClient(ready=False)
    task = asyncio.create_task(make_prefill(tmp_path, engine).run())
    for _ in range(2):
        engine.revive()
        await engine.wait_pinned(2)
        engine.die()
        assert engine.trunks == []
    await task
    await engine.close()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (TrunkPin.OVER_BUDGET, "the prompt of assistant 'all' is over the budget of pinned blocks"),
        (TrunkPin.FAILED, "the prompt of assistant 'all' was not prefilled"),
    ],
)
async def test_what_is_not_pinned_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, state: TrunkPin, message: str
) -> None:
    engine = ScriptedEngineClient()
    engine.core.trunk_pin = state
    with caplog.at_level(logging.WARNING):
        await make_prefill(tmp_path, engine).run()
    assert message in caplog.text
    await engine.close()


async def test_it_ends_with_the_client(tmp_path: Path) -> None:
    engine = ScriptedEngineClient(ready=False)
    task = asyncio.create_task(make_prefill(tmp_path, engine).run())
    await asyncio.sleep(0)
    await engine.close()
    await task
