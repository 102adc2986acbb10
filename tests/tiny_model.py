"""Tiny random models in Hugging Face's layout, for tests that want a real engine in a fraction of a second. No torch.

The weights are random but large enough that every position's logits depend visibly on all tokens before it; the
tokenizer is a real byte-level BPE of a few hundred entries with ChatML's control tokens and template.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FAMILIES = {
    "llama": ("LlamaForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {"sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", {"use_sliding_window": False}),
    "qwen3": ("Qwen3ForCausalLM", {"use_sliding_window": False, "attention_bias": False}),
}
_CORPUS = (
    "The trunk is computed once and read by many chats. Hello, world! How are you today?",
    "A block holds sixteen tokens; a full block never changes. 0 1 2 3 4 5 6 7 8 9 10 100",
    "You are a helpful assistant of a small shop. Answer politely and briefly, in plain words.",
    "Wörter mit Umlauten: schön, größer, Straße. 日本語のテキスト。 emoji: 🙂 🚀",
    "def main():\n    return {'key': [1, 2, 3]}\n\n  two spaces and\ttabs",
)


def make_tokenizer(vocab_size: int = 384) -> Tokenizer:
    """Byte-level BPE: all 256 bytes, a few merges, the three control tokens first (ids 0, 1, 2)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS * 2, trainer)
    return tokenizer


def make_tiny(
    path: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    tie_word_embeddings: bool = True,
    head_in_file: bool | None = None,
    vocab_size: int = 384,
    hidden_size: int = 64,
    intermediate_size: int = 128,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    max_position_embeddings: int = 512,
    rope_parameters: dict[str, Any] | None = None,
    num_shards: int = 1,
    config_changes: dict[str, Any] | None = None,
    chat_template: str | None = CHATML,
) -> Path:
    """Writes a Hugging Face directory to `path` (created) and returns it.

    `head_in_file` says whether lm_head.weight is in the file; by default only an untied model has it. `num_shards` > 1
    splits the weights and writes an index.
    """
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(vocab_size)
    vocab_size = max(vocab_size, tokenizer.get_vocab_size())
    tokenizer.save(str(path / "tokenizer.json"))
    tokenizer_config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_position_embeddings,
    }
    if chat_template is not None:
        tokenizer_config["chat_template"] = chat_template
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (path / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": [2, 0]}))

    architecture, extra = FAMILIES[family]
    config = {
        "architectures": [architecture],
        "model_type": family,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": tie_word_embeddings,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
        "rope_parameters": rope_parameters or {"rope_type": "default", "rope_theta": 10000.0},
        **extra,
        **(config_changes or {}),
    }
    (path / "config.json").write_text(json.dumps(config))

    tensors = _random_weights(config, family, np.random.default_rng(seed))
    if head_in_file is None:
        head_in_file = not tie_word_embeddings
    if not head_in_file:
        del tensors["lm_head.weight"]
    elif tie_word_embeddings:
        # a tied model whose file repeats the embedding, as some exporters write it
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    _save(path, tensors, num_shards)
    return path


def _random_weights(config: dict[str, Any], family: str, rng: np.random.Generator) -> dict[str, np.ndarray]:
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    ffn = config["intermediate_size"]

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    def norm(size: int) -> np.ndarray:
        return (1 + 0.1 * rng.standard_normal(size)).astype(np.float32)

    def bias(size: int) -> np.ndarray:
        return (0.3 * rng.standard_normal(size)).astype(np.float32)

    has_bias = family == "qwen2" or config.get("attention_bias", False)
    tensors = {"model.embed_tokens.weight": rng.standard_normal((config["vocab_size"], hidden)).astype(np.float32)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        tensors[layer + "input_layernorm.weight"] = norm(hidden)
        tensors[layer + "post_attention_layernorm.weight"] = norm(hidden)
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            tensors[f"{layer}self_attn.{name}_proj.weight"] = matrix(rows, hidden) * 2
            if has_bias:
                tensors[f"{layer}self_attn.{name}_proj.bias"] = bias(rows)
        if family == "qwen3":
            tensors[layer + "self_attn.q_norm.weight"] = norm(head_dim)
            tensors[layer + "self_attn.k_norm.weight"] = norm(head_dim)
        tensors[layer + "self_attn.o_proj.weight"] = matrix(hidden, q)
        if family == "llama" and config.get("attention_bias", False):
            tensors[layer + "self_attn.o_proj.bias"] = bias(hidden)
        for name, rows, columns in (("gate", ffn, hidden), ("up", ffn, hidden), ("down", hidden, ffn)):
            tensors[f"{layer}mlp.{name}_proj.weight"] = matrix(rows, columns)
            if config.get("mlp_bias", False):
                tensors[f"{layer}mlp.{name}_proj.bias"] = bias(rows)
    tensors["model.norm.weight"] = norm(hidden)
    tensors["lm_head.weight"] = matrix(config["vocab_size"], hidden)
    return tensors


def _save(path: Path, tensors: dict[str, np.ndarray], num_shards: int) -> None:
    if num_shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::num_shards]}
        save_file(part, path / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
