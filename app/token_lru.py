"""What was used of late, bounded in number and in tokens: what was used longest ago goes first."""

from collections import OrderedDict
from typing import Generic, TypeVar

V = TypeVar("V")


class TokenLru(Generic[V]):
    """Values by digest; each counts for the tokens that it was put in with."""

    def __init__(self, max_tokens: int, max_values: int) -> None:
        self._max_tokens = max_tokens
        self._max_values = max_values
        self._num_tokens = 0
        self._values: OrderedDict[bytes, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def put(self, key: bytes, value: V, num_tokens: int) -> None:
        """In place of what the key had. What has more tokens than all may have together is not kept."""
        if num_tokens > self._max_tokens:
            return
        if key in self._values:
            self._num_tokens -= self._values.pop(key)[1]
        self._values[key] = value, num_tokens
        self._num_tokens += num_tokens
        while self._num_tokens > self._max_tokens or len(self._values) > self._max_values:
            self._num_tokens -= self._values.popitem(last=False)[1][1]

    def use(self, key: bytes) -> V | None:
        """The value, which is now the one used last; None if it is not known (any more)."""
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key][0]
