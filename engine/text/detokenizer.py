"""Turns the ids of one answer into text while they arrive."""

import codecs
from collections import deque
from collections.abc import Iterable, Sequence

from engine.text.stop_strings import StopAutomaton, StopStrings
from engine.text.tokenizer import Tokenizer

PROMPT_SUFFIX_TOKENS = 8
"""Of a prompt that the answer continues, so many last ids are enough: a character spread over single-byte tokens has
fewer."""


class IncrementalDetokenizer:
    """Deltas put together are the decode of all ids, cut at the first stop string.

    Text comes out with the token that completes it: never half a character, nothing held back but the longest end that
    could still become a stop string. Each call costs as much as its own ids. End ids never show: the last id of an
    answer is not text, and only without `skip_special_tokens` is one shown that others follow (`ignore_eos`).

    `prompt_suffix_ids`: the last ids of a prompt that the answer continues as text (completions). Without them
    SentencePiece style drops the space before the first word. `stop`: answers of one request share an automaton.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Iterable[str] | StopAutomaton = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        prompt_suffix_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._end_ids = frozenset(tokenizer.eos_token_ids)
        self._hidden_ids = tokenizer.hidden_ids if skip_special_tokens else frozenset()
        self._stops = StopStrings(stop, include_in_output=include_stop_str_in_output)
        self._include_stop = include_stop_str_in_output
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = not prompt_suffix_ids
        for token_id in prompt_suffix_ids:
            # a prompt of ids may end within a character
            self._utf8.decode(b"" if token_id in self._hidden_ids else tokenizer.token_bytes(token_id))
        self._end_ids_held: list[int] = []  # they are text only if more follows
        self._num_decoded_chars = 0
        self._num_emitted_chars = 0
        self._unsettled: deque[int] = deque()  # of each id after the settled ones: the characters up to its end
        self._num_settled_tokens = 0
        self._emitted: list[str] = []
        self._is_finished = False
        self._odd_ids = self._end_ids | self._hidden_ids
        self._can_be_even = not self._stops.has_any
        self._is_even = False
        """Whether all that came is out, so that a token which is text by itself can simply be added. Nearly always."""

    @property
    def text(self) -> str:
        """All that was emitted."""
        return "".join(self._emitted)

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text: ids that came with it or later are ignored."""
        return self._stops.matched

    @property
    def num_settled_tokens(self) -> int:
        """How many ids, from the first, have their text wholly in what was emitted; end ids at the end do not count."""
        return self._num_settled_tokens

    def append(self, token_ids: Sequence[int], *, stop_token_id: int | None = None) -> str:
        """Takes the next ids, returns the new text.

        `stop_token_id`: the id that ended the answer, if one did; when it is the last of `token_ids` it is no text
        (unless stop strings are included in the output).
        """
        if self._is_even and stop_token_id is None and len(token_ids) == 1 and (text := self._plain_text(token_ids[0])):
            self._emitted.append(text)
            self._num_decoded_chars += len(text)
            self._num_emitted_chars += len(text)
            self._num_settled_tokens += 1
            return text
        shown = self._append(token_ids, stop_token_id)
        self._is_even = self._can_be_even and not (
            self._at_start or self._is_finished or self._end_ids_held or self._unsettled or self._utf8.getstate()[0]
        )
        return shown

    def _plain_text(self, token_id: int) -> str | None:
        """Of one that is shown, and by itself is text."""
        return None if token_id in self._odd_ids else self._tokenizer.whole_text(token_id)

    def _append(self, token_ids: Sequence[int], stop_token_id: int | None) -> str:
        if self._is_finished or self._stops.matched is not None:
            return ""
        new_ids = list(token_ids)
        if stop_token_id is not None and not self._include_stop and new_ids and new_ids[-1] == stop_token_id:
            del new_ids[-1]
        parts: list[str] = []
        for token_id in new_ids:
            if token_id in self._end_ids:
                self._end_ids_held.append(token_id)
                continue
            if self._end_ids_held:
                parts.extend(self._decode(held) for held in self._end_ids_held)
                self._end_ids_held.clear()
            parts.append(self._decode(token_id))
        return self._emit(self._stops.feed("".join(parts)))

    def finish(self) -> str:
        """The answer has ended: returns what was held back. Bytes that never became a character are one U+FFFD."""
        if self._is_finished:
            return ""
        self._is_finished, self._is_even = True, False
        rest = self._utf8.decode(b"", final=True)
        self._num_decoded_chars += len(rest)
        shown = self._stops.feed(rest)
        return self._emit(shown + self._stops.flush())

    def _decode(self, token_id: int) -> str:
        data = b""
        if token_id not in self._hidden_ids:
            tokenizer = self._tokenizer
            data = tokenizer.first_token_bytes(token_id) if self._at_start else tokenizer.token_bytes(token_id)
            self._at_start = False
        text = self._utf8.decode(data)
        self._num_decoded_chars += len(text)
        is_within_character = bool(self._utf8.getstate()[0])
        self._unsettled.append(self._num_decoded_chars + is_within_character)
        return text

    def _emit(self, text: str) -> str:
        if text:
            self._emitted.append(text)
            self._num_emitted_chars += len(text)
        while self._unsettled and self._unsettled[0] <= self._num_emitted_chars:
            self._unsettled.popleft()
            self._num_settled_tokens += 1
        return text
