"""Whose turn it is: rows are (request id, number of new tokens), decodes first. Blocks hold 8 tokens.

The bounds are those of docs/design.md, section 5.
"""

import math

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from engine.protocol import END, Scope, TenantShare
from tests.engine.fake_runner import Bench, ids

SETTINGS = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def bench_of(num_blocks: int = 100, shares: tuple[TenantShare, ...] = (), **more: int) -> Bench:
    bench = Bench(num_blocks, clock=lambda: 0.0, max_waiting=10_000, **more)
    bench.core.set_tenants(shares)
    return bench


# ---- turns


def test_tenants_that_arrive_together_take_turns():
    bench = bench_of(max_num_seqs=4)
    for i in range(3):
        bench.add(f"a{i}", ids(100 * i, 5), 1, tenant="a")
    for i in range(2):
        bench.add(f"b{i}", ids(500 + 100 * i, 5), 1, tenant="b")
    bench.run()
    assert bench.runner.rows == [[("a0", 5), ("b0", 5), ("a1", 5), ("b1", 5)], [("a2", 5)]]


def test_a_long_prompt_of_one_tenant_holds_up_no_short_one_of_another():
    bench = bench_of(max_num_batched_tokens=16, max_num_seqs=8)
    bench.add("long", ids(0, 100), 1, tenant="a")
    bench.add("longer", ids(200, 200), 1, tenant="a")
    bench.step(2)
    bench.add("short", ids(500, 10), 2, tenant="b")
    bench.step(3)
    # level at first, and long was there before; then it is ahead by its chunk
    assert bench.runner.rows == [
        [("long", 16)],
        [("long", 16)],
        [("long", 16)],
        [("short", 10), ("long", 6)],
        [("short", 1), ("long", 15)],
    ]
    bench.run()


def test_prompts_of_one_tenant_keep_their_order():
    bench = bench_of(max_num_batched_tokens=16, max_num_seqs=8)
    for name, tenant, start in (("a0", "a", 0), ("b0", "b", 300), ("a1", "a", 600)):
        bench.add(name, ids(start, 24), 1, tenant=tenant)
    bench.run()
    assert bench.runner.rows == [[("a0", 16)], [("b0", 16)], [("a0", 8), ("b0", 8)], [("a1", 16)], [("a1", 8)]]


def test_service_goes_by_weight():
    bench = bench_of(shares=(TenantShare(tenant="a", weight=3.0),), max_num_batched_tokens=8, max_num_seqs=8)
    for i in range(8):
        bench.add(f"a{i}", ids(40 * i, 32), 1, tenant="a")
        bench.add(f"b{i}", ids(500 + 40 * i, 32), 1, tenant="b")
    bench.step(32)
    rows = [row for rows in bench.runner.rows for row in rows]
    assert [sum(num for name, num in rows if name[0] == tenant) for tenant in "ab"] == [192, 64]
    bench.run()


def test_no_more_of_a_tenant_run_than_may_and_nobody_waits_for_that():
    bench = bench_of(shares=(TenantShare(tenant="a", max_running=2),), max_num_seqs=6)
    for i in range(4):
        bench.add(f"a{i}", ids(100 * i, 5), 3, tenant="a")
    for i in range(2):
        bench.add(f"b{i}", ids(500 + 100 * i, 5), 3, tenant="b")
    bench.step()
    assert bench.running == ["a0", "b0", "a1", "b1"]
    [a, b] = bench.core.stats().tenants
    assert (a.tenant, a.running, a.waiting, b.tenant, b.running, b.waiting) == ("a", 2, 2, "b", 2, 0)
    bench.run()


def test_a_follower_uses_its_turns_for_the_leader_of_another_tenant():
    """Whose tenant has had much more service and would not be served for long."""
    bench = bench_of(max_num_batched_tokens=16, max_num_seqs=8)
    trunk, scopes = ids(0, 40), {t: [Scope(40, b"trunk"), Scope(END, t.encode())] for t in "ab"}
    bench.add("b0", ids(300, 400), 1, tenant="b")
    bench.add("a0", ids(700, 128), 1, tenant="a")
    bench.step(16)
    bench.core.abort(["a0"])
    bench.add("leader", [*trunk, 1, 2], 1, tenant="a", scopes=scopes["a"])
    bench.step(2)
    bench.add("c0", [*trunk, 3], 1, tenant="c", scopes=scopes["b"])
    rows_before = len(bench.runner.rows)
    bench.run()
    rows = bench.runner.rows[rows_before:]
    first_token = next(i for i, row in enumerate(rows) if ("c0", 1) in row)
    assert first_token <= 2 * 3 + 2
    assert bench.outputs["c0"].num_cached_tokens == 40


