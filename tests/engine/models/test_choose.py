"""What a setting or the machine leaves of the backends: still the right logits, and a warning each."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.model_runner import ModelRunner
from engine.models import choose
from engine.models.decoder import Decoder
from engine.models.packed_decoder import PackedDecoder
from engine.models.prepare import prepare
from engine.models.weights import Weights
from engine.prepared import PreparedModel
from kernels.cpu import build
from kernels.cpu.backend import CpuKernels
from kernels.reference.backend import ReferenceKernels
from tests.engine.runner_driver import RunnerDriver
from tests.kernels.libraries import compiler
from tests.tiny_model import make_tiny

PROMPT = [(7 * i * i + 3 * i + 11) % 380 for i in range(40)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    path = tmp_path_factory.mktemp("model")
    return prepare(str(make_tiny(path / "tiny")), path / "state", "float32", lambda *_: None)


def start(model: PreparedModel, **settings: Any) -> ModelRunner:
    config = EngineConfig(model_dir=str(model.path), device="cpu", dtype="float32", num_blocks=64, threads=1)
    return ModelRunner(model, config.replace(**settings))


def logits(runner: ModelRunner) -> torch.Tensor:
    return RunnerDriver(runner).logits_in_chunks(PROMPT, [30, 1, 9])


@pytest.fixture
def expected(model: PreparedModel) -> torch.Tensor:
    return logits(start(model, kernels="reference"))


def assert_right(runner: ModelRunner, expected: torch.Tensor) -> None:
    assert torch.allclose(logits(runner), expected, atol=1e-4)


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("settings", [{}, {"kernels": "cpu"}, {"threads": 2}, {"max_isa": "avx2"}], ids=str)
def test_the_c_plus_plus_decoder_is_taken_where_it_can_be_had(
    model: PreparedModel, expected: torch.Tensor, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    if build.best_isa(build.cpu_flags()) is None:
        pytest.skip("nothing is compiled for this processor")
    compiler()
    runner = start(model, **settings)
    assert isinstance(runner._decoder, PackedDecoder)
    assert_right(runner, expected)
    assert messages(caplog) == []


def test_settings_take_others(model: PreparedModel, expected: torch.Tensor, caplog: pytest.LogCaptureFixture) -> None:
    for settings, kind in (({"kernels": "reference"}, ReferenceKernels), ({"max_isa": "none"}, CpuKernels)):
        runner = start(model, **settings)
        assert isinstance(runner._decoder, Decoder)
        assert isinstance(runner._decoder._kernels, kind)
        assert_right(runner, expected)
    assert messages(caplog) == []


def test_the_cpu_kernels_serve_no_other_device(model: PreparedModel) -> None:
    shape, config = model.manifest.config, EngineConfig(model_dir=str(model.path), kernels="cpu")
    weights = Weights(model.weights_path("float32"), shape)
    with pytest.raises(EngineError, match="compute on device cpu, not on meta"):
        choose.choose_decoder(shape, weights, config, torch.device("meta"), torch.float32, 64)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (None, "there is no C++ compiler on PATH"),
        ("exit 1", "c++ failed (1): no message"),
        ('while [ "$1" != -o ]; do shift; done; : > "$2"', "its self-test failed (1)"),
    ],
    ids=["no compiler", "a broken one", "a library that fails its self-test"],
)
def test_without_a_library_torch_serves_with_one_warning(
    model: PreparedModel,
    expected: torch.Tensor,
    script: str | None,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if build.best_isa(build.cpu_flags()) is None:
        why = "this processor has none of"
    programs = tmp_path / "bin"
    programs.mkdir()
    if script is not None:
        compiler = programs / "c++"
        compiler.write_text(f"#!/bin/sh\n{script}\n")
        compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    runner = start(model, kernels_dir=str(tmp_path / "kernels"))
    assert isinstance(runner._decoder, Decoder)
    assert_right(runner, expected)
    (message,) = messages(caplog)
    assert why in message


def test_heads_that_the_c_plus_plus_decoder_does_not_know(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny = make_tiny(tmp_path / "tiny", "qwen3", head_dim=258, num_heads=2, num_kv_heads=1)
    prepared = prepare(str(tiny), tmp_path / "state", "float32", lambda *_: None)
    runner = start(prepared)
    assert isinstance(runner._decoder, Decoder)
    assert messages(caplog) == ["the C++ decoder takes even head sizes up to 256, not 258"]
    assert_right(runner, logits(start(prepared, kernels="reference")))


def test_without_huge_pages(
    model: PreparedModel,
    expected: torch.Tensor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    setting = tmp_path / "enabled"
    for text, is_on in (("always [madvise] never", True), ("[always] madvise never", True), ("always [never]", False)):
        setting.write_text(text)
        assert choose.has_huge_pages(setting) is is_on
    assert choose.has_huge_pages(tmp_path / "absent") is False
    caplog.clear()
    monkeypatch.setattr(choose, "_HUGE_PAGES", setting)
    assert_right(start(model), expected)
    assert messages(caplog) == ["this system has no transparent huge pages: steps take 10 to 20% longer"]
