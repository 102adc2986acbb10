"""System prompts that are to stay in the cache: prefilled as sequences that draw no token, then pinned.

PinTrunk → loading → pinned, or over_budget (served like any prompt that was seen), or failed (and forgotten)
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from engine.errors import RequestError
from engine.protocol import FinishReason, PinTrunk, TrunkPin, TrunkState, TrunkStats
from engine.scheduler import Scheduler
from engine.sequence import Sequence

MakeSequence = Callable[[PinTrunk], Sequence]
"""Raises RequestError for a trunk that could never be served."""


@dataclass(eq=False, slots=True)
class Trunk:
    message: PinTrunk
    sequence: Sequence | None = None
    """While it is prefilled."""
    state: TrunkState | None = None
    """None before the first prefill has ended."""
    first_hash: bytes | None = None
    """Of its first block, once it was prefilled; None if it has no full one."""


class Trunks:
    def __init__(self, scheduler: Scheduler, make_sequence: MakeSequence) -> None:
        self._scheduler = scheduler
        self._kv = scheduler.kv
        self._make_sequence = make_sequence
        self._trunks: dict[str, Trunk] = {}
        self._loading: list[Trunk] = []
        self._news: list[TrunkState] = []

    def __contains__(self, trunk_id: str) -> bool:
        return trunk_id in self._trunks

    def pin(self, message: PinTrunk) -> TrunkState | None:
        """Its state, if that is known at once; else `take_news` brings it. An id stands for one text for ever."""
        trunk = self._trunks.get(message.trunk_id)
        if trunk is not None:
            if (trunk.message.token_ids, trunk.message.scopes) != (message.token_ids, message.scopes):
                return _failed(message.trunk_id)
            return trunk.state
        trunk = Trunk(message)
        try:
            self._load(trunk)
        except RequestError:
            return _failed(message.trunk_id)
        self._trunks[message.trunk_id] = trunk
        return None

    def unpin(self, trunk_id: str) -> None:
        """An unknown id is no error. Others that were over the budget may have their turn."""
        trunk = self._trunks.pop(trunk_id, None)
        if trunk is None:
            return
        if trunk.sequence is not None:
            self._loading.remove(trunk)
            self._scheduler.abort(trunk.sequence.request_id)
        self._kv.pins.unpin(trunk_id)
        self._load_what_fits()

    def settle(self) -> None:
        """After each step: pins what is prefilled, before anything else can take its blocks."""
        loading, self._loading = self._loading, []
        for trunk in loading:
            sequence = trunk.sequence
            assert sequence is not None, trunk
            if sequence.is_finished:
                trunk.sequence = None
                self._settle(trunk, sequence)
            else:
                self._loading.append(trunk)
        if self._kv.pins.num_dropped:
            self._report_dropped()
        if len(self._scheduler) == 0:
            self._load_what_fits()  # whoever needed the blocks of pins has ended

    def take_news(self) -> list[TrunkState]:
        """States that have changed since the last call."""
        news, self._news = self._news, []
        return news

    def stats(self) -> list[TrunkStats]:
        """Counts readers, between two steps."""
        readers = Counter(sequence.block_table[0] for sequence in self._scheduler.running if sequence.block_table)
        stats = []
        for trunk_id, trunk in self._trunks.items():
            state, num_tokens = trunk.state, len(trunk.message.token_ids)
            entry = self._kv.cache.find_entry(trunk.first_hash) if trunk.first_hash is not None else None
            stats.append(
                TrunkStats(
                    trunk_id=trunk_id,
                    state=state.state if state is not None else None,
                    num_tokens=num_tokens,
                    num_blocks=state.num_blocks if state is not None else -(-num_tokens // self._kv.block_size),
                    readers=readers[entry.block.block_id] if entry is not None else 0,
                )
            )
        return stats

    def count_unused_pinned_slots(self) -> int:
        """Of the blocks in which pinned trunks end; one in which several do counts by the longest."""
        unused: dict[int, int] = {}
        for trunk_id, trunk in self._trunks.items():
            blocks = self._kv.pins.find_blocks(trunk_id)
            if blocks:
                last = blocks[-1].block_id
                num_unused = len(blocks) * self._kv.block_size - len(trunk.message.token_ids)
                unused[last] = min(unused.get(last, num_unused), num_unused)
        return sum(unused.values())

    def _load(self, trunk: Trunk) -> None:
        trunk.sequence = self._make_sequence(trunk.message)
        self._scheduler.add(trunk.sequence)
        self._loading.append(trunk)

    def _load_what_fits(self) -> None:
        """Of the trunks over the budget those for which there is room now, in the order in which they came."""
        num_blocks = 0
        for trunk in self._trunks.values():
            state = trunk.state
            if state is None or state.state is not TrunkPin.OVER_BUDGET:
                continue
            if trunk.sequence is not None:
                num_blocks += state.num_blocks
            elif self._kv.pins.can_pin(num_blocks + state.num_blocks):
                num_blocks += state.num_blocks
                self._load(trunk)

    def _settle(self, trunk: Trunk, sequence: Sequence) -> None:
        trunk_id = trunk.message.trunk_id
        blocks = self._kv.find_all_blocks(sequence) if sequence.finish_reason is FinishReason.STOP else None
        if blocks is None:
            del self._trunks[trunk_id]
            self._news.append(_failed(trunk_id))
        else:
            trunk.first_hash = next(iter(sequence.block_hashes), None)
            is_pinned = self._kv.pins.try_pin(trunk_id, blocks)
            self._report(trunk, TrunkPin.PINNED if is_pinned else TrunkPin.OVER_BUDGET, len(blocks))

    def _report_dropped(self) -> None:
        self._kv.pins.num_dropped = 0
        for trunk_id, trunk in self._trunks.items():
            if trunk.state is not None and trunk.state.state is TrunkPin.PINNED and trunk_id not in self._kv.pins:
                self._report(trunk, TrunkPin.OVER_BUDGET, trunk.state.num_blocks)

    def _report(self, trunk: Trunk, state: TrunkPin, num_blocks: int) -> None:
        message = trunk.message
        trunk.state = TrunkState(message.trunk_id, state, len(message.token_ids), num_blocks)
        self._news.append(trunk.state)


def _failed(trunk_id: str) -> TrunkState:
    return TrunkState(trunk_id, TrunkPin.FAILED, 0, 0)
