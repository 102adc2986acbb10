"""Which of several engines gets a request: where its KV is, unless that engine has more than its share of the load.

Pure decisions; `app/engine_pool.py` carries them out. Each gateway decides by itself, with what it has sent itself and
by a ranking that all gateways have in common, so that no gateway needs to hear of another.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from math import ceil

from engine.protocol import Scope

CHUNK_TOKENS = 64
"""Prompts are compared by pieces of so many tokens: less than this is not worth a place."""
LOAD_BOUND = 1.25
"""No engine gets a request for the sake of its cache that would give it more than this times the mean load."""
NUM_HOMES = 4
"""Engines of an assistant's ranking among which its chats are kept as long as they are under the bound."""


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    """What routing sees of a prompt: digests that say nothing of its text and differ between scopes."""

    key: bytes
    """Of its assistant's trunk, else of how it begins: prompts with the same key have the same homes."""
    chunks: tuple[bytes, ...]
    """One for each whole chunk; it stands for all tokens up to its end, and for who may share them."""
    num_trunk_chunks: int
    """Leading ones that lie in the first scope."""

    @classmethod
    def of(cls, token_ids: Sequence[int], scopes: Sequence[Scope]) -> "RoutedPrompt":
        first = scopes[0]
        key = _digest(first.key, token_ids[: min(CHUNK_TOKENS, first.end_token)])
        chunks, scope, previous = [], 0, b""
        for start in range(0, len(token_ids) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
            end = start + CHUNK_TOKENS
            while scopes[scope].end_token < end:
                scope += 1
            previous = _digest(previous + scopes[scope].key, token_ids[start:end])
            chunks.append(previous)
        return cls(key, tuple(chunks), min(first.end_token // CHUNK_TOKENS, len(chunks)))


def _digest(prefix: bytes, token_ids: Sequence[int]) -> bytes:
    return blake2b(prefix + array("q", token_ids).tobytes(), digest_size=16).digest()


class HeldPrefixes:
    """What an engine probably holds: chunks that were sent to it, of which those used least recently are forgotten."""

    def __init__(self, max_chunks: int) -> None:
        """`max_chunks`: as many as fit into the engine's KV blocks."""
        self._chunks: OrderedDict[bytes, None] = OrderedDict()
        self._max_chunks = max_chunks

    def __len__(self) -> int:
        return len(self._chunks)

    def find_num_held(self, chunks: Sequence[bytes]) -> int:
        """How many leading ones it holds."""
        for i, chunk in enumerate(chunks):
            if chunk not in self._chunks:
                return i
        return len(chunks)

    def use(self, chunks: Sequence[bytes]) -> None:
        """They are held now. The last of a prompt are forgotten before its first ones, as in the engine."""
        for chunk in reversed(chunks):
            self._chunks[chunk] = None
            self._chunks.move_to_end(chunk)
        while len(self._chunks) > self._max_chunks:
            self._chunks.popitem(last=False)


@dataclass(slots=True)
class Candidate:
    """An engine that takes requests now."""

    name: str
    """The same in each gateway."""
    load: int
    """Requests that it has of this gateway."""
    held: HeldPrefixes = field(repr=False)


def choose(prompt: RoutedPrompt, candidates: Sequence[Candidate]) -> Candidate:
    """The engine for this prompt: the one that holds the most of its history; else the least loaded of

    1. its homes that hold the trunk,
    2. other engines that hold the trunk,
    3. its homes, of which one will hold the trunk from then on,
    4. all engines,

    and of none that has as many requests as the load bound allows.
    """
    limit = ceil(LOAD_BOUND * (sum(c.load for c in candidates) + 1) / len(candidates))
    free = {c.name: c for c in candidates if c.load < limit}
    num_held = {name: c.held.find_num_held(prompt.chunks) for name, c in free.items()}
    most = max(free, key=lambda name: (num_held[name], -free[name].load))
    if num_held[most] > prompt.num_trunk_chunks:
        return free[most]
    homes = [name for name in homes_of(prompt.key, tuple(c.name for c in candidates)) if name in free]
    holders = [name for name in free if 0 < prompt.num_trunk_chunks == num_held[name]]
    for names in ([name for name in homes if name in holders], holders, homes):
        if names:
            return free[min(names, key=lambda name: free[name].load)]
    return min(free.values(), key=lambda c: c.load)


@lru_cache(maxsize=4096)
def homes_of(key: bytes, names: tuple[str, ...]) -> tuple[str, ...]:
    """The first of all engines in the order that this key has (rendezvous hashing): an engine that goes or comes moves
    its own keys only."""
    return tuple(sorted(names, key=lambda name: blake2b(key + name.encode(), digest_size=8).digest())[:NUM_HOMES])
