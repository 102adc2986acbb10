"""The model of the scheduler with a small host tier, tenants with shares, aborts within a step, floods that evict all.

Beside the invariants of `test_scheduler_model`: what is findable, on the device and on the host, holds what its hash
stands for; nobody has more than its limit.
"""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from engine.prefix_cache import Entry
from engine.protocol import END, FinishReason, Scope, TenantShare
from engine.scheduled_batch import ScheduledBatch
from engine.shadow_kv import UNKNOWN
from tests.engine.test_scheduler_model import BLOCK_SIZE, TENANTS, SchedulerMachine

SETTINGS = settings(
    max_examples=120,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


class SharingMachine(SchedulerMachine):
    @initialize(
        num_blocks=st.integers(6, 20),
        num_host_blocks=st.integers(1, 8),
        max_num_seqs=st.integers(1, 6),
        extra_budget=st.integers(0, 30),
        pin_budget=st.sampled_from([0.2, 0.5, 1.0]),
        max_running=st.lists(st.sampled_from([None, None, 1]), min_size=len(TENANTS), max_size=len(TENANTS)),
        max_blocks=st.lists(st.sampled_from([None, None, 3, 6, 12]), min_size=len(TENANTS), max_size=len(TENANTS)),
    )
    def start(
        self,
        num_blocks: int,
        num_host_blocks: int,
        max_num_seqs: int,
        extra_budget: int,
        pin_budget: float,
        max_running: list[int | None],
        max_blocks: list[int | None],
    ) -> None:
        self.max_blocks = dict(zip(TENANTS, max_blocks, strict=True))
        self.guaranteed_blocks = dict.fromkeys(TENANTS, 0)
        self.begin(num_blocks, max_num_seqs, extra_budget, True, pin_budget, max_running, num_host_blocks)
        self.was_changed = False
        """A limit, so that who had more by then may still have it."""
        self.num_floods = 0
        self.content: dict[bytes, bytes] = {}
        """By hash: what the first block with it held."""

    def share_of(self, tenant: str) -> TenantShare:
        return TenantShare(
            tenant=tenant,
            weight=self.weights[tenant],
            max_running=self.max_running[tenant],
            guaranteed_blocks=self.guaranteed_blocks[tenant],
            max_blocks=self.max_blocks[tenant],
        )

    def find_limit(self, scopes: list[Scope], tenant: str) -> int:
        limit, max_blocks = super().find_limit(scopes, tenant), self.max_blocks[tenant]
        if max_blocks is None:
            return limit
        trunk_end = scopes[0].end_token if scopes[0].key != scopes[-1].key else 0
        return min(limit, (max_blocks + trunk_end // BLOCK_SIZE) * BLOCK_SIZE)

    @rule(tenant=st.sampled_from(TENANTS), guaranteed_blocks=st.integers(0, 6))
    def guarantee(self, tenant: str, guaranteed_blocks: int) -> None:
        self.guaranteed_blocks[tenant] = guaranteed_blocks
        self.set_weights(list(self.weights.values()))

    @rule(tenant=st.sampled_from(TENANTS), max_blocks=st.sampled_from([None, 3, 6]))
    def change_limit(self, tenant: str, max_blocks: int | None) -> None:
        self.max_blocks[tenant] = max_blocks
        self.was_changed = True
        self.set_weights(list(self.weights.values()))

    @rule(num_blocks=st.integers(2, 12), tenant=st.sampled_from(TENANTS))
    def flood(self, num_blocks: int, tenant: str) -> None:
        """A prompt that nobody has said and that nobody will say again evicts what others left."""
        self.num_floods += 1
        prompt_ids = [100 + (7 * self.num_floods + i) % 800 for i in range(num_blocks * BLOCK_SIZE - 3)]
        self.add_in([Scope(END, b"flood %d" % self.num_floods)], prompt_ids, 2, tenant)

    @precondition(lambda self: self.bench.core.has_work)
    @rule(data=st.data(), has_succeeded=st.sampled_from([True, True, False]))
    def abort_within_a_step(self, data: st.DataObject, has_succeeded: bool) -> None:
        core, scheduler = self.bench.core, self.bench.core.scheduler
        batch = scheduler.schedule()
        core._shadow.execute(batch)
        result = self.bench.runner.execute(batch)
        requests = [s.sequence.request_id for s in batch.sequences if not s.sequence.is_trunk]
        aborted = data.draw(st.sets(st.sampled_from(requests))) if requests else set()
        core.abort(sorted(aborted))
        self.gone |= aborted
        scheduler.check_integrity()
        if has_succeeded:
            self.take(batch, scheduler.update(batch, result))
        else:
            outputs = core.fail_batch(batch, RuntimeError("on purpose"))
            self.gone.update(output.request_id for output in outputs)
            assert {output.finish_reason for output in outputs} <= {FinishReason.ERROR}
        core.trunks.settle()
        core.check_integrity()
        self.bench.trunk_news += core.take_trunk_news()

    def step_once(self) -> None:
        super().step_once()
        self.what_is_findable_is_what_its_hash_stands_for()
        self.nobody_has_more_than_its_limit()

    def take(self, batch: ScheduledBatch, outputs: list) -> None:
        for output in outputs:
            if output.request_id in self.bench.outputs:
                self.bench.outputs[output.request_id].merge(output)
            else:
                self.bench.outputs[output.request_id] = output
        self.note_written(batch)

    @invariant()
    def what_is_findable_is_what_its_hash_stands_for(self) -> None:
        kv, shadow = self.bench.core.scheduler.kv, self.bench.core._shadow
        for entries in kv.cache._of_block.values():
            for entry in entries:
                held = shadow._slots[entry.block.block_id]
                if isinstance(entry, Entry):
                    assert UNKNOWN not in held, f"{entry} is findable, but holds {held}"
                    assert self.content.setdefault(entry.hash, held.tobytes()) == held.tobytes(), entry
                else:
                    assert UNKNOWN not in held[: len(entry.token_ids)], f"{entry} is findable, but holds {held}"
        for block_hash, slot in kv.host._slots.items():
            held = shadow._host_slots[slot]
            assert self.content[block_hash] == held.tobytes(), f"the host holds {held} for {block_hash.hex()}"

    @invariant()
    def nobody_has_more_than_its_limit(self) -> None:
        num_owned = self.bench.core.scheduler.kv.pool.num_owned
        for tenant, max_blocks in self.max_blocks.items():
            assert self.was_changed or max_blocks is None or num_owned.get(tenant, 0) <= max_blocks, num_owned


TestSharing = SharingMachine.TestCase
TestSharing.settings = SETTINGS


@pytest.mark.slow
class TestSharingAtLength(SharingMachine.TestCase):
    settings = settings(SETTINGS, max_examples=1000, stateful_step_count=60)
