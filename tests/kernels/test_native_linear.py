"""Packed linears in C++ against float64, and that a row's bits are its own."""

import itertools

import pytest
import torch

from kernels.cpu.build import Isa
from kernels.cpu.native import NativeDecoder
from tests.kernels.libraries import BEST, KINDS, decoder

ROWS = [1, 2, 3, 11, 12, 13, 16, 17, 25, 33, 64, 100]
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-5}
"""Relative: inputs are as they are given, products of bf16 are exact in fp32."""


def randn(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes))).to(dtype)


class Layer:
    """hidden 72, attended 80, intermediate 100: none a multiple of a panel."""

    def __init__(self, dtype: torch.dtype, isa: Isa | None, num_threads: int = 1) -> None:
        self.native: NativeDecoder = decoder(
            dtype,
            isa,
            num_threads=num_threads,
            hidden_size=72,
            num_heads=5,
            num_kv_heads=1,
            head_dim=16,
            intermediate_size=100,
        )
        sizes = {"q": (80, 72), "k": (16, 72), "v": (16, 72), "o": (72, 80)}
        sizes |= {"gate": (100, 72), "up": (100, 72), "down": (72, 100)}
        weights = {name: randn(*size, dtype=dtype) / 8 for name, size in sizes.items()}
        self.native.set_layer(0, {name: weight.data_ptr() for name, weight in weights.items()})
        gate, up = (torch.nn.functional.pad(weights[name], (0, 0, 0, 12)).view(7, 16, 72) for name in ("gate", "up"))
        self.expected = [
            torch.cat([weights[name] for name in ("q", "k", "v")]),
            weights["o"],
            torch.stack((gate, up), 1).view(-1, 72),
            weights["down"],
        ]

    def run(self, which: int, x: torch.Tensor) -> torch.Tensor:
        num_columns = self.expected[which].shape[0]
        out = torch.empty(len(x), -(-num_columns // 32) * 32)
        self.native.linear(0, which, x.data_ptr(), len(x), out.data_ptr())
        assert (out[:, num_columns:] == 0).all()
        return out[:, :num_columns]


@pytest.mark.parametrize(("dtype", "isa"), KINDS, ids=str)
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_products_of_packed_weights(dtype: torch.dtype, isa: Isa, num_threads: int) -> None:
    layer = Layer(dtype, isa, num_threads)
    for which, num_rows in itertools.product(range(4), ROWS):
        weight = layer.expected[which]
        x = randn(num_rows, weight.shape[1], dtype=dtype)
        expected = x.double() @ weight.double().T
        difference = layer.run(which, x).double() - expected
        assert difference.norm() <= TOLERANCE[dtype] * expected.norm(), (which, num_rows)


@pytest.mark.parametrize(("dtype", "isa"), KINDS, ids=str)
def test_a_row_has_the_same_bits_in_every_number_of_rows(dtype: torch.dtype, isa: Isa) -> None:
    layer, layer_of_two = Layer(dtype, isa), Layer(dtype, isa, 2)
    for which in range(4):
        x = randn(64, layer.expected[which].shape[1], dtype=dtype)
        everyone = layer.run(which, x)
        for first, last in ((0, 1), (5, 6), (63, 64), (0, 3), (10, 27), (30, 64)):
            some = layer_of_two.run(which, x[first:last].contiguous())
            assert torch.equal(some, everyone[first:last]), (which, first, last)


@pytest.mark.parametrize(("dtype", "isa"), BEST, ids=str)
def test_weights_are_packed_once_and_not_looked_at_again(dtype: torch.dtype, isa: None) -> None:
    layer = Layer(dtype, isa)
    x = randn(2, 72, dtype=dtype)
    before = layer.run(0, x)
    again = Layer(dtype, isa)
    assert torch.equal(layer.run(0, x), before)
    assert torch.equal(again.run(0, x), before)
    again.native.close()
    again.native.close()
