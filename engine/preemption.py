"""Who gives way when a place or blocks are wanted. Decides only; `engine.places` does it."""

import math
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass, field

from engine.fair_share import DECODE_TOKEN, Account, FairShare
from engine.kv_cache_manager import KVCacheManager
from engine.places import Places
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Claim:
    """What the first request of a tenant's queue lacks."""

    sequence: Sequence
    account: Account
    needs_place: bool
    num_blocks: int
    """That must be free for it."""
    num_own_blocks: int
    """That its own tenant has to give back first, as it may have no more."""
    prefix_blocks: Container[int]
    """Ids of those that it shares: they do not become free for it, whoever gives way."""
    spared: Container[Sequence]
    """What this step computes something of already."""

    @property
    def is_first(self) -> bool:
        """Its tenant runs nothing, and nothing was taken from this request before."""
        return self.account.num_running == 0 and self.sequence.num_preemptions == 0


@dataclass(slots=True)
class Plan:
    """Who gives way, while it is being found out."""

    victims: list[Sequence] = field(default_factory=list)
    references: Counter[int] = field(default_factory=Counter)
    """Of the victims, by block id."""
    num_freed_blocks: int = 0
    num_places_taken: Counter[str] = field(default_factory=Counter)
    """By tenant, like the blocks."""
    num_blocks_taken: Counter[str] = field(default_factory=Counter)
    """Of its own: those of trunks are nobody's."""


@dataclass(slots=True)
class Standing:
    """The most service that tenants have had who hold more than their share; -inf where there are none."""

    of_places: float = -math.inf
    of_spare_places: float = -math.inf
    """Who keep one at least."""
    of_blocks: float = -math.inf


