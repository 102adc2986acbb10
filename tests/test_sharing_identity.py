"""Equal token ids are not enough: KV of another model, setting or version of an assistant is a miss. Time is none."""

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import chat_template_utils

from app.config import AssistantConfig
from app.tenants import Tenant
from engine.block_hash import root_hash
from engine.config import EngineConfig
from engine.kv_cache_manager import KVCacheManager
from engine.model_runner import ModelRunner
from engine.models.prepare import prepare
from engine.prepared import PreparedModel
from tests.assistant_bench import AssistantBench, Prompts
from tests.byte_model import make_byte_model
from tests.engine.sequences import look_into, make_sequence
from tests.tiny_model import make_tiny

# ---- models

TOKEN_IDS = list(range(50))


def change_tokenizer(path: Path) -> None:
    """A revision that gives the same ids to what these tests ask."""
    file = path / "tokenizer.json"
    before = file.read_text()
    after = before.replace('"add_prefix_space": false', '"add_prefix_space": true', 1)
    assert after != before
    file.write_text(after)


@dataclass(frozen=True)
class Loading:
    """How a model is loaded: what is in its folder, and the engine's settings."""

    source: dict[str, Any]
    dtype: str = "float32"
    change: Callable[[Path], None] = lambda path: None


ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LOADINGS = {
    "first": Loading({"seed": 0, "rope_parameters": ROPE}),
    "revision": Loading({"seed": 1, "rope_parameters": ROPE}),
    "rope": Loading({"seed": 0, "rope_parameters": {**ROPE, "rope_theta": 500000.0}}),
    "rope scaling": Loading({"seed": 0, "rope_parameters": {**ROPE, "rope_type": "linear", "factor": 2.0}}),
    "tokenizer": Loading({"seed": 0, "rope_parameters": ROPE}, change=change_tokenizer),
    "dtype": Loading({"seed": 0, "rope_parameters": ROPE}, dtype="bfloat16"),
}


def load(path: Path, loading: Loading) -> bytes:
    """The root of the chains of a model that is loaded from `path`, where another one may have been before."""
    source = make_tiny(path / "tiny", **loading.source)
    loading.change(source)
    for file in source.glob("*.safetensors"):
        os.utime(file, (1, 1))  # not the time of writing, but what was written makes the difference here
    model = prepare(str(source), path / "state", loading.dtype, lambda *_: None)
    config = EngineConfig(
        model_dir=str(model.path),
        device="cpu",
        dtype=loading.dtype,  # type: ignore[arg-type]  one of them
        num_blocks=10,
        threads=1,
    )
    runner = ModelRunner(model, config)
    return root_hash(runner.info.fingerprint, *runner.identity)


def num_found(kv: KVCacheManager, root: bytes) -> int:
    """What a model with this root would find of another one's cache."""
    other = look_into(KVCacheManager(10, 16, root), kv)
    return other.find_longest_prefix(make_sequence("look", TOKEN_IDS)).num_tokens


def test_b04_a_model_loaded_in_another_ones_place_finds_nothing_of_its_kv(tmp_path):
    roots = {name: load(tmp_path, loading) for name, loading in LOADINGS.items()}
    for name, other in itertools.permutations(LOADINGS, 2):
        kv = KVCacheManager(10, 16, roots[name])
        sequence = make_sequence("r", TOKEN_IDS)
        assert kv.try_allocate_slots(sequence, sequence.num_tokens) is not None
        sequence.num_computed_tokens = sequence.num_tokens
        kv.commit_full_blocks(sequence)
        assert num_found(kv, roots[name]) == 48
        assert num_found(kv, roots[other]) == 0, (name, other)
    # and the very same once more has the same, so that it is none of the files' other properties that tells
    assert load(tmp_path, LOADINGS["first"]) == roots["first"]


# ---- assistants

TENANT = Tenant("a")
INSTRUCTIONS = "You are the support desk of a small shop. Be brief and kind."
EDITS = {
    "more": INSTRUCTIONS + " Never promise a refund.",
    "less": INSTRUCTIONS[:-9],
    "one letter": INSTRUCTIONS[:-2] + "s.",
    "space": INSTRUCTIONS + " ",
}


