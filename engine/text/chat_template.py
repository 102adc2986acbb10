"""A conversation to the ids of a prompt, through the model's own Jinja template."""

import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from engine.errors import ModelNotSupported, RequestError
from engine.text.guarded_text import Guard
from engine.text.tokenizer import Run, Tokenizer
from engine.text.turns import Turn, readings

ROLES = ("system", "developer", "user", "assistant", "tool")
TRUNK_PROBES = ("a", "\n\n", "  ", "1")
"""First texts of a user that merge in different ways with what a template writes before them."""
_RESERVED_KWARGS = {
    "messages",
    "conversations",
    "chat_template",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "return_assistant_tokens_mask",
    "bos_token",
    "eos_token",
}
_NEVER_LEFT_OUT = ("system", "tool")
"""Roles that some templates skip without a word."""
# what a sandboxed template may raise beside Jinja's own errors when it meets values that it does not expect
_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)


class TemplateError(RequestError):
    """The messages cannot be made into a prompt: one sentence for the client, a 400."""

    def __init__(self, message: str, *, param: str | None = "messages") -> None:
        super().__init__(message, code="invalid_messages", param=param)


@dataclass(frozen=True)
class Message:
    role: str
    content: str
    """None counts as empty."""
    token_ids: tuple[int, ...] | None = None
    """Of an answer of this model: the ids it was made of, used in place of the content where the template lets them."""


@dataclass(frozen=True)
class RenderedPrompt:
    token_ids: list[int]
    template_changed: tuple[int, ...]
    """Indices of messages whose kept ids could not be used; their text was."""


@dataclass(frozen=True)
class _AnswerOpening:
    """What stands before an answer: as the generation prompt, and as the template writes it in a history."""

    generated: str
    remembered: str


