"""The decoder as one C++ call a step: the same model as `decoder.Decoder`, its weights packed by kernels.cpu.native.

The residual stream is fp32, and linears, norms, rotation and attention round to the weights' dtype only where they
hand a matrix to the next product.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.models.rope import rope_table
from engine.models.weights import Weights
from kernels.batch import AttentionBatch, Int32Array, KVQuantisation, KVShape
from kernels.cpu.native import (
    LAYER_BIASES,
    LAYER_NORMS,
    LAYER_WEIGHTS,
    DecoderShape,
    NativeDecoder,
    NativeLibrary,
    StepArrays,
)
from kernels.kv_format import cache_dtype, layer_sizes

if TYPE_CHECKING:
    # for the types alone: the models run where msgspec is not installed
    from engine.config import ModelConfig

_NAMES = {
    **{name: f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")},
    **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
_NORMS = {
    "input_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}


class PackedDecoder:
    """Takes and gives what `Decoder` does; hidden states are fp32, and valid until the next step."""

    def __init__(
        self,
        config: "ModelConfig",
        weights: Weights,
        library: NativeLibrary,
        num_positions: int,
        block_size: int,
        *,
        num_threads: int,
        huge_pages: bool = True,
        quantisation: KVQuantisation | None = None,
    ) -> None:
        """quantisation: of the cache."""
        self.config = config
        shape = DecoderShape(
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            rms_norm_eps=config.rms_norm_eps,
            block_size=block_size,
            quantisation=quantisation,
        )
        self._native = NativeDecoder(library, shape, num_threads, huge_pages=huge_pages)
        self.backend = library.path.stem
        self.touch = library.touch
        self._embedding = weights.tensor("model.embed_tokens.weight").clone()
        self._cosines, self._sines = (t.contiguous() for t in rope_table(config.rope, config.head_dim, num_positions))
        head = self._embedding if config.tie_word_embeddings else weights.tensor("lm_head.weight").contiguous()
        norm = weights.tensor("model.norm.weight").float()
        tensors = (self._embedding, head, norm, self._cosines, self._sines)
        self._native.set_outer(*(tensor.data_ptr() for tensor in tensors), num_positions=num_positions)
        for i in range(config.num_layers):
            self._set_layer(i, weights)
        self._residual = torch.empty(0, config.hidden_size, dtype=torch.float32)
        self._logits = torch.empty(0, config.vocab_size, dtype=torch.float32)

    def _set_layer(self, i: int, weights: Weights) -> None:
        prefix = f"model.layers.{i}."
        tensors: dict[str, torch.Tensor] = {}
        for name in LAYER_WEIGHTS:
            tensors[name] = weights.tensor(f"{prefix}{_NAMES[name]}.weight").contiguous()
        for name in LAYER_BIASES:
            bias = weights.find(f"{prefix}{_NAMES[name.removesuffix('_bias')]}.bias")
            if bias is not None:
                tensors[name] = bias.float().contiguous()
        for name in LAYER_NORMS:
            norm = weights.find(f"{prefix}{_NORMS[name]}.weight")
            if norm is not None:
                tensors[name] = norm.float().contiguous()
        self._native.set_layer(i, {name: tensor.data_ptr() for name, tensor in tensors.items()})

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    def plan(self, batch: AttentionBatch, shape: KVShape) -> StepArrays:
        return StepArrays.of(batch)

    def forward(
        self,
        token_ids: Int32Array,
        positions: Int32Array,
        kv: torch.Tensor,
        plan: StepArrays,
        num_decodes: int,
        num_layers: int | None = None,
    ) -> torch.Tensor:
        """As `Decoder.forward`; the residual stream behind the last layer, or behind `num_layers`."""
        num_rows = len(token_ids)
        self._assert_layout(kv, self._native.shape.num_layers)
        for numbers in (token_ids, positions):
            assert numbers.shape == (num_rows,)
            assert numbers.dtype == np.int32
            assert numbers.flags.c_contiguous
        if num_rows > self._residual.shape[0]:
            self._residual = torch.empty(num_rows, self.config.hidden_size, dtype=torch.float32)
        self._native.forward(
            token_ids,
            positions,
            plan,
            kv.data_ptr(),
            kv.shape[2],
            self._residual.data_ptr(),
            num_layers,
        )
        return self._residual[:num_rows]

    def decode_attention(
        self, layer: int, q: torch.Tensor, kv: torch.Tensor, plan: StepArrays, out: torch.Tensor
    ) -> None:
        self._assert_layout(kv, kv.shape[0])
        assert layer < kv.shape[0]
        assert q.dtype == out.dtype == self.dtype
        assert q.shape == out.shape
        assert q.is_contiguous()
        assert out.is_contiguous()
        self._native.attention(layer, plan, kv.data_ptr(), kv.shape[2], q.data_ptr(), out.data_ptr())

    def _assert_layout(self, kv: torch.Tensor, num_layers: int) -> None:
        """Addresses are all that the C++ side gets."""
        shape = self._native.shape
        of_layer = KVShape(kv.shape[2], shape.num_kv_heads, shape.block_size, shape.head_dim, shape.quantisation)
        assert kv.shape == (num_layers, *layer_sizes(of_layer))
        assert kv.dtype == cache_dtype(of_layer, self.dtype)
        assert kv.is_contiguous()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: rows of what `forward` returned. fp32 [rows, vocab_size], valid until the next call."""
        hidden = hidden.contiguous()
        num_rows = hidden.shape[0]
        if num_rows > self._logits.shape[0]:
            self._logits = torch.empty(num_rows, self.config.vocab_size, dtype=torch.float32)
        self._native.logits(hidden.data_ptr(), num_rows, self._logits.data_ptr())
        return self._logits[:num_rows]

    def greedy(self, hidden: torch.Tensor) -> list[int]:
        """As `logits`, but only the id of each row's largest; -1 where it is not finite."""
        hidden = hidden.contiguous()
        ids = np.empty(hidden.shape[0], dtype=np.int32)
        self._native.greedy(hidden.data_ptr(), len(ids), ids.ctypes.data)
        drawn: list[int] = ids.tolist()
        return drawn
