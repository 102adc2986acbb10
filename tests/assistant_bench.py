"""Prompts as the gateway makes them for its tenants' chats, put to an engine core over a fake runner. No HTTP."""

from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from app.assistants import Assistant, Assistants
from app.config import AssistantConfig
from app.prompts import BuiltPrompt, PromptBuilder
from app.scopes import NOT_NARROWED, Narrowing, Scopes
from app.tenants import Tenant
from engine.prepared import PreparedModel
from engine.protocol import EngineStats, RequestOutput, Scope
from engine.text.chat_template import ChatTemplate, Message
from engine.text.tokenizer import Tokenizer
from tests.engine.fake_runner import Bench, continuation
from tests.engine.sequences import make_sequence

T = TypeVar("T")

NUM_HEAD_TOKENS = len("XsystemX")
"""Before an assistant's instructions, with the byte model."""
NUM_MARKUP_TOKENS = NUM_HEAD_TOKENS + len("XXXuserX")
"""Of a trunk, beside the instructions themselves."""


@dataclass(frozen=True)
class Work:
    """All that an engine's counters say about what it had to do."""

    query_tokens: int
    hit_tokens: int
    prompt_tokens_computed: int
    generation_tokens: int
    preemptions: int
    steps: int

    @classmethod
    def between(cls, before: EngineStats, after: EngineStats) -> "Work":
        return cls(**{name: getattr(after, name) - getattr(before, name) for name in cls.__annotations__})


@dataclass(frozen=True)
class Asked:
    prompt: BuiltPrompt
    output: RequestOutput
    work: Work

    @property
    def cached(self) -> tuple[int | None, int | None, int | None]:
        """What the caller is told: all, of the trunk, from the host tier."""
        output = self.output
        return output.num_cached_tokens, output.num_cached_trunk_tokens, output.num_cached_host_tokens


class Prompts:
    """What the gateway makes of a model and the assistants of a configuration."""

    def __init__(self, model: PreparedModel, configs: Iterable[AssistantConfig]) -> None:
        tokenizer = Tokenizer.load(model)
        template = ChatTemplate(model.chat_template or "", tokenizer)
        scopes = Scopes(b"s" * 32)
        self.assistants = Assistants.build(configs, template, scopes)
        self.builder = PromptBuilder(tokenizer, template, scopes)

    def find(self, tenant: Tenant, assistant_id: str) -> Assistant:
        assistant = self.assistants.find(tenant, assistant_id)
        assert assistant is not None, (tenant, assistant_id)
        return assistant

    def trunk(self, tenant: Tenant, assistant_id: str) -> BuiltPrompt:
        return self.builder.trunk_prompt(self.find(tenant, assistant_id))

    def chat(
        self, tenant: Tenant, text: str, assistant_id: str | None = None, narrowing: Narrowing = NOT_NARROWED
    ) -> BuiltPrompt:
        assistant = None if assistant_id is None else self.find(tenant, assistant_id)
        return self.build(tenant, [Message("user", text)], assistant, narrowing)

    def build(
        self,
        tenant: Tenant,
        messages: list[Message],
        assistant: Assistant | None = None,
        narrowing: Narrowing = NOT_NARROWED,
    ) -> BuiltPrompt:
        return at_once(self.builder.build(tenant, messages, assistant=assistant, narrowing=narrowing))


class AssistantBench(Bench):
    """Counts what each prompt costs."""

    def ask_for(self, tenant: Tenant, prompt: BuiltPrompt, max_tokens: int = 1) -> Asked:
        """Alone, to its end; the answer has to be the one that no cache would change."""
        before = self.core.stats()
        output = self.ask(prompt.token_ids, max_tokens, tenant=tenant.id, scopes=prompt.scopes)
        assert output.token_ids == continuation(prompt.token_ids, max_tokens)
        return Asked(prompt, output, Work.between(before, self.core.stats()))

    def find(self, token_ids: list[int], scopes: Iterable[Scope]) -> int:
        """Tokens that a request of these would find now."""
        sequence = make_sequence("look", token_ids, scopes=tuple(scopes))
        return self.core.scheduler.kv.find_longest_prefix(sequence).num_tokens


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """The result of what needs no event loop: short texts are rendered where they are."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError(f"{work} waits for something")
