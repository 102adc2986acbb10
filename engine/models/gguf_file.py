"""Reads a GGUF file of the Llama family: configuration, dequantised tensors by Hugging Face's names, tokenizer.

llama.cpp rotates neighbouring pairs where Hugging Face rotates the two halves of a head, so its converter permutes
the rows of q and k of the architecture `llama`; this is undone here.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from engine.config import ModelConfig, RopeConfig
from engine.errors import ModelNotSupported
from engine.models import gguf_tokenizer

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"


class GGUFSource:
    """The same interface as HuggingFaceSource."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        try:
            self._reader = GGUFReader(path)
        except (ValueError, OSError, IndexError) as e:
            raise ModelNotSupported(f"{path} cannot be read as GGUF: {e}") from e
        self.path = path
        self._fields: dict[str, Any] = {key: field.contents() for key, field in self._reader.fields.items()}
        if int(self._fields.get("split.count", 1)) > 1:
            raise ModelNotSupported(f"{path} is one part of {self._fields['split.count']}: join the parts first")
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._names = {
            hf_name(name): name for name in self._tensors if name not in (_ROPE_FACTORS, "rope_factors_long.weight")
        }
        self.config = self._model_config()

    @property
    def tensor_names(self) -> set[str]:
        return set(self._names)

    def tensors(self, names: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
        permuted = {"q_proj": self.config.num_heads, "k_proj": self.config.num_kv_heads}
        for name in sorted(names):
            tensor = torch.from_numpy(self._dequantised(self._names[name]))
            projection = name.split(".")[-2]
            if self._architecture == "llama" and projection in permuted:
                tensor = undo_permutation(tensor, permuted[projection])
            yield name, tensor

    def _dequantised(self, name: str) -> Any:
        from gguf.quants import dequantize

        tensor = self._tensors[name]
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            kind = tensor.tensor_type.name
            raise ModelNotSupported(f"tensor {name} of {self.path} is quantised as {kind}, which is unknown") from None
        # GGUF lists the fastest dimension first; the values are a fresh array unless they were plain fp32
        return values.reshape([int(n) for n in reversed(tensor.shape)]).copy()

    @property
    def chat_template(self) -> str | None:
        return self._fields.get("tokenizer.chat_template")

    def _token(self, key: str) -> str | None:
        token_id = self._fields.get(f"tokenizer.ggml.{key}_token_id")
        return None if token_id is None else str(self._fields["tokenizer.ggml.tokens"][token_id])

    @property
    def bos_token(self) -> str | None:
        return self._token("bos")

    @property
    def eos_token(self) -> str | None:
        return self._token("eos")

    @property
    def eos_token_ids(self) -> list[int]:
        keys = ("eos", "eot", "eom")
        ids = [self._fields.get(f"tokenizer.ggml.{key}_token_id") for key in keys]
        return [int(token_id) for token_id in ids if token_id is not None]

    @property
    def add_bos(self) -> bool | None:
        default = self._fields.get("tokenizer.ggml.model") == "llama" or self._fields.get("tokenizer.ggml.pre") in (
            "llama-bpe",
            "llama3",
        )
        return bool(self._fields.get("tokenizer.ggml.add_bos_token", default))

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        return {}

    def tokenizer_json(self) -> str:
        return gguf_tokenizer.tokenizer_json(self._fields)

    @property
    def _architecture(self) -> str:
        return str(self._fields.get("general.architecture"))

    def _model_config(self) -> ModelConfig:
        architecture = self._architecture
        if architecture not in ARCHITECTURES:
            raise ModelNotSupported(
                f"{self.path}: GGUF architecture {architecture} is not one of {', '.join(ARCHITECTURES)}"
            )

        def value(key: str, default: Any = None) -> Any:
            found = self._fields.get(f"{architecture}.{key}", default)
            if found is None:
                raise ModelNotSupported(f"{self.path} has no field {architecture}.{key}")
            return found

        if value("expert_count", 0):
            raise ModelNotSupported(f"{self.path}: mixtures of experts cannot be served")
        if "token_embd.weight" not in self._tensors:
            raise ModelNotSupported(f"{self.path} has no tensor token_embd.weight")
        num_heads, hidden_size = value("attention.head_count"), value("embedding_length")
        head_dim = value("attention.key_length", hidden_size // num_heads)
        if value("rope.dimension_count", head_dim) != head_dim:
            raise ModelNotSupported(f"{self.path}: partial rotary embeddings cannot be served")
        return ModelConfig(
            architecture=ARCHITECTURES[architecture],
            vocab_size=int(self._tensors["token_embd.weight"].shape[1]),
            hidden_size=hidden_size,
            intermediate_size=value("feed_forward_length"),
            num_layers=value("block_count"),
            num_heads=num_heads,
            num_kv_heads=value("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            # stored in fp32, of which the nearest short decimal was meant
            rms_norm_eps=float(f"{value('attention.layer_norm_rms_epsilon'):.6g}"),
            max_position_embeddings=value("context_length"),
            rope=self._rope(value, head_dim),
            tie_word_embeddings="output.weight" not in self._tensors,
            attention_bias="blk.0.attn_q.bias" in self._tensors,
            attention_output_bias="blk.0.attn_output.bias" in self._tensors,
            mlp_bias="blk.0.ffn_gate.bias" in self._tensors,
            qk_norm="blk.0.attn_q_norm.weight" in self._tensors,
        )

    def _rope(self, value: Any, head_dim: int) -> RopeConfig:
        theta = float(value("rope.freq_base", 10000.0))
        kind = value("rope.scaling.type", "none")
        if _ROPE_FACTORS in self._tensors:
            return llama3_rope(theta, head_dim, self._dequantised(_ROPE_FACTORS).tolist(), self.path)
        if kind == "none":
            return RopeConfig(theta=theta)
        if kind == "linear":
            return RopeConfig(theta=theta, kind="linear", factor=float(value("rope.scaling.factor")))
        raise ModelNotSupported(f"{self.path}: RoPE scaling {kind} is not one of none, linear, llama3")


def hf_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; unknown names are returned as they are."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    return name


def undo_permutation(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of each head from pair order (0, d/2, 1, d/2 + 1, …) back to halves. [heads * d] or [heads * d, in]."""
    rest = tensor.shape[1:]
    pairs = tensor.reshape(num_heads, -1, 2, *rest)
    return pairs.transpose(1, 2).reshape(tensor.shape)


def llama3_rope(theta: float, head_dim: int, factors: list[float], path: Path) -> RopeConfig:
    """Finds the parameters behind the divisors of the frequencies, which is all that GGUF keeps of them.

    The published models all use low 1, high 4, original context 8192; anything else is refused.
    """
    rope = RopeConfig(theta=theta, kind="llama3", factor=float(max(factors)))
    from engine.models.rope import inverse_frequencies

    plain = inverse_frequencies(RopeConfig(theta=theta), head_dim)
    expected = (plain / inverse_frequencies(rope, head_dim)).tolist()
    if len(factors) != len(expected) or not all(
        math.isclose(a, b, rel_tol=1e-4) for a, b in zip(factors, expected, strict=True)
    ):
        raise ModelNotSupported(f"{path}: the RoPE factors are not those of a Llama 3 model")
    return rope
