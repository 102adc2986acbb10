"""What changes a row's logits before temperature: logit bias, min_tokens, penalties. In place."""

import numpy as np
import torch

from engine.sampling_params import SamplingParams
from engine.sequence import Sequence


def has_adjustment(sequence: Sequence) -> bool:
    params = sequence.params
    return bool(
        params.logit_bias
        or sequence.num_output_tokens < params.min_tokens
        or params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
    )


def adjust(logits: torch.Tensor, sequence: Sequence) -> None:
    """logits: fp32 [vocab_size], of the token after `sequence`'s last.

    Repetition counts prompt and output, presence and frequency the output only; a prompt's tokens count whether they
    were computed or came from the cache.
    """
    params = sequence.params

    def tensor(values: object, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)

    if params.logit_bias:
        ids = tensor(list(params.logit_bias), torch.int64)
        logits.index_add_(0, ids, tensor(list(params.logit_bias.values()), torch.float32))
    if sequence.num_output_tokens < params.min_tokens:
        ends = ids_that_end(params)
        if ends:
            logits.index_fill_(0, tensor(ends, torch.int64), float("-inf"))
    if params.repetition_penalty != 1.0:
        ids = tensor(np.unique(sequence.token_ids), torch.int64)
        values = logits[ids]
        penalty = params.repetition_penalty
        logits[ids] = torch.where(values > 0, values / penalty, values * penalty)
    if (params.presence_penalty or params.frequency_penalty) and sequence.num_output_tokens:
        unique, counts = np.unique(sequence.output_ids, return_counts=True)
        penalties = params.presence_penalty + params.frequency_penalty * tensor(counts, torch.float32)
        logits[tensor(unique, torch.int64)] -= penalties


def ids_that_end(params: SamplingParams) -> list[int]:
    """Ids that min_tokens keeps from being drawn."""
    ends = params.stop_token_ids + (() if params.ignore_eos else params.eos_token_ids)
    return list(dict.fromkeys(ends))