def test_trunks_neither_starve_nor_are_starved():
    bench = bench_of(max_num_batched_tokens=16, max_num_seqs=8, pin_budget=1.0)
    for i in range(8):
        bench.add(f"a{i}", ids(40 * i, 40), 1, tenant="a")
        bench.pin(f"t{i}", ids(500 + 40 * i, 40))
    bench.step(20)
    computed = {kind: 0 for kind in "a\0"}
    for rows in bench.runner.rows:
        for name, num_tokens in rows:
            computed[name[0]] += num_tokens
    assert computed == {"a": 160, "\0": 160}
    assert [stats.tenant for stats in bench.core.stats().tenants] == ["a"]
    bench.run()


def test_with_one_tenant_neither_its_weight_nor_the_time_changes_a_step():
    def rows(now_s: float, **share: float) -> list[list[tuple[str, int]]]:
        time_s = 0.0

        def clock() -> float:
            nonlocal time_s
            time_s += now_s
            return time_s

        bench = Bench(14, max_num_seqs=5, max_num_batched_tokens=24, clock=clock)
        bench.core.set_tenants([TenantShare(tenant="a", **share)])
        for i in range(12):
            bench.add(f"r{i}", ids(90 * i, 1 + 13 * i % 50), 5 + 7 * i % 11, tenant="a", priority=i % 2)
            bench.step()
        bench.run()
        assert bench.core.stats().preemptions > 0
        return bench.runner.rows

    assert rows(0.0) == rows(3.0, weight=0.1) == rows(0.5, weight=900.0)


# ---- the bound on the first token


def first_token_bound(
    num_tokens: int, weights: dict[str, float], tenant: str, max_num_seqs: int, max_num_batched_tokens: int
) -> int:
    """Steps, from the arrival of a tenant that runs nothing and owes nothing."""
    own_and_others = num_tokens * sum(weights.values()) / weights[tenant]
    overshoot = (len(weights) - 1) * max_num_batched_tokens
    return 2 + math.ceil((own_and_others + overshoot) / (max_num_batched_tokens - max_num_seqs + 1))


def steps_to_first_token(bench: Bench, request_id: str) -> int:
    for num_steps in range(1, 10_000):
        bench.step()
        if request_id in bench.outputs:
            return num_steps
    raise AssertionError(f"{request_id} has no token")


