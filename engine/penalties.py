"""What changes a row's logits before temperature: logit bias, min_tokens, penalties. In place."""

from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from engine.sampling_params import SamplingParams
from engine.sequence import Sequence


class TokenCounts:
    """Which tokens a sequence has, and how often in its output; each token is counted once in the sequence's life."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._num_counted = 0
        self._index_of: dict[int, int] = {}
        self._ids: npt.NDArray[np.int64] = np.empty(64, dtype=np.int64)
        self._output_counts: npt.NDArray[np.float32] = np.zeros(64, dtype=np.float32)

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Of prompt and output, each once, int64 [unique]."""
        return self._ids[: len(self._index_of)]

    @property
    def output_counts(self) -> npt.NDArray[np.float32]:
        """Of `ids` in the output, fp32 [unique]."""
        return self._output_counts[: len(self._index_of)]

    def update(self, token_ids: list[int]) -> None:
        """`token_ids`: of the whole sequence, which only grows."""
        for position in range(self._num_counted, len(token_ids)):
            token_id = token_ids[position]
            index = self._index_of.setdefault(token_id, len(self._index_of))
            if index == len(self._ids):
                self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
                self._output_counts = np.concatenate((self._output_counts, np.zeros_like(self._output_counts)))
            self._ids[index] = token_id
            self._output_counts[index] += position >= self._num_prompt_tokens
        self._num_counted = len(token_ids)


class Penalties:
    """Remembers the token counts of the sequences that need them, as long as those live."""

    def __init__(self) -> None:
        self._counts: WeakKeyDictionary[Sequence, TokenCounts] = WeakKeyDictionary()

    def adjust(self, logits: torch.Tensor, sequence: Sequence) -> None:
        """logits: fp32 [vocab_size], of the token after `sequence`'s last.

        Repetition counts prompt and output, presence and frequency the output only; a prompt's tokens count whether
        they were computed or came from the cache.
        """
        params, device = sequence.params, logits.device
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), dtype=torch.int64, device=device)
            biases = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=device)
            logits.index_add_(0, ids, biases)
        if sequence.num_output_tokens < params.min_tokens and sequence.stop_ids:
            ids = torch.tensor(list(sequence.stop_ids), dtype=torch.int64, device=device)
            logits.index_fill_(0, ids, float("-inf"))
        if not _has_penalty(params):
            return
        counts = self._counts.get(sequence)
        if counts is None:
            counts = self._counts[sequence] = TokenCounts(sequence.num_prompt_tokens)
        counts.update(sequence.token_ids)
        ids = torch.from_numpy(counts.ids).to(device)
        values = logits[ids]
        penalty = params.repetition_penalty
        if penalty != 1.0:
            values = torch.where(values > 0, values / penalty, values * penalty)
        in_output = torch.from_numpy(counts.output_counts).to(device)
        values -= params.presence_penalty * (in_output > 0) + params.frequency_penalty * in_output
        logits[ids] = values


def may_adjust(params: SamplingParams) -> bool:
    return bool(params.logit_bias or params.min_tokens or _has_penalty(params))


def _has_penalty(params: SamplingParams) -> bool:
    return bool(params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty)
