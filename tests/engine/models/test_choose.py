"""What a setting or the machine leaves of the backends: still the right answer, and a warning each."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import device
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.model_runner import ModelRunner
from engine.models import choose
from engine.models.decoder import Decoder
from engine.models.packed_decoder import PackedDecoder
from engine.models.prepare import prepare
from engine.models.weights import Weights
from engine.prepared import PreparedModel
from kernels import interface
from kernels.cpu import build
from kernels.cpu.backend import CpuKernels
from kernels.reference.backend import ReferenceKernels
from tests.engine.runner_driver import RunnerDriver
from tests.interpreted.child import need_triton
from tests.kernels.libraries import compiler
from tests.tiny_model import make_tiny

PROMPT = [(7 * i * i + 3 * i + 11) % 380 for i in range(40)]
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PreparedModel]:
    """By dtype."""
    path = tmp_path_factory.mktemp("model")
    source = str(make_tiny(path / "tiny", tie_word_embeddings=False))
    return {dtype: prepare(source, path / "state", dtype, lambda *_: None) for dtype in ("float32", "bfloat16")}


@pytest.fixture(scope="module")
def model(models: dict[str, PreparedModel]) -> PreparedModel:
    return models["float32"]


@pytest.fixture(autouse=True)
def system_with_huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The setting's file. Whoever does not say how many threads there are to be has two."""
    setting = tmp_path / "enabled"
    setting.write_text("always [madvise] never")
    monkeypatch.setattr(choose, "_HUGE_PAGES", setting)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield setting
    torch.set_num_threads(num_threads)


def start(model: PreparedModel, dtype: str = "float32", **settings: Any) -> ModelRunner:
    config = EngineConfig(model_dir=str(model.path), device="cpu", dtype=dtype, num_blocks=64, threads=2)
    return ModelRunner(model, config.replace(**settings))


def greedy_answer(runner: ModelRunner) -> list[int]:
    driver = RunnerDriver(runner)
    sequence = driver.sequence(PROMPT)
    driver.execute([(sequence, len(PROMPT))])
    for _ in range(NUM_TOKENS - 1):
        driver.execute([(sequence, 1)])
    return sequence.token_ids[len(PROMPT) :]


@pytest.fixture(scope="module")
def expected(model: PreparedModel) -> list[int]:
    """Of the reference backend. The best logit is ahead of the next by more than what bf16 makes of it."""
    runner = start(model, kernels="reference")
    answer = greedy_answer(runner)
    assert len(set(answer)) > NUM_TOKENS // 2
    logits = RunnerDriver(runner).logits_in_chunks([*PROMPT, *answer[:-1]], [len(PROMPT) + NUM_TOKENS - 1])
    best, second = logits[len(PROMPT) - 1 :].topk(2).values.unbind(-1)
    assert (best - second).min() > 0.05
    return answer


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.fixture
def best_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """No better instructions are known than those that it has."""
    if build.usable_isa() is None:
        pytest.skip("nothing is compiled for this processor")
    compiler()
    best_here = {e: {build.usable_isa(None, e): ""} for e in ("float32", "bfloat16")}
    monkeypatch.setattr(interface, "_TIMES_AS_LONG", best_here)


