"""Reads a Hugging Face directory: configuration, safetensors (one file or shards), tokenizer, chat template."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from engine.config import ModelConfig, RopeConfig
from engine.errors import ModelNotSupported
from engine.models.safetensors_file import SafetensorsFile

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class HuggingFaceSource:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._config = read_json(path / "config.json")
        self._generation = _read_json_if_there(path / "generation_config.json")
        self._tokenizer_config = _read_json_if_there(path / "tokenizer_config.json")
        self.config = model_config(self._config, path)
        self._files = _open_shards(path)
        self._file_of = {name: file for file in self._files for name in file.header}

    @property
    def tensor_names(self) -> set[str]:
        return set(self._file_of)

    def tensors(self, names: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in sorted(names):
            yield name, self._file_of[name].tensor(name)

    @property
    def chat_template(self) -> str | None:
        jinja = self.path / "chat_template.jinja"
        if jinja.is_file():
            return jinja.read_text()
        template = self._tokenizer_config.get("chat_template")
        if template is None:
            template = _read_json_if_there(self.path / "chat_template.json").get("chat_template")
        if isinstance(template, list):  # several named templates
            template = {t["name"]: t["template"] for t in template}.get("default")
        return template

    @property
    def bos_token(self) -> str | None:
        return _token_text(self._tokenizer_config.get("bos_token"))

    @property
    def eos_token(self) -> str | None:
        return _token_text(self._tokenizer_config.get("eos_token"))

    @property
    def eos_token_ids(self) -> list[int]:
        """From configuration and generation configuration, in this order."""
        ids: list[int] = []
        for source in (self._config, self._generation):
            value = source.get("eos_token_id")
            ids += value if isinstance(value, list) else [] if value is None else [value]
        return ids

    @property
    def add_bos(self) -> bool | None:
        """None: the tokenizer's own post-processor decides."""
        return self._tokenizer_config.get("add_bos_token")

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        return {key: self._generation[key] for key in SAMPLING_DEFAULTS if self._generation.get(key) is not None}

    def tokenizer_json(self) -> str:
        path = self.path / "tokenizer.json"
        if path.is_file():
            return path.read_text()
        # transformers converts the older formats; it is loaded only where it is needed, as it is slow to load
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(self.path)).backend_tokenizer
        except (OSError, ValueError, ImportError, AttributeError) as e:
            raise ModelNotSupported(f"{self.path} has no tokenizer.json, and none can be made: {e}") from e
        return str(tokenizer.to_str())


def model_config(config: dict[str, Any], path: Path) -> ModelConfig:
    """From config.json as any version of transformers wrote it. Raises ModelNotSupported for what would be served
    wrongly."""
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in ARCHITECTURES:
        raise ModelNotSupported(f"{path}: architecture {architecture} is not one of {', '.join(ARCHITECTURES)}")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "of unknown method")
        raise ModelNotSupported(f"{path}: quantised safetensors ({method}) cannot be served; a GGUF file can")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelNotSupported(f"{path}: activation {config['hidden_act']} is not silu")
    rope = config.get("rope_parameters") or {}
    if config.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelNotSupported(f"{path}: partial rotary embeddings cannot be served")
    try:
        num_heads = config["num_attention_heads"]
        qwen3 = architecture == "Qwen3ForCausalLM"
        attention_bias = bool(config.get("attention_bias", False)) and architecture != "MistralForCausalLM"
        return ModelConfig(
            architecture=architecture,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=config.get("head_dim") or (128 if qwen3 else config["hidden_size"] // num_heads),
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            max_position_embeddings=_context_length(config, architecture),
            rope=rope_config(config, path),
            tie_word_embeddings=config.get("tie_word_embeddings", False),
            attention_bias=architecture == "Qwen2ForCausalLM" or attention_bias,
            attention_output_bias=architecture != "Qwen2ForCausalLM" and attention_bias,
            mlp_bias=bool(config.get("mlp_bias", False)) and architecture == "LlamaForCausalLM",
            qk_norm=qwen3,
        )
    except KeyError as e:
        raise ModelNotSupported(f"{path}/config.json has no {e.args[0]}") from None


def rope_config(config: dict[str, Any], path: Path) -> RopeConfig:
    """transformers 5 keeps everything in `rope_parameters`; before it was `rope_theta` and `rope_scaling`."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=float(rope["factor"]))
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind="llama3",
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
        )
    raise ModelNotSupported(f"{path}: RoPE type {kind} is not one of default, linear, llama3")


def _context_length(config: dict[str, Any], architecture: str) -> int:
    """A sliding window is served up to its length, where it is the same as full attention."""
    length = int(config.get("max_position_embeddings", 2048))
    window = config.get("sliding_window")
    uses_window = architecture == "MistralForCausalLM" or config.get("use_sliding_window", False)
    return min(length, window) if uses_window and window else length


def _open_shards(path: Path) -> list[SafetensorsFile]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        missing = [name for name in names if not (path / name).is_file()]
        if missing:
            raise ModelNotSupported(f"{path}: {len(missing)} of {len(names)} shards are missing, first {missing[0]}")
    else:
        names = sorted(file.name for file in path.glob("*.safetensors"))
        if "model.safetensors" in names:
            names = ["model.safetensors"]
    if not names:
        raise ModelNotSupported(f"{path} has no .safetensors file")
    return [SafetensorsFile(path / name) for name in names]


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelNotSupported(f"{path.parent} has no {path.name}") from None
    except ValueError as e:
        raise ModelNotSupported(f"{path} is not JSON: {e}") from None
    if not isinstance(value, dict):
        raise ModelNotSupported(f"{path} is not a JSON object")
    return value


def _read_json_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _token_text(value: Any) -> str | None:
    """A token in tokenizer_config.json is a string or an object with its content."""
    return value.get("content") if isinstance(value, dict) else value
