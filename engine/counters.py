"""What the scheduler counts."""

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerCounters:
    """Of this engine's life."""

    query_tokens: int = 0
    hit_tokens: int = 0
    """Prompts counted once: at the first admission, of several choices the first."""
    prompt_tokens_computed: int = 0
    """Recomputed ones too."""
    generation_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    blocks_not_read: int = 0
    """Readers of a node less one, times its blocks, for each node of each step."""
