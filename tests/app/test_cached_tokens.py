"""Cached tokens by where they came from."""

from app.cached_tokens import CachedTokens
from engine.protocol import RequestOutput


def test_what_is_not_of_the_trunk_is_history() -> None:
    output = RequestOutput(
        request_id="r", token_ids=[1], num_cached_tokens=40, num_cached_trunk_tokens=33, num_cached_host_tokens=16
    )
    cached = CachedTokens.of(output)
    assert cached == CachedTokens(trunk=33, history=7, host=16)
    assert cached.total == 40, "the host tier's are among them"
    assert CachedTokens.of(RequestOutput(request_id="r", num_cached_tokens=40)) == CachedTokens(history=40)


def test_they_add_up() -> None:
    one, two = CachedTokens(trunk=1, history=2, host=3), CachedTokens(trunk=10, history=20, host=30)
    assert sum([one, two], start=CachedTokens()) == CachedTokens(trunk=11, history=22, host=33)
