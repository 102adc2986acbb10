"""Keeps what users typed apart from what a template writes, while both go through the template as one string."""

import secrets
from collections.abc import Iterator
from typing import Any

from engine.text.added_tokens import ControlTokens


class Guard:
    """For one rendering: puts stand-ins for control strings (and kept answers) in contents, and takes them out after.

    A stand-in begins and ends with a nonce that nobody can know beforehand, so no content can hold one. White space at
    the ends of a content stays at its ends: templates trim.
    """

    def __init__(self, control: ControlTokens) -> None:
        self._control = control
        nonce = secrets.token_hex(8)
        self._open, self._close = f"\ue0a0{nonce}:", f":{nonce}\ue0a1"
        self._originals: list[str] = []

    def protect(self, content: str) -> str:
        """`content` with a stand-in for each control string, one at each end if neighbours could complete one."""
        core = content.strip()
        if not core:
            return content
        start = len(content) - len(content.lstrip())
        before, after = content[:start], content[start + len(core) :]
        guarded = self._control.pattern.sub(lambda match: self._replace(match.group()), core)
        edge = self._replace("") if self._control.can_join(core) else ""
        return f"{before}{edge}{guarded}{edge}{after}"

    def protect_all(self, value: Any) -> Any:
        """Every string within lists and dictionaries protected, their keys too."""
        if isinstance(value, str):
            return self.protect(value)
        if isinstance(value, dict):
            return {self.protect_all(k): self.protect_all(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.protect_all(v) for v in value]
        return value

    def _replace(self, original: str) -> str:
        self._originals.append(original)
        return f"{self._open}{len(self._originals) - 1}{self._close}"

    def restore(self, text: str) -> str:
        """What was typed in place of the stand-ins."""
        if not self._originals:
            return text
        return "".join(part if name is None else self._originals[name] for part, name in self._split(text, ""))

    def kept(self, index: int) -> str:
        """The stand-in of a kept answer."""
        return f"{self._open}kept{index}{self._close}"

    def find_kept(self, text: str) -> list[int]:
        """The kept answers in `text`, in order, repeated if they are."""
        return [name for _, name in self._split(text, "kept") if name is not None]

    def split_kept(self, text: str) -> Iterator[str | int]:
        """Text (may be empty) and kept answers in turn, beginning and ending with text."""
        before = ""
        for part, name in self._split(text, "kept"):
            if name is None:
                before += part
            else:
                yield before
                yield name
                before = ""
        yield before

    def _split(self, text: str, kind: str) -> Iterator[tuple[str, int | None]]:
        """Pieces of text, each without a number, and the numbers of the stand-ins of one kind, in order.

        Not by a regular expression: one for each nonce would take longer to compile than all else that a rendering
        takes.
        """
        first, *others = text.split(self._open)
        yield first, None
        for other in others:
            name, is_closed, after = other.partition(self._close)
            number = name.removeprefix(kind)
            if is_closed and name.startswith(kind) and number.isascii() and number.isdigit():
                yield "", int(number)
                yield after, None
            else:
                yield self._open + other, None
