"""Small tokenizers of each family that is served, trained here on a few sentences, with templates in their style."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer

CORPUS = [
    "A trunk line is one circuit that many calls share, and each call pays for its own part only.",
    "You are a helpful assistant. Answer in one or two short sentences; say so when you do not know.",
    "system user assistant tool model Hello world! What is the capital of France? It is Paris.",
    "def main():\n    for i in range(10):\n        print(i, 'numbers')\n\n\nif 1234567890 > 42:\n    main()",
    "Grüße aus Köln, où est la bibliothèque, 你好世界, こんにちは, привет мир, naïve café 😀 👩‍👩‍👧",
] * 3


@dataclass(frozen=True)
class Family:
    name: str
    spec: dict[str, Any]
    bos: str | None
    eos: tuple[str, ...]
    add_bos: bool
    source: str
    """The chat template."""

    @functools.cached_property
    def ids(self) -> dict[str, int]:
        """Of the added tokens."""
        return {entry["content"]: entry["id"] for entry in self.spec["added_tokens"]}

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        bos = None if self.bos is None else self.ids[self.bos]
        eos = [self.ids[t] for t in self.eos]
        return Tokenizer(self.spec, bos_token_id=bos, eos_token_ids=eos, add_bos=self.add_bos)

    @functools.cached_property
    def template(self) -> ChatTemplate:
        return ChatTemplate(self.source, self.tokenizer)

    @functools.cached_property
    def reference(self) -> Any:
        """Hugging Face's own tokenizer over the same file."""
        reference = PreTrainedTokenizerFast(
            tokenizer_object=FastTokenizer.from_str(json.dumps(self.spec)),
            eos_token=self.eos[0],
            **({} if self.bos is None else {"bos_token": self.bos}),
        )
        reference.chat_template = self.source
        return reference

    def reference_ids(self, messages: list[dict[str, str]], **kwargs: Any) -> list[int]:
        kwargs.setdefault("add_generation_prompt", True)
        ids: list[int] = self.reference.apply_chat_template(messages, tokenize=True, return_dict=False, **kwargs)
        return ids


def template_source(name: str) -> str:
    return (Path(__file__).parent / "templates" / f"{name}.jinja").read_text()


@functools.cache
def family(name: str) -> Family:
    return _MAKERS[name]()


def byte_level_spec(
    specials: list[str],
    others: tuple[str, ...] = (),
    *,
    normalizer: Any = None,
    pre_tokenizer: Any = None,
    size: int = 600,
) -> dict[str, Any]:
    tokenizer = FastTokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre_tokenizer is None)
    tokenizer.pre_tokenizer = (
        byte_level if pre_tokenizer is None else pre_tokenizers.Sequence([pre_tokenizer, byte_level])
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in specials])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in others])
    return json.loads(tokenizer.to_str())


def sentencepiece_spec(
    specials: list[str], *, first: list[str], normalizer: Any, pre_tokenizer: Any, decoder: Any
) -> dict[str, Any]:
    """`first`: specials that stand at the front of the vocabulary, as SentencePiece has them (<unk> is one)."""
    tokenizer = FastTokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("▁[^▁\n]*|\n+"), "isolated")
    byte_pieces = [f"<0x{b:02X}>" for b in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=[*first, *byte_pieces], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = [entry for entry in spec["added_tokens"] if entry["content"] in first]
    tokenizer = FastTokenizer.from_str(json.dumps(spec))
    tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder = normalizer, pre_tokenizer, decoder
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in specials])
    return json.loads(tokenizer.to_str())


def _smollm2() -> Family:
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"]
    spec = byte_level_spec(specials, pre_tokenizer=pre_tokenizers.Digits(individual_digits=True))
    return Family("smollm2", spec, "<|im_start|>", ("<|im_end|>", "<|endoftext|>"), False, template_source("smollm2"))


def _qwen(name: str) -> Family:
    words = Regex(
        r"(?i:'s|'t|'re|'m|'ll)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    spec = byte_level_spec(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        ("<tool_response>", "</tool_response>", "<think>", "</think>"),
        normalizer=normalizers.NFC(),
        pre_tokenizer=pre_tokenizers.Split(words, "isolated"),
    )
    return Family(name, spec, None, ("<|im_end|>", "<|endoftext|>"), False, template_source(name))


def _llama3() -> Family:
    specials = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    words = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    spec = byte_level_spec(specials, pre_tokenizer=pre_tokenizers.Split(words, "isolated"))
    spec["model"]["ignore_merges"] = True
    tokenizer = FastTokenizer.from_str(json.dumps(spec))
    bos = ("<|begin_of_text|>", tokenizer.token_to_id("<|begin_of_text|>"))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    spec = json.loads(tokenizer.to_str())
    return Family("llama3", spec, bos[0], ("<|eot_id|>", "<|end_of_text|>"), True, template_source("llama3"))


def _mistral() -> Family:
    """[INST] and [/INST] are control tokens; the space before words by Metaspace, at the very start only."""
    spec = sentencepiece_spec(
        ["[INST]", "[/INST]"],
        first=["<unk>", "<s>", "</s>"],
        normalizer=None,
        pre_tokenizer=pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False),
        decoder=decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
    )
    return Family("mistral", spec, "<s>", ("</s>",), True, template_source("mistral"))


def _llama2() -> Family:
    """[INST] is plain text; a space before each text between control tokens."""
    spec = sentencepiece_spec(
        [],
        first=["<unk>", "<s>", "</s>"],
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        pre_tokenizer=None,
        decoder=decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
    )
    return Family("llama2", spec, "<s>", ("</s>",), True, template_source("llama2"))


def _gemma() -> Family:
    """No space is put before words; runs of white space are added tokens."""
    spec = sentencepiece_spec(
        ["<start_of_turn>", "<end_of_turn>"],
        first=["<pad>", "<eos>", "<bos>", "<unk>"],
        normalizer=normalizers.Replace(" ", "▁"),
        pre_tokenizer=None,
        decoder=decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    )
    tokenizer = FastTokenizer.from_str(json.dumps(spec))
    tokenizer.add_tokens([AddedToken("\n" * n, special=False, normalized=False) for n in (2, 3, 4)])
    spec = json.loads(tokenizer.to_str())
    return Family("gemma", spec, "<bos>", ("<end_of_turn>", "<eos>"), True, template_source("gemma"))


_MAKERS: dict[str, Any] = {
    "smollm2": _smollm2,
    "qwen2": lambda: _qwen("qwen2"),
    "qwen3": lambda: _qwen("qwen3"),
    "llama3": _llama3,
    "mistral": _mistral,
    "llama2": _llama2,
    "gemma": _gemma,
}
FAMILIES = tuple(_MAKERS)
