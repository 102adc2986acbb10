"""Random requests, aborts, failures and steps over pools that are too small, against models that own no blocks.

After every step the core checks that each block is accounted for, the shadow KV that each slot which is read holds what
it should, and these models that every answer is the one that no cache would change.
"""

from collections import Counter
from collections.abc import Sequence

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.block_pool import BlockPool
from engine.protocol import END, FinishReason, PinTrunk, Scope, TenantShare, TrunkPin
from engine.scheduled_batch import ScheduledBatch
from tests.engine.fake_runner import Bench, continuation

SETTINGS = settings(
    max_examples=100,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
BLOCK_SIZE = 8
TRUNK = [7, 3, 9, 1] * 10
"""Prompts begin with parts of it, so that many of them share blocks."""
TENANTS = ["", "t", "u"]

Known = tuple[tuple[bytes, ...], tuple[int, ...]]
"""Tokens, and the scope keys of their full blocks and of the block in which they end."""


def known(scopes: Sequence[Scope], token_ids: list[int], num_tokens: int) -> Known:
    ends = [*range(BLOCK_SIZE, num_tokens, BLOCK_SIZE), num_tokens]
    keys = [next(scope.key for scope in scopes if end <= scope.end_token) for end in ends]
    return tuple(keys), tuple(token_ids[:num_tokens])


class BlockPoolMachine(RuleBasedStateMachine):
    """A pool against a bag of block ids, in which each reference is one."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7)
        self.held: Counter[int] = Counter()

    @rule(num_blocks=st.integers(0, 8))
    def allocate(self, num_blocks: int) -> None:
        free = set(range(1, 8)) - set(self.held)
        blocks = self.pool.try_allocate(num_blocks)
        assert (blocks is not None) == (num_blocks <= len(free))
        for block in blocks or []:
            assert block.block_id in free
            self.held[block.block_id] += 1
        assert len(set(self.held)) == 7 - len(free) + len(blocks or [])

    @rule(block_id=st.integers(1, 7))
    def add_reference(self, block_id: int) -> None:
        self.pool.add_reference(self.pool.blocks[block_id])
        self.held[block_id] += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data(), is_cached=st.booleans())
    def release(self, data: st.DataObject, is_cached: bool) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.held)))
        block = self.pool.blocks[block_id]
        block.is_cached = is_cached
        self.pool.release([block])
        self.held -= Counter([block_id])
        if block_id not in self.held:
            order = [free.block_id for free in self.pool.free_list]
            assert order[-1 if is_cached else 0] == block_id

    @invariant()
    def every_reference_is_counted(self) -> None:
        self.pool.check_integrity()
        assert {block.block_id: block.ref_count for block in self.pool.blocks if block.ref_count} == self.held
        assert (self.pool.num_referenced, self.pool.num_free) == (len(self.held), 7 - len(self.held))


class SchedulerMachine(RuleBasedStateMachine):
    """An engine core over a fake runner against what each request must answer and could have found in the cache."""

    @initialize(
        num_blocks=st.integers(6, 20),
        max_num_seqs=st.integers(1, 6),
        extra_budget=st.integers(0, 30),
        enable_prefix_caching=st.sampled_from([True, True, True, False]),
        pin_budget=st.sampled_from([0.2, 0.5, 1.0]),
        max_running=st.lists(st.sampled_from([None, 1, 2]), min_size=len(TENANTS), max_size=len(TENANTS)),
    )
    def start(
        self,
        num_blocks: int,
        max_num_seqs: int,
        extra_budget: int,
        enable_prefix_caching: bool,
        pin_budget: float,
        max_running: list[int | None],
    ) -> None:
        self.begin(num_blocks, max_num_seqs, extra_budget, enable_prefix_caching, pin_budget, max_running)

    def begin(
        self,
        num_blocks: int,
        max_num_seqs: int,
        extra_budget: int,
        enable_prefix_caching: bool,
        pin_budget: float,
        max_running: list[int | None],
        num_host_blocks: int = 0,
    ) -> None:
        self.budget, self.max_num_seqs = max_num_seqs + extra_budget, max_num_seqs
        self.num_blocks = num_blocks
        self.now_s = 0.0
        self.bench = Bench(
            num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=self.budget,
            max_waiting=10_000,
            enable_prefix_caching=enable_prefix_caching,
            pin_budget=pin_budget,
            clock=lambda: self.now_s,
            num_host_blocks=num_host_blocks,
            runs_ahead=extra_budget % 2 == 1,  # half of them
        )
        self.max_running = dict(zip(TENANTS, max_running, strict=True))
        self.set_weights([1.0] * len(TENANTS))
        self.max_pinned = int(pin_budget * num_blocks)
        self.version = 0
        """Of the assistant: each has its own scope."""
        self.trunk_ids: list[str] = []
        self.prompts: dict[str, list[int]] = {}
        self.scopes: dict[str, list[Scope]] = {}
        self.max_tokens: dict[str, int] = {}
        self.choices: dict[str, int] = {}
        self.gone: set[str] = set()
        """Aborted or failed."""
        self.tenants: dict[str, str] = {}
        self.written: set[Known] = set()
        """What some step has computed, of every length."""

    @rule(weights=st.lists(st.sampled_from([0.25, 1.0, 3.0]), min_size=len(TENANTS), max_size=len(TENANTS)))
    def set_weights(self, weights: list[float]) -> None:
        self.weights = dict(zip(TENANTS, weights, strict=True))
        self.bench.core.set_tenants(self.share_of(tenant) for tenant in TENANTS)

    def share_of(self, tenant: str) -> TenantShare:
        return TenantShare(tenant=tenant, weight=self.weights[tenant], max_running=self.max_running[tenant])

    @rule(seconds=st.sampled_from([0.1, 5.0, 1000.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    def add(self, prompt_ids: list[int], max_tokens: int, tenant: str, trunk_end: int, **more: int) -> None:
        scopes = [Scope(trunk_end, self.trunk_key), Scope(END, tenant.encode())] if trunk_end else [Scope(END, b"")]
        self.add_in(scopes, prompt_ids, max_tokens, tenant, **more)

    def add_in(self, scopes: list[Scope], prompt_ids: list[int], max_tokens: int, tenant: str, **more: int) -> None:
        request_id = f"r{len(self.prompts)}"
        self.tenants[request_id] = tenant
        refusal = self.bench.add(request_id, prompt_ids, max_tokens, tenant=tenant, scopes=scopes, **more)
        limit = self.find_limit(scopes, tenant)
        if len(prompt_ids) >= limit:
            assert refusal is not None
            assert refusal.error.code == "context_length_exceeded"
            self.gone.add(request_id)
        else:
            assert refusal is None
        self.prompts[request_id], self.scopes[request_id] = prompt_ids, scopes
        self.max_tokens[request_id] = min(max_tokens, limit - len(prompt_ids))
        self.choices[request_id] = more.get("choice", 0)

    def find_limit(self, scopes: list[Scope], tenant: str) -> int:
        """Tokens that a request may have."""
        return self.num_blocks * BLOCK_SIZE

    @rule(
        num_shared=st.sampled_from([0, 7, 8, 9, 16, 24, 31, 32, 40]),
        herd=st.lists(st.lists(st.integers(0, 3), max_size=20), min_size=1, max_size=5),
        max_tokens=st.integers(1, 40),
        tenant=st.sampled_from(TENANTS),
        trunk_end=st.sampled_from([0, 20, 33]),
        priority=st.integers(0, 2),
        choice=st.integers(0, 1),
    )
    def send(
        self, num_shared: int, herd: list[list[int]], max_tokens: int, tenant: str, trunk_end: int, **more: int
    ) -> None:
        for own_ids in herd:
            self.add([*TRUNK[:num_shared], *own_ids] or [5], max_tokens, tenant, trunk_end, **more)

    @precondition(lambda self: self.bench.outputs)
    @rule(data=st.data(), max_tokens=st.integers(1, 10))
    def send_next_turn(self, data: st.DataObject, max_tokens: int) -> None:
        before = data.draw(st.sampled_from(sorted(self.bench.outputs)))
        if before not in self.gone:
            prompt_ids = [*self.prompts[before], *self.bench.outputs[before].token_ids, 5]
            self.add(prompt_ids, max_tokens, "t", 0)

    @precondition(lambda self: self.prompts)
    @rule(
        data=st.data(),
        cuts=st.lists(st.integers(0, 60), min_size=1, max_size=4),
        own_ids=st.lists(st.integers(0, 3), min_size=1, max_size=9),
        max_tokens=st.integers(1, 20),
    )
    def fork(self, data: st.DataObject, cuts: list[int], own_ids: list[int], max_tokens: int) -> None:
        """Branches from anywhere in a prompt or an answer, which may still be written."""
        parent = data.draw(st.sampled_from(sorted(self.prompts)))
        token_ids = self.token_ids(parent)
        for cut in cuts:
            prompt_ids = [*token_ids[: len(token_ids) - cut], *own_ids]
            self.add_in(self.scopes[parent], prompt_ids, max_tokens, self.tenants[parent])

    @precondition(lambda self: self.prompts)
    @rule(data=st.data(), choices=st.lists(st.integers(0, 3), min_size=1, max_size=4), max_tokens=st.integers(1, 20))
    def regenerate(self, data: st.DataObject, choices: list[int], max_tokens: int) -> None:
        """The same prompt again, several at once, while the first may still be answered."""
        parent = data.draw(st.sampled_from(sorted(self.prompts)))
        for choice in choices:
            self.add_in(self.scopes[parent], self.prompts[parent], max_tokens, self.tenants[parent], choice=choice)

    @property
    def trunk_key(self) -> bytes:
        return b"trunk %d" % self.version

    @rule(trunk_end=st.sampled_from([8, 20, 33]))
    def pin(self, trunk_end: int) -> None:
        trunk_id = f"{trunk_end}@{self.version}"
        state = self.bench.core.pin(PinTrunk(trunk_id, TRUNK[:trunk_end], [Scope(END, self.trunk_key)]))
        if state is None or state.state is not TrunkPin.FAILED:
            self.trunk_ids.append(trunk_id)

    @precondition(lambda self: self.trunk_ids)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        trunk_id = data.draw(st.sampled_from(sorted(self.trunk_ids)))
        self.trunk_ids = [other for other in self.trunk_ids if other != trunk_id]
        self.bench.core.unpin(trunk_id)
        self.bench.core.check_integrity()

    @rule(trunk_end=st.sampled_from([20, 33]))
    def reload(self, trunk_end: int) -> None:
        """The assistant was edited: the new one is pinned before the old one goes."""
        old, self.trunk_ids = self.trunk_ids, []
        self.version += 1
        self.pin(trunk_end)
        for trunk_id in old:
            self.bench.core.unpin(trunk_id)
        self.bench.core.check_integrity()

    @rule()
    def send_with_prompt_logprobs(self) -> None:
        self.add(TRUNK[:20], 3, "", 0, prompt_logprobs=0)

    @precondition(lambda self: len(self.bench.core.scheduler) > 2)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        scheduler = self.bench.core.scheduler
        places = [*scheduler.running, *scheduler.waiting, *scheduler.followers]
        requests = sorted(sequence.request_id for sequence in places if not sequence.is_trunk)
        if not requests:
            return
        request_id = data.draw(st.sampled_from(requests))
        self.bench.core.abort([request_id])
        self.gone.add(request_id)
        self.bench.core.check_integrity()

    @precondition(lambda self: len(self.bench.core.scheduler) > 4)
    @rule()
    def fail(self) -> None:
        self.bench.runner.failure = RuntimeError("this step fails on purpose")
        outputs = self.bench.step()
        batch = self.bench.runner.batches[-1]
        rows = [s.sequence.request_id for s in batch.sequences if not s.sequence.is_trunk]
        assert [output.request_id for output in outputs] == rows
        assert all(output.finish_reason == FinishReason.ERROR for output in outputs)
        self.gone.update(output.request_id for output in outputs)

    @rule(num_steps=st.integers(1, 10))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.bench.core.has_work:
                self.step_once()

    def step_once(self) -> None:
        outputs = self.bench.step()
        batch = self.bench.runner.batches[-1]
        assert batch.num_tokens <= self.budget
        assert batch.sequences or self.bench.trunk_news  # the last that waited may be a trunk that cannot fit
        assert len(batch.sequences) <= self.max_num_seqs
        for sequence, num_new_tokens, samples in batch.decodes:
            assert (num_new_tokens, samples) == (1, True), sequence.request_id
        sampled = {s.sequence.request_id for s in batch.sequences if s.samples}
        assert {output.request_id for output in outputs} == sampled
        for output in outputs:
            if output.num_cached_tokens:
                self.check_cached(output.request_id, output.num_cached_tokens)
        self.note_written(batch)
        blocks = self.bench.core.scheduler.kv.pool.blocks
        for sequence in self.bench.core.scheduler.running:
            for block_id in sequence.block_table[sequence.num_computed_tokens // BLOCK_SIZE :]:
                assert blocks[block_id].ref_count == 1, f"{sequence.request_id} writes {blocks[block_id]}"
        stats = self.bench.core.stats()
        assert stats.blocks.pinned <= self.max_pinned
        for tenant in stats.tenants:
            max_running = self.max_running[tenant.tenant]
            assert max_running is None or tenant.running <= max_running

    def note_written(self, batch: ScheduledBatch) -> None:
        """After the update of a step that has succeeded."""
        for sequence, num_new_tokens, _ in batch.sequences:
            if sequence.finish_reason is FinishReason.ABORT:
                continue  # within the step: nobody publishes what it wrote
            num_computed = sequence.num_tokens - 1 if sequence.is_finished else sequence.num_computed_tokens
            if sequence.is_trunk:
                num_computed = sequence.num_tokens if sequence.is_finished else num_computed
            for num_tokens in range(num_computed - num_new_tokens, num_computed + 1):
                self.written.add(known(sequence.scopes, sequence.token_ids, num_tokens))
            assert num_new_tokens >= 1

    def check_cached(self, request_id: str, num_cached_tokens: int) -> None:
        """Somebody in the same scopes has computed it; of what it ends in perhaps one token more."""
        ends = range(num_cached_tokens, min(num_cached_tokens + 1, len(self.prompts[request_id])) + 1)
        scopes, token_ids = self.scopes[request_id], self.prompts[request_id]
        assert any(known(scopes, token_ids, end) in self.written for end in ends), (request_id, num_cached_tokens)

    def token_ids(self, request_id: str) -> list[int]:
        output = self.bench.outputs.get(request_id)
        return [*self.prompts[request_id], *(output.token_ids if output is not None else [])]

    @invariant()
    def answers_are_those_of_no_cache(self) -> None:
        for request_id, output in self.bench.outputs.items():
            expected = continuation(self.prompts[request_id], len(output.token_ids), choice=self.choices[request_id])
            assert output.token_ids == expected
            if request_id not in self.gone and output.finish_reason is not None:
                assert len(expected) == self.max_tokens[request_id]

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        for _ in range(5000):
            if self.bench.core.has_work:
                self.step_once()
        self.answers_are_those_of_no_cache()
        finished = {r for r, output in self.bench.outputs.items() if output.finish_reason == FinishReason.LENGTH}
        assert finished == set(self.prompts) - self.gone
        stats = self.bench.core.stats()
        assert (stats.running, stats.waiting, stats.blocks.referenced) == (0, 0, stats.blocks.pinned)
        for trunk_id in self.trunk_ids:
            self.bench.core.unpin(trunk_id)
        self.bench.run()
        assert self.bench.core.stats().blocks.referenced == 0


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = SETTINGS
TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = SETTINGS
