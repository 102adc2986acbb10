"""Draws the next token of each row.

One uniform number per row, Philox(seed, choice, position), is looked up in the cumulative distribution of what the
filters leave: no random number per vocabulary entry, and a row's token depends on its own logits and parameters alone,
never on its neighbours. Where filters cut, tokens are ranked by logit, equal ones by id, lowest first; the order of
the filters is min_p, top_k, top_p.
"""

from dataclasses import dataclass

import numpy as np
import torch

from engine import logprobs, penalties, philox
from engine.scheduled_batch import SampledToken
from engine.sequence import Sequence

NUM_CANDIDATES = 256
"""On a CPU the filters look at this many best tokens, at the whole vocabulary only if those do not settle it."""


_MAX_FLOAT32 = torch.finfo(torch.float32).max


class Sampler:
    def __init__(self) -> None:
        self._penalties = penalties.Penalties()

    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[SampledToken]:
        """logits: fp32 [len(sequences), vocab_size], changed in place.

        A row without a finite largest value brings a fault instead of a token; the others are drawn all the same.
        """
        if not sequences:
            return []
        wanted = [row for row, s in enumerate(sequences) if s.params.logprobs is not None]
        # penalties write into the logits, so what they must not change is copied first
        raw = logits[wanted] if wanted else None
        for row, sequence in enumerate(sequences):
            if penalties.has_adjustment(sequence):
                self._penalties.adjust(logits[row], sequence)
        best, token_ids = logits.max(-1)
        is_finite = best.isfinite()
        if not is_finite.all():
            logits[~is_finite] = best[~is_finite] = 0.0  # something to draw from; what is drawn is not looked at
        random = [row for row, s in enumerate(sequences) if not s.params.is_greedy]
        if random:
            everyone = len(random) == len(sequences)
            rows = slice(None) if everyone else random
            token_ids[rows] = _draw(logits[rows], best[rows], [sequences[row] for row in random])
        finite, ids = torch.stack((is_finite.long(), token_ids)).tolist()
        tokens = [SampledToken(token_id) for token_id in ids]
        if raw is not None:
            nums = [sequences[row].params.logprobs or 0 for row in wanted]
            for row, entry in zip(wanted, logprobs.token_logprobs(raw, [ids[r] for r in wanted], nums), strict=True):
                tokens[row] = SampledToken(ids[row], entry)
        for row, (sequence, is_well) in enumerate(zip(sequences, finite, strict=True)):
            if not is_well:
                fault = f"the largest logit at position {sequence.num_tokens} is not finite"
                tokens[row] = SampledToken(0, fault=fault)
        return tokens


@dataclass(frozen=True, slots=True)
class _Filters:
    """Per row, on the device. 0 is off for top_k and min_p, 1 for top_p."""

    top_k: torch.Tensor
    """int64 [rows, 1]"""
    top_p: torch.Tensor
    """float64 [rows, 1]"""
    min_p: torch.Tensor
    """float64 [rows, 1]"""

    def select(self, rows: torch.Tensor) -> "_Filters":
        return _Filters(self.top_k[rows], self.top_p[rows], self.min_p[rows])


