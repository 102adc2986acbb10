"""Makes a tokenizer.json out of the tokenizer fields of a GGUF file.

GGUF names a pre-tokenizer (`tokenizer.ggml.pre`) instead of storing it, so each one that is served is spelled out
here; an unknown one is refused, as a wrong one would give other ids without any error.
"""

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from engine.errors import ModelNotSupported


class TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def tokenizer_json(fields: Mapping[str, Any]) -> str:
    """`fields`: GGUF metadata by key. Raises ModelNotSupported for a tokenizer that is not known exactly."""
    model = fields.get("tokenizer.ggml.model")
    if model == "gpt2":
        tokenizer = _byte_level_bpe(fields)
    elif model == "llama":
        tokenizer = _sentencepiece_bpe(fields)
    else:
        raise ModelNotSupported(f"the GGUF file has a tokenizer of kind {model!r}, served are gpt2 and llama")
    _add_control_tokens(tokenizer, fields)
    return str(tokenizer.to_str())


def _byte_level_bpe(fields: Mapping[str, Any]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    pre = fields.get("tokenizer.ggml.pre", "default")
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    ignore_merges = pre in ("llama-bpe", "llama3")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges))

    def split(pattern: str) -> Any:
        return pre_tokenizers.Split(Regex(pattern), behavior="isolated")

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if pre in ("smollm", "starcoder", "refact", "command-r"):
        # GPT-2's split with every digit on its own
        steps = [pre_tokenizers.Digits(individual_digits=True), byte_level]
    elif pre in ("default", "gpt-2"):
        steps = [byte_level]
    elif pre in ("llama-bpe", "llama3"):
        steps = [split(_LLAMA3_SPLIT), bytes_only]
    elif pre == "qwen2":
        steps = [split(_QWEN2_SPLIT), bytes_only]
        tokenizer.normalizer = normalizers.NFC()
    else:
        raise ModelNotSupported(f"the GGUF file's pre-tokenizer {pre!r} is not known")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_bpe(fields: Mapping[str, Any]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    scores: list[float] = fields["tokenizer.ggml.scores"]
    unknown = tokens[fields.get("tokenizer.ggml.unknown_token_id", 0)]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab, merges=_merges_of_scores(vocab, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True
        )
    )
    add_prefix = fields.get("tokenizer.ggml.add_space_prefix", True)
    prepend = [normalizers.Prepend("▁")] if add_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if add_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_of_scores(vocab: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the pair whose result has the best score: as a list of merges, best result first."""
    merges = []
    for token, i in vocab.items():
        pairs = [(token[:k], token[k:]) for k in range(1, len(token))]
        known = [(vocab[a], vocab[b], a, b) for a, b in pairs if a in vocab and b in vocab]
        merges += [(-scores[i], i, a, b, left, right) for a, b, left, right in sorted(known)]
    return [(left, right) for *_, left, right in sorted(merges)]


def _add_control_tokens(tokenizer: Any, fields: Mapping[str, Any]) -> None:
    """Control tokens are special; user-defined ones are matched in text too, but are not special."""
    from tokenizers import AddedToken

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    types: list[int] = fields["tokenizer.ggml.token_type"]
    special = [t for t, kind in zip(tokens, types, strict=True) if kind in (TokenType.CONTROL, TokenType.UNKNOWN)]
    defined = [t for t, kind in zip(tokens, types, strict=True) if kind == TokenType.USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in defined])
