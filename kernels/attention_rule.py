"""What a model's attention does beside the usual: part of a backend, as all layers share it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """Raises ValueError for numbers below 0."""

    window: int = 0
    """Tokens that a row sees, itself counted; 0: all before it."""
    soft_cap: float = 0.0
    """Scores, scaled, are bent to stay within it: cap * tanh(score / cap); 0: they are left as they are."""

    def __post_init__(self) -> None:
        if self.window < 0 or self.soft_cap < 0:
            raise ValueError(f"window and soft_cap must not be below 0, got {self.window} and {self.soft_cap}")

    def first_seen(self, position: int) -> int:
        """Of the row at this position."""
        return max(0, position + 1 - self.window) if self.window else 0


FULL = AttentionRule()
"""Every row sees every token before it."""
