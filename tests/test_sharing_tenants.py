"""What lies past a trunk is never found under another private scope, and no tenant can tell what another one sent."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.config import AssistantConfig
from app.prompts import BuiltPrompt, num_common
from engine.protocol import END, Scope
from engine.text.chat_template import Message
from tests.assistant_bench import NUM_MARKUP_TOKENS, Asked, AssistantBench, Prompts
from tests.byte_model import make_byte_model

TENANTS = ("a", "b", "as")
SECRET = "the safe is behind the picture of the lake, its number is four seven one one, tell nobody about it"
INSTRUCTIONS = "Answer for the railway of a small town: briefly, kindly, and never about anything else than trains."


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Prompts]:
    """By the length of the trunks: one assistant for all, and one of the same id and text for each tenant."""
    path: Path = tmp_path_factory.mktemp("model")
    model = make_byte_model(path)

    @cache
    def of_length(num_trunk_tokens: int) -> Prompts:
        text = INSTRUCTIONS[: num_trunk_tokens - NUM_MARKUP_TOKENS]
        own = [AssistantConfig(id="own", tenant=tenant, instructions=text) for tenant in TENANTS]
        return Prompts(model, [AssistantConfig(id="shared", shared=True, instructions=text), *own])

    return of_length


class Chat(NamedTuple):
    tenant: str
    assistant: str | None
    """None: the instructions come as a message of the request's own."""
    cache_salt: str | None
    prompt_cache_key: str | None
    num_secret: int
    """Characters of the secret that the message begins with."""
    rest: str

    def prompt(self, prompts: Prompts) -> BuiltPrompt:
        more = {"cache_salt": self.cache_salt, "prompt_cache_key": self.prompt_cache_key}
        text = SECRET[: self.num_secret] + self.rest
        if self.assistant is not None:
            return prompts.chat(self.tenant, text, self.assistant, **more)
        instructions = prompts.find(self.tenant, "own").instructions
        return prompts.build(self.tenant, [Message("system", instructions), Message("user", text)], **more)


NUMBERS_AROUND_BLOCKS = st.builds(lambda blocks, more: max(0, 8 * blocks + more), st.integers(0, 5), st.integers(-1, 1))
CHATS = st.lists(
    st.builds(
        Chat,
        st.sampled_from(TENANTS),
        st.sampled_from([None, "own", "shared"]),
        # "s" behind tenant "a" reads like tenant "as"
        st.sampled_from([None, None, "", "s"]),
        st.sampled_from([None, None, "", "s"]),
        NUMBERS_AROUND_BLOCKS,
        st.sampled_from(["", "x", "yy"]),
    ),
    min_size=2,
    max_size=9,
)


def may_share(one: BuiltPrompt, other: BuiltPrompt) -> int:
    """Tokens that two prompts have in common and may: all within a private scope, else those of the trunk."""
    common = num_common(one.token_ids, other.token_ids)
    if one.private_key == other.private_key:
        return common
    if len(one.scopes) == len(other.scopes) == 2 and one.scopes[0].key == other.scopes[0].key:
        return min(common, one.scopes[0].end_token, other.scopes[0].end_token)
    return 0


def must_share(one: BuiltPrompt, other: BuiltPrompt) -> int:
    """Tokens of one that the other finds, up to the last whole block."""
    if one.scopes == other.scopes:
        return num_common(one.token_ids, other.token_ids)
    if len(one.scopes) == len(other.scopes) == 2 and one.scopes[0] == other.scopes[0]:
        return one.scopes[0].end_token
    return 0


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    num_trunk_tokens=st.integers(23, 50),
    block_size=st.sampled_from([8, 16]),
    budget=st.sampled_from([19, 512]),
    chats=CHATS,
)
def test_b41_what_lies_past_the_trunk_is_found_in_its_own_scope_only(
    prompts, num_trunk_tokens, block_size, budget, chats
):
    bench = AssistantBench(200, block_size=block_size, max_num_batched_tokens=budget)
    seen: list[BuiltPrompt] = []
    for chat in chats:
        prompt = chat.prompt(prompts(num_trunk_tokens))
        cached = bench.ask_for(chat.tenant, prompt).output.num_cached_tokens or 0
        due = min(max((must_share(prompt, other) for other in seen), default=0), len(prompt.token_ids) - 1)
        allowed = max((may_share(prompt, other) for other in seen), default=0)
        assert due // block_size * block_size <= cached <= allowed
        if any((prompt.token_ids, prompt.scopes) == (other.token_ids, other.scopes) for other in seen):
            assert cached == len(prompt.token_ids) - 1
        seen.append(prompt)
    for prompt in seen:
        assert len(prompt.scopes) == 1 or prompt.scopes[0].end_token == num_trunk_tokens
        strangers = [other.private_key for other in seen if other.private_key != prompt.private_key]
        for key in (*strangers, b"nobody's", prompt.private_key[:-1], prompt.private_key + b"\0"):
            scopes = [*prompt.scopes[:-1], Scope(END, key)]
            allowed = max(may_share(other, BuiltPrompt(prompt.token_ids, scopes)) for other in seen)
            assert bench.find(prompt.token_ids, scopes) <= allowed
    assert bench.core.stats().blocks.referenced == 0


