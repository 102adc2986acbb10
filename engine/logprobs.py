"""Log-probabilities of the raw logits, before penalties and temperature."""

from collections.abc import Sequence

import torch

from engine.protocol import TokenLogprobs

ROWS_AT_A_TIME = 128
"""A prompt's rows times a vocabulary of 150,000 would be gigabytes."""


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """logits fp32 [rows, vocab_size]; for each row its token and the number of best alternatives."""
    logprobs = logits.log_softmax(-1)
    ids = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
    chosen = logprobs.gather(1, ids[:, None]).squeeze(1).tolist()
    most = min(max(num_top), logits.shape[1])
    values, indices = logprobs.topk(most, dim=-1)
    tops = zip(indices.tolist(), values.tolist(), strict=True)
    return [
        TokenLogprobs(token_id, logprob, list(zip(ids_of_row[:num], values_of_row[:num], strict=True)))
        for token_id, logprob, num, (ids_of_row, values_of_row) in zip(token_ids, chosen, num_top, tops, strict=True)
    ]
