"""Steps of a real model without scheduler and processes, over blocks that were really computed."""

from collections.abc import Sequence as Rows

from benchmarks.step_work import DecodeShape
from benchmarks.turns import Step
from engine.config import EngineConfig
from engine.forest import find_shared_nodes
from engine.model_runner import ModelRunner
from engine.prepared import PreparedModel
from engine.sampling_params import SamplingParams
from engine.scheduled_batch import ScheduledBatch, ScheduledSequence
from engine.sequence import Sequence
from engine.shared_attention import DETERMINISTIC_TOKENS, SharedAttention

GREEDY = SamplingParams(temperature=0.0)


class SequenceMaker:
    """Makes sequences with a decode step to do, and hands out blocks for them until `free_all`."""

    def __init__(self, block_size: int, num_blocks: int, vocab_size: int) -> None:
        """num_blocks: without the null block."""
        self.block_size = block_size
        self._num_blocks = num_blocks
        self._vocab_size = vocab_size
        self.free_all()

    def free_all(self) -> None:
        """Steps made before must not be run any more."""
        self._next_block = 1  # behind the null block
        self._next_token = 3

    def rows(self, shape: DecodeShape, params: SamplingParams = GREEDY) -> list[Sequence]:
        """Sequences that are computed but for their last token. Rows of one trunk share its full blocks."""
        trunk_tokens = shape.trunk_tokens if shape.num_trunks else 0
        num_trunks = max(min(shape.num_trunks, shape.num_rows), 1)
        num_shared = trunk_tokens // self.block_size
        trunks = [(self.tokens(trunk_tokens), self.blocks(num_shared)) for _ in range(num_trunks)]
        rows = []
        for i in range(shape.num_rows):
            token_ids, block_ids = trunks[i % len(trunks)]
            sequence = Sequence("r", token_ids + self.tokens(shape.own_tokens), params, (), 1, 10**6)
            sequence.block_table = block_ids + self.blocks(sequence.num_tokens // self.block_size + 1 - num_shared)
            sequence.num_computed_tokens = sequence.num_tokens - 1
            rows.append(sequence)
        return rows

    def batch(self, rows: Rows[Sequence], shared_attention: SharedAttention) -> ScheduledBatch:
        nodes = find_shared_nodes(rows, self.block_size, shared_attention)
        return ScheduledBatch(tuple(ScheduledSequence(row, 1, True) for row in rows), len(rows), nodes=nodes)

    def blocks(self, num_blocks: int) -> list[int]:
        first, self._next_block = self._next_block, self._next_block + num_blocks
        if self._next_block > self._num_blocks + 1:
            raise RuntimeError(f"{self._next_block - 1} blocks are needed, there are {self._num_blocks}")
        return list(range(first, self._next_block))

    def tokens(self, num_tokens: int) -> list[int]:
        """Others at each call."""
        first, self._next_token = self._next_token, self._next_token + 1
        return [(7 * i * i + 13 * first) % self._vocab_size for i in range(num_tokens)]


class StepBench:
    def __init__(self, model: PreparedModel, config: EngineConfig) -> None:
        """Raises what `ModelRunner` does."""
        self.runner = runner = ModelRunner(model, config)
        unit_tokens = DETERMINISTIC_TOKENS if config.deterministic else 1
        self.shared_attention = SharedAttention(config.shared_attention, runner.node_cost, unit_tokens)
        self.sequences = SequenceMaker(runner.info.block_size, runner.info.num_blocks, runner.info.vocab_size)

    def free_all(self) -> None:
        self.sequences.free_all()

    def decode(self, shape: DecodeShape, params: SamplingParams = GREEDY) -> Step:
        rows = self.sequences.rows(shape, params)
        # untouched pages of the cache would all be the same page of zeros, which stays in the processor's caches
        computed: set[int] = set()
        for row in rows:
            self._compute(row, computed)
            computed.update(row.block_table)
        batch = self.sequences.batch(rows, self.shared_attention)
        return lambda: self.runner.execute(batch)

    def prefill(self, num_tokens: int, num_computed: int = 0, chunk_tokens: int | None = None) -> Step:
        """One step for each chunk; what is before `num_computed` is not computed."""
        chunk_tokens = chunk_tokens or num_tokens
        end = num_computed + num_tokens
        table = self.sequences.blocks(end // self.sequences.block_size + 1)
        token_ids = self.sequences.tokens(end)
        batches = []
        for start in range(num_computed, end, chunk_tokens):
            sequence = Sequence("r", token_ids, GREEDY, (), 1, 10**6)
            sequence.block_table = table
            sequence.num_computed_tokens = start
            num_new = min(chunk_tokens, end - start)
            batches.append(ScheduledBatch((ScheduledSequence(sequence, num_new, start + num_new == end),)))

        def step() -> None:
            for batch in batches:
                self.runner.execute(batch)

        return step

    def _compute(self, sequence: Sequence, computed: set[int]) -> None:
        """All tokens but the last, from the first block on that is not among those computed."""
        num_computed_blocks = next((i for i, b in enumerate(sequence.block_table) if b not in computed), 0)
        sequence.num_computed_tokens = num_computed_blocks * self.sequences.block_size
        while (num_tokens := min(sequence.num_uncomputed_tokens - 1, 1024)) > 0:
            self.runner.execute(ScheduledBatch((ScheduledSequence(sequence, num_tokens, False),)))
            sequence.num_computed_tokens += num_tokens
