"""A tiny model written as llama.cpp writes it is, prepared, the same as its Hugging Face directory."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from engine.config import RopeConfig
from engine.errors import ModelNotSupported
from engine.models import gguf_tokenizer
from engine.models.gguf_file import hf_name, undo_permutation
from engine.models.prepare import prepare
from engine.models.rope import inverse_frequencies
from engine.models.safetensors_file import SafetensorsFile
from engine.prepared import PreparedModel
from tests.tiny_model import CHATML, make_tiny, make_tokenizer

HEADS = {"q_proj": 4, "k_proj": 2}
ENDS = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


def permuted(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """Halves to pairs, as llama.cpp's converter does."""
    halves = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def gguf_name(name: str) -> str:
    *_, part, kind = name.split(".")
    return f"blk.{name.split('.')[2]}.{PARTS[part]}.{kind}" if ".layers." in name else f"{ENDS[part]}.{kind}"


def write_gguf(
    path: Path, source: Path, architecture: str = "llama", *, extra: dict[str, np.ndarray] | None = None, **fields: Any
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_key_length(16)
    tokenizer = make_tokenizer()
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(fields.pop("pre", "default"))
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(0)
    writer.add_chat_template(CHATML)
    for key, value in fields.items():
        writer.add_key_value(key.replace("__", "."), value, gguf.GGUFValueType.get_type(value))
    for name, weights in load_file(source / "model.safetensors").items():
        if architecture == "llama" and (heads := HEADS.get(name.split(".")[-2])):
            weights = permuted(weights, heads)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(weights))
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def ready(source: Path) -> PreparedModel:
    return prepare(str(source), source.parent / "state", "float32", lambda *_: None)


@pytest.mark.parametrize(
    ("family", "architecture", "options"),
    [
        ("llama", "llama", {}),
        ("llama", "llama", {"tie_word_embeddings": False}),
        ("llama", "llama", {"config_changes": {"attention_bias": True}}),
        ("qwen2", "qwen2", {}),
        ("qwen3", "qwen3", {}),
    ],
)
def test_it_is_the_same_model(tmp_path: Path, family: str, architecture: str, options: dict[str, Any]) -> None:
    source = make_tiny(tmp_path / "tiny", family, **options)
    expected = ready(source)
    model = ready(write_gguf(tmp_path / "tiny.F32.gguf", source, architecture))
    assert model.manifest.config == expected.manifest.config
    assert (model.manifest.name, model.manifest.bos_token_id) == ("tiny", 1)
    assert model.manifest.eos_token_ids == (2, 0)
    assert model.chat_template == CHATML
    got, wanted = (SafetensorsFile(m.weights_path("float32")) for m in (model, expected))
    assert got.shapes == wanted.shapes
    for name in wanted.shapes:
        assert torch.equal(got.tensor(name), wanted.tensor(name)), name
    tokenizers = [Tokenizer.from_file(str(m.tokenizer_path)) for m in (model, expected)]
    for text in ("Hello, world! 123", "schön 🙂<|im_end|>\n<|im_start|>user", "  two\n\n\ttabs"):
        ids = [tokenizer.encode(text).ids for tokenizer in tokenizers]
        assert ids[0] == ids[1]
        assert tokenizers[0].decode(ids[0]) == tokenizers[1].decode(ids[1])


def test_rope_of_llama_3_is_found_behind_its_factors(tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "tiny")
    rope = RopeConfig(theta=500000.0, kind="llama3", factor=32.0)
    factors = (inverse_frequencies(RopeConfig(theta=500000.0), 16) / inverse_frequencies(rope, 16)).numpy()
    path = write_gguf(
        tmp_path / "llama3.gguf", source, extra={"rope_freqs.weight": factors}, llama__rope__freq_base=500000.0
    )
    assert ready(path).manifest.config.rope == rope
    path = write_gguf(tmp_path / "other.gguf", source, extra={"rope_freqs.weight": np.linspace(1, 3, 8, dtype="f4")})
    with pytest.raises(ModelNotSupported, match="the RoPE factors are not those of a Llama 3 model"):
        ready(path)


