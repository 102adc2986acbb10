"""What the interpreter computes wrongly, or a device in another precision, stands in no kernel: products outside of the
one helper, and arithmetic in bfloat16, whose bits the interpreter would add and multiply as integers."""

import ast
import re
from pathlib import Path

import pytest

from tests.interpreted.child import need_triton

FOLDER = Path(__file__).parents[2] / "kernels" / "triton"
MOVES = {"arith.extf", "arith.truncf", "arith.select", "arith.constant", "arith.bitcast"}
"""Of values, which change none: widening, rounding, choosing."""


def products_in(source: str) -> list[str]:
    """The functions of a module that call tl.dot."""
    return [
        function.name
        for function in ast.parse(source).body
        if isinstance(function, ast.FunctionDef)
        and any(isinstance(node, ast.Attribute) and node.attr.startswith("dot") for node in ast.walk(function))
    ]


def bf16_arithmetic_in(intermediate: str) -> list[str]:
    """Lines of Triton's intermediate language that compute with bfloat16; pointers to it do not."""
    found = []
    for line in intermediate.splitlines():
        operation = re.search(r"\b(?:arith|math)\.\w+|\btt\.(?:reduce|scan|extern_elementwise)\b", line)
        if operation and operation.group() not in MOVES and "bf16" in line.replace("!tt.ptr<bf16>", ""):
            found.append(line.strip())
    return found


def test_tiles_are_multiplied_by_the_one_helper() -> None:
    found = {path.stem: names for path in FOLDER.glob("*.py") if (names := products_in(path.read_text()))}
    assert found == {"arithmetic": ["dot"]}
    assert products_in("def f(a, b):\n    return tl.dot(a, b) + tl.dot_scaled(a, b)") == ["f"]


def test_arithmetic_in_bf16_is_found() -> None:
    need_triton()
    import torch

    from tests.kernels import bf16_kernels
    from tests.kernels.ahead_of_time import TARGETS, Launched, intermediate_of

    values = torch.empty(16, dtype=torch.bfloat16)
    lines = {
        name: bf16_arithmetic_in(intermediate_of(TARGETS[1], Launched(kernel, {"values": values}, {"num_warps": 1})))
        for name, kernel in (("doubles", bf16_kernels.doubles), ("widened", bf16_kernels.doubles_widened))
    }
    [line] = lines["doubles"]
    assert "arith.mulf" in line
    assert lines["widened"] == []


@pytest.mark.parametrize("name", ["Qwen2.5-7B", "Qwen3-8B", "SmolLM2-135M"])
def test_no_kernel_computes_in_bf16(name: str) -> None:
    need_triton()
    from tests.kernels.ahead_of_time import DEFAULT, SHAPES, TARGETS, intermediate_of, launches_of

    for kernel, launched in launches_of(SHAPES[name], DEFAULT).items():
        intermediate = intermediate_of(TARGETS[1], launched)
        assert "bf16" in intermediate or kernel == "draw" or kernel.endswith(" blocks")
        assert bf16_arithmetic_in(intermediate) == [], kernel
