"""What sharing saved, and for whom; what of it the engine holds now."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from app.assistants import assistant_and_version
from engine.protocol import EngineInfo, EngineStats, TrunkPin, TrunkStats


@dataclass(slots=True)
class _Saved:
    prompt_tokens: int = 0
    prefill_s: float = 0.0
    unpriced_tokens: int = 0
    """Of `prompt_tokens`: those for which there was no rate yet."""


class Savings(Collector):
    """Prompt tokens from the cache by tenant and assistant, and the seconds that computing them would have taken.

    Seconds are added when the engine's rate is seen, at the rate of that moment; before the engine has measured one
    there are none. There is one row for each tenant with each assistant that it asked: both are of the configuration.
    """

    def __init__(self) -> None:
        self._saved: dict[tuple[str, str], _Saved] = {}

    def add(self, tenant: str, assistant: str | None, num_tokens: int) -> None:
        saved = self._saved.setdefault((tenant, assistant or ""), _Saved())
        saved.prompt_tokens += num_tokens
        saved.unpriced_tokens += num_tokens

    def price(self, prefill_tokens_per_s: float | None) -> None:
        """The rate at which the engine computes prompts now; None: it has not computed any."""
        if not prefill_tokens_per_s:
            return
        for saved in self._saved.values():
            saved.prefill_s += saved.unpriced_tokens / prefill_tokens_per_s
            saved.unpriced_tokens = 0

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "tenant": tenant,
                "assistant": assistant or None,
                "prompt_tokens": saved.prompt_tokens,
                "prefill_seconds": round(saved.prefill_s, 6),
            }
            for (tenant, assistant), saved in sorted(self._saved.items())
        ]

    def collect(self) -> Iterable[Metric]:
        tokens = CounterMetricFamily(
            "trunkline_saved_prompt_tokens",
            "Prompt tokens that sharing saved from being computed",
            labels=["tenant", "assistant"],
        )
        seconds = CounterMetricFamily(
            "trunkline_saved_prefill_seconds",
            "Time that computing them would have taken, at the engine's measured rate",
            labels=["tenant", "assistant"],
        )
        for labels, saved in sorted(self._saved.items()):
            tokens.add_metric(labels, saved.prompt_tokens)
            seconds.add_metric(labels, saved.prefill_s)
        yield tokens
        yield seconds


@dataclass(frozen=True, slots=True)
class TrunkUse:
    """One version of an assistant's prompt in the engine."""

    assistant: str
    version: str
    state: str
    num_tokens: int
    num_blocks: int
    readers: int
    kv_bytes_not_duplicated: int
    """(N - 1) S c for N readers of S tokens with c bytes of KV each, on each engine."""


def trunk_uses(stats: EngineStats, info: EngineInfo) -> list[TrunkUse]:
    """One for each version; if several engines hold it, with the blocks and readers of all, and the best state."""
    by_version: dict[tuple[str, str], list[TrunkStats]] = {}
    for trunk in stats.trunks:
        by_version.setdefault(assistant_and_version(trunk.trunk_id), []).append(trunk)
    return [_trunk_use(*version, held, info) for version, held in by_version.items()]


def _trunk_use(assistant: str, version: str, held: Sequence[TrunkStats], info: EngineInfo) -> TrunkUse:
    return TrunkUse(
        assistant,
        version,
        min((trunk.state for trunk in held), key=_BEST_FIRST.index) or "computing",
        max(trunk.num_tokens for trunk in held),
        sum(trunk.num_blocks for trunk in held),
        sum(trunk.readers for trunk in held),
        sum(max(trunk.readers - 1, 0) * trunk.num_tokens for trunk in held) * info.kv_bytes_per_token,
    )


_BEST_FIRST = (TrunkPin.PINNED, TrunkPin.OVER_BUDGET, None, TrunkPin.FAILED)


def kv_bytes_not_duplicated(stats: EngineStats, info: EngineInfo) -> int:
    """That the sequences which run now would take more if each had a KV cache of its own."""
    return stats.not_duplicated_blocks * info.block_size * info.kv_bytes_per_token


def kv_bytes_not_read(stats: EngineStats, info: EngineInfo) -> int:
    """That attention would have read more in all steps if each sequence had read its blocks for itself."""
    return stats.blocks_not_read * info.block_size * info.kv_bytes_per_token


def slot_usage_ratio(stats: EngineStats) -> float:
    """KV slots that are there for a token, of all slots of the blocks that are held; 1 where none are."""
    return stats.slots_used / stats.slots_allocated if stats.slots_allocated else 1.0
