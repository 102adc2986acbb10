"""The time of a step by threads, as the doctor asks for it."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from engine.config import ModelConfig
from kernels.cpu import build, native_check, step_time
from kernels.cpu.native import DecoderShape
from tests.kernels.libraries import library

SHAPE = json.dumps(asdict(native_check.SHAPE))


def test_each_number_of_threads_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = library(torch.float32, "avx2").path
    monkeypatch.setattr(step_time, "BUDGET_S", 0)
    monkeypatch.setattr(step_time, "find_library", lambda dtype, folder: build.NativeLibrary(path))
    assert step_time.main(str(tmp_path), "float32", SHAPE, "1", "2") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["rows"] == step_time.NUM_ROWS
    assert list(answer["step_ms"]) == ["1", "2"]
    assert min(answer["step_ms"].values()) > 0


def test_nothing_is_compiled_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert step_time.main(str(tmp_path), "float32", SHAPE, "1", "2") == 0
    assert capsys.readouterr().out == "null\n"
    assert list(tmp_path.iterdir()) == []


def test_without_a_compiler_there_is_nothing_to_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert step_time.main(str(tmp_path), "bfloat16", SHAPE, "1", "2") == 0
    assert capsys.readouterr().out == "null\n"


def test_a_model_says_all_of_its_shape() -> None:
    """The doctor hands over fields of a model's configuration, and the block size; its cache is not quantised."""
    assert {*DecoderShape.__slots__} - {"block_size", "quantisation"} <= {*ModelConfig.__struct_fields__}
