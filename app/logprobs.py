"""Log-probabilities as OpenAI's two APIs write them."""

import codecs
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from app.events import Logprob, TopLogprob
from engine.protocol import TokenLogprobs
from engine.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def finite(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST


def chat_logprobs(
    tokenizer: Tokenizer, entries: Iterable[TokenLogprobs], end: TokenLogprobs | None = None
) -> list[dict[str, Any]]:
    """Entries of `logprobs.content`: one a token, with its bytes, since a token may be part of a character.

    `end` is that of an id that ended the answer: its entry comes last and has no bytes, as it has no text.
    """

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        return {"token": tokenizer.token_text(token_id), "logprob": finite(logprob), "bytes": list(data)}

    def with_top(entry: TokenLogprobs) -> dict[str, Any]:
        return {**one(entry.token_id, entry.logprob), "top_logprobs": [one(t, lp) for t, lp in entry.top]}

    written = [with_top(entry) for entry in entries]
    if end is not None:
        written.append({**with_top(end), "bytes": []})
    return written


class CompletionLogprobs:
    """The four lists of a completion, with offsets that go on over the chunks of a stream."""

    def __init__(self, tokenizer: Tokenizer, hidden_ids: frozenset[int] = frozenset()) -> None:
        """`hidden_ids`: tokens that have no text in the answer."""
        self._tokenizer = tokenizer
        self._hidden_ids = hidden_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_characters = 0

    def add(self, entries: Sequence[TokenLogprobs | None], first_id: int | None = None) -> dict[str, list[Any]]:
        """The lists for the next tokens. None stands for a prompt's first token, `first_id`, which has no value."""
        lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in entries:
            token_id = entry.token_id if entry is not None else first_id
            if token_id is None:
                raise ValueError("an entry without a value needs first_id")
            lists["text_offset"].append(self._num_characters)
            if token_id not in self._hidden_ids:
                self._num_characters += len(self._utf8.decode(self._tokenizer.token_bytes(token_id)))
            lists["tokens"].append(self._name(token_id))
            lists["token_logprobs"].append(finite(entry.logprob) if entry is not None else None)
            lists["top_logprobs"].append(self._top(entry) if entry is not None else None)
        return lists

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        top = {self._name(t): finite(lp) for t, lp in entry.top}
        # OpenAI's list also has the drawn token, so that it may be one longer than asked for
        top.setdefault(self._name(entry.token_id), finite(entry.logprob))
        return top

    def _name(self, token_id: int) -> str:
        """The token as text; parts of characters by their bytes, since names must differ."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in data)


def logprob_writer(tokenizer: Tokenizer) -> Callable[[TokenLogprobs], Logprob]:
    """Entries as the Responses API has them."""

    def one(token_id: int, logprob: float) -> TopLogprob:
        data = list(tokenizer.token_bytes(token_id))
        return TopLogprob(token=tokenizer.token_text(token_id), logprob=finite(logprob), bytes=data)

    def write(entry: TokenLogprobs) -> Logprob:
        drawn = one(entry.token_id, entry.logprob)
        top = [one(token_id, logprob) for token_id, logprob in entry.top]
        return Logprob(token=drawn.token, logprob=drawn.logprob, bytes=drawn.bytes, top_logprobs=top)

    return write
