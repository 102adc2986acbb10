"""Who may import whom (docs/design.md, section 2), and that nobody shadows our package `kernels`."""

import ast
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import kernels

REPOSITORY = Path(__file__).parent.parent
TORCH_FREE_ENGINE = [
    *("config", "protocol", "errors", "prepared", "sampling_params", "sequence", "scheduled_batch", "forest"),
    "shared_attention",
    *("block_hash", "block_pool", "prefix_cache", "kv_cache_manager", "scheduler", "shadow_kv", "core", "process"),
    *("fair_share", "places", "preemption", "admission", "drawn_token"),
    *("followers", "waiting_queue", "trunk_hashes", "beam_search"),
    *("client", "token_stream", "inproc_client", "models.fingerprint", "rank_messages", "rank_watch"),
    *("text.tokenizer", "text.chat_template", "text.detokenizer", "text.stop_strings"),
]
APP_MODULES = sorted(
    p.relative_to(REPOSITORY).with_suffix("").as_posix().replace("/", ".") for p in (REPOSITORY / "app").glob("*.py")
)


def test_import_contracts() -> None:
    """The contracts of import-linter in pyproject.toml hold."""
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("modules", [TORCH_FREE_ENGINE], ids=["engine"])
def test_scheduling_text_and_protocol_need_no_torch(modules: list[str]) -> None:
    loaded_after(*(f"engine.{m}" for m in modules))


def test_the_gateway_needs_no_torch() -> None:
    loaded_after(*(m for m in APP_MODULES if not m.endswith(("__main__", "__init__"))))


def loaded_after(*modules: str) -> None:
    """Imports them in a fresh interpreter and asserts that torch did not come along."""
    program = f"import sys\nfor m in {modules!r}: __import__(m)\nsys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or "torch was loaded"


@pytest.mark.parametrize("package", ["kernels", "engine/models"])
def test_kernels_and_models_run_on_a_bare_gpu_machine(package: str) -> None:
    """Outside the project they import only the standard library, torch, triton and numpy at their top level;
    what prepares a model from other formats may load more when it is asked to."""
    allowed = {*sys.stdlib_module_names, "torch", "triton", "numpy", "kernels", "engine", "msgspec", "safetensors"}
    for path in (REPOSITORY / package).rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for name in names:
                assert name.split(".")[0] in allowed, f"{path.relative_to(REPOSITORY)} imports {name}"


def test_only_config_reads_the_environment() -> None:
    for path in (REPOSITORY / "app").rglob("*.py"):
        if path.name != "config.py":
            text = path.read_text()
            assert not re.search(r"\b(os\.environ|environ\b|getenv)", text), f"{path.name} reads the environment"


def test_kernels_is_ours() -> None:
    """transformers probes for a distribution of this name: ours must stay the one that is found, and out of the
    range of versions that transformers accepts as its own (0.18.2 up to 0.19)."""
    assert Path(kernels.__file__).is_relative_to(REPOSITORY)
    major, minor, *_ = (int(x) for x in version("trunkline").split(".")[:3])
    assert (major, minor) != (0, 18)


def test_files_are_short() -> None:
    """One noun a file, readable in one sitting."""
    for package in ("app", "engine", "kernels"):
        for path in (REPOSITORY / package).rglob("*.py"):
            lines = len(path.read_text().splitlines())
            assert lines <= 350, f"{path.relative_to(REPOSITORY)} has {lines} lines"