@pytest.mark.usefixtures("best_processor")
@pytest.mark.parametrize("settings", [{}, {"kernels": "cpu"}, {"threads": 3}, {"max_isa": "amx_bf16"}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_c_plus_plus_decoder_is_taken_where_it_can_be_had(
    models: dict[str, PreparedModel],
    expected: list[int],
    dtype: str,
    settings: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner = start(models[dtype], dtype, **settings)
    assert isinstance(runner._decoder, PackedDecoder)
    assert greedy_answer(runner) == expected
    assert messages(caplog) == []


def test_settings_take_others(model: PreparedModel, expected: list[int], caplog: pytest.LogCaptureFixture) -> None:
    for settings, kind in (({"kernels": "reference"}, ReferenceKernels), ({"max_isa": "none"}, CpuKernels)):
        runner = start(model, **settings)
        assert isinstance(runner._decoder, Decoder)
        assert isinstance(runner._decoder._kernels, kind)
        assert greedy_answer(runner) == expected
    (message,) = messages(caplog)
    assert message.endswith("torch's operators are, two to four times slower: max_isa is none")


SLOWER = [
    (dtype, isa, who)
    for dtype, isas in interface._TIMES_AS_LONG.items()
    for isa in list(isas)[1:]
    if build.usable_isa(isa, dtype) == isa
    for who in (["max_isa", "the processor"] if isa != build.usable_isa(None, dtype) else ["the processor"])
]
"""What this processor can do, but for the best of all, and who says that it shall do no more: `max_isa` only where
there is more."""


@pytest.mark.parametrize(("dtype", "isa", "who"), SLOWER)
def test_less_than_the_best_instructions(
    models: dict[str, PreparedModel],
    expected: list[int],
    dtype: build.ElementType,
    isa: build.Isa,
    who: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiler()
    best = next(iter(interface._TIMES_AS_LONG[dtype]))
    if who == "max_isa":
        max_isa, why = isa, "as max_isa says"
    else:
        max_isa, why = None, "the best that this processor has"
        monkeypatch.setattr(build, "cpu_flags", lambda: build._NEEDED[isa])
    runner = start(models[dtype], dtype, max_isa=max_isa)
    assert isinstance(runner._decoder, PackedDecoder)
    assert greedy_answer(runner) == expected
    (message,) = messages(caplog)
    assert re.fullmatch(rf"the C\+\+ decoder uses {isa}, {why}: steps take .+ times as long as with {best}", message)


@pytest.mark.usefixtures("best_processor")
def test_one_core(
    model: PreparedModel, expected: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device, "available_cpus", lambda: 1)
    assert greedy_answer(start(model, threads=None)) == expected
    assert messages(caplog) == ["one thread computes: steps take up to twice as long as with two"]
    caplog.clear()
    assert greedy_answer(start(model, threads=None, max_isa="avx2", kernels="reference")) == expected
    assert messages(caplog) == []


def test_the_cpu_kernels_serve_no_other_device(model: PreparedModel) -> None:
    shape, config = model.manifest.config, EngineConfig(model_dir=str(model.path), kernels="cpu")
    weights = Weights(model.weights_path("float32"), shape)
    with pytest.raises(EngineError, match="compute on device cpu, not on meta"):
        choose.choose_decoder(shape, weights, config, torch.device("meta"), torch.float32, 64)


def test_triton_kernels_are_for_gpus(model: PreparedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(interface, "find_spec", lambda name: None)
        with pytest.raises(EngineError, match="were asked for, but the package triton is not installed; GPU builds of"):
            start(model, kernels="triton")
    need_triton()
    with pytest.raises(EngineError, match="they are compiled for device cuda, and the device is cpu"):
        start(model, kernels="triton")


def test_where_triton_computes_not_the_reference_does_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert interface.select_kernels(torch.device("meta"), torch.bfloat16, 4).name == "reference"
    (message,) = messages(caplog)
    assert message.startswith("plain torch is used instead of the triton kernels, slowly: ")


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (None, "there is no C++ compiler on PATH"),
        ("exit 1", "c++ failed (1): no message"),
        ('while [ "$1" != -o ]; do shift; done; : > "$2"', "its self-test failed (1)"),
        ('while [ "$1" != -o ]; do shift; done; PATH={path}; cp {crashing} "$2"', "its self-test failed (-"),
    ],
    ids=["no compiler", "a broken one", "a library that cannot be loaded", "one that crashes"],
)
def test_without_a_library_torch_serves_with_one_warning(
    model: PreparedModel,
    expected: list[int],
    script: str | None,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if build.usable_isa() is None:
        why = "this processor has none of"
    programs, crashing = tmp_path / "bin", tmp_path / "crashing.so"
    programs.mkdir()
    if script is not None:
        source = "__attribute__((constructor)) static void crash(void) { __builtin_trap(); }"
        command = [compiler(), "-shared", "-fPIC", "-xc", "-", "-o", crashing]
        subprocess.run(command, input=source.encode(), check=True)
        program = programs / "c++"
        program.write_text(f"#!/bin/sh\n{script.format(path=os.environ['PATH'], crashing=crashing)}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    runner = start(model, kernels_dir=str(tmp_path / "kernels"))
    assert isinstance(runner._decoder, Decoder)
    assert greedy_answer(runner) == expected
    (message,) = messages(caplog)
    assert why in message


@pytest.mark.usefixtures("best_processor")
def test_heads_that_the_c_plus_plus_decoder_does_not_know(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny = make_tiny(tmp_path / "tiny", "qwen3", head_dim=258, num_heads=2, num_kv_heads=1)
    prepared = prepare(str(tiny), tmp_path / "state", "float32", lambda *_: None)
    runner = start(prepared)
    assert isinstance(runner._decoder, Decoder)
    assert messages(caplog) == ["the C++ decoder takes even head sizes up to 256, not 258"]
    assert greedy_answer(runner) == greedy_answer(start(prepared, kernels="reference"))


@pytest.mark.usefixtures("best_processor")
def test_without_huge_pages(
    model: PreparedModel,
    expected: list[int],
    system_with_huge_pages: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    setting = system_with_huge_pages
    for text, is_on in (("always [madvise] never", True), ("[always] madvise never", True), ("always [never]", False)):
        setting.write_text(text)
        assert choose.has_huge_pages(setting) is is_on
    assert choose.has_huge_pages(tmp_path / "absent") is False
    caplog.clear()
    assert greedy_answer(start(model)) == expected
    assert messages(caplog) == ["this system has no transparent huge pages: steps take 10 to 20% longer"]
