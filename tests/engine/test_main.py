"""`python -m engine`: what it refuses, each in one sentence and with exit code 2."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripted_engine import make_byte_model


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "engine", *arguments], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "expected one argument, the engine's configuration as JSON, got 0"),
        (["{"], "Input data was truncated"),
        (["{}"], "Object missing required field `model_dir`"),
        (['{"model_dir": "/nowhere"}'], "/nowhere is not a prepared model: it has no manifest.json"),
    ],
)
def test_what_can_never_start_is_one_sentence(arguments: list[str], sentence: str) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stderr) == (2, sentence + "\n")


def test_a_model_without_weights_is_one_sentence(tmp_path: Path) -> None:
    model = make_byte_model(tmp_path / "m")
    done = run(f'{{"model_dir": "{model.path}", "dtype": "float32", "address": "ipc://{tmp_path}/e"}}')
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "weights-float32.safetensors" in line
