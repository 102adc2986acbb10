"""Names and shapes of a decoder's weights, and the prepared file they are read from."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.errors import ModelNotSupported
from engine.models.safetensors_file import SafetensorsFile
from engine.models.shard import WHOLE, Shard

if TYPE_CHECKING:
    # for the types alone: the models run where msgspec is not installed
    from engine.config import ModelConfig

IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".rope_freqs.weight")
"""Tables that older files carry and that are computed here."""


def expected_shapes(config: "ModelConfig") -> dict[str, tuple[int, ...]]:
    """Every tensor the decoder reads, by Hugging Face's names. A tied head is not among them."""
    hidden, ffn, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * head_dim, config.num_kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}

    def linear(name: str, rows: int, columns: int, bias: bool) -> None:
        shapes[name + ".weight"] = (rows, columns)
        if bias:
            shapes[name + ".bias"] = (rows,)

    for i in range(config.num_layers):
        layer = f"model.layers.{i}."
        shapes[layer + "input_layernorm.weight"] = (hidden,)
        linear(layer + "self_attn.q_proj", q, hidden, config.attention_bias)
        linear(layer + "self_attn.k_proj", kv, hidden, config.attention_bias)
        linear(layer + "self_attn.v_proj", kv, hidden, config.attention_bias)
        if config.qk_norm:
            shapes[layer + "self_attn.q_norm.weight"] = (head_dim,)
            shapes[layer + "self_attn.k_norm.weight"] = (head_dim,)
        linear(layer + "self_attn.o_proj", hidden, q, config.attention_output_bias)
        shapes[layer + "post_attention_layernorm.weight"] = (hidden,)
        linear(layer + "mlp.gate_proj", ffn, hidden, config.mlp_bias)
        linear(layer + "mlp.up_proj", ffn, hidden, config.mlp_bias)
        linear(layer + "mlp.down_proj", hidden, ffn, config.mlp_bias)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def check_names(config: "ModelConfig", found: set[str], source: object) -> None:
    """Raises ModelNotSupported if a tensor of the decoder would stay unset or one of the file unread."""
    expected = set(expected_shapes(config))
    unset = sorted(expected - found)
    if unset:
        raise ModelNotSupported(f"{source} has no tensor {unset[0]} ({len(unset)} of {len(expected)} are missing)")
    unread = sorted(name for name in found - expected if not name.endswith(IGNORED_SUFFIXES))
    if config.tie_word_embeddings:
        # some files repeat the embedding under the head's name
        unread = [name for name in unread if name != "lm_head.weight"]
    if unread:
        raise ModelNotSupported(f"{source} has {len(unread)} tensors that would not be read, first {unread[0]}")


class Weights:
    """One rank's part of a prepared weights file. Tensors are views of the file until something copies them."""

    def __init__(self, path: Path, config: "ModelConfig", shard: Shard = WHOLE) -> None:
        """config: of the whole model."""
        if not path.is_file():
            raise ModelNotSupported(f"there is no {path}: prepare the model with this dtype")
        self.shard = shard
        self._file = SafetensorsFile(path)
        self._shapes = expected_shapes(config)
        check_names(config, set(self._file.header), path)

    @property
    def num_bytes(self) -> int:
        offsets = {name: entry["data_offsets"] for name, entry in self._file.header.items()}
        return sum(self.shard.num_bytes(name, int(end) - int(start)) for name, (start, end) in offsets.items())

    def tensor(self, name: str) -> torch.Tensor:
        tensor = self._file.tensor(name)
        if tuple(tensor.shape) != self._shapes[name]:
            raise ModelNotSupported(f"tensor {name} has shape {tuple(tensor.shape)}, expected {self._shapes[name]}")
        return self.shard.part(name, tensor)

    def find(self, name: str) -> torch.Tensor | None:
        """None if this model, or this rank, has no such tensor (a bias, mostly)."""
        return self.tensor(name) if name in self._shapes and self.shard.has(name) else None