class Preemption:
    """Three rules.

    *Growth.* A running sequence needs a block and none is free: of the tenants that hold more than their share of the
    blocks the one that had most service loses its least urgent request, and of those the newest.

    *Claims on other tenants.* The first request of a queue may take a place, or blocks, from tenants that hold more
    than their share of what it lacks: all there are, times their weight over the weights of all tenants with requests.
    It may if its tenant runs nothing and has had no more service than they (then it must not have been preempted itself
    before, and they keep one place at least); or if they have had more by over `quantum` (then whoever goes must have
    computed `quantum` worth of new tokens since it was admitted). So no claim can be taken back before there was
    progress, and whatever has to be computed again for it is bounded by that.

    *Urgency.* Where that does not do, it may take them from less urgent requests of its own tenant.
    """

    def __init__(self, kv: KVCacheManager, fair_share: FairShare, places: Places, quantum: float) -> None:
        self.quantum = quantum
        self._kv = kv
        self._fair_share = fair_share
        self._places = places
        self._standing: Standing | None = None
        self._total_weight = 0.0
        self._num_shared_blocks = 0

    def find_victim_of_growth(self, sequence: Sequence) -> Sequence:
        """One that runs, for the want of a block of this one, which runs too."""
        running = self._places.running
        if self._kv.count_over_share(sequence):
            return max((other for other in running if other.tenant == sequence.tenant), key=_expendable)
        newest = {sequence.tenant: sequence.arrival for sequence in sorted(running, key=_arrival)}
        self._find_standing()
        accounts = [account for account in self._fair_share.accounts if account.num_running]
        over_share = [account for account in accounts if self._is_over_share_of_blocks(account)]
        most_served = max(over_share or accounts, key=lambda account: (*self._rank(account), newest[account.tenant]))
        return max((sequence for sequence in running if sequence.tenant == most_served.tenant), key=_expendable)

    def forget_standing(self) -> None:
        """To be called when others hold other things than when `may_claim` was asked last."""
        self._standing = None

    def may_claim(self, sequence: Sequence, account: Account, *, is_capped: bool) -> bool:
        """Whether it is worth asking `find_victims`; costs next to nothing.

        `is_capped`: the tenant has as much as it may have, so that only its own can give way.
        """
        if account.running_by_priority and max(account.running_by_priority) > sequence.priority:
            return True
        if is_capped:
            return False
        standing, service = self._standing or self._find_standing(), account.service
        if max(standing.of_places, standing.of_blocks) > service + self.quantum:
            return True
        is_first = account.num_running == 0 and sequence.num_preemptions == 0
        return is_first and max(standing.of_spare_places, standing.of_blocks) >= service

    def find_victims(self, claim: Claim, *, is_capped: bool) -> list[Sequence]:
        """The fewest, in the order of the rules, who leave the claim nothing to lack; none if they do not exist."""
        if self._standing is None:
            self._find_standing()  # an urgent one may claim without a look at what others hold
        for find_next in (self._find_less_urgent,) if is_capped else (self._find_over_served, self._find_less_urgent):
            plan = self._make_plan(claim, find_next)
            if plan is not None:
                return plan.victims
        return []

    def _find_standing(self) -> Standing:
        accounts, standing = self._fair_share.accounts, Standing()
        held = [(account, self._kv.count_held_blocks(account.tenant)) for account in accounts]
        self._total_weight = self._fair_share.total_weight
        self._num_shared_blocks = self._kv.num_free_blocks + sum([num_blocks for _, num_blocks in held])
        for account, num_blocks in held:
            service, share = account.service, account.weight / self._total_weight
            if account.num_running > int(self._places.max_num_seqs * share):
                standing.of_places = max(standing.of_places, service)
                if account.num_running > 1:
                    standing.of_spare_places = max(standing.of_spare_places, service)
            if num_blocks > self._num_shared_blocks * share:
                standing.of_blocks = max(standing.of_blocks, service)
        self._standing = standing
        return standing

    def _make_plan(
        self, claim: Claim, find_next: Callable[[Claim, Plan, list[Sequence]], Sequence | None]
    ) -> Plan | None:
        plan = Plan()
        candidates = [sequence for sequence in self._places.running if sequence not in claim.spared]
        candidates.sort(key=_expendable, reverse=True)
        own = claim.account.tenant
        while (
            self._lacks_place(claim, plan)
            or self._lacks_blocks(claim, plan)
            or plan.num_blocks_taken[own] < claim.num_own_blocks
        ):
            victim = find_next(claim, plan, candidates)
            if victim is None:
                return None
            candidates.remove(victim)
            self._add(claim, plan, victim)
        return plan

    def _find_over_served(self, claim: Claim, plan: Plan, candidates: list[Sequence]) -> Sequence | None:
        """Of other tenants, the most over-served first."""
        for account in sorted(self._fair_share.accounts, key=self._rank, reverse=True):
            if account is claim.account or account.service < claim.account.service:
                continue
            for is_entitled in (True, False):
                if self._holds_too_much(account, claim, plan, is_entitled=is_entitled):
                    for sequence in candidates:
                        if sequence.tenant == account.tenant and (is_entitled or self._has_progressed(sequence)):
                            return sequence
        return None

    def _find_less_urgent(self, claim: Claim, plan: Plan, candidates: list[Sequence]) -> Sequence | None:
        for sequence in candidates:
            if sequence.tenant == claim.account.tenant and sequence.priority > claim.sequence.priority:
                return sequence
        return None

    def _holds_too_much(self, other: Account, claim: Claim, plan: Plan, *, is_entitled: bool) -> bool:
        """Of what the claim lacks; `is_entitled`: by the first half of the rule, else by the second."""
        if not (claim.is_first if is_entitled else other.service > claim.account.service + self.quantum):
            return False
        share = self._share(other)
        if self._lacks_place(claim, plan):
            num_kept = int(self._places.max_num_seqs * share)
            num_left = other.num_running - plan.num_places_taken[other.tenant]
            return num_left > (max(1, num_kept) if is_entitled else num_kept)
        return self._is_over_share_of_blocks(other, plan.num_blocks_taken[other.tenant])

    def _is_over_share_of_blocks(self, account: Account, num_taken: int = 0) -> bool:
        return self._kv.count_held_blocks(account.tenant) - num_taken > self._num_shared_blocks * self._share(account)

    def _has_progressed(self, sequence: Sequence) -> bool:
        num_new_tokens = sequence.num_computed_tokens - sequence.num_served_tokens
        return num_new_tokens * DECODE_TOKEN >= self.quantum

    def _share(self, account: Account) -> float:
        return account.weight / self._total_weight

    @staticmethod
    def _lacks_place(claim: Claim, plan: Plan) -> bool:
        return claim.needs_place and not plan.victims

    def _lacks_blocks(self, claim: Claim, plan: Plan) -> bool:
        return claim.num_blocks > self._kv.num_free_blocks + plan.num_freed_blocks

    def _add(self, claim: Claim, plan: Plan, victim: Sequence) -> None:
        plan.victims.append(victim)
        plan.num_places_taken[victim.tenant] += 1
        plan.references.update(victim.block_table)
        for block_id in victim.block_table:
            block = self._kv.pool.blocks[block_id]
            if block.ref_count == plan.references[block_id] and block_id not in claim.prefix_blocks:
                plan.num_freed_blocks += 1
                plan.num_blocks_taken[victim.tenant] += block.owner == victim.tenant

    def _rank(self, account: Account) -> tuple[float, float]:
        """How over-served it is; between tenants with as much service, by what it holds of the blocks."""
        return account.service, self._kv.count_held_blocks(account.tenant) / account.weight


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival


def _expendable(sequence: Sequence) -> tuple[int, int]:
    """Of a tenant the least urgent goes first, and of those the newest."""
    return sequence.priority, sequence.arrival
