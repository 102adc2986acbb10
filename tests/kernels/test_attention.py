"""The CPU backend of torch's operators, and the reference, against float64: odd heads, ragged tails, nodes of every
size, poison where nothing is."""

import pytest
import torch

from kernels.attention_rule import AttentionRule
from kernels.batch import KVQuantisation, KVShape, Tail
from kernels.checked import CheckedKernels
from kernels.cpu.backend import CpuKernels
from kernels.cpu.plan import group_tails
from kernels.reference.backend import ReferenceKernels
from kernels.reference.functions import block_rows, kv_rows
from tests.kernels import attention_cases as cases

RULES = [AttentionRule(window=1), AttentionRule(window=50, soft_cap=2.0), AttentionRule(soft_cap=0.5)]


def backends(num_heads: int) -> list[CheckedKernels]:
    return [CheckedKernels(CpuKernels(packs_linears=False)), CheckedKernels(ReferenceKernels(torch.device("cpu")))]


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), cases.HEADS)
@pytest.mark.parametrize("head_dim", cases.HEAD_DIMS)
def test_decode_of_ragged_tails(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
    cases.check_decode(backends, dtype, heads, kv_heads, head_dim)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("layout", cases.NODE_LAYOUTS)
@pytest.mark.parametrize("block_size", [8, 16])
def test_nodes_are_read_for_all_their_rows(dtype: torch.dtype, layout: str, block_size: int) -> None:
    cases.check_nodes(backends, dtype, layout, block_size)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), cases.HEADS)
def test_extends_see_their_context_and_themselves(dtype: torch.dtype, heads: int, kv_heads: int) -> None:
    cases.check_extends(backends, dtype, heads, kv_heads)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), cases.HEADS)
def test_heads_are_turned_by_their_angles_and_written_to_their_slots_only(
    dtype: torch.dtype, heads: int, kv_heads: int
) -> None:
    cases.check_rotation(backends, dtype, heads, kv_heads)


@pytest.mark.parametrize("quantisation", cases.QUANTISATIONS)
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (7, 1, 80)])
def test_quantised_keys_and_values_are_read_as_they_were_written(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, quantisation: KVQuantisation
) -> None:
    cases.check_quantised_writes(backends, dtype, heads, kv_heads, head_dim, quantisation)
    cases.check_decode(backends, dtype, heads, kv_heads, head_dim, quantisation)
    cases.check_extends(backends, dtype, heads, kv_heads, head_dim, quantisation)
    cases.check_nodes(backends, dtype, "two levels", 8, (heads, kv_heads), head_dim, quantisation)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_windows_and_soft_caps_of_the_reference(rule: AttentionRule) -> None:
    def make(num_heads: int) -> list[CheckedKernels]:
        return [CheckedKernels(ReferenceKernels(torch.device("cpu"), rule))]

    cases.check_decode(make, torch.float32, 4, 2, 32, rule=rule)
    cases.check_nodes(make, torch.float32, "eight at two levels", 16, rule=rule)
    cases.check_extends(make, torch.float32, 4, 2, rule=rule)


def test_a_rule_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="window and soft_cap must not be below 0, got -1 and 0"):
        AttentionRule(window=-1)


@pytest.mark.parametrize("num_parts", [1, 2, 9])
def test_parts_are_merged_by_their_weights(num_parts: int) -> None:
    cases.check_merge(backends, num_parts)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("size", [64, 80])
def test_norms(dtype: torch.dtype, size: int) -> None:
    cases.check_norms(backends, dtype, size)


def test_tails_of_very_different_lengths_are_not_padded_to_the_longest() -> None:
    tails = [Tail(list(range(n)), n * 16) for n in (3, 200, 4, 7, 190, 90)]
    assert group_tails(tails) == [[1, 4], [5], [0, 2, 3]]


def test_rows_of_a_pool_of_more_than_two_to_the_31_elements_do_not_wrap() -> None:
    """Those that torch's operators read and write by, for the first and the last block of K and of V."""
    num_blocks, num_kv_heads, block_size = 2**28, 8, 16
    shape = KVShape(num_blocks, num_kv_heads, block_size, head_dim=128)
    last = num_blocks - 1
    heads = [(kv * num_blocks + last) * num_kv_heads + head for kv in range(2) for head in range(num_kv_heads)]
    table = torch.tensor([[last]])
    assert block_rows(table, shape).tolist() == heads
    # the slots of the last block are beyond 32 bits too
    written = kv_rows([last * block_size + 15], shape, torch.device("cpu")).tolist()
    assert written == [row * block_size + 15 for row in heads]
