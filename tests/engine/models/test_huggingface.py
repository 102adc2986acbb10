"""What is read from a Hugging Face directory, and what is refused in one sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import ModelConfig, RopeConfig
from engine.errors import ModelNotSupported
from engine.models.fingerprint import find_source
from engine.models.huggingface import model_config
from engine.models.prepare import prepare
from engine.models.safetensors_file import SafetensorsFile
from engine.prepared import PreparedModel
from tests.tiny_model import make_tiny


def ready(source: Path) -> PreparedModel:
    return prepare(str(source), source.parent / "state", "float32", lambda *_: None)


def refusal(source: Path) -> str:
    with pytest.raises(ModelNotSupported) as raised:
        ready(source)
    return str(raised.value)


def change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def config_of(source: Path) -> dict[str, Any]:
    return dict(json.loads((source / "config.json").read_text()))


def test_shards_are_one_model(tmp_path: Path) -> None:
    whole, sharded = make_tiny(tmp_path / "whole"), make_tiny(tmp_path / "sharded", num_shards=3)
    files = [SafetensorsFile(ready(source).weights_path("float32")) for source in (whole, sharded)]
    assert files[0].shapes == files[1].shapes
    assert all(torch.equal(files[0].tensor(name), files[1].tensor(name)) for name in files[0].shapes)


def test_a_missing_shard(tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "tiny", num_shards=3)
    (source / "model-00002-of-00003.safetensors").unlink()
    assert refusal(source) == f"{source}: 1 of 3 shards are missing, first model-00002-of-00003.safetensors"


def test_missing_files(tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "tiny")
    (source / "model.safetensors").rename(source / "model.bin")
    assert refusal(source) == f"{source} has no .safetensors file"
    (source / "config.json").unlink()
    assert refusal(source) == f"{source} has no config.json"


def test_no_tokenizer(tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "tiny")
    (source / "tokenizer.json").unlink()
    assert refusal(source).startswith(f"{source} has no tokenizer.json, and none can be made: ")


def test_a_config_that_is_not_json_or_lacks_a_field(tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "tiny")
    config = config_of(source)
    del config["hidden_size"]
    (source / "config.json").write_text(json.dumps(config))
    assert refusal(source) == f"{source}/config.json has no hidden_size"
    (source / "config.json").write_text("{")
    assert refusal(source).startswith(f"{source}/config.json is not JSON: ")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architecture GPT2LMHeadModel is not one of LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, "
            "Qwen3ForCausalLM",
        ),
        ({"architectures": None}, "architecture none is not one of LlamaForCausalLM"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised safetensors (awq) cannot be served"),
        ({"hidden_act": "gelu"}, "activation gelu is not silu"),
        ({"partial_rotary_factor": 0.5}, "partial rotary embeddings cannot be served"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
            "RoPE type yarn is not one of default, linear, llama3",
        ),
    ],
)
def test_models_that_would_be_served_wrongly(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    source = make_tiny(tmp_path / "tiny")
    change(source / "config.json", **changes)
    assert sentence in refusal(source)


def test_tensors_unset_unread_or_of_another_shape(tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "tiny")
    weights = source / "model.safetensors"
    tensors = load_file(weights)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({k: v for k, v in tensors.items() if k != name}, weights)
    assert refusal(source) == f"{source} has no tensor {name} (1 of 20 are missing)"
    save_file({**tensors, "model.layers.1.mlp.extra.weight": torch.ones(2)}, weights)
    assert refusal(source) == (f"{source} has 1 tensors that would not be read, first model.layers.1.mlp.extra.weight")
    save_file({**tensors, name: torch.ones(2, 3)}, weights)
    assert refusal(source) == f"tensor {name} has shape (2, 3), expected (128, 64)"
    save_file({**tensors, name: torch.ones(128, 64, dtype=torch.int8)}, weights)
    assert refusal(source) == (f"tensor {name} of {weights} is stored as I8: quantised safetensors cannot be served")
    # tables that older exporters wrote are computed here
    save_file({**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, weights)
    ready(source)


def test_the_older_spelling_of_rope(tmp_path: Path) -> None:
    config = config_of(make_tiny(tmp_path / "tiny"))
    del config["rope_parameters"]
    assert model_config({**config, "rope_theta": 5e5}, tmp_path).rope == RopeConfig(theta=5e5)
    scaling = {"type": "linear", "factor": 2.0}
    linear = model_config({**config, "rope_theta": 1e4, "rope_scaling": scaling}, tmp_path).rope
    assert linear == RopeConfig(theta=1e4, kind="linear", factor=2.0)
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    llama3 = model_config({**config, "rope_theta": 5e5, "rope_scaling": scaling}, tmp_path).rope
    assert llama3 == RopeConfig(theta=5e5, kind="llama3", factor=32.0)


def test_biases_and_norms_of_each_family(tmp_path: Path) -> None:
    def settings(config: ModelConfig) -> tuple[bool, bool, bool, bool]:
        return config.attention_bias, config.attention_output_bias, config.mlp_bias, config.qk_norm

    config = config_of(make_tiny(tmp_path / "tiny"))
    config.update(attention_bias=True, mlp_bias=True)
    assert settings(model_config(config, tmp_path)) == (True, True, True, False)
    expected = {
        "MistralForCausalLM": (False, False, False, False),
        "Qwen2ForCausalLM": (True, False, False, False),
        "Qwen3ForCausalLM": (True, True, False, True),
    }
    for architecture, flags in expected.items():
        assert settings(model_config({**config, "architectures": [architecture]}, tmp_path)) == flags


def test_a_sliding_window_is_served_up_to_its_length(tmp_path: Path) -> None:
    """Within the window it is full attention."""
    config = config_of(make_tiny(tmp_path / "tiny", "mistral"))
    assert model_config(config, tmp_path).max_position_embeddings == 512
    assert model_config({**config, "sliding_window": 64}, tmp_path).max_position_embeddings == 64
    qwen = {**config, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 64}
    assert model_config({**qwen, "use_sliding_window": False}, tmp_path).max_position_embeddings == 512
    assert model_config({**qwen, "use_sliding_window": True}, tmp_path).max_position_embeddings == 64


def test_templates_wherever_they_are_kept(tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "tiny", chat_template=None)
    assert ready(source).chat_template is None
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    change(source / "tokenizer_config.json", chat_template=named)
    assert ready(source).chat_template == "D"
    (source / "chat_template.jinja").write_text("J")
    assert ready(source).chat_template == "J"


def test_tokens_may_be_objects(tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "tiny")
    change(source / "tokenizer_config.json", bos_token={"content": "<|endoftext|>", "special": True})
    assert ready(source).manifest.bos_token_id == 0


def test_a_hub_id_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    def unreachable(repository: str, **kwargs: Any) -> str:
        raise LocalEntryNotFoundError("no network\nand much more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(ModelNotSupported, match=r"^owner/name cannot be downloaded from the hub: no network$"):
        find_source("owner/name")


def test_a_hub_id_is_the_models_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "snapshot")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repository, **kwargs: str(source))
    model = prepare("owner/name", tmp_path / "state", "float32", lambda *_: None)
    assert model.manifest.name == "owner/name"
    assert model.path.name.startswith("owner--name-")
