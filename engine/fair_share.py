"""How much service each tenant has had: virtual token counters (Sheng et al. 2024, "Fairness in Serving LLMs").

A counter is what the tenant was served, divided by its weight. Whoever has work and the lowest counter has the next
turn; so tenants that all have work waiting are served by their weights, up to a constant (docs/design.md, section 5).
Nobody is owed the service that it did not ask for: a tenant without work is kept level with the lowest of those that
have some, and where nobody had any all start level. What a tenant has had beyond that it owes, also if it leaves.
"""

from collections.abc import Callable, Iterable, ValuesView
from dataclasses import dataclass, field

from engine.kv_cache_manager import KVCacheManager
from engine.protocol import TenantStats
from engine.sequence import Sequence
from engine.tenant_shares import TenantShares

PREFILL_TOKEN = 1.0
"""Service of computing a token that was known and not in the cache: of a prompt, or again after a preemption."""
DECODE_TOKEN = 2.0
"""Of a decode row: it reads all of its context for one token. 1 and 2 are the weights of the paper."""
SLOT_SECOND = 0.01
"""Of keeping one slot of KV for a second, in the blocks of running sequences behind their trunks."""
MAX_LOWEST_SERVICE = 2.0**24
"""All counters go down by the lowest of them when that is higher: in a float so small also the least service counts."""
MAX_DEBTORS = 1024
"""Tenants without requests of which is kept what they owe; of more than that the largest debts."""
TRUNKS = "\0trunks"
"""The tenant of all trunks: they take turns like the requests of one tenant of weight 1, and cost nobody anything."""


@dataclass(eq=False, slots=True)
class Account:
    """Of a tenant with requests."""

    tenant: str
    weight: float = 1.0
    """Looked up when its first request comes, and once a step."""
    service: float = 0.0
    """Its virtual token counter: service divided by weight."""
    num_sequences: int = 0
    """That have not ended."""
    num_running: int = 0
    running_by_priority: dict[int, int] = field(default_factory=dict)
    has_work: bool = False
    """In the last step: something of it could be computed if it had the next turn."""


class FairShare:
    """`clock`: seconds, never going back."""

    def __init__(self, shares: TenantShares, kv: KVCacheManager, clock: Callable[[], float]) -> None:
        self._shares = shares
        self._kv = kv
        self._clock = clock
        self._time_s = clock()
        self._accounts: dict[str, Account] = {}
        self._debts: dict[str, float] = {}
        """Counters of tenants without requests, where they are above that of somebody with work."""

    def __getitem__(self, tenant: str) -> Account:
        """Raises KeyError for a tenant without requests."""
        return self._accounts[tenant]

    @property
    def accounts(self) -> ValuesView[Account]:
        return self._accounts.values()

    @property
    def total_weight(self) -> float:
        """Of the tenants with requests."""
        return sum([account.weight for account in self._accounts.values()])

    def count_waiting(self, tenant: str) -> int:
        """Its requests that do not run."""
        account = self._accounts.get(tenant)
        return 0 if account is None else account.num_sequences - account.num_running

    def max_running(self, account: Account) -> int | None:
        return self._shares.of(account.tenant).max_running

    def join(self, tenant: str) -> None:
        """One more request of it."""
        account = self._accounts.get(tenant)
        if account is None:
            weight, debt = self._shares.of(tenant).weight, self._debts.pop(tenant, 0.0)
            account = self._accounts[tenant] = Account(tenant, weight, debt)
        account.num_sequences += 1

    def leave(self, tenant: str) -> None:
        """One of its requests has ended."""
        account = self._accounts[tenant]
        account.num_sequences -= 1
        if account.num_sequences:
            return
        assert account.num_running == 0, account
        del self._accounts[tenant]
        lowest = min((other.service for other in self.accounts if other.has_work), default=account.service)
        if account.service > lowest:
            self._debts[tenant] = account.service
            if len(self._debts) > MAX_DEBTORS:
                del self._debts[min(self._debts, key=self._debts.__getitem__)]

    def start(self, sequence: Sequence) -> None:
        """It has a place."""
        account = self._accounts[sequence.tenant]
        account.num_running += 1
        account.running_by_priority[sequence.priority] = account.running_by_priority.get(sequence.priority, 0) + 1

    def stop(self, sequence: Sequence) -> None:
        """It gives its place back."""
        account = self._accounts[sequence.tenant]
        account.num_running -= 1
        account.running_by_priority[sequence.priority] -= 1
        if account.running_by_priority[sequence.priority] == 0:
            del account.running_by_priority[sequence.priority]

    def charge(self, account: Account, service: float) -> None:
        account.service += service / account.weight

    @property
    def time_s(self) -> float:
        """As of the last `pass_time`."""
        return self._time_s

    def pass_time(self) -> None:
        """Before each step: charges for the blocks kept since the one before, and takes in new weights."""
        now_s = self._clock()
        of_a_block = max(0.0, now_s - self._time_s) * self._kv.block_size * SLOT_SECOND
        self._time_s = now_s
        for tenant, account in self._accounts.items():
            account.weight = self._shares.of(tenant).weight
            account.service += self._kv.count_held_blocks(tenant) * of_a_block / account.weight

    def begin_turns(self, with_work: Iterable[Account]) -> None:
        """Before each step in which somebody has work: levels those that had none in the step before."""
        lowest = min((account.service for account in with_work if account.has_work), default=None)
        if lowest is None:
            lowest = max((account.service for account in self.accounts), default=0.0)
            self._debts.clear()
        for account in self._accounts.values():
            if account.service < lowest:
                account.service = lowest
            account.has_work = False
        for account in with_work:
            account.has_work = True
        if lowest > MAX_LOWEST_SERVICE:
            self._set_back(lowest)

    def end_turns(self) -> None:
        """Before each step in which nobody has work."""
        for account in self._accounts.values():
            account.has_work = False

    def _set_back(self, lowest: float) -> None:
        for account in self._accounts.values():
            account.service -= lowest
        self._debts = {tenant: debt - lowest for tenant, debt in self._debts.items() if debt > lowest}

    def stats(self) -> list[TenantStats]:
        """Of the tenants that have requests, or blocks of their own."""
        num_owned = self._kv.pool.num_owned
        nobody = Account("")
        stats = []
        for tenant in dict.fromkeys([*self._accounts, *num_owned]):
            account = self._accounts.get(tenant, nobody)
            if tenant != TRUNKS:
                stats.append(
                    TenantStats(
                        tenant=tenant,
                        running=account.num_running,
                        waiting=account.num_sequences - account.num_running,
                        blocks=num_owned.get(tenant, 0),
                        service=account.service if account is not nobody else self._debts.get(tenant, 0.0),
                    )
                )
        return stats

    def check_integrity(self, sequences: Iterable[Sequence], running: Iterable[Sequence]) -> None:
        """Raises AssertionError, with data, unless the accounts say what there is."""
        expected: dict[str, list[int]] = {}
        for sequence in sequences:
            expected.setdefault(sequence.tenant, [0, 0])[0] += 1
        for sequence in running:
            expected[sequence.tenant][1] += 1
        accounts = {a.tenant: [a.num_sequences, a.num_running] for a in self.accounts}
        assert accounts == expected, f"accounts {accounts}, expected {expected}"
        assert len(self._debts) <= MAX_DEBTORS, self._debts
