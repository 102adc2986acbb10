"""Counters of tenants, in tokens by weight. Blocks hold 8 tokens."""

import pytest

from engine.fair_share import DECODE_TOKEN, MAX_DEBTORS, PREFILL_TOKEN, SLOT_SECOND, TRUNKS, FairShare
from engine.kv_cache_manager import NO_PREFIX, KVCacheManager
from engine.protocol import END, Scope, TenantShare, TenantStats
from engine.tenant_shares import TenantShares
from tests.engine.sequences import make_sequence


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def fair_share(*tenants: str, clock: Clock | None = None, **weights: float) -> FairShare:
    """With one request of each tenant."""
    shares = TenantShares()
    shares.set([TenantShare(tenant=tenant, weight=weight) for tenant, weight in weights.items()])
    kv = KVCacheManager(20, 8, b"root", shares=shares)
    share = FairShare(shares, kv, clock or Clock())
    for tenant in tenants:
        share.join(tenant)
    return share


def service(share: FairShare) -> dict[str, float]:
    return {account.tenant: account.service for account in share.accounts}


def step(share: FairShare, *with_work: str) -> dict[str, float]:
    share.begin_turns([share[tenant] for tenant in with_work])
    return service(share)


def test_service_counts_by_weight():
    share = fair_share("a", "b", a=2.0, b=0.5)
    share.charge(share["a"], 10 * PREFILL_TOKEN)
    share.charge(share["b"], 3 * DECODE_TOKEN)
    assert service(share) == {"a": 5.0, "b": 12.0}
    assert (share.total_weight, share["b"].weight) == (2.5, 0.5)


def test_a_new_weight_counts_from_the_next_step_on():
    share = fair_share("a", a=2.0)
    share._shares.set([TenantShare(tenant="a", weight=4.0)])
    share.charge(share["a"], 8)
    assert service(share) == {"a": 4.0}
    share.pass_time()
    share.charge(share["a"], 8)
    assert service(share) == {"a": 6.0}


def test_blocks_are_paid_for_by_time_but_those_of_a_trunk_are_free():
    clock = Clock()
    share = fair_share("a", "b", "idle", clock=clock, b=4.0)
    for tenant, trunk_end in (("a", 0), ("b", 20)):
        scopes = (Scope(trunk_end, b"trunk"), Scope(END, b"own")) if trunk_end else (Scope(END, b"own"),)
        sequence = make_sequence(tenant, list(range(40)), tenant=tenant, scopes=scopes)
        assert share._kv.try_start(sequence, NO_PREFIX)
    clock.now_s += 10
    share.pass_time()
    # of b's five blocks two lie wholly in the trunk
    expected = {"a": 5 * 80 * SLOT_SECOND, "b": 3 * 80 * SLOT_SECOND / 4, "idle": 0.0}
    assert service(share) == pytest.approx(expected)
    share.pass_time()
    assert service(share) == pytest.approx(expected)


def test_nothing_is_saved_up_while_others_have_work():
    share = fair_share("a", "b", "idle")
    step(share, "a", "b")
    share.charge(share["a"], 100)
    share.charge(share["b"], 70)
    assert step(share, "a", "b") == {"a": 100.0, "b": 70.0, "idle": 70.0}
    share.join("new")
    assert step(share, "a", "b", "new", "idle") == {"a": 100.0, "b": 70.0, "idle": 70.0, "new": 70.0}
    share.charge(share["new"], 5)
    assert step(share, "a", "b", "new", "idle")["new"] == 75.0


def test_where_nobody_had_work_all_start_level():
    share = fair_share("a", "b", "c")
    step(share, "a", "b")
    share.charge(share["a"], 100)
    share.end_turns()
    assert step(share, "b") == {"a": 100.0, "b": 100.0, "c": 100.0}


def test_after_weeks_of_service_a_token_still_counts_and_who_owes_what_is_kept():
    share = fair_share("light", "heavy", "debtor", light=0.001, heavy=1000.0)
    step(share, "light", "heavy", "debtor")
    for tenant in ("light", "heavy", "debtor"):
        share[tenant].service = 2.0**50
    share.charge(share["debtor"], 64.0)
    share.leave("debtor")
    step(share, "light", "heavy")
    share.charge(share["heavy"], DECODE_TOKEN)
    assert service(share) == {"light": 0.0, "heavy": 0.002}
    share.join("debtor")
    assert step(share, "light", "heavy", "debtor") == {"light": 0.0, "heavy": 0.002, "debtor": 64.0}


def test_who_leaves_owes_what_it_has_had_until_the_others_have_had_as_much():
    share = fair_share("a", "b")
    step(share, "a", "b")
    share.charge(share["a"], 100)
    share.leave("a")
    share.join("a")
    assert step(share, "a", "b") == {"a": 100.0, "b": 0.0}
    share.leave("a")
    share.charge(share["b"], 130)
    share.join("a")
    assert step(share, "a", "b") == {"a": 130.0, "b": 130.0}


def test_who_leaves_when_nobody_has_work_owes_nothing():
    share = fair_share("a", "b")
    step(share, "a")
    share.charge(share["a"], 100)
    share.leave("a")
    share.join("a")
    assert service(share) == {"a": 0.0, "b": 0.0}


def test_debts_are_bounded_in_number_and_the_largest_are_kept():
    share = fair_share("b")
    for i in range(MAX_DEBTORS + 3):
        share.join(f"t{i}")
        step(share, "b")
        share.charge(share[f"t{i}"], 1000 - i % 1000)
        share.leave(f"t{i}")
    share.check_integrity([make_sequence("r", [1], tenant="b")], [])
    share.join("t0")
    share.join("t999")
    assert (share["t0"].service, share["t999"].service) == (1000.0, 0.0)


def test_trunks_are_nobody_s_in_the_report():
    share = fair_share("a", TRUNKS)
    sequence = make_sequence("r", [1, 2], tenant="a", priority=3)
    share.join("a")
    share.start(sequence)
    assert share["a"].running_by_priority == {3: 1}
    [stats] = share.stats()
    assert (stats.tenant, stats.running, stats.waiting, stats.service) == ("a", 1, 1, 0.0)
    share.stop(sequence)
    assert (share["a"].num_running, share["a"].running_by_priority) == (0, {})


def test_the_report_names_tenants_without_requests_that_have_blocks():
    share = fair_share()
    assert share._kv.try_start(make_sequence("r", list(range(20)), tenant="gone"), NO_PREFIX)
    [stats] = share.stats()
    assert stats == TenantStats(tenant="gone", running=0, waiting=0, blocks=3, service=0.0)


def test_check_integrity_sees_an_account_that_counts_wrong():
    share = fair_share("a")
    share["a"].num_running = 1
    with pytest.raises(AssertionError, match=r"accounts \{'a': \[1, 1\]\}, expected \{'a': \[1, 0\]\}"):
        share.check_integrity([make_sequence("r", [1], tenant="a")], [])
