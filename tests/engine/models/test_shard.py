"""Which part of each tensor a rank has; together the parts are the model."""

import pytest
import torch

from engine.config import ModelConfig
from engine.errors import ModelNotSupported
from engine.models.prepare import prepare
from engine.models.shard import Shard, split_config
from engine.models.weights import Weights, expected_shapes
from engine.prepared import PreparedModel
from tests.tiny_model import make_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    """With every bias there can be, and a head of its own."""
    path = tmp_path_factory.mktemp("model")
    changes = {"attention_bias": True, "mlp_bias": True}
    tiny = make_tiny(path / "tiny", tie_word_embeddings=False, config_changes=changes)
    return prepare(str(tiny), path / "state", "float32", lambda *_: None)


def opened(model: PreparedModel, shard: Shard) -> Weights:
    return Weights(model.weights_path("float32"), model.manifest.config, shard)


def test_two_ranks_have_the_model_between_them(model: PreparedModel) -> None:
    whole, *ranks = (opened(model, shard) for shard in (Shard(), Shard(0, 2), Shard(1, 2)))
    kinds: dict[str, set[str]] = {"outputs": set(), "inputs": set(), "once": set(), "everywhere": set()}
    for name in expected_shapes(model.manifest.config):
        tensor = whole.tensor(name)
        parts = [part for rank in ranks if (part := rank.find(name)) is not None]
        if len(parts) == 1:
            kind = "once"
            assert ranks[0].find(name) is not None
            assert torch.equal(parts[0], tensor)
        elif parts[0].shape == tensor.shape:
            kind = "everywhere"
            assert all(torch.equal(part, tensor) for part in parts)
        else:
            kind = "outputs" if parts[0].shape[0] < tensor.shape[0] else "inputs"
            assert torch.equal(torch.cat(parts, 0 if kind == "outputs" else 1), tensor)
        kinds[kind].add(name.removeprefix("model.layers.0.").removeprefix("model.layers.1."))
    by_outputs = {f"self_attn.{p}_proj" for p in "qkv"} | {"mlp.gate_proj", "mlp.up_proj"}
    assert kinds == {
        "outputs": {f"{name}.{what}" for name in by_outputs for what in ("weight", "bias")},
        "inputs": {"self_attn.o_proj.weight", "mlp.down_proj.weight"},
        "once": {"self_attn.o_proj.bias", "mlp.down_proj.bias", "lm_head.weight"},
        "everywhere": {
            *("model.embed_tokens.weight", "model.norm.weight", "input_layernorm.weight"),
            "post_attention_layernorm.weight",
        },
    }


def test_a_rank_counts_the_bytes_it_has(model: PreparedModel) -> None:
    for shard in (Shard(), Shard(0, 2), Shard(1, 2)):
        weights = opened(model, shard)
        tensors = [weights.find(name) for name in expected_shapes(model.manifest.config)]
        assert weights.num_bytes == sum(t.numel() * t.itemsize for t in tensors if t is not None)


def test_the_shape_of_a_part(model: PreparedModel) -> None:
    config = model.manifest.config
    half = split_config(config, 2)
    assert half == config.replace(num_heads=2, num_kv_heads=1, intermediate_size=64)
    assert half.kv_bytes_per_token(4) * 2 == config.kv_bytes_per_token(4)
    assert split_config(config, 1) == config


@pytest.mark.parametrize(
    ("changes", "size", "sentence"),
    [
        ({}, 4, "tensor parallel 4 cannot split this model: it has 2 KV heads, which is no multiple of 4"),
        ({}, 3, "tensor parallel 3 cannot split this model: it has 2 KV heads, which is no multiple of 3"),
        (
            {"intermediate_size": 129},
            2,
            "tensor parallel 2 cannot split this model: it has 129 feed-forward features, which is no multiple of 2",
        ),
    ],
)
def test_what_cannot_be_split_is_one_sentence(
    model: PreparedModel, changes: dict[str, int], size: int, sentence: str
) -> None:
    config: ModelConfig = model.manifest.config
    with pytest.raises(ModelNotSupported) as raised:
        split_config(config.replace(**changes), size)
    assert str(raised.value) == sentence