@pytest.mark.parametrize("is_pinned", [True, False])
@pytest.mark.parametrize("edit", EDITS)
def test_b04_an_edited_assistant_finds_nothing_of_what_it_was(tmp_path, edit, is_pinned):
    model = make_byte_model(tmp_path)
    versions = [
        Prompts(model, [AssistantConfig(id="support", tenant="a", instructions=text)])
        for text in (INSTRUCTIONS, EDITS[edit])
    ]
    bench = AssistantBench(100)
    for version, prompts in enumerate(versions):
        trunk = prompts.trunk(TENANT, "support")
        chats = [prompts.chat(TENANT, text, "support") for text in ("Hello", "Where are you?")]
        if is_pinned and version == 0:
            assert bench.pinned("support", trunk.token_ids, trunk.scopes[0].key)[0] == "pinned"
        cached = [bench.ask_for(TENANT, chat).output.num_cached_tokens for chat in chats]
        assert cached == [len(trunk.token_ids) if is_pinned and version == 0 else 0, len(trunk.token_ids)]
    # the old one is still there for chats that began with it
    first = versions[0].chat(TENANT, "Who are you?", "support")
    assert bench.ask_for(TENANT, first).output.num_cached_tokens == first.scopes[0].end_token


# ---- time

DATED = (
    "<|im_start|>system\nToday is {{ strftime_now('%d %b %Y') }}.\n{{ messages[0]['content'] }}<|im_end|>\n"
    "{%- for message in messages[1:] %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>"
    "\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""As Llama 3.1's: the date stands before the instructions."""
NOON = datetime(2026, 7, 31, 12, 0, 0)
MIDNIGHT = datetime(2026, 8, 1, 0, 0, 30)


def set_clock(monkeypatch: pytest.MonkeyPatch, moment: datetime) -> None:
    """All that this process could put into a prompt."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return moment

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    monkeypatch.setattr("time.time", moment.timestamp)


@pytest.mark.parametrize("template", ["plain", "dated"])
def test_b06_a_minute_later_the_assistants_prompt_is_the_same(tmp_path, monkeypatch, template):
    model = make_byte_model(tmp_path)
    if template == "dated":
        (tmp_path / "chat_template.jinja").write_text(DATED)
        model = PreparedModel.load(tmp_path)
    set_clock(monkeypatch, NOON)
    prompts = Prompts(model, [AssistantConfig(id="support", tenant="a", instructions=INSTRUCTIONS)])
    bench = AssistantBench(100, block_size=16)
    first = bench.ask_for(TENANT, prompts.chat(TENANT, "Hello", "support"))
    set_clock(monkeypatch, NOON + timedelta(seconds=61))
    second = bench.ask_for(TENANT, prompts.chat(TENANT, "And now?", "support"))
    num_trunk_tokens = len(prompts.trunk(TENANT, "support").token_ids)
    assert first.cached[0] == 0
    assert second.cached[0] == num_trunk_tokens > len(INSTRUCTIONS)


def test_b06_at_midnight_a_dated_prompt_is_another_one_and_shared_again(tmp_path, monkeypatch):
    """The trunk is yesterday's: what it still has in common is shared, the rest within the private scope."""
    make_byte_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(DATED)
    set_clock(monkeypatch, MIDNIGHT - timedelta(seconds=61))
    prompts = Prompts(
        PreparedModel.load(tmp_path), [AssistantConfig(id="support", tenant="a", instructions=INSTRUCTIONS)]
    )
    bench = AssistantBench(100, block_size=16)
    bench.ask_for(TENANT, prompts.chat(TENANT, "Hello", "support"))
    set_clock(monkeypatch, MIDNIGHT)
    chats = [prompts.chat(TENANT, text, "support") for text in ("Good morning", "Is it late?")]
    first, second = (bench.ask_for(TENANT, chat) for chat in chats)
    num_alike = len("XsystemXToday is ")
    assert first.cached[0] == num_alike // 16 * 16
    assert second.cached[0] is not None
    assert second.cached[0] >= len(INSTRUCTIONS) // 16 * 16
