"""Hands out what a step can compute beside the decode rows: chunks of prompts, and places for requests that wait.

Tenants take turns: the one that has had the least service goes next, computes one thing and is charged for it. First
come its running prompts, in order, then the requests that wait.
"""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.fair_share import DECODE_TOKEN, PREFILL_TOKEN, Account, FairShare
from engine.kv_cache_manager import KVCacheManager
from engine.places import Places
from engine.preemption import Claim, Preemption
from engine.prefix_cache import Prefix
from engine.scheduled_batch import ScheduledSequence
from engine.sequence import Sequence, SequenceStatus

MAX_BYPASSES = 32
"""Requests admitted past one that waits for blocks; then all wait until enough are free for it."""
MAX_MISFITS = 8
"""Requests of a tenant tried in one step that do not fit, before looking for smaller ones is given up."""


@dataclass(slots=True)
class Draft:
    """What a step computes, while it is put together."""

    budget: int
    """Tokens that may be computed beside those in `decodes` and `chunks`."""
    decodes: list[Sequence]
    chunks: list[ScheduledSequence] = field(default_factory=list)
    scheduled: set[Sequence] = field(default_factory=set)
    """By turns, in chunks or as a decode row."""
    losers: set[Account] = field(default_factory=set)
    """Whose requests had to give way: they are given no place in the same step."""
    is_tight: bool = False
    """Some running one had to go, as another grew: only tenants that run nothing are given a place."""
    misfits: list[tuple[Sequence, Account]] = field(default_factory=list)
    """That found too few free blocks."""
    lowest_service: float = math.inf
    """Of the tenants that found no place, or too few free blocks."""


@dataclass(eq=False, slots=True)
class Turn:
    account: Account
    arrival: int
    """Of the first of its requests; decides between tenants with as much service."""
    prompts: list[Sequence] = field(default_factory=list)
    """That run: its own, and those of others that its requests follow."""
    waiting: Iterator[Sequence] = field(default_factory=lambda: iter(()))
    num_misfits: int = 0
    is_capped: bool = False
    """It runs as many as it may."""


