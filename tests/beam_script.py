"""A script of which beam searches find something worth finding, and what they must find."""

from collections.abc import Iterator

from engine.protocol import AddRequest
from tests.beam_reference import Found, search_plainly
from tests.byte_model import BYTE_VOCAB_SIZE, IM_END
from tests.scripted_core import Item

STOP_ID = ord("k")
"""Some sequences end with it, if it is asked for."""


def best_letter(ids: list[int]) -> int:
    """The most probable token behind `ids`; those after it in the alphabet follow, as the scripted engine has it."""
    return ord("a") + sum((i + 3) * t for i, t in enumerate(ids)) % 20


def say_letters(request: AddRequest) -> Iterator[Item]:
    yield best_letter(request.prompt_ids)


def expected_letters(prompt: list[int], width: int, max_tokens: int, length_penalty: float = 1.0) -> list[Found]:
    def next_logprobs(token_ids: tuple[int, ...]) -> list[float]:
        best = best_letter([*prompt, *token_ids])
        return [-0.5 - (t - best) % BYTE_VOCAB_SIZE for t in range(BYTE_VOCAB_SIZE)]

    return search_plainly(next_logprobs, len(prompt), width, max_tokens, frozenset({STOP_ID, IM_END}), length_penalty)


def text_of(found: Found) -> str:
    return bytes(found.token_ids[: len(found.token_ids) - found.has_ended]).decode()