@pytest.mark.parametrize(
    ("num_blocks", "max_num_seqs", "max_num_batched_tokens", "flood_tokens", "expected"),
    [(400, 8, 64, 20, 1), (24, 8, 64, 20, 1), (400, 2, 2, 5, 10), (400, 4, 16, 300, 2), (64, 4, 16, 300, 1)],
    ids=["places", "blocks", "all decode", "long prompts", "one long prompt at a time"],
)
def test_a_flood_of_200_requests_does_not_hold_up_another_tenant(
    num_blocks, max_num_seqs, max_num_batched_tokens, flood_tokens, expected
):
    bench = bench_of(num_blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    for i in range(200):
        bench.add(f"a{i}", ids(7 * i, flood_tokens), 60, tenant="a")
    bench.step(30)
    bench.add("b", ids(500, 10), 5, tenant="b")
    bound = first_token_bound(10, {"a": 1.0, "b": 1.0}, "b", max_num_seqs, max_num_batched_tokens)
    assert steps_to_first_token(bench, "b") == expected <= bound
    bench.core.abort([f"a{i}" for i in range(200)])
    bench.run()
    bench.assert_complete("b", ids(500, 10), 5)


@given(data=st.data())
@settings(SETTINGS, max_examples=150)
def test_the_first_token_of_a_tenant_that_owes_nothing_comes_within_the_bound(data: st.DataObject):
    draw = data.draw
    tenants = [f"t{i}" for i in range(draw(st.integers(2, 4)))]
    weights = {tenant: draw(st.sampled_from([0.5, 1.0, 2.0, 3.0])) for tenant in tenants}
    max_num_seqs = draw(st.integers(2, 8))
    max_num_batched_tokens = max_num_seqs + draw(st.sampled_from([0, 1, 7, 40]))
    num_blocks = draw(st.integers(12, 60))
    total = sum(weights.values())
    assume(all(max_num_seqs * weight >= total for weight in weights.values()))
    num_shared = math.ceil(num_blocks * weights["t0"] / total) - 1
    assume(num_shared >= 1)
    shares = tuple(TenantShare(tenant=tenant, weight=weight) for tenant, weight in weights.items())
    bench = bench_of(
        num_blocks,
        shares,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=draw(st.booleans()),
    )
    most = num_blocks * 8 - 2
    for tenant in tenants[1:]:
        longest = draw(st.sampled_from([10, 60, most - 1]))
        for i in range(draw(st.sampled_from([3, 40]))):
            num_tokens = 1 + (draw(st.integers(0, 400)) if i < 3 else 131 * i) % min(longest, most - 1)
            max_tokens = 1 + (17 * i) % min(60, most - num_tokens)
            bench.add(f"{tenant} {i}", ids(97 * i + 31 * len(tenant), num_tokens), max_tokens, tenant=tenant)
    bench.step(draw(st.integers(0, 60)))
    num_tokens = draw(st.integers(1, num_shared * 8))
    bench.add("probe", ids(500, num_tokens), 1, tenant="t0")
    bound = first_token_bound(num_tokens, weights, "t0", max_num_seqs, max_num_batched_tokens)
    assert steps_to_first_token(bench, "probe") <= bound


# ---- the bound on the difference of service


@given(data=st.data())
@settings(SETTINGS, max_examples=25)
def test_tenants_with_work_waiting_are_served_by_weight_up_to_the_bound(data: st.DataObject):
    """Counted from the rows of each step; the largest difference of any interval is that of its highest and lowest."""
    draw = data.draw
    num_tenants, max_num_seqs = draw(st.integers(2, 4)), draw(st.integers(1, 6))
    quantum = max_num_seqs + draw(st.sampled_from([0, 5, 30]))
    num_blocks = draw(st.integers(6, 40))
    weights = [draw(st.sampled_from([0.25, 1.0, 1.0, 4.0])) for _ in range(num_tenants)]
    num_prompt = [draw(st.integers(4, min(40, num_blocks * 4))) for _ in range(num_tenants)]
    num_output = [draw(st.integers(4, 30)) for _ in range(num_tenants)]
    shares = tuple(TenantShare(tenant=str(i), weight=weight) for i, weight in enumerate(weights))
    bench = bench_of(
        num_blocks,
        shares,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=quantum,
        enable_prefix_caching=draw(st.booleans()),
    )
    served, added, num_steps = [0.0] * num_tenants, 0, 0
    highest: dict[tuple[int, int], float] = {}
    bounds = [quantum + max_num_seqs * (num_prompt[i] + 2 * num_output[i]) / weights[i] for i in range(num_tenants)]
    while min(served) < 2 * max(bounds):  # so much that an unfair scheduler would be beyond the bound
        assert num_steps < 5000, (served, bounds)
        num_steps += 1
        num_waiting = [0] * num_tenants
        for sequence in bench.core.scheduler.waiting:
            num_waiting[int(sequence.tenant)] += 1
        for i in range(num_tenants):
            for _ in range(max_num_seqs + 10 - num_waiting[i]):
                num_tokens = 1 + 7 * added % num_prompt[i]
                bench.add(f"{i} {added}", ids(13 * added, num_tokens), 1 + 5 * added % num_output[i], tenant=str(i))
                added += 1
        bench.core.step()
        batch = bench.runner.batches[-1]
        for row in batch.decodes:
            served[int(row.sequence.tenant)] += 2 / weights[int(row.sequence.tenant)]
        for row in batch.extends:
            served[int(row.sequence.tenant)] += row.num_new_tokens / weights[int(row.sequence.tenant)]
        for f in range(num_tenants):
            for g in range(num_tenants):
                highest[f, g] = max(highest.get((f, g), 0.0), served[f] - served[g])
        if num_steps % 50 == 0:
            bench.core.check_integrity()
    for f in range(num_tenants):
        for g in range(f):
            assert highest[f, g] + highest[g, f] <= bounds[f] + bounds[g], (f, g, served)
