"""What each tenant may have of the KV cache: pools of blocks of 8 tokens, one request after the other or together."""

from engine.protocol import END, FinishReason, Scope, TenantShare
from tests.engine.fake_runner import Bench, continuation, ids


def make_bench(num_blocks: int, *shares: TenantShare, **more) -> Bench:
    bench = Bench(num_blocks, **more)
    bench.core.set_tenants(shares)
    return bench


def blocks_of(bench: Bench, tenant: str) -> int:
    return bench.core.scheduler.kv.pool.num_owned.get(tenant, 0)


def cached(bench: Bench, prompt_ids: list[int], tenant: str) -> int:
    """Tokens that the tenant would find now."""
    return bench.ask([*prompt_ids, 999], 1, tenant=tenant).num_cached_tokens


def test_a_flood_of_one_tenant_does_not_evict_what_another_has_within_its_share():
    bench = make_bench(20)
    small = ids(0, 40)
    bench.ask(small, 1, tenant="small")
    for i in range(20):
        bench.ask(ids(50 * i + 100, 40), 1, tenant="flood")
    assert cached(bench, small, "small") == 40


def test_a_larger_weight_may_keep_more():
    kept = {}
    for weight in (1.0, 4.0):
        bench = make_bench(20, TenantShare(tenant="a", weight=weight))
        prompt = ids(0, 15 * 8)
        bench.ask(prompt, 1, tenant="a")
        for i in range(10):
            bench.ask(ids(50 * i + 300, 40), 1, tenant="b")
        kept[weight] = cached(bench, prompt, "a") // 8
    assert kept[1.0] <= 11 < kept[4.0]


def test_guaranteed_blocks_outlast_a_flood_of_many_tenants():
    prompt = ids(0, 48)
    for guaranteed_blocks, is_kept in ((0, False), (6, True)):
        bench = make_bench(20, TenantShare(tenant="small", guaranteed_blocks=guaranteed_blocks))
        bench.ask(prompt, 1, tenant="small")
        for i in range(40):
            bench.ask(ids(20 * i + 100, 20), 1, tenant=f"t{i}")
        assert (cached(bench, prompt, "small") == 48) == is_kept


def test_what_is_guaranteed_keeps_the_trunk_under_it():
    bench = make_bench(20, TenantShare(tenant="small", guaranteed_blocks=6))
    prompt, scopes = ids(0, 64), [Scope(24, b"assistant"), Scope(END, b"small")]
    bench.ask(prompt, 1, tenant="small", scopes=scopes)
    assert blocks_of(bench, "small") == 5
    for i in range(40):
        bench.ask(ids(20 * i + 100, 20), 1, tenant=f"t{i}")
    output = bench.ask([*prompt, 999], 1, tenant="small", scopes=scopes)
    assert output.num_cached_tokens == 64


def test_what_is_guaranteed_outlasts_a_trunk_that_nobody_needs_though_one_prompt_takes_both():
    bench = make_bench(20, TenantShare(tenant="small", guaranteed_blocks=6), max_num_batched_tokens=400)
    prompt = ids(0, 48)
    bench.ask(prompt, 1, tenant="small")
    bench.ask(ids(300, 80), 1, tenant="x", scopes=[Scope(80, b"assistant"), Scope(END, b"x")])
    bench.ask(ids(500, 104), 1, tenant="y")
    assert cached(bench, prompt, "small") == 48


def test_a_trunk_is_nobodys_share():
    bench = make_bench(40, TenantShare(tenant="a", max_blocks=3))
    assert bench.pinned("t", ids(0, 48))[0] == "pinned"
    scopes = [Scope(48, b"assistant"), Scope(END, b"a")]
    for i in range(5):
        prompt = [*ids(0, 48), *ids(500 + 20 * i, 15)]
        output = bench.ask(prompt, 8, tenant="a", scopes=scopes)
        assert output.token_ids == continuation(prompt, 8)
        assert output.num_cached_tokens == 48
        assert blocks_of(bench, "a") <= 3


