"""What a step of a decoder cannot do without: bytes that come from memory or go there, and floating point operations.

Weights are read once a step, KV of a shared trunk once for all rows that read it, KV of a row's own tokens once a row.
Keys and values of new tokens are written, and so are the logits (fp32) of rows that sample. Activations are left out:
they stay in the processor's caches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # for the types alone: GPUs are measured where msgspec is not installed
    from engine.config import ModelConfig

LOGIT_BYTES = 4


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """One token for each of `num_rows` sequences, dealt out evenly to `num_trunks` trunks (0: none, all is own)."""

    num_rows: int
    trunk_tokens: int
    own_tokens: int
    """Behind the trunk, for each row, its newest token included."""
    num_trunks: int = 1

    @property
    def context_tokens(self) -> int:
        """What a row sees, its own token included."""
        return (self.trunk_tokens if self.num_trunks else 0) + self.own_tokens


@dataclass(frozen=True, slots=True)
class Work:
    weight_bytes: int
    trunk_bytes: int
    own_bytes: int
    """KV read for single rows."""
    written_bytes: int
    """KV and logits."""
    flops: int

    @property
    def num_bytes(self) -> int:
        return self.weight_bytes + self.trunk_bytes + self.own_bytes + self.written_bytes

    def __add__(self, other: "Work") -> "Work":
        return Work(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    def floor_s(self, *, bytes_per_s: float, flops_per_s: float) -> float:
        """If moving and computing overlap wholly."""
        return max(self.num_bytes / bytes_per_s, self.flops / flops_per_s)


def layer_parameters(config: "ModelConfig") -> int:
    """Of all layers together, norms included; biases, where a model has them, are too few to count."""
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = config.hidden_size * (2 * q_size + 2 * kv_size)
    norms = 2 * config.hidden_size + (2 * config.head_dim if config.qk_norm else 0)
    return config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size + norms)


def head_parameters(config: "ModelConfig") -> int:
    """The last norm and the head."""
    return config.hidden_size + config.vocab_size * config.hidden_size


def num_parameters(config: "ModelConfig") -> int:
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return layer_parameters(config) + head_parameters(config) + embedding


def decode_work(config: "ModelConfig", dtype_bytes: int, shape: DecodeShape) -> Work:
    kv_bytes = config.kv_bytes_per_token(config.head_dim * dtype_bytes)
    rows = shape.num_rows
    return Work(
        weight_bytes=(layer_parameters(config) + head_parameters(config)) * dtype_bytes,
        trunk_bytes=shape.num_trunks * shape.trunk_tokens * kv_bytes,
        own_bytes=rows * (shape.own_tokens - 1) * kv_bytes,
        written_bytes=rows * (kv_bytes + config.vocab_size * LOGIT_BYTES),
        flops=2 * rows * (layer_parameters(config) + head_parameters(config))
        + _attention_flops(config, rows * shape.context_tokens),
    )


def prefill_work(config: "ModelConfig", dtype_bytes: int, chunks: Sequence[int]) -> Work:
    """A prompt from position 0 on, one step for each chunk of tokens; the last token samples."""
    kv_bytes = config.kv_bytes_per_token(config.head_dim * dtype_bytes)
    work = Work(0, 0, 0, 0, 0)
    num_context = 0
    for i, num_tokens in enumerate(chunks):
        samples = i == len(chunks) - 1
        read = layer_parameters(config) + (head_parameters(config) if samples else 0)
        pairs = num_tokens * num_context + num_tokens * (num_tokens + 1) // 2
        work += Work(
            weight_bytes=read * dtype_bytes,
            trunk_bytes=0,
            own_bytes=num_context * kv_bytes,
            written_bytes=num_tokens * kv_bytes + samples * config.vocab_size * LOGIT_BYTES,
            flops=2 * num_tokens * layer_parameters(config)
            + 2 * samples * head_parameters(config)
            + _attention_flops(config, pairs),
        )
        num_context += num_tokens
    return work


def _attention_flops(config: "ModelConfig", num_pairs: int) -> int:
    """num_pairs: of a query and a token that it sees, whatever head and layer."""
    return 4 * config.num_layers * config.num_heads * config.head_dim * num_pairs