def _draw(logits: torch.Tensor, best: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    """int64 [rows]. best: the largest logit of each row."""
    device = logits.device
    vocab_size = logits.shape[1]
    params = [s.params for s in sequences]
    temperatures = torch.tensor([p.temperature for p in params], dtype=torch.float64, device=device)
    temperatures = temperatures.clamp_(max=_MAX_FLOAT32).float()
    # from the largest down, so that nothing overflows however low the temperature
    scaled = (logits - best[:, None]).div_(temperatures[:, None])
    noise = philox.uniforms(
        [s.seed for s in sequences], [s.choice for s in sequences], [s.num_tokens for s in sequences]
    )
    # in (0, 1]: the first token whose cumulative sum reaches it has a share of its own
    shares = torch.from_numpy(1.0 - noise).to(device)
    top_k = [p.top_k if 0 < p.top_k < vocab_size else 0 for p in params]  # all of them is no filter, and draws alike
    is_filtered = [bool(k or p.top_p < 1.0 or p.min_p > 0.0) for k, p in zip(top_k, params, strict=True)]
    filtered, plain = np.flatnonzero(is_filtered), np.flatnonzero(np.logical_not(is_filtered))
    drawn = torch.empty(len(sequences), dtype=torch.int64, device=device)
    if plain.size:
        rows = torch.from_numpy(plain).to(device)
        cumulative = scaled[rows].exp_().cumsum(-1)
        target = (shares[rows, None] * cumulative[:, -1:]).float()
        drawn[rows] = torch.searchsorted(cumulative, target).squeeze(1).clamp_(max=vocab_size - 1)
    if filtered.size:

        def column(values: list[float] | list[int], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        filters = _Filters(
            column(top_k, torch.int64),
            column([p.top_p for p in params], torch.float64),
            column([p.min_p for p in params], torch.float64),
        )
        pending = torch.from_numpy(filtered).to(device)
        if device.type == "cpu" and vocab_size > NUM_CANDIDATES:
            ids, is_settled = _draw_among_best(scaled[pending], shares[pending], filters.select(pending))
            drawn[pending] = ids
            pending = pending[~is_settled]
        if len(pending):
            drawn[pending] = _draw_among_all(scaled[pending], shares[pending], filters.select(pending))
    return drawn


def _draw_among_best(
    scaled: torch.Tensor, shares: torch.Tensor, filters: _Filters
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids drawn [rows], and whether NUM_CANDIDATES best tokens were enough to tell [rows].

    scaled: fp32 [rows, vocab_size], largest value 0.
    """
    values, ids = scaled.topk(NUM_CANDIDATES, dim=-1)
    ids, by_id = ids.sort(dim=-1)
    values, by_value = values.gather(1, by_id).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, by_value)
    total = scaled.exp().sum(-1, keepdim=True, dtype=torch.float64)
    rank, last, is_settled = _draw_rank(values, shares, filters, total)
    # equal logits behind the last candidate could rank before it
    is_settled &= values.gather(1, last) > values[:, -1:]
    return ids.gather(1, rank).squeeze(1), is_settled.squeeze(1)


def _draw_among_all(scaled: torch.Tensor, shares: torch.Tensor, filters: _Filters) -> torch.Tensor:
    """Ids drawn [rows]. Values are sorted without their ids, which is several times faster: of those equal to the
    value that is drawn, the id is found by counting."""
    if scaled.device.type == "cpu":
        values = torch.from_numpy(np.sort(scaled.numpy(), axis=-1)).flip(-1)  # torch's own is slower
    else:
        values = scaled.sort(dim=-1, descending=True).values
    rank, _, _ = _draw_rank(values, shares, filters, None)
    value = values.gather(1, rank)
    place = rank - (scaled > value).sum(-1, keepdim=True)
    return torch.searchsorted((scaled == value).cumsum(-1), place + 1).squeeze(1)


def _draw_rank(
    values: torch.Tensor, shares: torch.Tensor, filters: _Filters, total: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rank drawn, the last rank that the filters keep, and whether the values were enough to tell, [rows, 1] each.

    values: the best of each row, best first. total: the mass of the whole row, None if all its values are there. Every
    filter keeps a leading run of the ranking; what is kept is the shortest of them.
    """
    num_rows, num_values = values.shape
    is_whole = total is None
    shares_of = values.double().exp_()
    cumulative = shares_of.cumsum(-1)
    unknown = torch.full((num_rows, 1), num_values + 1, dtype=torch.int64, device=values.device)
    by_k = torch.where(filters.top_k > 0, filters.top_k, unknown)
    num_likely = (shares_of >= filters.min_p).sum(-1, keepdim=True)
    is_cut_off = (num_likely == num_values) & (not is_whole)
    by_min_p = torch.where((filters.min_p > 0) & ~is_cut_off, num_likely, unknown)
    kept = torch.minimum(by_k, by_min_p)
    # a row whose min_p reaches past the values is not settled, unless top_k ends before
    is_settled = (kept <= num_values) | ((filters.top_k == 0) & (filters.min_p == 0))

    last = (kept.clamp(max=num_values) - 1).clamp_(min=0)
    mass = cumulative.gather(1, last)
    if total is not None:
        mass = torch.where(kept <= num_values, mass, total)
    reached = cumulative >= filters.top_p * mass
    by_p = torch.where(reached.any(-1, keepdim=True), reached.long().argmax(-1, keepdim=True) + 1, unknown)
    kept = torch.where(filters.top_p < 1.0, torch.minimum(kept, by_p), kept)
    if is_whole:
        kept = kept.clamp(max=num_values)
    is_settled &= kept <= num_values
    last = kept.clamp(max=num_values) - 1
    target = shares[:, None] * cumulative.gather(1, last)
    rank = torch.minimum(torch.searchsorted(cumulative, target), last)
    return rank, last, is_settled
