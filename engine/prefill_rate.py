"""How many prompt tokens a second this engine computes, measured on the steps that it makes anyway."""

from engine.scheduled_batch import ScheduledBatch

HALF_LIFE_TOKENS = 10_000
"""After so many tokens an old measurement counts half."""
MIN_TOKENS = 16
"""A step of fewer new tokens says more about what a step costs than about what its tokens do."""


class PrefillRate:
    """Of steps in which at least half of the new tokens are prompt tokens; what is decoded beside them counts too."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        # of steps that nobody has waited for yet
        self._num_tokens = self._num_decodes = 0
        self._step_s = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """None before the first measurement."""
        return self._tokens / self._seconds if self._seconds > 0 else None

    def add(self, batch: ScheduledBatch, seconds: float) -> None:
        """A step took so long. One that draws no token is not waited for on a device that computes by itself: it counts
        together with the next one.
        """
        if len(batch.sequences) == batch.num_decodes and not self._num_tokens:
            return  # most steps
        self._num_tokens += batch.num_tokens
        self._num_decodes += batch.num_decodes
        self._step_s += seconds
        if not any(scheduled.samples for scheduled in batch.sequences):
            return
        if self._num_tokens >= max(MIN_TOKENS, 2 * self._num_decodes):
            weight = 0.5 ** (self._num_tokens / HALF_LIFE_TOKENS)
            self._tokens = self._tokens * weight + self._num_tokens
            self._seconds = self._seconds * weight + self._step_s
        self._num_tokens = self._num_decodes = 0
        self._step_s = 0.0
