"""Whether a block is had more cheaply from the host than by computing it."""

from dataclasses import dataclass

from engine.prefill_rate import PrefillRate


@dataclass(frozen=True, slots=True)
class SwapTime:
    """What moving blocks between device and host costs, measured when the engine starts."""

    step_s: float = 0.0
    """For each step that moves any."""
    block_s: float = 0.0
    """For each block in one direction."""


class SwapCost:
    """`step_s + n * block_s` for n blocks against `n * block_size` tokens at the rate of real steps.

    Until a step has been measured the host wins: it was asked for.
    """

    def __init__(self, time: SwapTime, rate: PrefillRate, block_size: int) -> None:
        self._time = time
        self._rate = rate
        self._block_size = block_size

    def is_cheaper(self, num_blocks: int) -> bool:
        """To swap so many blocks in."""
        tokens_per_s = self._rate.tokens_per_s
        if tokens_per_s is None:
            return True
        return self._time.step_s + num_blocks * self._time.block_s < num_blocks * self._block_size / tokens_per_s

    @property
    def can_pay(self) -> bool:
        """Whether a stretch that is long enough would be: else it is of no use to swap a block out."""
        tokens_per_s = self._rate.tokens_per_s
        return tokens_per_s is None or self._time.block_s < self._block_size / tokens_per_s
