"""The engine over interpreted Triton kernels: some prompts in every way in the fast suite, and all that is tested of an
engine with a model in the slow one (half an hour of one core). A file of it alone:

    TRITON_INTERPRET=1 TRUNKLINE_TEST_KERNELS=triton python -m pytest -p tests.interpreted.quicker -m "not slow" FILE
"""

import re
from pathlib import Path

import pytest

from tests.interpreted.child import run_interpreted

TESTS = Path(__file__).parents[1]
SUITE = (
    *("engine/models/test_decoder.py", "engine/test_core_with_model.py", "engine/test_llm.py"),
    *("engine/test_model_runner.py", "engine/test_tensor_parallel.py", "test_beam_search.py", "test_greedy_equal.py"),
    *("test_greedy_reference.py", "test_sharing_equal.py", "test_sharing_regenerate.py", "test_unused_slots.py"),
)
"""All that has an engine with a model compute, whatever with. What is right says the reference backend, or
transformers."""
OTHER = {
    "engine/models/test_choose.py": "which kernels are taken",
    "engine/models/test_packed_decoder.py": "the C++ decoder",
    "engine/test_attention_timing.py": "what nodes cost on a CPU",
    "engine/test_decode_graphs.py": "what is launched, not what it computes",
    "engine/test_steady_decode.py": "steps of the C++ decoder in place",
    "test_accuracy.py": "the C++ decoder in bf16",
    "test_deterministic.py": "equal bits, which Triton refuses",
    "test_kv_dtype.py": "quantised caches, with kernels that each test names",
    "test_sharing_identity.py": "a runner that is never asked to compute",
}
"""What else loads a model, and why it says nothing of Triton."""


def test_some_prompts_in_every_way() -> None:
    run_interpreted("tests/interpreted/engine")


@pytest.mark.slow
@pytest.mark.parametrize("file", SUITE)
def test_the_whole_engine_suite(file: str) -> None:
    run_interpreted(f"tests/{file}", "-m", "not slow", "-k", "not demo_model", TRUNKLINE_TEST_KERNELS="triton")


def test_the_suite_is_whole() -> None:
    """A new file that loads a model has to be in one of the two lists."""
    loads = re.compile(r"\b(ModelRunner|LLM)\(")
    files = {path.relative_to(TESTS) for path in TESTS.rglob("test_*.py") if loads.search(path.read_text())}
    found = {file.as_posix() for file in files if file.parts[0] not in ("interpreted", "kernels")}
    assert found == {*SUITE, *OTHER}
