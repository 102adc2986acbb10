"""The floor of attention and steps, against the figures worked out for an H200 in the table of shapes."""

import pytest

from benchmarks.gpu_work import (
    DRY,
    LLAMA_3_8B,
    ON_A_DEVICE,
    QWEN_2_5_7B,
    Ceilings,
    DecodeCase,
    ModelShape,
    Sizes,
    attention_cases,
    decode_cases,
    decode_floor,
)

H200 = Ceilings(bytes_per_s=4.3e12, flops_per_s=790e12)
ROWS = [
    # trunk, rows; GB flat and shared; ms flat; ms of trunk, tails, merge, linear layers
    (QWEN_2_5_7B, 2048, 32, (4.2, 0.59), 0.98, (0.03, 0.11, 0.03, 3.3)),
    (QWEN_2_5_7B, 2048, 128, (16.9, 2.0), 3.93, (0.13, 0.44, 0.12, 3.3)),
    (QWEN_2_5_7B, 8192, 512, (248, 8.0), 57.7, (2.13, 1.75, 0.48, 9.2)),
    (LLAMA_3_8B, 2048, 32, (9.7, 1.34), 2.25, (0.06, 0.25, 0.04, 3.5)),
    (LLAMA_3_8B, 2048, 128, (38.7, 4.56), 8.99, (0.17, 1.00, 0.16, 3.5)),
    (LLAMA_3_8B, 8192, 128, (142, 5.37), 33.0, (0.70, 1.00, 0.16, 3.5)),
    (LLAMA_3_8B, 8192, 512, (567, 18.3), 132, (2.78, 4.00, 0.63, 9.7)),
]


@pytest.mark.parametrize(("model", "trunk", "rows", "gb", "flat_ms", "phases_ms"), ROWS)
def test_floors(
    model: ModelShape, trunk: int, rows: int, gb: tuple[float, float], flat_ms: float, phases_ms: tuple[float, ...]
) -> None:
    case = DecodeCase(model, trunk, rows, 256)
    assert (case.flat_bytes / 1e9, case.shared_bytes / 1e9) == pytest.approx(gb, rel=0.02)
    assert case.flat_bytes / H200.bytes_per_s * 1000 == pytest.approx(flat_ms, rel=0.01)
    floor = decode_floor(case, H200)
    found = (floor.trunk_ms, floor.tails_ms, floor.merge_ms, floor.linear_ms)
    assert found == pytest.approx(phases_ms, abs=0.006, rel=0.02)
    assert floor.step_ms == pytest.approx(sum(found))


def test_weights_and_kv_are_those_of_the_models() -> None:
    assert (LLAMA_3_8B.kv_bytes, QWEN_2_5_7B.kv_bytes) == (131_072, 57_344)
    assert 2 * LLAMA_3_8B.read_parameters == pytest.approx(15.0e9, rel=0.01)
    assert 2 * QWEN_2_5_7B.read_parameters == pytest.approx(14.1e9, rel=0.01)


@pytest.mark.parametrize("sizes", [ON_A_DEVICE, DRY], ids=["device", "dry"])
def test_cases_have_names_of_their_own(sizes: Sizes) -> None:
    attention = [case.name for case in attention_cases(sizes)]
    assert len(set(attention)) == len(attention) == 12
    decode = [case.name for case in decode_cases(sizes)]
    assert len(set(decode)) == len(decode)


def test_decode_steps_of_a_device_stay_within_a_piece() -> None:
    """So that a captured graph has the same programs in each of them."""
    assert ON_A_DEVICE.own_tokens <= 256
    assert 0 < ON_A_DEVICE.decode_steps < ON_A_DEVICE.own_tokens
