"""Drives a ModelRunner without a scheduler: tables are dealt out from block 1 upwards, shared only if asked for."""

import torch

from engine.forest import SharedNode, find_shared_nodes
from engine.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.scheduled_batch import ScheduledBatch, ScheduledSequence, StepResult
from engine.sequence import Sequence
from engine.shared_attention import SharedAttention

GREEDY = SamplingParams(temperature=0.0, max_tokens=None)


class RunnerDriver:
    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self._block_size = runner.info.block_size
        self._next_block = 1

    def sequence(
        self, prompt_ids: list[int], params: SamplingParams = GREEDY, *, request_id: str = "a", seed: int = 0
    ) -> Sequence:
        return Sequence(request_id, prompt_ids, params, (), seed, 10**6)

    def share(self, source: Sequence, target: Sequence, num_blocks: int) -> None:
        """`target` takes the leading blocks of `source` as computed."""
        assert not target.block_table
        target.block_table = source.block_table[:num_blocks]
        target.num_computed_tokens = num_blocks * self._block_size

    def batch(self, news: list[tuple[Sequence, int]], *, with_nodes: bool = True) -> ScheduledBatch:
        """(sequence, new tokens) each; a decode row is a sequence with one token left."""
        for sequence, num_new in news:
            while len(sequence.block_table) * self._block_size < sequence.num_computed_tokens + num_new:
                sequence.block_table.append(self._next_block)
                self._next_block += 1
        assert self._next_block <= self.runner.info.num_blocks + 1
        decodes = [s for s, num_new in news if num_new == 1 and s.num_uncomputed_tokens == 1]
        nodes: tuple[SharedNode, ...] = ()
        if with_nodes:
            nodes = find_shared_nodes(decodes, self._block_size, SharedAttention("always"))
        rows = [ScheduledSequence(s, n, n == s.num_uncomputed_tokens) for s, n in news]
        rows.sort(key=lambda row: row.sequence not in decodes)
        return ScheduledBatch(tuple(rows), len(decodes), nodes=nodes)

    def execute(self, news: list[tuple[Sequence, int]], *, with_nodes: bool = True) -> StepResult:
        """A step, with the drawn tokens appended."""
        batch = self.batch(news, with_nodes=with_nodes)
        result = self.runner.execute(batch)
        tokens = iter(result.tokens)
        for row in batch.sequences:
            row.sequence.num_computed_tokens += row.num_new_tokens
            if row.samples:
                row.sequence.token_ids.append(next(tokens).token_id)
        return result

    def logits(self, news: list[tuple[Sequence, int]], *, with_nodes: bool = True) -> torch.Tensor:
        """The logits of every row; nothing is drawn."""
        batch = self.batch(news, with_nodes=with_nodes)
        logits = self.runner.logits(batch)
        for row in batch.sequences:
            row.sequence.num_computed_tokens += row.num_new_tokens
        return logits

    def logits_in_chunks(self, token_ids: list[int], sizes: list[int]) -> torch.Tensor:
        """All positions' logits of one new sequence, computed in steps of the given sizes."""
        assert sum(sizes) == len(token_ids)
        sequence = self.sequence(token_ids)
        return torch.cat([self.logits([(sequence, size)]) for size in sizes])
