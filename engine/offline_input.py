"""The forms in which users of the offline API give their prompts and conversations: one of them, or several."""

from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import InvalidRequest

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, ids, or vLLM's forms of them: `{"prompt": text}` or `{"prompt_token_ids": ids}`."""
Conversation = Sequence[Mapping[str, str]]


def each_prompt(prompts: Prompt | Sequence[Prompt]) -> list[str | list[int]]:
    """Texts and ids. Raises InvalidRequest for an object that has neither."""
    if isinstance(prompts, str | Mapping):
        return [_prompt(prompts)]
    ids = [item for item in prompts if isinstance(item, int)]
    return [ids] if ids else [_prompt(item) for item in prompts if not isinstance(item, int)]


def _prompt(prompt: Prompt) -> str | list[int]:
    if isinstance(prompt, Mapping):
        given = prompt.get("prompt_token_ids", prompt.get("prompt"))
        if given is None:
            raise InvalidRequest(f"expected 'prompt' or 'prompt_token_ids', got {sorted(prompt)}", param="prompt")
        return _prompt(given)
    return prompt if isinstance(prompt, str) else list(prompt)


def each_conversation(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    turns = [item for item in messages if isinstance(item, Mapping)]
    return [turns] if turns else [item for item in messages if not isinstance(item, Mapping)]
