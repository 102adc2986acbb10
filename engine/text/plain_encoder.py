"""Encodes text that may hold anything a user typed: no text can become a control token."""

import json
import secrets
from typing import Any

import tokenizers

from engine.errors import InvalidRequest, ModelNotSupported
from engine.text.added_tokens import AddedToken

LONG_TEXT_CHARS = 4096
"""From here on the library's call for batches is used, as it is the one that lets other threads run meanwhile."""


class PlainEncoder:
    """A tokenizer built from a tokenizer.json without its control tokens and without a post-processor (so no BOS).

    Three variants share one model and differ in the space that SentencePiece-style tokenizers put before words:
    `encode_first` for text at the very start, `encode_after_control` for text right after a control token, and
    `encode_continuation` for text that goes on after other ids and gets no such space.
    """

    def __init__(self, tokenizer_json: dict[str, Any], added: list[AddedToken]) -> None:
        spec = {"normalizer": None, "pre_tokenizer": None, "added_tokens": [], **tokenizer_json}
        spec["post_processor"] = spec["decoder"] = spec["truncation"] = spec["padding"] = None
        spec["model"] = _hide(spec["model"], {t.id for t in added if t.is_control})
        spec["model"], kept = _with_ids(spec["model"], [t for t in added if not t.is_control])
        kept_ids = {t.id for t in kept}
        spec["added_tokens"] = [entry for entry in spec["added_tokens"] if entry["id"] in kept_ids]
        try:
            self._first = tokenizers.Tokenizer.from_str(json.dumps(spec))
        except Exception as e:
            # the library raises bare `Exception` for a file that it cannot read
            raise ModelNotSupported(f"tokenizer.json cannot be loaded: {e}") from e
        self._after_control = self._variant(_without_first_prefix(spec))
        self._continuation = self._variant(_without_any_prefix(spec))

    def _variant(self, changed: dict[str, Any]) -> Any:
        """A tokenizer over the same model with another normalizer and pre-tokenizer; itself if nothing is changed."""
        if not changed:
            return self._first
        donor_spec: dict[str, Any] = {
            "version": "1.0",
            "added_tokens": [],
            "model": {"type": "BPE", "vocab": {}, "merges": []},
            "normalizer": None,
            "pre_tokenizer": None,
        }
        donor = tokenizers.Tokenizer.from_str(json.dumps(donor_spec | changed))
        variant = tokenizers.Tokenizer(self._first.model)
        variant.add_tokens(list(self._first.get_added_tokens_decoder().values()))
        variant.normalizer = donor.normalizer if "normalizer" in changed else self._first.normalizer
        variant.pre_tokenizer = donor.pre_tokenizer if "pre_tokenizer" in changed else self._first.pre_tokenizer
        return variant

    def encode_first(self, text: str) -> list[int]:
        return _encode(self._first, text)

    def encode_after_control(self, text: str) -> list[int]:
        return _encode(self._after_control, text)

    def encode_continuation(self, text: str) -> list[int]:
        return _encode(self._continuation, text)


def _encode(tokenizer: Any, text: str) -> list[int]:
    if not text:
        return []
    try:
        if len(text) < LONG_TEXT_CHARS:
            encoding = tokenizer.encode(text, add_special_tokens=False)
        else:
            (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    except TypeError:
        # the library's word for half of a surrogate pair, which has no UTF-8
        raise InvalidRequest("text must be valid Unicode, got half of a surrogate pair") from None
    ids: list[int] = encoding.ids
    return ids


def _hide(model: dict[str, Any], ids: set[int]) -> dict[str, Any]:
    """The model with the pieces of these ids under names that nobody can type.

    Files made from GGUF list control tokens among the learned pieces, where a lookup of whole words would find them.
    Names are changed, not removed: the position in a Unigram vocabulary is the id, and `unk` must exist.
    """
    secret = secrets.token_hex(16)
    vocab = model["vocab"]
    if isinstance(vocab, list):  # Unigram: [piece, score] by id
        return model | {"vocab": [[f"{secret}{i}", -1e9] if i in ids else entry for i, entry in enumerate(vocab)]}
    hidden = {piece: f"{secret}{i}" for piece, i in vocab.items() if i in ids}
    changed = model | {"vocab": {hidden.get(piece, piece): i for piece, i in vocab.items()}}
    if "merges" in model and hidden:
        changed["merges"] = [m for m in model["merges"] if not hidden.keys() & {*_pair(m), "".join(_pair(m))}]
    if model.get("unk_token") in hidden:
        changed["unk_token"] = hidden[model["unk_token"]]
    return changed


def _pair(merge: str | list[str]) -> list[str]:
    return merge.split(" ") if isinstance(merge, str) else merge


def _with_ids(model: dict[str, Any], tokens: list[AddedToken]) -> tuple[dict[str, Any], list[AddedToken]]:
    """The model with these tokens in its vocabulary, as the library numbers added tokens anew unless it finds them
    there; and those of them for which that worked."""
    vocab = model["vocab"]
    if isinstance(vocab, list):
        return model, [t for t in tokens if t.id < len(vocab) and vocab[t.id][0] == t.content]
    tokens = [t for t in tokens if vocab.get(t.content, t.id) == t.id]
    return model | {"vocab": vocab | {t.content: t.id for t in tokens}}, tokens


def _without_first_prefix(spec: dict[str, Any]) -> dict[str, Any]:
    """What to change so that text is not taken for the start of the whole text."""
    pre_tokenizer = _edit(spec["pre_tokenizer"], lambda part: _no_metaspace_prefix(part, ("first",)))
    return {} if pre_tokenizer == spec["pre_tokenizer"] else {"pre_tokenizer": pre_tokenizer}


def _without_any_prefix(spec: dict[str, Any]) -> dict[str, Any]:
    """What to change so that no space is put before text."""

    def no_prefix(part: dict[str, Any]) -> dict[str, Any] | None:
        if part["type"] == "Prepend":
            return None
        if part["type"] == "ByteLevel":
            return part | {"add_prefix_space": False}
        return _no_metaspace_prefix(part, ("first", "always"))

    changed = {}
    for name in ("normalizer", "pre_tokenizer"):
        part = _edit(spec[name], no_prefix)
        if part != spec[name]:
            changed[name] = part
    return changed


def _no_metaspace_prefix(part: dict[str, Any], schemes: tuple[str, ...]) -> dict[str, Any]:
    if part["type"] == "Metaspace" and part.get("prepend_scheme", "always") in schemes:
        return part | {"prepend_scheme": "never"}
    return part


def _edit(component: dict[str, Any] | None, change: Any) -> dict[str, Any] | None:
    """`component`, or each part of it if it is a sequence, passed through `change` (None: leave it out)."""
    if component is None:
        return None
    if component["type"] == "Sequence":
        name = "normalizers" if "normalizers" in component else "pretokenizers"
        parts = [_edit(part, change) for part in component[name]]
        return component | {name: [part for part in parts if part is not None]}
    edited: dict[str, Any] | None = change(component)
    return edited