class ChatTemplate:
    """Safe to share between threads. Control strings that users typed come out as plain text.

    What a template refuses is tried again with neighbours of one role merged, then with system turns folded into user
    turns (first all but those at the start), then with both; then it is a TemplateError.
    """

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        """Raises ModelNotSupported if `source` is no Jinja template."""
        self._source = source
        self._tokenizer = tokenizer
        self._tokens = {
            name: tokenizer.token_text(token_id)
            for name, token_id in (
                ("bos_token", tokenizer.bos_token_id),
                ("eos_token", next(iter(tokenizer.eos_token_ids), None)),
            )
            if token_id is not None
        }
        self._splits_reasoning = "</think>" in source
        try:
            self._render_text([Turn("user", "a")], True, {})
        except jinja2.TemplateSyntaxError as e:
            raise ModelNotSupported(f"the chat template cannot be read: {e}") from None
        except _TEMPLATE_FAULTS:
            pass  # it may refuse this conversation and take others

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        known_runs: Mapping[str, Sequence[int]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt:
        """Raises TemplateError for what neither the template nor the policy for roles can take.

        `known_runs`: from `head_runs`, so that the ids of an assistant's instructions are not made again.
        `template_kwargs`: values that the template asks for by name; strings in them are guarded like contents.
        """
        template_kwargs = template_kwargs or {}
        self._check(messages, template_kwargs)
        as_text: set[int] = set()
        while True:
            guard = Guard(self._tokenizer.control)
            kwargs = _guarded(template_kwargs, guard)
            turns = [self._turn(guard, i, m, as_text) for i, m in enumerate(messages)]
            text = self._render_by_policy(guard, turns, add_generation_prompt, kwargs)
            kept = {i for i, m in enumerate(messages) if m.token_ids is not None and i not in as_text}
            found = guard.find_kept(text)
            lost = {i for i in kept if found.count(i) != 1}
            if not lost:
                break
            as_text |= lost
        opening = (self._find_opening(kwargs) if kwargs else self._plain_opening) if kept else None
        pieces = self._pieces(guard, text, messages, opening)
        token_ids = self._tokenizer.encode_runs(pieces, known_runs=known_runs)
        if not token_ids:
            raise TemplateError("the messages make an empty prompt")
        return RenderedPrompt(token_ids, tuple(sorted(as_text)))

    def trunk_ids(
        self,
        head: Sequence[Message],
        *,
        known_runs: Mapping[str, Sequence[int]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The ids that prompts which start with `head` and go on with a user's turn have in common.

        Found with four probe texts; a prompt whose first user text merges in yet another way shares a little less.
        """
        prompts = [
            self.render(
                [*head, Message("user", probe)],
                add_generation_prompt=False,
                known_runs=known_runs,
                template_kwargs=template_kwargs,
            ).token_ids
            for probe in TRUNK_PROBES
        ]
        common = 0
        for column in zip(*prompts, strict=False):
            if len(set(column)) > 1:
                break
            common += 1
        return prompts[0][:common]

    def head_runs(
        self,
        head: Sequence[Message],
        *,
        known_runs: Mapping[str, Sequence[int]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Sequence[int]]:
        """The runs of text that `head` gives to every prompt, with their ids: `known_runs` for `render`."""
        self._check(head, template_kwargs or {})
        runs: list[set[str]] = []
        for probe in TRUNK_PROBES:
            guard = Guard(self._tokenizer.control)
            turns = [self._turn(guard, i, m, set()) for i, m in enumerate([*head, Message("user", probe)])]
            text = self._render_by_policy(guard, turns, False, _guarded(template_kwargs or {}, guard))
            pieces = list(self._pieces(guard, text, head, None))
            runs.append(
                {
                    piece
                    for before, piece in itertools.pairwise(pieces)
                    if isinstance(before, int) and isinstance(piece, str)
                }
            )
        known = known_runs or {}
        return {
            run: known[run] if run in known else self._tokenizer.encode_after_control(run)
            for run in set.intersection(*runs)
        }

    def _check(self, messages: Sequence[Message], template_kwargs: Mapping[str, Any]) -> None:
        if not messages:
            raise TemplateError("messages must not be empty")
        for i, message in enumerate(messages):
            if message.role not in ROLES:
                raise TemplateError(f"messages[{i}].role must be one of {', '.join(ROLES)}, got {message.role!r}")
        for name in template_kwargs:
            if name in _RESERVED_KWARGS or not name.isidentifier():
                raise TemplateError(f"chat_template_kwargs must not set {name!r}", param="chat_template_kwargs")

    def _turn(self, guard: Guard, index: int, message: Message, as_text: set[int]) -> Turn:
        role = "system" if message.role == "developer" else message.role
        if message.token_ids is not None and index not in as_text:
            return Turn(role, guard.kept(index))
        content = message.content or ""
        if role == "assistant" and self._splits_reasoning and "</think>" in content:
            # as these templates do it themselves, which they cannot once the marks are guarded
            thoughts = content.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
            answer = content.split("</think>")[-1].lstrip("\n")
            return Turn(role, guard.protect(answer), guard.protect(thoughts))
        return Turn(role, guard.protect(content))

    def _render_text(self, turns: Sequence[Turn], add_generation_prompt: bool, kwargs: Mapping[str, Any]) -> str:
        rendered, _ = render_jinja_template(
            conversations=[[turn.to_dict() for turn in turns]],
            chat_template=self._source,
            add_generation_prompt=add_generation_prompt,
            **self._tokens,
            **kwargs,
        )
        text: str = rendered[0]
        return text

    def _render_by_policy(
        self, guard: Guard, turns: Sequence[Turn], add_generation_prompt: bool, kwargs: Mapping[str, Any]
    ) -> str:
        """The first of the readings of `turns` that the template takes."""
        refusal = ""
        tried: list[Sequence[Turn]] = []
        for attempt in readings(turns):
            if attempt in tried:
                continue
            tried.append(attempt)
            try:
                text = self._render_text(attempt, add_generation_prompt, kwargs)
            except _TEMPLATE_FAULTS as e:
                refusal = refusal or _sentence(guard.restore(str(e)))
                continue
            left_out = [t for t in attempt if t.role in _NEVER_LEFT_OUT and not _holds(text, t.content.strip())]
            if not left_out:
                return text
            refusal = refusal or f"it leaves out a message of role {left_out[0].role}"
        raise TemplateError(f"the model's chat template refuses these messages: {refusal}")

    @functools.cached_property
    def _plain_opening(self) -> _AnswerOpening | None:
        return self._find_opening({})

    def _find_opening(self, kwargs: Mapping[str, Any]) -> _AnswerOpening | None:
        """None if both are the same, or the template does not let them be told."""
        user, answer, next_user = Turn("user", "\ue0a2"), Turn("assistant", "\ue0a3"), Turn("user", "\ue0a4")
        try:
            before = self._render_text([user], False, kwargs)
            asked = self._render_text([user], True, kwargs)
            answered = self._render_text([user, answer, next_user], False, kwargs)
        except _TEMPLATE_FAULTS:
            return None
        if not (asked.startswith(before) and answered.startswith(before) and answered.count(answer.content) == 1):
            return None
        generated = asked[len(before) :]
        remembered = answered[len(before) : answered.index(answer.content)]
        return None if generated == remembered else _AnswerOpening(generated, remembered)

    def _pieces(
        self, guard: Guard, text: str, messages: Sequence[Message], opening: _AnswerOpening | None
    ) -> Iterator[Run | int | tuple[int, ...]]:
        parts = list(guard.split_kept(text))
        for i, part in enumerate(parts):
            if isinstance(part, int):
                yield messages[part].token_ids or ()
                continue
            following = parts[i + 1] if i + 1 < len(parts) else None
            if opening is not None and isinstance(following, int):
                part = self._reopened(part, opening, messages[following].token_ids or ())
            for piece in self._tokenizer.control.split(part):
                yield guard.restore(piece) if isinstance(piece, str) else piece

    def _reopened(self, text: str, opening: _AnswerOpening, answer_ids: Sequence[int]) -> str:
        """`text`, which a kept answer follows, with the generation prompt that the answer followed when it was made.

        Not if the answer opens by itself what the generation prompt would (its own thoughts, say).
        """
        if not text.endswith(opening.remembered):
            return text
        added = opening.generated.removeprefix(opening.remembered)
        if answer_ids and answer_ids[0] == next(self._tokenizer.control.split(added), None):
            return text
        return text.removesuffix(opening.remembered) + opening.generated


def _guarded(template_kwargs: Mapping[str, Any], guard: Guard) -> dict[str, Any]:
    """The names as they are: a template asks for them, and never writes them."""
    return {name: guard.protect_all(value) for name, value in template_kwargs.items()}


def _holds(text: str, content: str) -> bool:
    """Whether `content` is in `text`. Preparing to look for a long string takes long; mostly it is where it begins."""
    start = text.find(content[:32])
    return start >= 0 and (text.startswith(content, start) or content in text)


def _sentence(text: str) -> str:
    text = re.sub(r"\s+", " ", text).strip()
    return text[:200] or "no reason given"
