"""Block hashes of trunks, computed once, so that a request pays for hashing its own text only."""

from collections import OrderedDict

from engine.protocol import END, Scope
from engine.sequence import Sequence

MAX_TRUNKS = 64


class TrunkHashes:
    """The last `MAX_TRUNKS` trunks: what lies in a request's first scope, if that one has an end.

    Only a shortcut: the tokens are compared, so that whoever says the same scope of other tokens gets nothing.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._trunks: OrderedDict[Scope, tuple[list[int], list[bytes]]] = OrderedDict()
        """Tokens and hashes of the full blocks of each."""

    def find(self, sequence: Sequence) -> list[bytes]:
        """Hashes of the leading full blocks of a sequence, as far as a trunk is known that it starts with."""
        scope = sequence.scopes[0]
        token_ids, hashes = self._trunks.get(scope, ([], []))
        if sequence.token_ids[: len(token_ids)] != token_ids:
            return []
        if hashes:
            self._trunks.move_to_end(scope)
        return hashes

    def remember(self, sequence: Sequence, num_known: int) -> None:
        """Takes the hashes of the sequence's trunk, as far as they are computed; `find` has given `num_known`."""
        scope = sequence.scopes[0]
        num_blocks = min(scope.end_token // self._block_size, len(sequence.block_hashes))
        if scope.end_token == END or num_blocks <= num_known:
            return
        self._trunks[scope] = sequence.token_ids[: num_blocks * self._block_size], sequence.block_hashes[:num_blocks]
        self._trunks.move_to_end(scope)
        if len(self._trunks) > MAX_TRUNKS:
            self._trunks.popitem(last=False)