class Admission:
    def __init__(self, kv: KVCacheManager, fair_share: FairShare, places: Places, preemption: Preemption) -> None:
        self._kv = kv
        self._fair_share = fair_share
        self._places = places
        self._preemption = preemption

    def share_budget(self, draft: Draft, extends: list[Sequence]) -> None:
        """`extends`: sequences that run and have more to compute than the one token of a decode row."""
        if not extends and not self._places.waiting:
            self._fair_share.end_turns()
            return
        turns = self._make_turns(extends)
        self._fair_share.begin_turns([turn.account for turn in turns if turn.prompts or not turn.is_capped])
        self._preemption.forget_standing()
        order = [(turn.account.service, turn.arrival, index, turn) for index, turn in enumerate(turns)]
        heapq.heapify(order)
        # without a chunk and without budget there are decode rows only: whoever gives way leaves room for one token
        while order and (draft.budget or not draft.chunks):
            _, arrival, index, turn = order[0]
            if self._take(turn, draft):
                heapq.heapreplace(order, (turn.account.service, arrival, index, turn))
            else:
                heapq.heappop(order)

    def _make_turns(self, extends: list[Sequence]) -> list[Turn]:
        turns: dict[str, Turn] = {}
        for sequence in extends:
            self._turn_of(sequence.tenant, sequence.arrival, turns).prompts.append(sequence)
        for follower, leader in self._places.followers.of_other_tenants():
            if _is_prompt(leader):
                self._turn_of(follower.tenant, follower.arrival, turns).prompts.append(leader)
        for tenant in self._places.waiting.tenants:
            turn = self._turn_of(tenant, self._places.waiting.of(tenant)[0].arrival, turns)
            turn.waiting = _walk(self._places.waiting.of(tenant))
            turn.is_capped = self._is_capped(turn.account)
        return list(turns.values())

    def _turn_of(self, tenant: str, arrival: int, turns: dict[str, Turn]) -> Turn:
        turn = turns.get(tenant)
        if turn is None:
            turn = turns[tenant] = Turn(self._fair_share[tenant], arrival)
        return turn

    def _is_capped(self, account: Account) -> bool:
        max_running = self._fair_share.max_running(account)
        return max_running is not None and account.num_running >= max_running

    def _take(self, turn: Turn, draft: Draft) -> bool:
        """One thing; False if there is none any more."""
        for index, sequence in enumerate(turn.prompts):
            if _is_prompt(sequence) and sequence not in draft.scheduled:
                del turn.prompts[: index + 1]
                self._schedule_chunk(sequence, turn.account, draft)
                return True
        turn.prompts.clear()
        return self._admit_next(turn, draft)

    def _schedule_chunk(self, sequence: Sequence, account: Account, draft: Draft) -> None:
        num_uncomputed = sequence.num_uncomputed_tokens
        num_new = min(num_uncomputed, draft.budget)
        draft.budget -= num_new
        draft.scheduled.add(sequence)
        draft.chunks.append(ScheduledSequence(sequence, num_new, num_new == num_uncomputed and not sequence.is_trunk))
        self._fair_share.charge(account, num_new * PREFILL_TOKEN)

    def _admit_next(self, turn: Turn, draft: Draft) -> bool:
        """Tries the next request that waits; False if the tenant's next ones have no better chance.

        One that shares a block with what a running sequence is computing waits for it and holds nobody up. One that
        is too large for the free blocks is passed by smaller ones, but not for ever.
        """
        account = turn.account
        if turn.num_misfits == MAX_MISFITS or account in draft.losers or (draft.is_tight and account.num_running):
            return False
        sequence = next(turn.waiting, None)
        if sequence is None or self._is_held_up(account, draft):
            return False
        turn.is_capped = self._is_capped(account)
        has_room = not (turn.is_capped or self._places.is_full or self._kv.num_free_blocks == 0)
        if not has_room and not self._may_claim(sequence, turn):
            return self._give_up(turn, draft)
        prefix = self._kv.find_longest_prefix(sequence)
        block_hash = self._find_what_to_wait_for(sequence, prefix)
        if block_hash is not None:
            self._places.park(sequence, block_hash)
            turn.prompts.append(self._places.followers.leader(block_hash))
        elif (has_room and self._kv.try_start(sequence, prefix)) or (
            self._may_claim(sequence, turn)
            and self._make_way(sequence, prefix, turn, draft)
            and self._kv.try_start(sequence, prefix)
        ):
            self._start(sequence, account, draft)
        elif turn.is_capped or self._places.is_full or self._kv.count_over_share(sequence, prefix):
            return self._give_up(turn, draft)
        else:
            turn.num_misfits += 1
            draft.misfits.append((sequence, account))
            draft.lowest_service = min(draft.lowest_service, account.service)
        return True

    def _may_claim(self, sequence: Sequence, turn: Turn) -> bool:
        """Only the first of a queue may; what that takes is looked at only where there is no room."""
        return turn.num_misfits == 0 and self._preemption.may_claim(sequence, turn.account, is_capped=turn.is_capped)

    def _give_up(self, turn: Turn, draft: Draft) -> bool:
        """For this step; who waits for its own tenant's requests to end is no reason for others to wait."""
        if not turn.is_capped and (self._places.is_full or self._kv.num_free_blocks == 0):
            draft.lowest_service = min(draft.lowest_service, turn.account.service)
        return False

    def _is_held_up(self, account: Account, draft: Draft) -> bool:
        """By one that cannot be admitted: its tenant is behind by too much, or it has been passed often enough."""
        if account.service > draft.lowest_service + self._preemption.quantum:
            return True
        for misfit, other in draft.misfits:
            is_next = other is not account and account.num_running == 0 and account.service <= other.service
            if misfit.num_bypasses >= MAX_BYPASSES and not is_next:
                return True
        return False

    def _make_way(self, sequence: Sequence, prefix: Prefix, turn: Turn, draft: Draft) -> bool:
        """Preempts others for it; False, and nothing changed, if not enough of them can go."""
        num_own_blocks = self._kv.count_over_share(sequence, prefix)
        claim = Claim(
            sequence,
            turn.account,
            needs_place=turn.is_capped or self._places.is_full,
            num_blocks=self._kv.count_blocks_to_start(sequence, prefix),
            num_own_blocks=num_own_blocks,
            prefix_blocks=set(prefix.block_ids),
            spared=draft.scheduled,
        )
        victims = self._preemption.find_victims(claim, is_capped=turn.is_capped or num_own_blocks > 0)
        for victim in victims:
            account = self._fair_share[victim.tenant]
            draft.losers.add(account)
            if victim in draft.decodes:
                draft.decodes.remove(victim)
                draft.budget += 1
                self._fair_share.charge(account, -DECODE_TOKEN)
            self._places.preempt(victim)
        return bool(victims)

    def _start(self, sequence: Sequence, account: Account, draft: Draft) -> None:
        for misfit, _ in draft.misfits:
            misfit.num_bypasses += 1
        self._places.start(sequence)
        self._preemption.forget_standing()
        if sequence.num_uncomputed_tokens == 1 and not sequence.is_trunk:
            draft.budget -= 1
            draft.scheduled.add(sequence)
            draft.decodes.append(sequence)
            self._fair_share.charge(account, DECODE_TOKEN)
        else:
            self._schedule_chunk(sequence, account, draft)

    def _find_what_to_wait_for(self, sequence: Sequence, prefix: Prefix) -> bytes | None:
        """The last block, or tail, behind the known prefix that a running sequence is computing; None if it is none."""
        # what the host has is missing too: somebody may be swapping it in
        num_full = prefix.num_tokens // self._kv.block_size
        missing = self._kv.shareable_hashes(sequence)[num_full - len(prefix.host_hashes) :]
        num_claimed = self._places.followers.count_claimed(missing)
        index = max(num_full, num_full - len(prefix.host_hashes) + num_claimed)
        num_known = max(prefix.num_tokens, index * self._kv.block_size)
        for end, tail_hash in self._kv.shareable_tails(sequence, index):
            if min(end, sequence.num_tokens - 1) > num_known and self._places.followers.is_claimed(tail_hash):
                return tail_hash
        return missing[num_claimed - 1] if num_claimed else None


def _walk(queue: list[Sequence]) -> Iterator[Sequence]:
    """What is in it when the first one is asked for; it changes meanwhile. Most often nobody asks."""
    yield from queue.copy()


def _is_prompt(sequence: Sequence) -> bool:
    """It runs and has more to compute than the one token of a decode row."""
    is_running = sequence.status is SequenceStatus.RUNNING
    return is_running and (sequence.num_uncomputed_tokens > 1 or sequence.is_trunk)
