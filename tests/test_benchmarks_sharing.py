"""The prompts and the configuration that the sharing benchmarks are made with."""

from pathlib import Path

import pytest

from app.config import load_file_config
from app.prompts import num_common
from benchmarks.gateway_time import PARTS, gateway_time
from benchmarks.tenants import ADMIN_KEY, KEYS, Prompts, SharedAssistant, num_own, num_shared, write_configuration
from engine.models.prepare import prepare
from engine.text.chat_template import TRUNK_PROBES
from tests.tiny_model import make_tiny

SMALL, LARGE = SharedAssistant(40), SharedAssistant(80)


@pytest.fixture
def prompts(tmp_path: Path) -> Prompts:
    source = make_tiny(tmp_path / "tiny", max_position_embeddings=4096)
    return Prompts(prepare(str(source), tmp_path / "state", "float32", lambda *_: None), [SMALL, LARGE])


def test_the_configuration_is_one_that_the_server_takes(tmp_path: Path) -> None:
    path = tmp_path / "benchmark.toml"
    write_configuration(path, [SMALL, LARGE])
    config = load_file_config(path)
    assert [tenant.id for tenant in config.tenants] == ["a", "b"]
    assert [(a.id, a.instructions, a.shared) for a in config.assistants] == [
        ("about-40", SMALL.instructions, True),
        ("about-80", LARGE.instructions, True),
    ]
    assert config.admin_key_hashes
    assert len({*KEYS, ADMIN_KEY}) == 3


async def test_own_tokens_are_what_follows_a_trunk_or_a_system_prompt(prompts: Prompts) -> None:
    system = [{"role": "system", "content": "You sell hats."}]
    for head, assistant in (([], SMALL), (system, None)):
        chats = [[*head, {"role": "user", "content": text}] for text in TRUNK_PROBES]
        built = [await prompts.build(messages, assistant) for messages in chats]
        common = min(num_common(built[0].token_ids, prompt.token_ids) for prompt in built)
        assert [num_shared(prompt) for prompt in built] == [common] * len(chats)
        assert [num_own(prompt) + common for prompt in built] == [len(prompt.token_ids) for prompt in built]
    alone = await prompts.build([{"role": "user", "content": "Hello"}])
    assert (num_shared(alone), num_own(alone)) == (0, len(alone.token_ids))


async def test_gateway_time_compares_the_sums_of_its_parts(prompts: Prompts) -> None:
    figures = await gateway_time(prompts, SMALL, LARGE, num_rounds=3)
    for assistant in (SMALL, LARGE):
        parts = figures[assistant.id]
        trunk = num_shared(await prompts.build([{"role": "user", "content": "Hello"}], assistant))
        assert parts["trunk_tokens"] == trunk
        assert all(parts[f"{part}_us"] > 0 for part in PARTS)
        assert parts["total_us"] > max(parts[f"{part}_us"] for part in PARTS)
    assert figures["ratio"]["value"] > 0
