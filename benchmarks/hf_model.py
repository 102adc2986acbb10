"""The weights of a prepared Llama as a model of transformers, to compare with."""

from typing import Any

import transformers
from safetensors.torch import load_file

from engine.prepared import PreparedModel


def load_hf_model(model: PreparedModel, dtype: str, *, device: str) -> Any:
    """A `LlamaForCausalLM` without any end of text, in `dtype`.

    Raises ValueError for another architecture or a scaled RoPE, which it would compute differently.
    """
    shape = model.manifest.config
    if shape.architecture != "LlamaForCausalLM" or shape.rope.kind != "default":
        raise ValueError(f"only a Llama with plain RoPE can be compared, got {shape.architecture}, {shape.rope.kind}")
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position_embeddings,
        rms_norm_eps=shape.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope.theta},
        tie_word_embeddings=shape.tie_word_embeddings,
        attention_bias=shape.attention_bias,
        mlp_bias=shape.mlp_bias,
        bos_token_id=None,
        eos_token_id=None,
    )
    hf_model = transformers.LlamaForCausalLM(config)
    weights = load_file(model.weights_path(dtype))
    missing, unexpected = hf_model.load_state_dict(weights, strict=False, assign=True)
    tied = {"lm_head.weight"} if shape.tie_word_embeddings else set()
    if set(missing) - tied or unexpected:
        raise ValueError(f"{model.path}: missing {sorted(set(missing) - tied)}, unexpected {sorted(unexpected)}")
    hf_model.tie_weights()
    return hf_model.to(device).eval()
