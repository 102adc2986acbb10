"""Heads: the system messages that a chat begins with, and where in its prompt they end."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.token_lru import TokenLru
from engine.text.chat_template import ChatTemplate, Message, TemplateError

HEAD_ROLES = ("system", "developer")
MAX_HEADS = 1024
MAX_HEAD_TOKENS = 1 << 18


def num_leading(messages: Sequence[Message]) -> int:
    """How many system messages a chat begins with."""
    return next((i for i, m in enumerate(messages) if m.role not in HEAD_ROLES), len(messages))


@dataclass(frozen=True)
class Head:
    token_ids: list[int] = field(repr=False)
    """Longest common prefix of the prompts that start with these messages."""
    runs: Mapping[str, Sequence[int]] = field(repr=False)
    """Ids of the texts that these messages give to each prompt, so that they are not made anew for each."""


class Heads:
    """Heads of late, by scope and text. Bounded: those that were used least recently go first.

    A head is known within its scope only: how long a request takes says nothing about anybody else's.
    """

    def __init__(self, template: ChatTemplate, max_heads: int = MAX_HEADS, max_tokens: int = MAX_HEAD_TOKENS) -> None:
        self._template = template
        self._heads: TokenLru[Head] = TokenLru(max_tokens, max_heads)

    def __len__(self) -> int:
        return len(self._heads)

    @staticmethod
    def key(scope_key: bytes, messages: Sequence[Message], template_digest: str = "") -> bytes:
        """What the head of these system messages is known by. `template_digest`: of the template's options."""
        digest = hashlib.sha256(len(scope_key).to_bytes(8, "little") + scope_key)
        digest.update(len(template_digest).to_bytes(8, "little") + template_digest.encode())
        for message in messages:
            data = message.content.encode()
            digest.update(len(data).to_bytes(8, "little") + data)
        return digest.digest()

    def find(self, key: bytes) -> Head | None:
        return self._heads.use(key)

    def try_make(
        self,
        messages: Sequence[Message],
        known_runs: Mapping[str, Sequence[int]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Head | None:
        """None where the template takes no user's turn after these messages: then nothing ends there.

        Takes several renderings and may run in any thread. `known_runs`: of an assistant's instructions among them.
        """
        try:
            runs = self._template.head_runs(messages, known_runs=known_runs, template_kwargs=template_kwargs)
            ids = self._template.trunk_ids(messages, known_runs=runs, template_kwargs=template_kwargs)
            return Head(ids, runs)
        except TemplateError:
            return None

    def keep(self, key: bytes, head: Head) -> None:
        self._heads.put(key, head, len(head.token_ids))
