"""Flipping any one field of what a block is known by is a miss, also where fields run together to the same bytes."""

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from app.scopes import Narrowing, Scopes
from app.tenants import Tenant
from engine.block_hash import hash_block, root_hash
from engine.kv_cache_manager import KVCacheManager
from engine.protocol import END, Scope
from engine.sequence import Sequence
from tests.engine.sequences import look_into, make_sequence

BLOCK_SIZE = 8
SETTINGS = settings(max_examples=150, deadline=None, derandomize=True)
LETTERS = st.text("ab\0\1", max_size=4)
"""Few of them, so that what is drawn is often alike."""


@dataclass(frozen=True)
class Identity:
    """All that the KV of a prompt is known by. The trunk may be empty."""

    root: tuple[str, ...]
    num_trunk_tokens: int
    trunk_scope: bytes
    own_scope: bytes
    token_ids: tuple[int, ...]

    @property
    def scopes(self) -> list[Scope]:
        own = Scope(END, self.own_scope)
        return [Scope(self.num_trunk_tokens, self.trunk_scope), own] if self.num_trunk_tokens else [own]

    def sequence(self) -> Sequence:
        """One more token, as the last one is always computed."""
        return make_sequence("r", [*self.token_ids, 999], scopes=tuple(self.scopes))

    def manager(self) -> KVCacheManager:
        return KVCacheManager(20, BLOCK_SIZE, root_hash(*self.root))

    def find_in(self, other: KVCacheManager) -> int:
        """How many tokens of it are known there."""
        return look_into(self.manager(), other).find_longest_prefix(self.sequence()).num_tokens


IDENTITIES = st.builds(
    Identity,
    st.lists(LETTERS, min_size=1, max_size=4).map(tuple),
    st.sampled_from([0, 7, 8, 9, 15, 16, 17]),
    st.binary(max_size=4),
    st.binary(max_size=4),
    st.lists(st.integers(0, 3), min_size=18, max_size=34).map(tuple),
)


def cached(identity: Identity) -> KVCacheManager:
    """With what is known once this one has been computed."""
    kv, sequence = identity.manager(), identity.sequence()
    assert kv.try_allocate_slots(sequence, sequence.num_tokens) is not None
    kv.unpublished_hashes(sequence)
    sequence.num_computed_tokens = sequence.num_tokens
    kv.commit_full_blocks(sequence)
    kv.commit_tails(sequence)
    kv.check_integrity([sequence])
    assert identity.find_in(kv) == len(identity.token_ids)
    return kv


@SETTINGS
@given(IDENTITIES, st.lists(LETTERS, min_size=1, max_size=4).map(tuple))
def test_b04_another_root_is_a_miss_from_the_first_block_on(identity, root):
    assume(root != identity.root)
    assert replace(identity, root=root).find_in(cached(identity)) == 0


@SETTINGS
@given(IDENTITIES, st.binary(max_size=4), st.binary(max_size=4))
def test_another_scope_is_a_miss_from_where_it_begins(identity, trunk_scope, own_scope):
    kv = cached(identity)
    same_trunk = identity.num_trunk_tokens
    if own_scope != identity.own_scope:
        assert replace(identity, own_scope=own_scope).find_in(kv) == same_trunk
    if same_trunk >= BLOCK_SIZE and trunk_scope != identity.trunk_scope:
        assert replace(identity, trunk_scope=trunk_scope).find_in(kv) == 0
        assert replace(identity, trunk_scope=trunk_scope, own_scope=own_scope).find_in(kv) == 0


