"""What bytes a token id stands for. Text is bytes put together, then UTF-8: no token is decoded alone."""

import contextlib
from collections.abc import Iterable
from typing import Any

from engine.errors import ModelNotSupported
from engine.text.added_tokens import AddedToken


class Pieces:
    """The bytes of each id, as the `decoder` of a tokenizer.json makes them.

    Two families are known: byte-level (GPT-2, Llama 3, Qwen, SmolLM), where each character of a piece is a byte, and
    SentencePiece style (Llama 2, Mistral, Gemma), where "▁" is a space and `<0x0A>` a byte. ModelNotSupported for
    others, as their text depends on neighbouring tokens.
    """

    def __init__(self, tokenizer_json: dict[str, Any], added: Iterable[AddedToken]) -> None:
        vocab = tokenizer_json["model"]["vocab"]
        pieces: dict[int, str] = {}
        if isinstance(vocab, list):  # Unigram: [piece, score] by id
            pieces.update(enumerate(piece for piece, _ in vocab))
        else:
            pieces.update((i, piece) for piece, i in vocab.items())
        self._added: dict[int, bytes] = {t.id: t.content.encode() for t in added}
        self.size = max([*pieces, *self._added], default=-1) + 1
        self._pieces = pieces
        self._bytes: list[bytes | None] = [None] * self.size
        self._texts: dict[int, str | None] = {}
        self._byte_level = self._byte_fallback = False
        self._replacements: list[tuple[str, str]] = []
        self._num_leading_spaces = 0  # taken off the start of a text
        for part in _flatten(tokenizer_json.get("decoder")):
            self._take(part)

    def _take(self, part: dict[str, Any]) -> None:
        kind = part["type"]
        if kind == "ByteLevel":
            self._byte_level = True
        elif kind == "ByteFallback":
            self._byte_fallback = True
        elif kind == "Replace" and "String" in part["pattern"]:
            self._replacements.append((part["pattern"]["String"], part["content"]))
        elif kind == "Metaspace":
            self._replacements.append((part["replacement"], " "))
            if part.get("prepend_scheme", "always") != "never":
                self._num_leading_spaces = 1
        elif kind == "Strip" and part["content"] == " " and not part["stop"]:
            self._num_leading_spaces = part["start"]
        elif kind != "Fuse":
            raise ModelNotSupported(f"the tokenizer decodes with {kind}, which is not supported: {part}")

    def literal(self, token_id: int) -> bytes:
        """b"" for an id that the tokenizer does not know (an embedding table may be longer than its vocabulary)."""
        if not 0 <= token_id < self.size:
            return b""
        data = self._bytes[token_id]
        if data is None:
            data = self._bytes[token_id] = self._make(token_id)
        return data

    def text(self, token_id: int) -> str | None:
        """None for an id whose bytes are no whole characters."""
        try:
            return self._texts[token_id]
        except KeyError:
            text = None
            with contextlib.suppress(UnicodeDecodeError):
                text = self.literal(token_id).decode()
            self._texts[token_id] = text
            return text

    def at_start(self, token_id: int) -> bytes:
        """Of a token that a text begins with: without the space that SentencePiece style puts before the first word."""
        data = self.literal(token_id)
        num_spaces = len(data) - len(data.lstrip(b" "))
        return data[min(num_spaces, self._num_leading_spaces) :]

    def _make(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id]
        piece = self._pieces.get(token_id, "")
        if self._byte_level:
            if all(c in _BYTE_OF for c in piece):
                return bytes(_BYTE_OF[c] for c in piece)
            return piece.encode()
        if self._byte_fallback and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        for old, new in self._replacements:
            piece = piece.replace(old, new)
        return piece.encode()


def _flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        raise ModelNotSupported("tokenizer.json has no decoder, so text cannot be put together from its tokens")
    if decoder["type"] != "Sequence":
        return [decoder]
    return [part for inner in decoder["decoders"] for part in _flatten(inner)]


def _byte_of_characters() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes are themselves, the other 68 are numbered from U+0100 upwards."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(rest)}


_BYTE_OF = _byte_of_characters()
