"""Trunks of assistants in the engine's cache."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.assistants import Assistants, assistant_and_version, trunk_id
from app.config import FileConfig
from app.disconnect import cancel_and_wait
from app.prefill import Prefill
from app.services import Services
from app.tenants import Tenant
from engine.client import EngineClient
from engine.inproc_client import InprocEngineClient
from engine.protocol import END, AddRequest, Scope, TrunkPin
from engine.sampling_params import SamplingParams
from engine.text.chat_template import Message
from tests.app.serving import make_services
from tests.engine.fake_runner import Bench, continuation
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


@contextlib.asynccontextmanager
async def prefilling(path: Path, engine: EngineClient) -> AsyncIterator[tuple[Prefill, Services]]:
    services = make_services(path, engine, CONFIG)
    prefill = Prefill(engine, services.prompts)
    prefill.keep(services.current.assistants)
    task = asyncio.create_task(prefill.run())
    try:
        yield prefill, services
    finally:
        await cancel_and_wait(task)
        await engine.close()
        services.prompts.close()


def edited(services: Services, **instructions: str) -> Assistants:
    """The assistants of these ids, with other texts."""
    assistants = [
        a.model_copy(update={"instructions": instructions[a.id]}) for a in CONFIG.assistants if a.id in instructions
    ]
    services.live.current = services.live.build(CONFIG.model_copy(update={"assistants": tuple(assistants)}))
    return services.current.assistants


def texts(engine: ScriptedEngineClient) -> list[str]:
    """Of the trunks that are pinned, in the order in which they came."""
    return [bytes(t for t in trunk.token_ids if t < 256).decode() for trunk in engine.trunks]


def trunk(instructions: str) -> str:
    return f"system\n{instructions}\nuser\n"


async def test_each_trunk_once_in_its_scope(tmp_path: Path) -> None:
    engine = ScriptedEngineClient()
    async with prefilling(tmp_path, engine) as (prefill, services):
        await prefill.wait_settled()
        prefill.keep(services.current.assistants)
        await prefill.wait_settled()
        assert texts(engine) == [trunk("Be kind."), trunk("Be there.")]
        assert [len(trunk.scopes) for trunk in engine.trunks] == [1, 1]
        assert engine.trunks[0].scopes != engine.trunks[1].scopes
        expected = [(assistant.id, assistant.version) for assistant in services.current.assistants]
        assert [assistant_and_version(trunk.trunk_id) for trunk in engine.trunks] == expected
        assert engine.requests == []


async def test_again_in_each_life_of_the_engine(tmp_path: Path) -> None:
    engine = ScriptedEngineClient(ready=False)
    async with prefilling(tmp_path, engine):
        for _ in range(2):
            engine.revive()
            await engine.wait_pinned(2)
            engine.die()
            assert engine.trunks == []


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
        async with prefilling(tmp_path, engine) as (prefill, _):
            await prefill.wait_settled()
    assert message in caplog.text


async def test_a_trunk_that_failed_is_asked_for_again_with_the_next_configuration(tmp_path: Path) -> None:
    engine = ScriptedEngineClient()
    engine.core.trunk_pin = TrunkPin.FAILED
    async with prefilling(tmp_path, engine) as (prefill, services):
        await prefill.wait_settled()
        engine.core.trunk_pin = TrunkPin.PINNED
        prefill.keep(edited(services, support="Be kind.", all="Be here."))
        await prefill.wait_settled()
        assert texts(engine) == [trunk("Be kind."), trunk("Be here.")]


async def test_it_ends_with_the_client(tmp_path: Path) -> None:
    engine = ScriptedEngineClient(ready=False)
    services = make_services(tmp_path, engine, CONFIG)
    prefill = Prefill(engine, services.prompts)
    prefill.keep(services.current.assistants)
    task = asyncio.create_task(prefill.run())
    await asyncio.sleep(0)
    await engine.close()
    await task
    services.prompts.close()


async def test_a_new_version_is_pinned_before_the_old_one_is_given_back(tmp_path: Path) -> None:
    engine = ScriptedEngineClient()
    seen: list[list[str]] = []

    class Seen(ScriptedEngineClient):
        async def unpin(self, trunk_id: str) -> None:
            seen.append(texts(self))
            await super().unpin(trunk_id)

    engine = Seen()
    async with prefilling(tmp_path, engine) as (prefill, services):
        await prefill.wait_settled()
        prefill.keep(edited(services, support="Be brief.", all="Be there."))
        await prefill.wait_settled()
        assert seen == [[trunk("Be kind."), trunk("Be there."), trunk("Be brief.")]]
        assert texts(engine) == [trunk("Be there."), trunk("Be brief.")]
        prefill.keep(edited(services, all="Be there."))
        await prefill.wait_settled()
        assert texts(engine) == [trunk("Be there.")]


async def test_of_edits_without_an_engine_only_the_last_is_pinned(tmp_path: Path) -> None:
    engine = ScriptedEngineClient(ready=False)
    async with prefilling(tmp_path, engine) as (prefill, services):
        await asyncio.sleep(0)
        for number in range(20):
            prefill.keep(edited(services, support=f"Number {number}."))
            await asyncio.sleep(0)
        engine.revive()
        await prefill.wait_settled()
        assert texts(engine) == [trunk("Number 19.")]


async def test_fifty_edits_under_twenty_chats_leave_one_version_within_the_budget(tmp_path: Path) -> None:
    """No chat ever reads KV of another version: each answer is what the model says to the prompt without any cache."""
    bench = Bench(160, max_num_seqs=32, pin_budget=0.05)  # for one of these trunks, not for two
    engine = InprocEngineClient(bench.core, bench.info)
    await engine.start()
    async with prefilling(tmp_path, engine) as (prefill, services):
        await prefill.wait_settled()
        num_answers, is_over = [0] * 20, False
        tasks_before = len(asyncio.all_tasks())

        async def chat(number: int) -> None:
            while not is_over:
                (assistant,) = services.current.assistants
                said = [Message("user", f"chat {number}")]
                prompt = await services.prompts.build(Tenant("a"), said, assistant=assistant)
                request = AddRequest(
                    request_id=f"{number}-{num_answers[number]}",
                    prompt_ids=prompt.token_ids,
                    params=SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True),
                    scopes=prompt.scopes,
                )
                with engine.submit(request) as stream:
                    answer = [t async for output in stream for t in output.token_ids]
                assert answer == continuation(prompt.token_ids, 6)
                num_answers[number] += 1

        texts = [f"Version {number:02}. Be as kind as can be." for number in range(50)]
        prefill.keep(edited(services, support=texts[0]))
        await prefill.wait_settled()
        chats = [asyncio.create_task(chat(number)) for number in range(20)]
        for number, text in enumerate(texts):
            prefill.keep(edited(services, support=text))
            if number % 3:  # some are edited again before they are pinned
                await prefill.wait_settled()
            pinned = (await engine.stats()).blocks.pinned
            assert pinned <= 8
        await prefill.wait_settled()
        is_over = True
        await asyncio.gather(*chats)
        assert min(num_answers) > 0

        (assistant,) = services.current.assistants
        state = await engine.pin(trunk_id(assistant), list(assistant.trunk_ids), [Scope(END, assistant.scope_key)])
        assert (state.state, state.num_tokens) == (TrunkPin.PINNED, len(assistant.trunk_ids))
        blocks = (await engine.stats()).blocks
        assert (blocks.pinned, blocks.referenced) == (state.num_blocks, state.num_blocks)
        assert len(engine._pins) == 1
        assert len(asyncio.all_tasks()) == tasks_before
