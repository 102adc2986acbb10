"""What lies past a trunk is never found under another private scope, and no tenant can tell what another one sent."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.config import AssistantConfig
from app.prompts import BuiltPrompt, num_common
from app.scopes import NOT_NARROWED, Narrowing
from app.tenants import Tenant
from engine.protocol import END, Scope
from engine.text.chat_template import Message
from tests.assistant_bench import NUM_MARKUP_TOKENS, AssistantBench, Prompts
from tests.byte_model import make_byte_model

A, B, BY_USER = Tenant("a"), Tenant("b"), Tenant("as", is_scoped_by_user=True)
TENANTS = (A, B, BY_USER, Tenant("a", is_scoped_by_user=True))
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
        own = [AssistantConfig(id="own", tenant=tenant, instructions=text) for tenant in ("a", "b", "as")]
        return Prompts(model, [AssistantConfig(id="shared", shared=True, instructions=text), *own])

    return of_length


class Chat(NamedTuple):
    tenant: Tenant
    narrowing: Narrowing
    assistant: str | None
    """None: the instructions come as a message of the request's own."""
    num_secret: int
    """Characters of the secret that the message begins with."""
    rest: str

    def prompt(self, prompts: Prompts) -> BuiltPrompt:
        text = SECRET[: self.num_secret] + self.rest
        if self.assistant is not None:
            return prompts.chat(self.tenant, text, self.assistant, self.narrowing)
        instructions = prompts.find(self.tenant, "own").instructions
        messages = [Message("system", instructions), Message("user", text)]
        return prompts.build(self.tenant, messages, narrowing=self.narrowing)


NUMBERS_AROUND_BLOCKS = st.builds(lambda blocks, more: max(0, 8 * blocks + more), st.integers(0, 5), st.integers(-1, 1))
# "s" behind tenant "a" reads like tenant "as"
SALTS = st.sampled_from([None, None, None, "", "s"])
CHATS = st.lists(
    st.builds(
        Chat,
        st.sampled_from(TENANTS),
        st.builds(Narrowing, SALTS, SALTS, SALTS),
        st.sampled_from([None, "own", "shared"]),
        NUMBERS_AROUND_BLOCKS,
        st.sampled_from(["", "x", "yy"]),
    ),
    min_size=2,
    max_size=9,
)


def trunk_of(prompt: BuiltPrompt) -> Scope | None:
    """What of it lies in an assistant's scope."""
    first = prompt.scopes[0]
    return first if first.key != prompt.private_key else None


def may_share(one: BuiltPrompt, other: BuiltPrompt) -> int:
    """Tokens that two prompts have in common and may: all within a private scope, else those of the trunk."""
    common = num_common(one.token_ids, other.token_ids)
    if one.private_key == other.private_key:
        return common
    trunk = trunk_of(one)
    return min(common, trunk.end_token) if trunk is not None and trunk == trunk_of(other) else 0


def must_share(one: BuiltPrompt, other: BuiltPrompt) -> int:
    """Tokens of one that the other finds, up to the last whole block."""
    return may_share(one, other) if trunk_of(one) == trunk_of(other) else 0


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
    pool=st.sampled_from([(200, 0), (24, 0), (24, 8), (24, 200)]),
    chats=CHATS,
)
def test_b41_what_lies_past_the_trunk_is_found_in_its_own_scope_only(
    prompts, num_trunk_tokens, block_size, budget, pool, chats
):
    """Also after some of it was evicted, or swapped out to the host and in again."""
    num_blocks, num_host_blocks = pool
    bench = AssistantBench(
        num_blocks, num_host_blocks=num_host_blocks, block_size=block_size, max_num_batched_tokens=budget
    )
    seen: list[BuiltPrompt] = []
    for chat in chats:
        prompt = chat.prompt(prompts(num_trunk_tokens))
        cached = bench.ask_for(chat.tenant, prompt).output.num_cached_tokens or 0
        due = min(max((must_share(prompt, other) for other in seen), default=0), len(prompt.token_ids) - 1)
        allowed = max((may_share(prompt, other) for other in seen), default=0)
        assert cached <= allowed
        if num_blocks == 24:  # what was there may be gone
            seen.append(prompt)
            continue
        assert due // block_size * block_size <= cached
        if any((prompt.token_ids, prompt.scopes) == (other.token_ids, other.scopes) for other in seen):
            assert cached == len(prompt.token_ids) - 1
        seen.append(prompt)
    for prompt in seen:
        trunk = trunk_of(prompt)
        assert trunk is None or trunk.end_token == num_trunk_tokens
        strangers = [other.private_key for other in seen if other.private_key != prompt.private_key]
        for key in (*strangers, b"nobody's", prompt.private_key[:-1], prompt.private_key + b"\0"):
            scopes = [*([trunk] if trunk is not None else []), Scope(END, key)]
            allowed = max(may_share(other, BuiltPrompt(prompt.token_ids, scopes)) for other in seen)
            assert bench.find(prompt.token_ids, scopes) <= allowed
    assert bench.core.stats().blocks.referenced == 0


# ---- guesses

NUM_GUESSES = 200
NARROWINGS = (NOT_NARROWED, Narrowing(cache_salt="salt of a"), NOT_NARROWED, Narrowing(prompt_cache_key="key of a"))
"""A guesser knows even these."""


