"""Why a prompt was cached as far as it was, and no further."""

import enum
from collections.abc import Callable, Sequence

import msgspec

from app.cached_tokens import CachedTokens
from app.prompt_history import Comparison, PromptHistory, PromptRecord
from app.prompts import BuiltPrompt

TOKENS_BEFORE = 2
TOKENS_FROM = 8
"""Of the texts that show where two prompts part: so many tokens before that place, and from there on."""

Decode = Callable[[Sequence[int]], str]


class Reason(enum.StrEnum):
    NEVER_SEEN = "never_seen"
    """Nothing that this caller asked before, and that could be shared, goes on like this."""
    EVICTED = "evicted"
    """It was computed for this caller before, and is not held any more."""
    TEMPLATE_CHANGED = "template_changed"
    """What was said before is rendered otherwise now: other template options, or an answer whose own ids the template
    did not take."""
    ASSISTANT_VERSION = "assistant_version"
    """The assistant's prompt has been edited since the caller asked it last."""
    NARROWER_SCOPE = "narrower_scope"
    """The caller asked the same before in another scope of its own."""
    LAST_TOKEN = "last_token"
    """All is cached that can be: the last token is computed always, as the first of the answer is drawn from it."""


class FirstMiss(msgspec.Struct, frozen=True, kw_only=True):
    position: int
    """Index of the first prompt token that had to be computed."""
    reason: Reason
    expected_text: str | None
    """Of the caller's own closest earlier prompt, around the place where the two part; None where there is none."""
    actual_text: str
    """Of this prompt there."""


class CacheReport(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    cached: CachedTokens
    first_miss: FirstMiss

    def to_wire(self, response_id: str) -> dict[str, object]:
        return {
            "response_id": response_id,
            "prompt_tokens": self.prompt_tokens,
            "cached": {**msgspec.structs.asdict(self.cached), "total": self.cached.total},
            "first_miss": self.first_miss,
        }


class Explainer:
    """Explains one request: `compare` when it has been submitted, `report` once its first token is there."""

    def __init__(
        self, history: PromptHistory, tenant_id: str, prompt: BuiltPrompt, block_size: int, decode: Decode
    ) -> None:
        """`block_size`: of the engine's blocks, in tokens. `decode` shows control tokens too."""
        self._history = history
        self._tenant_id = tenant_id
        self._prompt = prompt
        self._block_size = block_size
        self._decode = decode
        self._comparison: Comparison | None = None

    def compare(self) -> None:
        """With what was computed before; what comes later cannot have been of use."""
        self._comparison = self._history.compare(self._tenant_id, PromptRecord.of(self._prompt))

    def report(self, cached: CachedTokens) -> CacheReport | None:
        """None for a request that was never submitted."""
        if self._comparison is None:
            return None
        first_miss = explain(self._comparison, cached.total, self._block_size, self._decode)
        return CacheReport(prompt_tokens=len(self._prompt.token_ids), cached=cached, first_miss=first_miss)


def explain(comparison: Comparison, num_cached_tokens: int, block_size: int, decode: Decode) -> FirstMiss:
    """From a request's own earlier prompts alone, never from what the engine holds of others."""
    prompt = comparison.prompt
    reason, other = _reason(comparison, num_cached_tokens, block_size)
    parting = prompt.num_common_tokens(other) if other is not None else 0
    if other is None or not num_cached_tokens <= parting < other.num_tokens or other.private_key != prompt.private_key:
        other, parting = None, num_cached_tokens
    shown = (parting - TOKENS_BEFORE, parting + TOKENS_FROM)
    return FirstMiss(
        position=num_cached_tokens,
        reason=reason,
        expected_text=decode(other.token_ids(*shown)) if other is not None else None,
        actual_text=decode(prompt.token_ids(*shown)),
    )


def _reason(comparison: Comparison, num_cached: int, block_size: int) -> tuple[Reason, PromptRecord | None]:
    """And the earlier prompt from which this one parts, for reasons that have to do with that."""
    prompt, of_assistant = comparison.prompt, comparison.of_assistant
    if num_cached >= prompt.num_tokens - 1:
        return Reason.LAST_TOKEN, None
    others = [o for o in (comparison.in_scope, comparison.in_any_scope, of_assistant) if o is not None]
    if any(_num_reusable(prompt, o, _num_in_same_scopes(prompt, o), block_size) > num_cached for o in others):
        return Reason.EVICTED, None
    if of_assistant is not None and num_cached < prompt.num_trunk_tokens:
        if of_assistant.assistant_version != prompt.assistant_version:
            return Reason.ASSISTANT_VERSION, of_assistant
        parts_early = prompt.num_common_tokens(of_assistant) < prompt.num_trunk_tokens
        if parts_early and of_assistant.template_digest != prompt.template_digest:
            return Reason.TEMPLATE_CHANGED, of_assistant
    if any(_num_reusable(prompt, o, prompt.num_common_tokens(o), block_size) > num_cached for o in others):
        return Reason.NARROWER_SCOPE, None
    closest = comparison.in_scope
    if prompt.template_changed and closest is not None and prompt.num_common_tokens(closest) < closest.num_tokens - 1:
        return Reason.TEMPLATE_CHANGED, closest
    return Reason.NEVER_SEEN, closest


def _num_in_same_scopes(prompt: PromptRecord, other: PromptRecord) -> int:
    """Leading tokens that both have in common, for the same readers."""
    num_common = prompt.num_common_tokens(other)
    if prompt.private_key == other.private_key and prompt.trunk == other.trunk:
        return num_common
    if prompt.trunk is None or other.trunk is None or prompt.trunk.key != other.trunk.key:
        return 0
    return min(num_common, prompt.trunk.end_token, other.trunk.end_token)


def _num_reusable(prompt: PromptRecord, other: PromptRecord, num_common: int, block_size: int) -> int:
    """Of the leading tokens in common those that the engine could have taken over: whole blocks, or up to a tail."""
    whole = min(num_common, other.num_computed_tokens) // block_size * block_size
    return min(max([whole, *(end for end in other.ends if end <= num_common)]), prompt.num_tokens - 1)
