"""Packed linears, their epilogues and norms; and the unstable operators the CPU backend is made of."""

import pytest
import torch
import torch.nn.functional as F

from kernels.checked import CheckedKernels
from kernels.cpu import self_test
from kernels.cpu.backend import CpuKernels
from kernels.interface import select_kernels
from kernels.reference.backend import ReferenceKernels

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}


def randn(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_torch_still_has_the_operators_the_cpu_backend_is_made_of(dtype: torch.dtype) -> None:
    """Each is called, with all its epilogues, and compared: mkldnn::_reorder_linear_weight, _linear_pointwise and
    _scaled_dot_product_flash_attention_for_cpu are not stable interfaces."""
    assert self_test.packed_linear_works(dtype)
    assert self_test.flash_attention_works(dtype)
    assert select_kernels(CPU, dtype, 4).name == "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 16, 17, 33, 64])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("packs", [True, False])
def test_linear_and_swiglu(dtype: torch.dtype, rows: int, has_bias: bool, packs: bool) -> None:
    x, residual = randn(rows, 80, dtype=dtype), randn(rows, 112, dtype=dtype)
    weight, up = randn(112, 80, dtype=dtype) / 9, randn(113, 80, dtype=dtype)[:112] / 9
    bias = randn(112, dtype=dtype) if has_bias else None
    product = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    other = F.linear(x.double(), up.double())
    for kernels in map(CheckedKernels, (CpuKernels(packs_linears=packs), ReferenceKernels(CPU))):
        packed, packed_up = kernels.pack_linear(weight, bias), kernels.pack_linear(up)
        for got, expected in (
            (kernels.linear(x, packed), product),
            (kernels.linear(x, packed, residual=residual), product + residual.double()),
            (kernels.swiglu(x, packed, packed_up), F.silu(product) * other),
        ):
            assert got.dtype == dtype
            torch.testing.assert_close(got.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_packed_weights_own_their_memory() -> None:
    """The prepared file's map is not kept, or changed, through them."""
    for kernels in (CpuKernels(packs_linears=True), CpuKernels(packs_linears=False), ReferenceKernels(CPU)):
        weight, bias = randn(32, 16, dtype=torch.float32), randn(32, dtype=torch.float32)
        x = randn(2, 16, dtype=torch.float32)
        packed = kernels.pack_linear(weight, bias)
        before = kernels.linear(x, packed)
        weight.zero_()
        bias.zero_()
        assert torch.equal(kernels.linear(x, packed), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rms_norm_is_computed_in_fp32(dtype: torch.dtype) -> None:
    x, weight = randn(5, 3, 64, dtype=dtype) * 100, randn(64, dtype=dtype)
    wide = x.double()
    expected = wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    for kernels in map(CheckedKernels, (select_kernels(CPU, dtype, 4), ReferenceKernels(CPU))):
        got = kernels.rms_norm(x, weight, 1e-5)
        torch.testing.assert_close(got.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_a_build_without_the_operators_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.interface.packed_linear_works", lambda dtype: False)
    kernels = select_kernels(CPU, torch.float32, 4)
    assert (kernels.name, kernels.pack_linear(torch.ones(2, 2)).is_packed) == ("cpu", False)
    monkeypatch.setattr("kernels.interface.flash_attention_works", lambda dtype: False)
    assert select_kernels(CPU, torch.float32, 4).name == "reference"


def test_a_missing_operator_fails_its_self_test() -> None:
    """Half precision or not, a fault of the operator is an answer, not an error."""
    monkeypatch = pytest.MonkeyPatch()
    with monkeypatch.context() as patch:
        patch.delattr(torch.ops.mkldnn, "_reorder_linear_weight", raising=False)
        patch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", None, raising=False)
        assert not self_test.packed_linear_works(torch.float32)
    assert self_test.packed_linear_works(torch.float32)
