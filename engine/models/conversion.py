"""Writes the folder of a prepared model from a source that was read."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from engine.config import ModelConfig
from engine.models.fingerprint import ModelSource
from engine.models.gguf_file import GGUFSource
from engine.models.huggingface import HuggingFaceSource
from engine.models.safetensors_file import write_safetensors
from engine.models.weights import check_names, expected_shapes
from engine.prepared import FORMAT_VERSION, Manifest

END_OF_TURN_TOKENS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_text|>", "<|endoftext|>", "</s>"),
    *("<end_of_turn>", "<|end_of_turn|>", "<|return|>"),
)
"""Markers that end a turn where a chat template writes them and the vocabulary has them as control tokens."""


class Source(Protocol):
    """What a reader of one format tells of a model. Tensors and names are Hugging Face's."""

    config: ModelConfig

    @property
    def tensor_names(self) -> set[str]: ...
    def tensors(self, names: set[str]) -> Iterator[tuple[str, torch.Tensor]]: ...
    @property
    def chat_template(self) -> str | None: ...
    @property
    def bos_token(self) -> str | None: ...
    @property
    def eos_token(self) -> str | None: ...
    @property
    def eos_token_ids(self) -> list[int]: ...
    @property
    def add_bos(self) -> bool | None: ...
    @property
    def sampling_defaults(self) -> dict[str, Any]: ...
    def tokenizer_json(self) -> str: ...


def convert(source: ModelSource, folder: Path, dtype: str, progress: Callable[[str, int, int], None]) -> None:
    """Writes everything of a prepared model into `folder`, which exists and is empty."""
    reader: Source = GGUFSource(source.path) if source.kind == "gguf" else HuggingFaceSource(source.path)
    check_names(reader.config, reader.tensor_names, source.path)
    tokenizer_json = reader.tokenizer_json()
    (folder / "tokenizer.json").write_text(tokenizer_json)
    template = reader.chat_template
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    manifest = _manifest(source, reader, tokenizer_json, template)
    (folder / "manifest.json").write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
    shapes = expected_shapes(reader.config)
    write_safetensors(
        folder / f"weights-{dtype}.safetensors",
        shapes,
        getattr(torch, dtype),
        reader.tensors(set(shapes)),
        lambda done, total: progress(f"preparing {source.name} ({dtype})", done, total),
    )


def _manifest(source: ModelSource, reader: Source, tokenizer_json: str, template: str | None) -> Manifest:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(tokenizer_json)
    bos = reader.bos_token
    bos_token_id = tokenizer.token_to_id(bos) if bos else None
    add_bos = reader.add_bos
    if add_bos is None:
        add_bos = bos_token_id is not None and tokenizer.encode("a").ids[:1] == [bos_token_id]
    return Manifest(
        format_version=FORMAT_VERSION,
        name=source.name,
        source=str(source.path),
        fingerprint=source.fingerprint,
        config=reader.config,
        bos_token_id=bos_token_id,
        eos_token_ids=_end_ids(reader, tokenizer, template),
        add_bos=add_bos and bos_token_id is not None,
        sampling_defaults=reader.sampling_defaults,
    )


def _end_ids(reader: Source, tokenizer: Any, template: str | None) -> tuple[int, ...]:
    """The tokenizer's own first (templates call it eos_token), then those of both configurations, then the
    template's."""
    ids = [tokenizer.token_to_id(reader.eos_token)] if reader.eos_token else []
    ids += reader.eos_token_ids
    special = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items()}
    ids += [special[token] for token in END_OF_TURN_TOKENS if token in (template or "") and token in special]
    in_range = (i for i in ids if i is not None and 0 <= i < reader.config.vocab_size)
    return tuple(dict.fromkeys(in_range))
