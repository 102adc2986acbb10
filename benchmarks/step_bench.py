"""Steps of a real model without scheduler and processes, over blocks that were really computed."""

from collections.abc import Sequence as Rows

from benchmarks.step_work import DecodeShape
from benchmarks.turns import Step
from engine.forest import find_shared_nodes
from engine.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.scheduled_batch import ScheduledBatch, ScheduledSequence
from engine.sequence import Sequence

GREEDY = SamplingParams(temperature=0.0)


class StepBench:
    """Hands out the runner's blocks until `free_all`."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.block_size = runner.info.block_size
        self.free_all()

    def free_all(self) -> None:
        """Steps made before must not be run any more."""
        self._next_block = 1  # behind the null block
        self._next_token = 3

    def rows(self, shape: DecodeShape, params: SamplingParams = GREEDY, *, compute: bool = True) -> list[Sequence]:
        """Sequences with one token to compute. Rows of one trunk share its full blocks.

        Without `compute` their blocks stay as they are: only for who brings a cache of its own, as untouched pages are
        all the same page of zeros, which stays in the processor's caches.
        """
        trunk_tokens = shape.trunk_tokens if shape.num_trunks else 0
        trunks = [
            (self._tokens(trunk_tokens), self._blocks(trunk_tokens // self.block_size)) for _ in self._trunks(shape)
        ]
        rows = []
        for i in range(shape.num_rows):
            token_ids, block_ids = trunks[i % len(trunks)]
            sequence = Sequence("r", token_ids + self._tokens(shape.own_tokens), params, (), 1, 10**6)
            num_blocks = sequence.num_tokens // self.block_size + 1
            sequence.block_table = block_ids + self._blocks(num_blocks - len(block_ids))
            num_shared = len(block_ids) * self.block_size if i >= len(trunks) else 0
            sequence.num_computed_tokens = num_shared if compute else sequence.num_tokens - 1
            if compute:
                self._compute(sequence)
            rows.append(sequence)
        return rows

    def decode(self, shape: DecodeShape, params: SamplingParams = GREEDY, *, with_nodes: bool = True) -> Step:
        rows = self.rows(shape, params)
        batch = self.batch(rows, with_nodes=with_nodes)
        return lambda: self.runner.execute(batch)

    def batch(self, rows: Rows[Sequence], *, with_nodes: bool = True) -> ScheduledBatch:
        nodes = find_shared_nodes(rows, self.block_size) if with_nodes else ()
        return ScheduledBatch(tuple(ScheduledSequence(row, 1, True) for row in rows), len(rows), nodes=nodes)

    def prefill(self, num_tokens: int, num_computed: int = 0, chunk_tokens: int | None = None) -> Step:
        """One step for each chunk; what is before `num_computed` is not computed."""
        chunk_tokens = chunk_tokens or num_tokens
        end = num_computed + num_tokens
        table = self._blocks(end // self.block_size + 1)
        token_ids = self._tokens(end)
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

    def _trunks(self, shape: DecodeShape) -> range:
        return range(max(min(shape.num_trunks, shape.num_rows), 1))

    def _compute(self, sequence: Sequence) -> None:
        while (num_tokens := min(sequence.num_uncomputed_tokens - 1, 1024)) > 0:
            self.runner.execute(ScheduledBatch((ScheduledSequence(sequence, num_tokens, False),)))
            sequence.num_computed_tokens += num_tokens

    def _blocks(self, num_blocks: int) -> list[int]:
        first, self._next_block = self._next_block, self._next_block + num_blocks
        if self._next_block > self.runner.info.num_blocks + 1:
            raise RuntimeError(f"{self._next_block - 1} blocks are needed, there are {self.runner.info.num_blocks}")
        return list(range(first, self._next_block))

    def _tokens(self, num_tokens: int) -> list[int]:
        first, self._next_token = self._next_token, self._next_token + 1
        return [(7 * i * i + 13 * first) % self.runner.info.vocab_size for i in range(num_tokens)]
