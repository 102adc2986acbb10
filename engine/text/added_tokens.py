"""Added tokens of a tokenizer.json: the strings that stand for one id outside the vocabulary of learned pieces.

Most of them are *control tokens*: a template writes them, users must not. All count, not only those marked `special`
(Qwen3's `<think>` is not). The exception are runs of white space that some tokenizers add (GPT-NeoX, Gemma): they are
plain text, cannot forge anything, and source code would come out as other ids without them.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

# what the `tokenizers` library calls white space; Python's own \s also has U+001C..U+001F
WHITE_SPACE = "\t\n\x0b\x0c\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"  # noqa: E501


@dataclass(frozen=True, slots=True)
class AddedToken:
    """`lstrip` and `rstrip`: it swallows white space beside it. `single_word`: only where no word goes on."""

    id: int
    content: str
    special: bool
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> "AddedToken":
        return cls(
            id=entry["id"],
            content=entry["content"],
            special=entry.get("special", False),
            lstrip=entry.get("lstrip", False),
            rstrip=entry.get("rstrip", False),
            single_word=entry.get("single_word", False),
        )

    @property
    def is_control(self) -> bool:
        return self.special or bool(self.content.strip(WHITE_SPACE + "▁"))


class ControlTokens:
    """Finds control strings in text: leftmost first, of those that start there the longest."""

    def __init__(self, tokens: Iterable[AddedToken]) -> None:
        self.by_content = {t.content: t for t in tokens if t.is_control and t.content}
        self.ids = frozenset(t.id for t in self.by_content.values())
        self.pattern = re.compile(alternation(self.by_content) if self.by_content else r"(?!)")
        self._beginnings = {c[:i] for c in self.by_content for i in range(1, len(c))}
        self._ends = {c[i:] for c in self.by_content for i in range(1, len(c))}
        self._max_part = max(map(len, self.by_content), default=1) - 1

    def can_join(self, text: str) -> bool:
        """Whether a control string could come about where other text is put before or after `text`."""
        sizes = range(1, min(self._max_part, len(text)) + 1)
        if any(text[-n:] in self._beginnings or text[:n] in self._ends for n in sizes):
            return True
        return len(text) < self._max_part and any(text in content for content in self.by_content)

    def split(self, text: str) -> Iterator[str | int]:
        """Text between control strings (never empty) and the ids of the control strings, in order."""
        start = 0  # of the text that has not been yielded
        strip_left = False
        for match in self.pattern.finditer(text):
            token = self.by_content[match.group()]
            if token.single_word and _touches_word(text, match.start(), match.end()):
                continue
            piece = text[start : match.start()]
            piece = piece.lstrip(WHITE_SPACE) if strip_left else piece
            piece = piece.rstrip(WHITE_SPACE) if token.lstrip else piece
            if piece:
                yield piece
            yield token.id
            start, strip_left = match.end(), token.rstrip
        piece = text[start:]
        piece = piece.lstrip(WHITE_SPACE) if strip_left else piece
        if piece:
            yield piece


def _touches_word(text: str, start: int, end: int) -> bool:
    return (start > 0 and _is_word(text[start - 1])) or (end < len(text) and _is_word(text[end]))


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


def alternation(strings: Iterable[str]) -> str:
    """A regular expression that matches the longest of `strings`; a trie, as there may be thousands of them.

    A flat `a|b|c` would try each one at every character that could begin one.
    """
    root: dict[str, Any] = {}
    for string in strings:
        node = root
        for character in string:
            node = node.setdefault(character, {})
        node[""] = {}
    return _trie_source(root)


def _trie_source(node: dict[str, Any]) -> str:
    branches = []
    for character, child in node.items():
        if not character:
            continue
        literal = re.escape(character)
        while len(child) == 1 and "" not in child:
            ((following, child),) = child.items()
            literal += re.escape(following)
        branches.append(literal + _trie_source(child))
    if not branches:
        return ""
    source = branches[0] if len(branches) == 1 and "" not in node else f"(?:{'|'.join(branches)})"
    return source + "?" if "" in node else source
