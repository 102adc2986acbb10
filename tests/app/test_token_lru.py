"""What was used of late, bounded in number and in tokens."""

from app.token_lru import TokenLru


def test_what_was_used_longest_ago_goes_first() -> None:
    lru: TokenLru[str] = TokenLru(max_tokens=100, max_values=2)
    lru.put(b"a", "A", 1)
    lru.put(b"b", "B", 1)
    assert lru.use(b"a") == "A"
    lru.put(b"c", "C", 1)
    assert (lru.use(b"a"), lru.use(b"b"), lru.use(b"c"), len(lru)) == ("A", None, "C", 2)


def test_tokens_of_all_are_bounded_and_what_is_replaced_counts_no_more() -> None:
    lru: TokenLru[str] = TokenLru(max_tokens=10, max_values=100)
    lru.put(b"a", "A", 4)
    lru.put(b"b", "B", 6)
    lru.put(b"a", "other", 4)
    assert (lru.use(b"b"), lru.use(b"a")) == ("B", "other")
    lru.put(b"c", "C", 1)
    assert (lru.use(b"b"), lru.use(b"a"), lru.use(b"c")) == (None, "other", "C")
    lru.put(b"too large", "X", 11)
    assert (lru.use(b"too large"), len(lru)) == (None, 2)
