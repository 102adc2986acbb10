"""What an engine is asked for: each choice over its own prompt, from its first token or from where it stands."""

from pathlib import Path

import pytest

from app.errors import EngineUnavailable
from app.prompts import BuiltPrompt
from app.submission import Submission
from engine.protocol import END, Scope
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer
from tests.byte_model import make_byte_model
from tests.scripted_engine import ScriptedEngineClient, say

PROMPTS = [BuiltPrompt(list(text), [Scope(END, text)]) for text in (b"ab", b"cd")]


def submission(engine: ScriptedEngineClient, folder: Path) -> Submission:
    tokenizer = Tokenizer.load(make_byte_model(folder))
    params = SamplingParams(n=2, seed=7)
    return Submission(engine, tokenizer, PROMPTS, params, "tenant", priority=3, request_id="mine", continues_text=False)


async def test_a_choice_is_asked_for_from_where_it_stands(tmp_path: Path) -> None:
    engine = ScriptedEngineClient(script=say("xyz"))
    asked = submission(engine, tmp_path)
    for index in (0, 3):
        choice = asked.make_choice(index)
        choice.token_ids += b"xy" if index else b""
        with asked.submit(choice) as stream:
            assert choice.stream is stream
    first, second = engine.requests
    assert (first.request_id, first.choice, first.output_ids) == ("mine-0", 0, [])
    assert (second.request_id, second.choice, second.output_ids) == ("mine-3", 1, list(b"xy"))
    assert (second.prompt_ids, second.scopes) == (list(b"cd"), [Scope(END, b"cd")])
    assert (second.tenant, second.priority, second.params.seed) == ("tenant", 3, 7)


async def test_without_an_engine_nothing_is_asked_for(tmp_path: Path) -> None:
    asked = submission(ScriptedEngineClient(ready=False), tmp_path)
    with pytest.raises(EngineUnavailable):
        asked.submit(asked.make_choice(0))