@SETTINGS
@given(IDENTITIES, st.data())
def test_another_token_is_a_miss_from_there_on(identity, data):
    """That goes for the blocks behind it too, which hold the same tokens behind another parent."""
    kv = cached(identity)
    place = data.draw(st.integers(0, len(identity.token_ids) - 1))
    other = data.draw(st.integers(0, 1000 - 1).filter(lambda token_id: token_id != identity.token_ids[place]))
    token_ids = (*identity.token_ids[:place], other, *identity.token_ids[place + 1 :])
    found = replace(identity, token_ids=token_ids).find_in(kv)
    # whole blocks before it, and the end of the trunk
    ends = [place // BLOCK_SIZE * BLOCK_SIZE, identity.num_trunk_tokens]
    assert found == max(end for end in ends if end <= place)


# ---- fields that run together


def split(data: bytes, cuts: list[int]) -> tuple[bytes, ...]:
    places = sorted(min(cut, len(data)) for cut in cuts)
    return tuple(data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True))


def texts(data: bytes, cuts: list[int]) -> tuple[str, ...]:
    return tuple(part.decode("latin-1") for part in split(data, cuts))


def private_key(tenant: str, second: str, third: str) -> bytes:
    return SCOPES.private_key(Tenant(tenant), Narrowing(cache_salt=second, prompt_cache_key=third))


def user_key(tenant: str, second: str, third: str) -> bytes:
    return SCOPES.private_key(Tenant(tenant, is_scoped_by_user=True), Narrowing(user=second, cache_salt=third))


SCOPES = Scopes(b"s" * 32)
CUTS = st.lists(st.integers(0, 12), min_size=2, max_size=2)
DIGESTS: dict[str, Callable[[str, str, str], bytes]] = {
    "root": root_hash,
    "private scope": private_key,
    "user's scope": user_key,
    "assistant's scope": SCOPES.assistant_key,
}


@SETTINGS
@given(st.sampled_from(sorted(DIGESTS)), st.binary(min_size=1, max_size=12), CUTS, CUTS)
def test_the_border_between_two_fields_is_part_of_them(name, data, cuts, other_cuts):
    assume(split(data, cuts) != split(data, other_cuts))
    assert DIGESTS[name](*texts(data, cuts)) != DIGESTS[name](*texts(data, other_cuts))


@SETTINGS
@given(st.lists(st.integers(0, 3), min_size=3, max_size=10), CUTS, CUTS)
def test_the_borders_of_parent_scope_and_tokens_are_part_of_a_block(words, cuts, other_cuts):
    """All of them put together are the same 32-bit words."""

    def hash_of(cuts: list[int]) -> tuple[tuple[bytes, ...], bytes]:
        first, second = sorted(min(cut, len(words)) for cut in cuts)
        parent, scope, token_ids = words[:first], words[first:second], words[second:]
        fields = (struct.pack(f"<{len(parent)}I", *parent), struct.pack(f"<{len(scope)}I", *scope))
        return (*fields, bytes(token_ids)), hash_block(*fields, token_ids)

    (fields, digest), (other_fields, other_digest) = hash_of(cuts), hash_of(other_cuts)
    assert (fields == other_fields) == (digest == other_digest)


SALTS = st.none() | LETTERS
TENANTS = st.builds(Tenant, LETTERS, st.booleans())
NARROWINGS = st.builds(Narrowing, SALTS, SALTS, SALTS)


def who(tenant: Tenant, narrowing: Narrowing) -> tuple[Tenant, Narrowing]:
    """What tells private scopes apart: the user only where the tenant says so."""
    return tenant, narrowing if tenant.is_scoped_by_user else replace(narrowing, user=None)


@SETTINGS
@given(TENANTS, NARROWINGS, TENANTS, NARROWINGS, LETTERS)
def test_private_scopes_are_one_if_all_that_tells_them_apart_is_and_never_an_assistants(
    tenant, narrowing, other_tenant, other_narrowing, text
):
    """No text is unlike the empty one too."""
    key, other_key = SCOPES.private_key(tenant, narrowing), SCOPES.private_key(other_tenant, other_narrowing)
    assert (key == other_key) == (who(tenant, narrowing) == who(other_tenant, other_narrowing))
    shared, own = SCOPES.assistant_key(None, tenant.id, text), SCOPES.assistant_key(tenant.id, text, text)
    assert len({key, shared, own, SCOPES.assistant_key("", tenant.id, text)}) == 4 - (tenant.id == text == "")
