"""The decoder of the Llama family: Llama, SmolLM2, Mistral, Qwen2 and Qwen3 are settings of it.

Residual stream x [rows, hidden]; per layer x += attention(norm(x)), x += mlp(norm(x)). Rows of all sequences of a step
lie one after the other; which tokens each may see is in the kernels' plan.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from engine.models.rope import rope_table
from engine.models.weights import Weights
from kernels.batch import AttentionBatch, Int32Array, KVShape
from kernels.fixed_step import FixedStep, StepLimits
from kernels.interface import Kernels

if TYPE_CHECKING:
    # for the types alone: the models run where msgspec is not installed
    from engine.config import ModelConfig


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    input_norm: torch.Tensor
    qkv: Any
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Any
    post_attention_norm: torch.Tensor
    gate: Any
    up: Any
    down: Any


class Decoder:
    """Weights packed for one backend, and the forward pass over them."""

    def __init__(
        self, config: "ModelConfig", weights: Weights, kernels: Kernels, device: torch.device, num_positions: int
    ) -> None:
        """config: of this rank's part of the model, as `weights` are."""
        self.config = config
        self._kernels = kernels
        self._device = device

        def own(name: str) -> torch.Tensor:
            return weights.tensor(name).to(device, copy=True)

        self._embedding = own("model.embed_tokens.weight")
        self._layers = [_layer(i, weights, kernels, own, config) for i in range(config.num_layers)]
        self._norm = own("model.norm.weight")
        head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        # no other rank draws tokens
        self._head = kernels.pack_linear(weights.tensor(head)) if weights.shard.is_first else None
        cosines, sines = rope_table(config.rope, config.head_dim, num_positions)
        self._cosines, self._sines = cosines.to(device), sines.to(device)

    @property
    def kernels_name(self) -> str:
        return self._kernels.name

    @property
    def backend(self) -> str:
        return f"{self._kernels.name} torch-{torch.__version__}"

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    def plan(self, batch: AttentionBatch, shape: KVShape) -> Any:
        """What `forward` takes as its plan; shape is that of one layer's cache."""
        return self._kernels.plan(batch, shape, self.dtype)

    def fixed_step(self, limits: StepLimits, shape: KVShape) -> FixedStep | None:
        """For `forward_on_device` and `logits`; None: these kernels have none."""
        return self._kernels.fixed_step(limits, shape, self.dtype, self.config.vocab_size)

    def forward(
        self, token_ids: Int32Array, positions: Int32Array, kv: torch.Tensor, plan: Any, num_decodes: int
    ) -> torch.Tensor:
        """Writes K and V of the rows and returns the residual stream, [rows, hidden], before the last norm.

        token_ids, positions: [rows], the decode rows first. kv: [num_layers, 2, num_blocks, num_kv_heads,
        block_size, head_dim].
        """
        ids, places = (torch.from_numpy(numbers).to(self._device) for numbers in (token_ids, positions))
        return self.forward_on_device(ids, places, kv, plan, num_decodes)

    def forward_on_device(
        self, token_ids: torch.Tensor, positions: torch.Tensor, kv: torch.Tensor, plan: Any, num_decodes: int
    ) -> torch.Tensor:
        """`forward` of ids and positions, int32 or int64, that lie on the device already: nothing here is copied from
        the host, so that it can be captured in a graph."""
        cosines, sines = self._cosines[positions].unsqueeze(1), self._sines[positions].unsqueeze(1)
        x = self._embedding[token_ids]
        attended = x.new_empty(x.shape[0], self.config.num_heads, self.config.head_dim)
        normed = self._kernels.rms_norm(x, self._layers[0].input_norm, self.config.rms_norm_eps)
        for i, layer_kv in enumerate(kv.unbind(0)):
            self._attend(self._layers[i], normed, layer_kv, plan, num_decodes, cosines, sines, attended)
            next_norm = self._layers[i + 1].input_norm if i + 1 < len(self._layers) else None
            x, normed = self._behind_attention(self._layers[i], x, attended.flatten(1), next_norm)
        return x

    def decode_attention(self, layer: int, q: torch.Tensor, kv: torch.Tensor, plan: Any, out: torch.Tensor) -> None:
        self._kernels.decode_attention(q, kv[layer], plan, out)

    def _attend(
        self,
        layer: DecoderLayer,
        normed: torch.Tensor,
        kv: torch.Tensor,
        plan: Any,
        num_decodes: int,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        attended: torch.Tensor,
    ) -> None:
        kernels, config = self._kernels, self.config
        eps = config.rms_norm_eps
        num_rows = normed.shape[0]
        qkv = kernels.linear(normed, layer.qkv)
        heads = qkv.view(num_rows, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = heads[:, : config.num_heads], heads[:, config.num_heads : config.num_heads + config.num_kv_heads]
            q.copy_(kernels.rms_norm(q, layer.q_norm, eps))
            k.copy_(kernels.rms_norm(k, layer.k_norm, eps))
        q = kernels.rope_and_write_kv(heads, cosines, sines, kv, plan)
        if num_decodes:
            kernels.decode_attention(q[:num_decodes], kv, plan, attended[:num_decodes])
        if num_rows > num_decodes:
            kernels.extend_attention(q[num_decodes:], kv, plan, attended[num_decodes:])

    def _behind_attention(
        self, layer: DecoderLayer, x: torch.Tensor, attended: torch.Tensor, next_norm: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream behind the layer, and that as the next layer reads it; behind the last one itself."""
        kernels, eps = self._kernels, self.config.rms_norm_eps
        x, normed = kernels.linear_and_norm(attended, layer.o, x, layer.post_attention_norm, eps)
        activated = kernels.swiglu(normed, layer.gate, layer.up)
        if next_norm is None:
            x = kernels.linear(activated, layer.down, residual=x)
            return x, x
        return kernels.linear_and_norm(activated, layer.down, x, next_norm, eps)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden: rows of what `forward` returned. fp32 [rows, vocab_size], `out` if given. Of the first rank only."""
        assert self._head is not None, "this rank has no head"
        normed = self._kernels.rms_norm(hidden, self._norm, self.config.rms_norm_eps)
        logits = self._kernels.linear(normed, self._head)
        return logits.float() if out is None else out.copy_(logits)


def _layer(i: int, weights: Weights, kernels: Kernels, own: Any, config: "ModelConfig") -> DecoderLayer:
    prefix = f"model.layers.{i}."

    def linear(*names: str) -> Any:
        """Several projections of one input are one product, their rows one under the other."""
        parts = [weights.tensor(f"{prefix}{name}.weight") for name in names]
        biases = [b for name in names if (b := weights.find(f"{prefix}{name}.bias")) is not None]
        weight = parts[0] if len(parts) == 1 else torch.cat(parts)
        bias = None if not biases else biases[0] if len(biases) == 1 else torch.cat(biases)
        return kernels.pack_linear(weight, bias)

    return DecoderLayer(
        input_norm=own(prefix + "input_layernorm.weight"),
        qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        q_norm=own(prefix + "self_attn.q_norm.weight") if config.qk_norm else None,
        k_norm=own(prefix + "self_attn.k_norm.weight") if config.qk_norm else None,
        o=linear("self_attn.o_proj"),
        post_attention_norm=own(prefix + "post_attention_layernorm.weight"),
        gate=linear("mlp.gate_proj"),
        up=linear("mlp.up_proj"),
        down=linear("mlp.down_proj"),
    )
