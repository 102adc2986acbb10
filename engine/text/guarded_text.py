"""Keeps what users typed apart from what a template writes, while both go through the template as one string."""

import re
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
        self._stand_in = re.compile(f"{self._open}([0-9]+){self._close}")
        self._kept = re.compile(f"{self._open}kept([0-9]+){self._close}")
        self._originals: list[str] = []

    def protect(self, content: str) -> str:
        """`content` with a stand-in for each control string, one at each end if neighbours could complete one."""
        core = content.strip()
        if not core:
            return content
        start = content.index(core)
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
        return self._stand_in.sub(lambda match: self._originals[int(match[1])], text)

    def kept(self, index: int) -> str:
        """The stand-in of a kept answer."""
        return f"{self._open}kept{index}{self._close}"

    def find_kept(self, text: str) -> list[int]:
        """The kept answers in `text`, in order, repeated if they are."""
        return [int(match[1]) for match in self._kept.finditer(text)]

    def split_kept(self, text: str) -> Iterator[str | int]:
        """Text (may be empty) and kept answers in turn, beginning and ending with text."""
        for i, part in enumerate(self._kept.split(text)):
            yield int(part) if i % 2 else part
