"""Draws the next token of each row.

One uniform number per row, Philox(seed, choice, position), is looked up in the cumulative distribution of what the
filters leave: no random number per vocabulary entry, and a row's token depends on its own logits and parameters alone,
never on its neighbours.
"""

from dataclasses import dataclass

import numpy as np
import torch

from engine import device_draw, logprobs, penalties
from engine.cpu_draw import CpuDraw, Floats
from engine.decode_graphs import GraphStep
from engine.draw_batches import DrawBatches
from engine.noise import Noise
from engine.scheduled_batch import SampledToken
from engine.sequence import Sequence
from kernels.batch import DrawBatch
from kernels.interface import TokenDraw


@dataclass(frozen=True, slots=True)
class _Kinds:
    """What has to be done for which of the rows; found out once for all steps that have the same ones."""

    sequences: list[Sequence]
    random: list[int]
    adjustable: list[int]
    """Rows that penalties, biases or min_tokens may change."""
    with_logprobs: list[int]

    @classmethod
    def of(cls, sequences: list[Sequence]) -> "_Kinds":
        params = list(enumerate(sequence.params for sequence in sequences))
        return cls(
            sequences,
            random=[row for row, p in params if not p.is_greedy],
            adjustable=[row for row, p in params if penalties.may_adjust(p)],
            with_logprobs=[row for row, p in params if p.logprobs is not None],
        )


class Sampler:
    def __init__(self, draw: TokenDraw | None = None) -> None:
        """draw: of a backend that has one."""
        self._draw = draw
        self._draw_batches = DrawBatches()
        self._penalties = penalties.Penalties()
        self._noise = Noise()
        self._cpu_draw = CpuDraw()
        self._kinds = _Kinds.of([])

    def takes_largest(self, sequences: list[Sequence]) -> bool:
        """Whether every row's token is its largest logit, and nothing else of the logits is asked for."""
        kinds = self._kinds_of(sequences)
        return not (kinds.random or kinds.adjustable or kinds.with_logprobs)

    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[SampledToken]:
        """logits: fp32 [len(sequences), vocab_size], changed in place. A list that comes again must not have changed.

        A row without a finite largest value brings a fault instead of a token; the others are drawn all the same.
        """
        if not sequences:
            return []
        kinds = self._kinds_of(sequences)
        # penalties write into the logits, so what they must not change is copied first
        raw = logits[kinds.with_logprobs] if kinds.with_logprobs else None
        for row in kinds.adjustable:
            self._penalties.adjust(logits[row], sequences[row])
        if self._draw is not None:
            drawn, finite = self._draw(logits, self._draw_batches.of(sequences)).tolist()
            ids, is_finite = drawn, [bool(x) for x in finite]
        elif logits.device.type == "cpu":
            ids, is_finite = self._draw_rows(logits.numpy(), kinds)
        else:
            ids, is_finite = self._draw_on_device(logits, kinds)
        return self._tokens(kinds, ids, is_finite, raw)

    def draw_batch(self, sequences: list[Sequence]) -> DrawBatch:
        """For a step that draws by itself. A list that comes again must not have changed."""
        return self._draw_batches.of(sequences)

    def needs_logits(self, sequences: list[Sequence]) -> bool:
        """Whether `take` looks at the step's logits."""
        kinds = self._kinds_of(sequences)
        return bool(kinds.adjustable or kinds.with_logprobs)

    def take(self, step: GraphStep, sequences: list[Sequence]) -> list[SampledToken]:
        """What a step launched with `draw_batch` has drawn; what its logits have to be changed for is drawn anew."""
        kinds = self._kinds_of(sequences)
        if kinds.adjustable:
            return self.sample(step.logits, sequences)
        ids, is_finite = step.wait()
        return self._tokens(kinds, ids, is_finite, step.logits[kinds.with_logprobs] if kinds.with_logprobs else None)

    def _tokens(
        self, kinds: _Kinds, ids: list[int], is_finite: list[bool], raw: torch.Tensor | None
    ) -> list[SampledToken]:
        """raw: logits of `kinds.with_logprobs`, if there are such rows."""
        sequences = kinds.sequences
        tokens = [SampledToken(token_id) for token_id in ids]
        if raw is not None:
            rows = kinds.with_logprobs
            nums = [sequences[row].params.logprobs or 0 for row in rows]
            for row, entry in zip(rows, logprobs.token_logprobs(raw, [ids[row] for row in rows], nums), strict=True):
                tokens[row] = SampledToken(ids[row], entry)
        if not all(is_finite):
            for row, sequence in enumerate(sequences):
                if not is_finite[row]:
                    tokens[row] = not_finite(sequence)
        return tokens

    def _kinds_of(self, sequences: list[Sequence]) -> _Kinds:
        if self._kinds.sequences is not sequences:
            self._kinds = _Kinds.of(sequences)
        return self._kinds

    def _draw_rows(self, logits: Floats, kinds: _Kinds) -> tuple[list[int], list[bool]]:
        """Ids drawn, and whether the largest value is finite."""
        best_ids = logits.argmax(-1)
        best = logits[np.arange(len(logits)), best_ids]
        ids, is_finite = best_ids.tolist(), np.isfinite(best).tolist()
        if kinds.random:
            uniforms = self._noise.of([kinds.sequences[row] for row in kinds.random])
            for row, uniform in zip(kinds.random, uniforms, strict=True):
                if is_finite[row]:
                    params = kinds.sequences[row].params
                    ids[row] = self._cpu_draw.draw(logits[row], float(best[row]), params, uniform)
        return ids, is_finite

    def _draw_on_device(self, logits: torch.Tensor, kinds: _Kinds) -> tuple[list[int], list[bool]]:
        """As `_draw_rows`; nothing waits for the device before the end."""
        best, ids = logits.max(-1)
        is_finite = best.isfinite()
        # something to draw from; what is drawn is not looked at
        logits.masked_fill_(~is_finite[:, None], 0.0)
        best.masked_fill_(~is_finite, 0.0)
        if kinds.random:
            everyone = len(kinds.random) == len(kinds.sequences)
            rows = slice(None) if everyone else kinds.random
            sequences = [kinds.sequences[row] for row in kinds.random]
            params = [sequence.params for sequence in sequences]
            ids[rows] = device_draw.draw(logits[rows], best[rows], params, self._noise.of(sequences))
        finite, drawn = torch.stack((is_finite.long(), ids)).tolist()
        return drawn, [bool(x) for x in finite]


def not_finite(sequence: Sequence) -> SampledToken:
    """In place of a token where there is no largest logit."""
    return SampledToken(0, fault=f"the largest logit at position {sequence.num_tokens} is not finite")
