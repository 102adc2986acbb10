"""Every kernel, compiled for GPUs that are not here at the head shapes of four models, needs what the committed table
says, and nothing of it spills. The table is written by `python -m tests.kernels.ahead_of_time`.

What this cannot show is how fast anything is, or that it computes on a device what it computes in the interpreter.
"""

from typing import Any

import pytest

from tests.interpreted.child import need_triton

need_triton()

import triton  # noqa: E402

from tests.kernels import ahead_of_time as ahead  # noqa: E402

MANY_ROWS = {"nodes, many rows", "extends"}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run's own: what an earlier version of a kernel compiled to is not looked at."""
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
        yield


def check_limits(target: ahead.Target, kernel: str, needs: dict[str, Any]) -> None:
    assert needs["stack"] == 0, (kernel, needs)
    assert needs["shared"] <= target.max_shared_bytes, (kernel, needs)
    usual = kernel.split(": ")[-1]
    assert (needs["mma"] != "none") == (usual in ahead.ATTENTION), (kernel, needs)
    if usual in MANY_ROWS:
        assert needs["mma"] == target.mma, (kernel, needs)


def test_the_table_keeps_to_the_limits_of_each_target() -> None:
    table = ahead.read_table()["kernels"]
    assert set(table) == {target.name for target in ahead.TARGETS}
    for target in ahead.TARGETS:
        assert set(table[target.name]) == set(ahead.SHAPES)
        for name, kernels in table[target.name].items():
            assert set(kernels) == set(ahead.launches_of(ahead.SHAPES[name], ahead.DEFAULT))
            for kernel, needs in kernels.items():
                check_limits(target, kernel, needs)


def test_no_step_needs_another_compilation_than_the_first() -> None:
    """Whatever its numbers of rows and tokens, as nothing may be compiled while others wait. Nodes alone come in a form
    for each size of their tiles."""
    forms: dict[str, set[str]] = {}
    for num_decodes, num_new in ((1, 1), (2, 16), (3, 2), (6, 7), (16, 1), (17, 33), (64, 20)):
        for kernel, launched in ahead.step_launches(
            ahead.SHAPES["Qwen3-8B"], ahead.DEFAULT, num_decodes, num_new
        ).items():
            source = ahead.source_of(launched)
            form = (sorted(source.constants.items()), sorted(source.attrs.items()), source.signature, launched.options)
            forms.setdefault(kernel, set()).add(repr(form))
    assert {kernel for kernel, of_kernel in forms.items() if len(of_kernel) > 1} == {"nodes"}
    assert len(forms["nodes"]) == 3


def check(target: ahead.Target, name: str, kernels: tuple[str, ...] = ()) -> None:
    table = ahead.read_table()
    measured = ahead.measure(target, ahead.SHAPES[name], kernels)
    for kernel, needs in measured.items():
        check_limits(target, kernel, needs)
    if table["triton"] == triton.__version__:
        expected = table["kernels"][target.name][name]
        assert measured == {kernel: expected[kernel] for kernel in measured}


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("target", "name", "kernels"),
    [
        ("sm_90", "Qwen2.5-7B", ("tails", "nodes, many rows", "extends", "merge", "rotate and write")),
        ("sm_80", "SmolLM2-135M", ("tails", "extends")),
        ("gfx942", "Llama-3-8B", ("tails", "nodes, many rows")),
        ("sm_80", "Qwen2.5-7B", ("int8: rotate and write", "int8: nodes, few rows", "fp8: tails")),
        ("sm_90", "Llama-3-8B", ("window and soft cap: nodes, few rows",)),
    ],
)
def test_some_kernels_compile_as_the_table_says(target: str, name: str, kernels: tuple[str, ...]) -> None:
    check(next(t for t in ahead.TARGETS if t.name == target), name, kernels)


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("target", ahead.TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize("name", ahead.SHAPES)
def test_all_kernels_compile_as_the_table_says(target: ahead.Target, name: str) -> None:
    check(target, name)
