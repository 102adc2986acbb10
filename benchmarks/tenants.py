"""Tenants and assistants of the sharing benchmarks: the configuration they are served with, and their prompts."""

import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from app.assistants import Assistants
from app.config import AssistantConfig
from app.prompts import BuiltPrompt, PromptBuilder
from app.scopes import SECRET_BYTES, Scopes
from app.tenants import Tenant
from benchmarks.load import system_prompt
from engine.prepared import PreparedModel
from engine.text.chat_template import ChatTemplate, Message
from engine.text.tokenizer import Tokenizer

TENANTS = ("a", "b")
KEYS = ("benchmark-key-of-a", "benchmark-key-of-b")
ADMIN_KEY = "benchmark-admin-key"
"""No secrets: the server that takes them listens on loopback, and only while a benchmark runs."""
INSTRUCTIONS_SEED = 7


@dataclass(frozen=True)
class SharedAssistant:
    """Offered to all tenants, with instructions of about `num_tokens` tokens."""

    num_tokens: int

    @property
    def id(self) -> str:
        return f"about-{self.num_tokens}"

    @property
    def instructions(self) -> str:
        return str(system_prompt(self.num_tokens, 0, INSTRUCTIONS_SEED))


def write_configuration(path: Path, assistants: Iterable[SharedAssistant]) -> None:
    """A file for `trunkline serve --config`. JSON's strings are TOML's too."""
    lines = [f"admin_key = {json.dumps(ADMIN_KEY)}"]
    for tenant, key in zip(TENANTS, KEYS, strict=True):
        lines += ["", "[[tenants]]", f"id = {json.dumps(tenant)}", f"keys = [{json.dumps(key)}]"]
    for assistant in assistants:
        lines += ["", "[[assistants]]", f"id = {json.dumps(assistant.id)}", "shared = true"]
        lines.append(f"instructions = {json.dumps(assistant.instructions)}")
    path.write_text("\n".join(lines) + "\n")


class Prompts:
    """Prompts as the gateway makes them, in this process."""

    def __init__(self, model: PreparedModel, assistants: Iterable[SharedAssistant]) -> None:
        self.model = model
        self.tokenizer = Tokenizer.load(model)
        template = ChatTemplate(model.chat_template or "", self.tokenizer)
        scopes = Scopes(secrets.token_bytes(SECRET_BYTES))
        configs = [AssistantConfig(id=a.id, instructions=a.instructions, shared=True) for a in assistants]
        self._assistants = Assistants.build(configs, template, scopes)
        self.builder = PromptBuilder(self.tokenizer, template, scopes)

    async def build(self, messages: list[dict[str, str]], assistant: SharedAssistant | None = None) -> BuiltPrompt:
        tenant = Tenant(TENANTS[0])
        found = None
        if assistant is not None:
            found = self._assistants.find(tenant, assistant.id)
            assert found is not None, assistant.id
        return await self.builder.build(
            tenant, [Message(m["role"], m["content"]) for m in messages], assistant=found, param="messages"
        )


def num_shared(prompt: BuiltPrompt) -> int:
    """Tokens of the prompt that it has in common with the other chats of its assistant, or under its system prompt."""
    return prompt.scopes[-2].end_token if len(prompt.scopes) > 1 else 0


def num_own(prompt: BuiltPrompt) -> int:
    """Tokens of the prompt that are the chat's own: its message, and the markup after it."""
    return len(prompt.token_ids) - num_shared(prompt)