def text_of(number: int, *, is_sent: bool) -> str:
    """Like lengths, other words from the first character on; lengths go round all block borders."""
    words = f"{number} is what tenant a {'sent' if is_sent else 'kept'}: {SECRET}"
    return chr(0x100 + 2 * number + is_sent) + words[: 8 + number % 70]


def assistant_of(number: int) -> str | None:
    return "shared" if number % 2 else None


class Caller(NamedTuple):
    tenant: Tenant
    user: str | None = None

    def chat(self, prompts: Prompts, number: int, *, is_sent: bool) -> BuiltPrompt:
        narrowing = replace(NARROWINGS[number // 2 % len(NARROWINGS)], user=self.user)
        return prompts.chat(self.tenant, text_of(number, is_sent=is_sent), assistant_of(number), narrowing)


STRANGERS = {"tenants": (Caller(A), Caller(B)), "users": (Caller(BY_USER, "one"), Caller(BY_USER, "other"))}
"""Who has sent prompts, and who guesses them."""
ROUNDS = [range(first, first + 10) for first in range(0, NUM_GUESSES, 10)]


def served_engine(prompts: Prompts, caller: Caller, numbers: range, *, has_sent: bool) -> AssistantBench:
    """An engine to which a caller has sent the prompts that will be guessed, or others as long."""
    bench = AssistantBench(500)
    for number in numbers:
        bench.ask_for(caller.tenant, caller.chat(prompts, number, is_sent=has_sent))
    return bench


@pytest.mark.parametrize("strangers", STRANGERS)
def test_b41_two_hundred_guesses_cost_the_same_whether_somebody_else_has_sent_them_or_not(prompts, strangers):
    sender, guesser = STRANGERS[strangers]
    for numbers in ROUNDS:
        sent, not_sent = (served_engine(prompts(37), sender, numbers, has_sent=has) for has in (True, False))
        for number in numbers:
            guess, other_guess = (guesser.chat(prompts(37), number, is_sent=is_sent) for is_sent in (True, False))
            right, wrong = sent.ask_for(guesser.tenant, guess), sent.ask_for(guesser.tenant, other_guess)
            elsewhere = not_sent.ask_for(guesser.tenant, guess)
            assert (right.cached, right.work) == (wrong.cached, wrong.work) == (elsewhere.cached, elsewhere.work)
            assert right.cached[0] == (37 if assistant_of(number) else 0)
            assert right.work.prompt_tokens_computed == len(guess.token_ids) - (right.cached[0] or 0)


@pytest.mark.parametrize("num_host_blocks", [0, 20, 500])
def test_b41_under_pressure_guesses_cost_the_same_whatever_somebody_else_has_sent(prompts, num_host_blocks):
    """As long as it is as much: what is evicted, and what comes back from the host, does not depend on the words."""
    sender, guesser = STRANGERS["tenants"]
    costs = []
    for has_sent in (True, False):
        bench = AssistantBench(40, num_host_blocks=num_host_blocks)
        seen = []
        for number in range(40):
            bench.ask_for(sender.tenant, sender.chat(prompts(37), number, is_sent=has_sent))
            for earlier in (number, number // 2):
                asked = bench.ask_for(guesser.tenant, guesser.chat(prompts(37), earlier, is_sent=True))
                seen.append((asked.cached, asked.work))
        costs.append(seen)
        assert (bench.core.stats().host.swapped_in > 0) == (num_host_blocks > 0)
    assert costs[0] == costs[1]


@pytest.mark.parametrize("strangers", STRANGERS)
def test_b41_who_has_sent_it_hits_it(prompts, strangers):
    """The other half: the guesses above tell nothing because of scopes, not because nothing is cached."""
    sender, _ = STRANGERS[strangers]
    for numbers in ROUNDS[:4]:
        bench = served_engine(prompts(37), sender, numbers, has_sent=True)
        for number in numbers:
            again, new = (
                bench.ask_for(sender.tenant, sender.chat(prompts(37), number, is_sent=is_sent))
                for is_sent in (True, False)
            )
            assert again.cached[0] == len(again.prompt.token_ids) - 1
            assert new.cached[0] == (37 if assistant_of(number) else 0)
            assert again.work.prompt_tokens_computed == 1 < new.work.prompt_tokens_computed


@pytest.mark.parametrize("num_steps", [1, 2, 5])
@pytest.mark.parametrize(("guesser", "is_stranger"), [(Caller(A), False), (Caller(B), True)], ids=["itself", "other"])
def test_b41_a_guess_waits_for_no_other_tenants_prompt_that_is_being_computed(prompts, num_steps, guesser, is_stranger):
    """Chats that arrive together with one cold prompt wait for its leader: within a private scope only."""
    seen = []
    for is_sent in (True, False):
        bench = AssistantBench(100, max_num_batched_tokens=24)
        leader = Caller(A).chat(prompts(37), 64, is_sent=is_sent)
        guess = guesser.chat(prompts(37), 64, is_sent=True)
        bench.add("leader", leader.token_ids, 4, tenant="a", scopes=leader.scopes)
        bench.step(num_steps)
        bench.add("guess", guess.token_ids, 4, tenant=guesser.tenant.id, scopes=guess.scopes)
        bench.run()
        bench.assert_complete("guess", guess.token_ids, 4)
        seen.append((bench.runner.rows, bench.outputs["guess"].num_cached_tokens))
    assert (seen[0] == seen[1]) == is_stranger
    assert seen[0][1] == (0 if is_stranger else len(guess.token_ids) - 1)
