"""A prepared model whose tokens are bytes: everything a gateway needs, without weights and without torch."""

from pathlib import Path

import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.config import ModelConfig, RopeConfig
from engine.prepared import FORMAT_VERSION, Manifest, PreparedModel
from engine.protocol import EngineInfo

IM_START = 256
IM_END = 257
END_OF_TEXT = 258
BYTE_VOCAB_SIZE = 259
CHATML = (
    "{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>'"
    " + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
OPTIONAL_THINKING = (
    "{%- if thinking is defined %}{{ '<|im_start|>mode\n' ~ thinking ~ '<|im_end|>\n' }}{% endif %}"
    "{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{%- if loop.first and tail is defined %}{{ tail }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML with two options: `thinking` is a turn before all others, `tail` is put behind the first message."""


def make_byte_model(
    path: Path, *, name: str = "byte-model", max_model_len: int = 4096, chat_template: str = CHATML
) -> PreparedModel:
    """A prepared model without weights: token id = byte value for 0..255, then <|im_start|>, <|im_end|>, <|endoftext|>.

    `path` is created if it is not there.
    """
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE(vocab={c: b for b, c in _byte_characters().items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(t, special=True, normalized=False) for t in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")]
    tokenizer.add_special_tokens(specials)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(chat_template)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        name=name,
        source="tests/scripted_engine.py",
        fingerprint=f"scripted-{name}",
        config=ModelConfig(
            architecture="LlamaForCausalLM",
            vocab_size=BYTE_VOCAB_SIZE,
            hidden_size=64,
            intermediate_size=128,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            rms_norm_eps=1e-5,
            max_position_embeddings=max_model_len,
            rope=RopeConfig(),
            tie_word_embeddings=True,
        ),
        bos_token_id=IM_START,
        eos_token_ids=(IM_END, END_OF_TEXT),
    )
    (path / "manifest.json").write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
    return PreparedModel.load(path)


def _byte_characters() -> dict[int, str]:
    """The printable character that byte-level tokenizers write for each byte value."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    characters = {b: chr(b) for b in printable}
    for b in range(256):
        if b not in characters:
            characters[b] = chr(256 + len(characters) - len(printable))
    return characters


def byte_model_info(
    *, model_name: str = "byte-model", max_model_len: int = 4096, block_size: int = 16, num_blocks: int = 1024
) -> EngineInfo:
    return EngineInfo(
        model_name=model_name,
        fingerprint=f"scripted-{model_name}",
        vocab_size=BYTE_VOCAB_SIZE,
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
    )
