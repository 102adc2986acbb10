"""The largest logit of each row, found while logits are computed, against those logits."""

import numpy as np
import pytest
import torch

from kernels.cpu.build import Isa
from kernels.cpu.native import NativeDecoder
from tests.kernels.libraries import KINDS, decoder

VOCAB, HIDDEN = 75, 32


class Head:
    """75 columns: two panels and a part of a third. Columns 3, 40 and 70 are the same."""

    def __init__(self, dtype: torch.dtype, isa: Isa, num_threads: int) -> None:
        self.native: NativeDecoder = decoder(dtype, isa, num_threads=num_threads, hidden_size=HIDDEN, vocab_size=VOCAB)
        self._weight = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
        self._weight[[40, 70]] = self._weight[3].clone()
        self._norm, self._table = torch.ones(HIDDEN), torch.ones(1, 16)
        tensors = (self._weight, self._weight, self._norm, self._table, self._table)
        self.native.set_outer(*(tensor.data_ptr() for tensor in tensors), num_positions=1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(hidden), VOCAB)
        self.native.logits(hidden.data_ptr(), len(hidden), out.data_ptr())
        return out

    def greedy(self, hidden: torch.Tensor) -> list[int]:
        ids = np.full(len(hidden), -2, np.int32)
        self.native.greedy(hidden.data_ptr(), len(hidden), ids.ctypes.data)
        return list(ids)

    def row_for(self, token_id: int) -> torch.Tensor:
        """A row whose logit of this id is large."""
        return self._weight[token_id].float() * 4


@pytest.mark.parametrize(("dtype", "isa"), KINDS, ids=str)
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_the_largest_logit_and_the_least_id_of_equal_ones(dtype: torch.dtype, isa: Isa, num_threads: int) -> None:
    head = Head(dtype, isa, num_threads)
    for num_rows in (1, 3, 16, 33):
        hidden = torch.randn(num_rows, HIDDEN, generator=torch.Generator().manual_seed(num_rows))
        hidden[-1] = head.row_for(70)
        ids = head.greedy(hidden)
        assert ids == np.argmax(head.logits(hidden).numpy(), -1).tolist()
        assert ids[-1] == 3
    assert head.greedy(torch.stack([head.row_for(id) for id in (74, 64, 31, 0)])) == [74, 64, 31, 0]


@pytest.mark.parametrize(("dtype", "isa"), KINDS, ids=str)
def test_a_row_without_a_finite_largest_logit_has_none(dtype: torch.dtype, isa: Isa) -> None:
    head = Head(dtype, isa, 2)
    hidden = torch.stack([head.row_for(5)] * 3)
    hidden[1, 7] = torch.nan
    assert head.greedy(hidden) == [5, -1, 5]
