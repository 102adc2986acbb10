"""Draws the tokens of all rows at once by torch's operators, where the logits are. `cpu_draw` has the rules."""

from dataclasses import dataclass

import numpy as np
import torch

from engine.sampling_params import SamplingParams

_MAX_FLOAT32 = torch.finfo(torch.float32).max


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


def draw(logits: torch.Tensor, best: torch.Tensor, params: list[SamplingParams], uniforms: list[float]) -> torch.Tensor:
    """int64 [rows]. logits: fp32 [rows, vocab_size]; best: the largest of each row, finite; uniforms: in [0, 1)."""
    device = logits.device
    vocab_size = logits.shape[1]
    temperatures = torch.tensor([p.temperature for p in params], dtype=torch.float64, device=device)
    temperatures = temperatures.clamp_(max=_MAX_FLOAT32).float()
    # from the largest down, so that nothing overflows however low the temperature
    scaled = (logits - best[:, None]).div_(temperatures[:, None])
    # in (0, 1]: the first token whose cumulative sum reaches it has a share of its own
    shares = 1.0 - torch.tensor(uniforms, dtype=torch.float64, device=device)
    top_k = [p.top_k if 0 < p.top_k < vocab_size else 0 for p in params]  # all of them is no filter, and draws alike
    is_filtered = [bool(k or p.top_p < 1.0 or p.min_p > 0.0) for k, p in zip(top_k, params, strict=True)]
    filtered, plain = np.flatnonzero(is_filtered), np.flatnonzero(np.logical_not(is_filtered))
    drawn = torch.empty(len(params), dtype=torch.int64, device=device)
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
        rows = torch.from_numpy(filtered).to(device)
        drawn[rows] = _draw_among_all(scaled[rows], shares[rows], filters.select(rows))
    return drawn


def _draw_among_all(scaled: torch.Tensor, shares: torch.Tensor, filters: _Filters) -> torch.Tensor:
    """Ids drawn [rows]. Values are sorted without their ids, which is several times faster: of those equal to the
    value that is drawn, the id is found by counting."""
    values = scaled.sort(dim=-1, descending=True).values
    rank = _draw_rank(values, shares, filters)
    value = values.gather(1, rank)
    place = rank - (scaled > value).sum(-1, keepdim=True)
    return torch.searchsorted((scaled == value).cumsum(-1), place + 1).squeeze(1)


def _draw_rank(values: torch.Tensor, shares: torch.Tensor, filters: _Filters) -> torch.Tensor:
    """The rank drawn, [rows, 1].

    values: best first. Every filter keeps a leading run of the ranking; what is kept is the shortest of them.
    """
    num_values = values.shape[1]
    shares_of = values.double().exp_()
    cumulative = shares_of.cumsum(-1)
    num_likely = (shares_of >= filters.min_p).sum(-1, keepdim=True)
    kept = torch.where(filters.top_k > 0, filters.top_k.minimum(num_likely), num_likely)
    reached = cumulative >= filters.top_p * cumulative.gather(1, kept - 1)
    by_p = torch.where(filters.top_p < 1.0, reached.long().argmax(-1, keepdim=True) + 1, num_values)
    last = torch.minimum(kept, by_p) - 1
    target = shares[:, None] * cumulative.gather(1, last)
    return torch.minimum(torch.searchsorted(cumulative, target), last)
