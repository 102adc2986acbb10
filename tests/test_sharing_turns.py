"""A conversation of 200 turns, with restarts of gateway and engine in between, computes its new messages only.

The rule: a turn computes the tokens that its prompt has more than the last turn's prompt and answer, which are the new
message and the markup around it, and one token more: the last one of the answer before, which was drawn, never read.
The first turn after a restart of the engine computes everything behind the assistant's trunk; the first one after a
restart of the gateway is like any other.

The engine is a fake one which answers in letters, one token each. The tokenizer would make fewer tokens of most
answers, so that an answer is found again only if its very ids are kept.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import httpx
import pytest

from app.config import AssistantConfig, FileConfig
from app.disconnect import cancel_and_wait
from app.prefill import Prefill
from engine.core import EngineCore
from engine.models.prepare import prepare
from engine.prepared import PreparedModel
from engine.protocol import AddRequest, EngineInfo
from engine.text.tokenizer import Tokenizer
from tests.app.session_store import SessionServer, session_server
from tests.app.stateful_gateway import create, output_text, running_gateway
from tests.held_engine import WatchedClient
from tests.letter_engine import letter_core, letters_after
from tests.scripted_engine import say
from tests.tiny_model import SPECIAL_TOKENS, make_tiny

NUM_TURNS = 200
NUM_ANSWER_TOKENS = 5
IM_START, IM_END = [[SPECIAL_TOKENS.index(name)] for name in ("<|im_start|>", "<|im_end|>")]
MAX_MODEL_LEN = 16_384
CONFIG = FileConfig(
    assistants=(AssistantConfig(id="guide", shared=True, instructions="You show people round a town. Be brief."),)
)


@dataclass(frozen=True)
class Life:
    """Of a gateway, over a core that may outlive it."""

    engine: WatchedClient
    http: httpx.AsyncClient
    num_trunk_tokens: int


@dataclass(frozen=True)
class World:
    model: PreparedModel
    tokenizer: Tokenizer
    state_dir: Path
    store: SessionServer

    @property
    def letters(self) -> list[int]:
        return [self.tokenizer.encode(letter)[0] for letter in ascii_lowercase]

    def core(self) -> EngineCore:
        manifest = self.model.manifest
        info = EngineInfo(
            model_name=manifest.name,
            fingerprint=manifest.fingerprint,
            vocab_size=manifest.config.vocab_size,
            max_model_len=MAX_MODEL_LEN,
            block_size=16,
            num_blocks=1024,
        )
        return letter_core(info, self.letters)

    @contextlib.asynccontextmanager
    async def gateway(self, core: EngineCore) -> AsyncIterator[Life]:
        """A new one, which has its assistant prefilled first."""
        async with (
            WatchedClient(core) as engine,
            running_gateway(
                self.store, say(""), engine=engine, model=self.model, state_dir=self.state_dir, file_config=CONFIG
            ) as gateway,
            gateway.http(key=None) as http,
        ):
            [assistant] = gateway.services.current.assistants
            prefill = Prefill(engine, gateway.services.prompts)
            prefill.keep(gateway.services.current.assistants)
            task = asyncio.create_task(prefill.run())
            await prefill.wait_settled()
            await cancel_and_wait(task)
            yield Life(engine, http, len(assistant.trunk_ids))

    def answer(self, request: AddRequest) -> str:
        """Without any cache."""
        letters = letters_after(request.prompt_ids, NUM_ANSWER_TOKENS, self.letters, request.params.seed)
        return self.tokenizer.decode(letters)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    source = make_tiny(tmp_path / "byte-model", max_position_embeddings=MAX_MODEL_LEN)
    model = prepare(str(source), tmp_path / "models", "float32", lambda *_: None)
    async with session_server() as store:
        yield World(model, Tokenizer.load(model), tmp_path / "state", store)


@dataclass
class Talk:
    """Says one thing after another, and knows what each turn ought to compute."""

    world: World
    answers: list[dict[str, Any]] = field(default_factory=list)

    @property
    def message(self) -> str:
        turn = len(self.answers)
        return f"Tell me about house number {turn}" + " please" * (turn % 7)

    @property
    def num_new_tokens(self) -> int:
        """Of the next message and the markup that comes with it."""
        user = [IM_START, f"user\n{self.message}", IM_END, "\n"]
        return len(self.world.tokenizer.encode_runs([IM_END, "\n", *user, IM_START, "assistant\n"]))

    async def say(self, life: Life) -> tuple[int, int]:
        """Tokens of the next turn's prompt, and how many of them it computes."""
        before = (await life.engine.stats()).prompt_tokens_computed
        if self.answers:
            where = {"previous_response_id": self.answers[-1]["id"]}
            num_tokens = self.answers[-1]["usage"]["total_tokens"] + self.num_new_tokens
        else:
            where, num_tokens = {"prompt": {"id": "guide"}}, None
        answer = await create(life.http, self.message, max_output_tokens=NUM_ANSWER_TOKENS, **where)
        self.answers.append(answer)
        assert output_text(answer) == self.world.answer(life.engine.requests[-1])
        usage = answer["usage"]
        num_tokens = num_tokens or usage["input_tokens"]
        num_computed = (await life.engine.stats()).prompt_tokens_computed - before
        assert (usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]) == (
            num_tokens,
            num_tokens - num_computed,
        )
        return num_tokens, num_computed

    async def say_many(self, life: Life, num_turns: int) -> None:
        for _ in range(num_turns):
            expected = self.num_new_tokens + 1
            _, num_computed = await self.say(life)
            assert num_computed == expected, f"turn {len(self.answers)}"


async def test_a_conversation_of_200_turns_across_restarts_computes_its_new_messages_only(world: World) -> None:
    core, talk = world.core(), Talk(world)
    async with world.gateway(core) as life:
        num_tokens, num_computed = await talk.say(life)
        assert num_computed == num_tokens - life.num_trunk_tokens
        await talk.say_many(life, 70)
    async with world.gateway(core) as life:  # the engine stays
        await talk.say_many(life, 60)
    async with world.gateway(world.core()) as life:
        num_tokens, num_computed = await talk.say(life)
        assert num_computed == num_tokens - life.num_trunk_tokens > 3000
        await talk.say_many(life, NUM_TURNS - len(talk.answers))
    assert len(talk.answers) == NUM_TURNS
    texts = [output_text(answer) for answer in talk.answers]
    assert any(len(world.tokenizer.encode(text)) < NUM_ANSWER_TOKENS for text in texts), "kept ids would not be missed"