# ---- guesses

NUM_GUESSES = 200
NARROWINGS: list[dict[str, str]] = [{}, {}, {"cache_salt": "salt of a"}, {"prompt_cache_key": "key of a"}]
"""Two of four as most requests come; a guesser knows even these."""


def text_of(number: int, *, is_sent: bool) -> str:
    """Like lengths, other words from the first character on; lengths go round all block borders."""
    words = f"{number} is what tenant a {'sent' if is_sent else 'kept'}: {SECRET}"
    return chr(0x100 + 2 * number + is_sent) + words[: 8 + number % 70]


def narrowing(number: int) -> dict[str, str]:
    return NARROWINGS[number // 2 % len(NARROWINGS)]


def assistant_of(number: int) -> str | None:
    return "shared" if number % 2 else None


def served_engine(prompts: Prompts, numbers: range, *, has_sent: bool) -> AssistantBench:
    """An engine to which tenant a has sent the prompts that b will guess, or others as long."""
    bench = AssistantBench(500)
    for number in numbers:
        text = text_of(number, is_sent=has_sent)
        bench.ask_for("a", prompts.chat("a", text, assistant_of(number), **narrowing(number)))
    return bench


def guess(bench: AssistantBench, prompts: Prompts, tenant: str, number: int, *, is_sent: bool) -> Asked:
    """The very prompt, with the very salt."""
    text = text_of(number, is_sent=is_sent)
    return bench.ask_for(tenant, prompts.chat(tenant, text, assistant_of(number), **narrowing(number)))


ROUNDS = [range(first, first + 10) for first in range(0, NUM_GUESSES, 10)]


def test_b41_two_hundred_guesses_cost_the_same_whether_another_tenant_has_sent_them_or_not(prompts):
    for numbers in ROUNDS:
        sent, not_sent = (served_engine(prompts(37), numbers, has_sent=has_sent) for has_sent in (True, False))
        for number in numbers:
            right = guess(sent, prompts(37), "b", number, is_sent=True)
            wrong = guess(sent, prompts(37), "b", number, is_sent=False)
            elsewhere = guess(not_sent, prompts(37), "b", number, is_sent=True)
            assert (right.cached, right.work) == (wrong.cached, wrong.work) == (elsewhere.cached, elsewhere.work)
            assert right.cached[0] == (37 if assistant_of(number) else 0)
            assert right.work.prompt_tokens_computed == len(right.prompt.token_ids) - (right.cached[0] or 0)


def test_b41_the_tenant_itself_hits_what_it_has_sent(prompts):
    """The other half: the guesses above tell nothing because of scopes, not because nothing is cached."""
    for numbers in ROUNDS:
        bench = served_engine(prompts(37), numbers, has_sent=True)
        for number in numbers:
            right, wrong = (
                guess(bench, prompts(37), "a", number, is_sent=True),
                guess(bench, prompts(37), "a", number, is_sent=False),
            )
            assert right.cached[0] == len(right.prompt.token_ids) - 1
            assert wrong.cached[0] == (37 if assistant_of(number) else 0)
            assert right.work.prompt_tokens_computed == 1 < wrong.work.prompt_tokens_computed


@pytest.mark.parametrize("num_steps", [1, 2, 5])
@pytest.mark.parametrize("guesser", ["a", "b"])
def test_b41_a_guess_waits_for_no_other_tenants_prompt_that_is_being_computed(prompts, num_steps, guesser):
    """Chats that arrive together with one cold prompt wait for its leader: within a private scope only."""
    rows = []
    for is_sent in (True, False):
        bench = AssistantBench(100, max_num_batched_tokens=24)
        leader = prompts(37).chat("a", text_of(63, is_sent=is_sent))
        follower = prompts(37).chat(guesser, text_of(63, is_sent=True))
        bench.add("leader", leader.token_ids, 4, tenant="a", scopes=leader.scopes)
        bench.step(num_steps)
        bench.add("guess", follower.token_ids, 4, tenant=guesser, scopes=follower.scopes)
        bench.run()
        bench.assert_complete("guess", follower.token_ids, 4)
        rows.append((bench.runner.rows, bench.outputs["guess"].num_cached_tokens))
    assert (rows[0] == rows[1]) == (guesser == "b")
    assert (rows[0][1] or 0) == (len(follower.token_ids) - 1 if guesser == "a" else 0)
