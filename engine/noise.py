"""The uniform numbers of sequences, made for some positions at once: for one they cost as much as for all of them."""

from weakref import WeakKeyDictionary

from engine import philox
from engine.sequence import Sequence

POSITIONS_AHEAD = 32


class Noise:
    """Forgets nothing that matters: every number is Philox(seed, choice, position) whenever it is made."""

    def __init__(self) -> None:
        self._ahead: WeakKeyDictionary[Sequence, tuple[int, list[float]]] = WeakKeyDictionary()
        """The first position, and the numbers from there on."""

    def of(self, sequences: list[Sequence]) -> list[float]:
        """For the token behind each sequence's last one, in [0, 1)."""
        numbers = [self._find(sequence) for sequence in sequences]
        missing = [sequence for sequence, number in zip(sequences, numbers, strict=True) if number is None]
        if missing:
            self._draw(missing)
            numbers = [self._find(sequence) for sequence in sequences]
        return [number for number in numbers if number is not None]

    def _find(self, sequence: Sequence) -> float | None:
        first, numbers = self._ahead.get(sequence, (0, []))
        place = len(sequence.token_ids) - first
        return numbers[place] if 0 <= place < len(numbers) else None

    def _draw(self, sequences: list[Sequence]) -> None:
        each = range(POSITIONS_AHEAD)
        drawn = philox.uniforms(
            [s.seed for s in sequences for _ in each],
            [s.choice for s in sequences for _ in each],
            [s.num_tokens + i for s in sequences for i in each],
        )
        for sequence, numbers in zip(sequences, drawn.reshape(-1, POSITIONS_AHEAD).tolist(), strict=True):
            self._ahead[sequence] = (sequence.num_tokens, numbers)
