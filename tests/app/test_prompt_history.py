"""What a prompt is compared with: its own owner's, bounded, the longest beginning in common."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.prompt_history import CHUNK_TOKENS, MIN_RECORD_TOKENS, Comparison, PromptHistory, PromptRecord
from app.prompts import BuiltPrompt
from engine.protocol import END, Scope

CHUNK = CHUNK_TOKENS


def record(
    token_ids: list[int],
    output_ids: list[int] | tuple[int, ...] = (),
    *,
    owner: bytes = b"owner",
    scope: bytes = b"private",
    assistant: str | None = None,
    ended: bool = False,
) -> PromptRecord:
    prompt = BuiltPrompt(token_ids, [Scope(END, scope)], owner_key=owner, assistant_id=assistant)
    return PromptRecord.of(prompt, output_ids, ended=ended)


def ids(*runs: tuple[int, int]) -> list[int]:
    """So many times each token."""
    return [token for token, count in runs for _ in range(count)]


def test_a_record_says_what_the_engine_was_to_publish() -> None:
    scopes = [Scope(3, b"assistant"), Scope(5, b"private"), Scope(END, b"private")]
    prompt = BuiltPrompt([1, 2, 3, 4, 5, 6], scopes, owner_key=b"o")
    alone = PromptRecord.of(prompt)
    assert (alone.ends, alone.num_computed_tokens, alone.num_tokens) == ((3, 5, 6), 6, 6)
    assert alone.trunk == Scope(3, b"assistant")
    answered = PromptRecord.of(prompt, [7, 8], ended=True)
    assert (answered.ends, answered.num_computed_tokens, answered.num_tokens) == ((3, 5, 6, 7), 7, 8), (
        "8 was only drawn"
    )
    cut = PromptRecord.of(prompt, [7, 8])
    assert (cut.ends, cut.num_computed_tokens) == ((3, 5, 6), 7), "where a turn ended that was cut off is not known"
    assert record([1, 2]).trunk is None
    assert PromptRecord.of(BuiltPrompt([1], [Scope(9, b"p"), Scope(END, b"p")])).trunk is None, "a mark is no trunk"
    assert answered.token_ids(-2, 3) == [1, 2, 3]
    assert answered.token_ids(6, 99) == [7, 8]


@given(st.lists(st.integers(0, 2), max_size=70), st.lists(st.integers(0, 2), max_size=70), st.integers(0, 70))
def test_the_longest_common_prefix(one: list[int], other: list[int], num_shared: int) -> None:
    one, other = one, [*one[:num_shared], *other]
    expected = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    assert record(one).num_common_tokens(record(other)) == expected == record(other).num_common_tokens(record(one))


def test_nothing_is_known_at_first() -> None:
    prompt = record([1, 2, 3])
    assert PromptHistory().compare("a", prompt) == Comparison(prompt)


def test_the_newest_of_those_with_as_many_chunks_in_common_is_found() -> None:
    history = PromptHistory()
    far, near, other = record(ids((1, CHUNK), (2, 40))), record(ids((1, 3 * CHUNK))), record(ids((9, 40)))
    for known in (near, far, other):
        history.add("a", known)
    assert history.compare("a", record(ids((1, 2 * CHUNK + 3)))).in_scope is near
    assert history.compare("a", record(ids((1, CHUNK), (5, 9)))).in_scope is far
    assert history.compare("a", record(ids((7, 5)))).in_scope is other, "nothing in common: the newest"


def test_each_tenant_owner_and_scope_sees_its_own() -> None:
    history = PromptHistory()
    prompt = ids((1, 40))
    mine = record(prompt, owner=b"ada", scope=b"ada's")
    history.add("a", mine)
    assert history.compare("b", record(prompt, owner=b"ada", scope=b"ada's")).in_any_scope is None
    found = history.compare("a", record(prompt, owner=b"bob", scope=b"ada's"))
    assert (found.in_scope, found.in_any_scope) == (None, None)
    found = history.compare("a", record(prompt, owner=b"ada", scope=b"salted"))
    assert (found.in_scope, found.in_any_scope) == (None, mine)
    found = history.compare("a", record(prompt, owner=b"ada", scope=b"ada's"))
    assert (found.in_scope, found.in_any_scope) == (mine, mine)


def test_the_latest_of_an_assistant() -> None:
    history = PromptHistory()
    first, second, other = (record([n], assistant=name) for n, name in ((1, "shop"), (2, "shop"), (3, "desk")))
    for known in (first, second, other):
        history.add("a", known)
    assert history.compare("a", record([5], assistant="shop")).of_assistant is second
    assert history.compare("a", record([5], assistant="shop", owner=b"else")).of_assistant is None
    assert history.compare("a", record([5])).of_assistant is None


def test_the_oldest_go_first_within_a_tenants_bound_and_the_whole() -> None:
    history = PromptHistory(max_tenant_tokens=100, max_tokens=250)
    for n in range(5):
        history.add("a", record(ids((n, 40)), assistant=f"assistant {n}"))
    assert history.size_tokens == 80

    def is_known(tenant: str, token: int) -> bool:
        found = history.compare(tenant, record(ids((token, 40)), assistant=f"assistant {token}"))
        known = found.in_scope is not None and found.in_scope.token_ids(0, 1) == [token]
        assert known == (found.of_assistant is not None)
        return known

    assert [is_known("a", n) for n in range(5)] == [False, False, False, True, True]
    history.add("a", record(ids((5, 101))))
    assert history.size_tokens == 80, "longer than a tenant's memory"
    for tenant in "bcd":
        for n in (6, 7):
            history.add(tenant, record(ids((n, 40)), assistant=f"assistant {n}"))
    assert history.size_tokens == 240
    assert [is_known("a", n) for n in (3, 4)] == [False, False], "who was active longest ago pays"
    assert [is_known(tenant, n) for tenant in "bcd" for n in (6, 7)] == [True] * 6


def test_short_ones_are_bounded_in_number_too() -> None:
    history = PromptHistory(max_tenant_tokens=3 * MIN_RECORD_TOKENS)
    for token in range(10):
        history.add("a", record([token], scope=b"%d" % token))
    known = [token for token in range(10) if history.compare("a", record([token], scope=b"%d" % token)).in_scope]
    assert (known, history.size_tokens) == ([7, 8, 9], 3 * MIN_RECORD_TOKENS)


chunks = st.lists(st.integers(0, 1), max_size=4).map(lambda kinds: ids(*((kind, CHUNK) for kind in kinds)))
records = st.builds(
    record,
    st.builds(lambda whole, rest: whole + rest, chunks, st.lists(st.integers(0, 1), max_size=3)),
    owner=st.sampled_from([b"ada", b"bob"]),
    scope=st.sampled_from([b"1", b"2"]),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(records, max_size=12), records, st.integers(0, 12), st.sampled_from([64, 150, 10_000]))
def test_found_as_if_all_that_is_kept_were_looked_through(
    known: list[PromptRecord], prompt: PromptRecord, num_before: int, max_tenant_tokens: int
) -> None:
    """Also where the index is made in the middle: it begins with the first comparison."""
    history = PromptHistory(max_tenant_tokens=max_tenant_tokens)
    kept: list[PromptRecord] = []
    for number, other in enumerate(known):
        if number == num_before:
            history.compare("a", prompt)
        history.add("a", other)
        if other.size_tokens <= max_tenant_tokens:
            kept.append(other)
        while sum(r.size_tokens for r in kept) > max_tenant_tokens:
            kept.pop(0)
    assert history.size_tokens == sum(r.size_tokens for r in kept)

    def best(candidates: list[PromptRecord]) -> PromptRecord | None:
        return max(candidates, key=lambda r: (prompt.num_common_tokens(r) // CHUNK, kept.index(r)), default=None)

    of_owner = [r for r in kept if r.owner_key == prompt.owner_key]
    found = history.compare("a", prompt)
    assert found.in_any_scope is best(of_owner)
    assert found.in_scope is best([r for r in of_owner if r.private_key == prompt.private_key])


def test_records_are_hidden_where_they_are_shown() -> None:
    shown = repr(record([1, 2, 3], scope=b"secret scope", owner=b"secret owner"))
    assert "secret" not in shown
    with pytest.raises(AttributeError):
        record([1]).ids = b""  # type: ignore[misc]