@pytest.mark.parametrize(
    ("architecture", "fields", "sentence"),
    [
        ("gemma", {}, "GGUF architecture gemma is not one of llama, qwen2, qwen3"),
        ("llama", {"llama__rope__scaling__type": "yarn"}, "RoPE scaling yarn is not one of none, linear, llama3"),
        ("llama", {"llama__expert_count": 8}, "mixtures of experts cannot be served"),
        ("llama", {"llama__rope__dimension_count": 8}, "partial rotary embeddings cannot be served"),
        ("llama", {"split__count": 3}, "is one part of 3: join the parts first"),
        ("llama", {"pre": "viking"}, "the GGUF file's pre-tokenizer 'viking' is not known"),
    ],
)
def test_files_that_would_be_served_wrongly(
    tmp_path: Path, architecture: str, fields: dict[str, Any], sentence: str
) -> None:
    path = write_gguf(tmp_path / "x.gguf", make_tiny(tmp_path / "tiny"), architecture, **fields)
    with pytest.raises(ModelNotSupported, match=sentence):
        ready(path)


def test_linear_rope_scaling(tmp_path: Path) -> None:
    fields = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0}
    path = write_gguf(tmp_path / "x.gguf", make_tiny(tmp_path / "tiny"), **fields)
    assert ready(path).manifest.config.rope == RopeConfig(kind="linear", factor=4.0)


def test_a_file_that_is_not_gguf(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"not at all" * 10)
    with pytest.raises(ModelNotSupported, match=r"x\.gguf cannot be read as GGUF: "):
        ready(tmp_path / "x.gguf")
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(ModelNotSupported, match=r"x\.bin is neither a directory nor a \.gguf file"):
        ready(tmp_path / "x.bin")


def test_names_of_tensors() -> None:
    assert hf_name("blk.12.ffn_down.weight") == "model.layers.12.mlp.down_proj.weight"
    assert hf_name("output.weight") == "lm_head.weight"
    assert hf_name("blk.0.ssm_a") == "blk.0.ssm_a"


def test_the_permutation_is_undone() -> None:
    rows = np.arange(24)
    assert permuted(rows, 3).tolist()[:8] == [0, 4, 1, 5, 2, 6, 3, 7]
    assert undo_permutation(torch.from_numpy(permuted(rows, 3)), 3).tolist() == rows.tolist()


def test_the_demo_tokenizer_splits_digits_and_keeps_control_tokens_whole(demo_model: PreparedModel) -> None:
    """SmolLM2's GGUF says only "smollm"; its tokenizer.json on the hub splits every digit off."""
    tokenizer = Tokenizer.from_file(str(demo_model.tokenizer_path))
    assert tokenizer.encode("In 2024, 135M").tokens == ["In", "Ġ", "2", "0", "2", "4", ",", "Ġ", "1", "3", "5", "M"]
    encoded = tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n")
    assert encoded.ids[0] == 1
    assert encoded.ids[-2] == 2
    assert tokenizer.decode(encoded.ids) == "user\nhi\n"
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == "<|im_start|>user\nhi<|im_end|>\n"


def sentencepiece_fields() -> dict[str, Any]:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "h", "i", "t", "e", "hi", "▁t", "he"]
    pieces += ["▁the", "the", "[INST]"]
    scores = [0.0] * 259 + [-20.0, -21.0, -22.0, -23.0, -24.0, -1.0, -2.0, -3.0, -4.0, -5.0, 0.0]
    types = [2, 3, 3] + [6] * 256 + [1] * 10 + [4]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
    }


def test_sentencepiece_joins_the_pair_with_the_best_score() -> None:
    tokenizer = Tokenizer.from_str(gguf_tokenizer.tokenizer_json(sentencepiece_fields()))
    assert tokenizer.encode("hi the").tokens == ["▁", "hi", "▁the"]
    # a character that no piece has is spelled in bytes
    assert tokenizer.encode("hé").tokens == ["▁", "h", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("hi thé the").ids) == "hi thé the"
    assert tokenizer.encode("[INST]hi</s>").tokens == ["[INST]", "▁", "hi", "</s>"]


def test_other_tokenizers_are_refused() -> None:
    with pytest.raises(ModelNotSupported, match="has a tokenizer of kind 'bert', served are gpt2 and llama"):
        gguf_tokenizer.tokenizer_json({"tokenizer.ggml.model": "bert"})
