"""What a response is made from comes back to the letter, and is as large as its prompt."""

from dataclasses import replace

import pytest

from app import recipe as recipes
from app.prompts import BuiltPrompt
from app.recipe import Recipe
from engine.protocol import END, Scope
from engine.sampling_params import SamplingParams

PROMPT = BuiltPrompt(
    [5, 70_000, 3],
    [Scope(2, b"trunk"), Scope(END, b"\x00private")],
    "input",
    owner_key=b"owner",
    assistant_id="support",
    assistant_version="0123456789abcdef",
    num_trunk_tokens=4,
    num_known_tokens=2,
    template_changed=True,
    template_digest="digest",
)
PARAMS = SamplingParams(max_tokens=None, temperature=0.7, seed=2**63 - 1, logit_bias={5: -1.5}, stop=("x",), logprobs=2)


def recipe(prompt: BuiltPrompt = PROMPT, params: SamplingParams = PARAMS) -> Recipe:
    return Recipe.of(
        prompt,
        params,
        fingerprint="model",
        priority=-2,
        block_size=16,
        created_at=1.5,
        num_reserved_tokens=77,
        reserved_day=None,
    )


def test_everything_comes_back() -> None:
    found = recipes.from_bytes(recipes.to_bytes(recipe()))
    assert found == recipe()
    assert found.params == PARAMS
    assert found.num_prompt_tokens == 3
    # its ids have been looked at, all of them
    assert found.prompt == replace(PROMPT, num_known_tokens=3)
    assert all(isinstance(scope, Scope) for scope in found.prompt.scopes)


def test_it_is_as_large_as_its_prompt() -> None:
    sizes = [len(recipes.to_bytes(recipe(replace(PROMPT, token_ids=[1] * n)))) for n in (1000, 2000)]
    assert sizes[1] - sizes[0] == 4 * 1000
    assert sizes[0] < 4 * 1000 + 500


def test_tokens_that_would_be_drawn_anew_are_refused() -> None:
    with pytest.raises(ValueError, match="the seed must be fixed"):
        recipe(params=SamplingParams(temperature=1.0))
    assert recipe(params=SamplingParams(temperature=0.0)).params.seed is None