def test_above_its_limit_a_tenants_own_cached_blocks_go_first():
    bench = make_bench(40, TenantShare(tenant="a", max_blocks=6))
    bench.ask(ids(500, 40), 1, tenant="b")
    for i in range(6):
        bench.ask(ids(100 * i, 24), 1, tenant="a")
        assert blocks_of(bench, "a") <= 6
    assert bench.core.stats().blocks.free == 40
    assert cached(bench, ids(500, 24), "a") == 24  # the last one
    assert cached(bench, ids(500, 40), "b") == 40


def test_over_its_limit_a_request_waits_for_its_own_tenants_and_holds_nobody_up():
    bench = make_bench(40, TenantShare(tenant="a", max_blocks=6), max_num_batched_tokens=200)
    for name in ("a1", "a2", "a3"):
        bench.add(name, ids(100 * int(name[1]), 30), 8, tenant="a")
    for name in ("b1", "b2"):
        bench.add(name, ids(500 + 100 * int(name[1]), 30), 8, tenant="b")
    bench.step()
    assert bench.running == ["a1", "b1", "b2"]
    while bench.core.has_work:
        bench.step()
        assert blocks_of(bench, "a") <= 6
    for name in ("a1", "a2", "a3"):
        bench.assert_complete(name, ids(100 * int(name[1]), 30), 8)


def test_a_tenant_that_outgrows_its_limit_preempts_its_own():
    bench = make_bench(40, TenantShare(tenant="a", max_blocks=8), max_num_batched_tokens=200)
    bench.add("b", ids(700, 20), 60, tenant="b")
    for name in ("a1", "a2"):
        bench.add(name, ids(100 * int(name[1]), 24), 40, tenant="a")
    bench.step()
    assert bench.running == ["b", "a1", "a2"]
    preempted = set()
    while bench.core.has_work:
        bench.step()
        assert blocks_of(bench, "a") <= 8
        preempted |= {s.request_id for s in bench.core.scheduler.waiting if s.num_preemptions}
    assert preempted == {"a2"}
    for name in ("a1", "a2"):
        bench.assert_complete(name, ids(100 * int(name[1]), 24), 40)
    bench.assert_complete("b", ids(700, 20), 60)


def test_a_request_that_its_tenant_may_never_hold_is_refused_at_once():
    bench = make_bench(40, TenantShare(tenant="a", max_blocks=4))
    refusal = bench.add("x", ids(0, 32), 5, tenant="a")
    assert refusal is not None
    assert refusal.finish_reason == FinishReason.ERROR
    assert refusal.error.code == "context_length_exceeded"
    assert "the tenant's share of the KV cache holds 32 tokens" in refusal.error.message
    assert len(bench.ask(ids(0, 30), 10, tenant="a").token_ids) == 2
    assert len(bench.ask(ids(0, 30), 10, tenant="b").token_ids) == 10
    # what lies in an assistant's scope is not its own
    scopes = [Scope(19, b"assistant"), Scope(END, b"a")]
    assert len(bench.ask(ids(0, 40), 10, tenant="a", scopes=scopes).token_ids) == 8


def test_a_limit_that_was_lowered_under_a_running_request_lets_it_end():
    bench = make_bench(40)
    bench.add("a1", ids(0, 40), 30, tenant="a")
    bench.add("a2", ids(100, 40), 30, tenant="a")
    bench.step()
    bench.core.set_tenants([TenantShare(tenant="a", max_blocks=2)])
    bench.run()
    for name, start in (("a1", 0), ("a2", 100)):
        bench.assert_complete(name, ids(start, 40), 30)


def test_many_turns_of_one_tenant_alone_may_fill_the_whole_pool():
    bench = make_bench(20, TenantShare(tenant="a", weight=0.01, guaranteed_blocks=3))
    bench.ask(ids(0, 150), 2, tenant="a")
    assert cached(bench, ids(0, 144), "a") == 144
