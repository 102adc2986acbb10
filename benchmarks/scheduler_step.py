"""Times what the scheduler and the block manager cost a step: `schedule()` and `update()`, without a model and torch.

    python -m benchmarks.scheduler_step [--sequences 256] [--tokens 8000] [--tenants 1 8] [--steps 200] [--rounds 7]

All sequences run, each draws one token a step; their tables share a trunk of half their tokens and differ in length, so
that some of them need a block in each step. Microseconds a step: the median of each round, then the median of the
rounds, least and most. With `--waiting` requests more of each tenant, which find no place.
"""

import argparse
import statistics
import time

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.protocol import END, AddRequest, EngineInfo, Scope
from engine.sampling_params import SamplingParams
from engine.scheduled_batch import SampledToken, ScheduledBatch, StepResult

BLOCK_SIZE = 16
VOCAB_SIZE = 50_000


class NoRunner:
    """Computes nothing: says the same token for each row that wants one."""

    def __init__(self) -> None:
        self._tokens = [SampledToken(7)] * 100_000

    def execute(self, batch: ScheduledBatch) -> StepResult:
        num_samples = batch.num_decodes + sum(scheduled.samples for scheduled in batch.extends)
        return StepResult(self._tokens[:num_samples])


def running_core(num_sequences: int, num_tokens: int, num_tenants: int, num_waiting: int) -> EngineCore:
    """All prompts are computed, all sequences decode."""
    num_blocks = num_sequences * (num_tokens // BLOCK_SIZE + 200)
    info = EngineInfo(
        model_name="none",
        fingerprint="none",
        vocab_size=VOCAB_SIZE,
        max_model_len=10 * num_tokens,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
    )
    config = EngineConfig(
        model_dir="", num_blocks=num_blocks, max_num_seqs=num_sequences, max_num_batched_tokens=max(2048, num_sequences)
    )
    core = EngineCore(config, info, NoRunner())
    trunk = [i % VOCAB_SIZE for i in range(num_tokens // 2)]
    for i in range(num_sequences + num_waiting * num_tenants):
        tenant = f"tenant {i % num_tenants}"
        own = [(i + 31 * j) % VOCAB_SIZE for j in range(num_tokens - len(trunk) + i % BLOCK_SIZE)]
        refusal = core.add(
            AddRequest(
                request_id=str(i),
                prompt_ids=[*trunk, *own],
                params=SamplingParams(max_tokens=None, ignore_eos=True),
                scopes=[Scope(len(trunk), b"trunk"), Scope(END, tenant.encode())],
                tenant=tenant,
            )
        )
        assert refusal is None, refusal
    while len(core.scheduler.running) < num_sequences or any(
        s.num_uncomputed_tokens > 1 for s in core.scheduler.running
    ):
        core.step()
    return core


def microseconds(core: EngineCore, num_steps: int) -> float:
    """The median of so many steps."""
    scheduler, runner = core.scheduler, NoRunner()
    taken = []
    for _ in range(num_steps):
        start = time.perf_counter()
        batch = scheduler.schedule()
        scheduled = time.perf_counter()
        result = runner.execute(batch)
        executed = time.perf_counter()
        scheduler.update(batch, result)
        taken.append(time.perf_counter() - executed + scheduled - start)
    return statistics.median(taken) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--tenants", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--waiting", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    for num_tenants in options.tenants:
        core = running_core(options.sequences, options.tokens, num_tenants, options.waiting)
        rounds = [microseconds(core, options.steps) for _ in range(options.rounds)]
        print(
            f"{options.sequences} sequences of {options.tokens} tokens, {num_tenants} tenants, "
            f"{options.waiting} waiting each: {statistics.median(rounds):.0f} us a step "
            f"({min(rounds):.0f} - {max(rounds):.0f})"
        )


if __name__ == "__main__":
    main()
