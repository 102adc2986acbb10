"""Prepares a model once: `python -m engine.models.prepare SOURCE --state-dir DIR --dtype DTYPE`.

The last line on stdout is the folder of the prepared model; progress goes to stderr. A model that is there already
is found by its fingerprint without loading torch.
"""

import argparse
import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from engine.config import DTYPES
from engine.errors import ModelNotSupported
from engine.models.fingerprint import ModelSource, find_prepared, find_source, resolve_dtype
from engine.prepared import PreparedModel

__all__ = ["prepare", "resolve_dtype"]

Progress = Callable[[str, int, int], None]
"""what is being done, done, total (bytes)"""
ABANDONED_AFTER_S = 24 * 3600
_TEMPORARY = ".preparing-"


def prepare(source: str, state_dir: Path, dtype: str, progress: Progress) -> PreparedModel:
    """Finds or makes the prepared model of a Hugging Face directory, hub id or GGUF file, with weights in `dtype`.

    A folder is written beside its place and renamed, so that it is never there in part.
    Raises ModelNotSupported, in one sentence.
    """
    dtype = resolve_dtype(dtype, "auto")
    if dtype not in DTYPES:
        raise ModelNotSupported(f"dtype {dtype} is not one of auto, {', '.join(DTYPES)}")
    model_source = find_source(source)
    found = find_prepared(model_source, state_dir, dtype)
    return found or _write(model_source, state_dir, dtype, progress)


def _write(source: ModelSource, state_dir: Path, dtype: str, progress: Progress) -> PreparedModel:
    # torch and the readers are loaded only now: finding a prepared model must not take seconds
    from engine.models import conversion

    target = source.prepared_path(state_dir)
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(target.parent)
    temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=target.parent))
    try:
        conversion.convert(source, temporary, dtype, progress)
        _publish(temporary, target, dtype)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return PreparedModel.load(target)


def _remove_abandoned(folder: Path) -> None:
    """What a process that was killed left half written; a day is longer than any preparation takes."""
    for path in folder.glob(f"{_TEMPORARY}*"):
        with contextlib.suppress(FileNotFoundError):  # another process has just published it
            if time.time() - path.stat().st_mtime > ABANDONED_AFTER_S:
                shutil.rmtree(path, ignore_errors=True)


def _publish(temporary: Path, target: Path, dtype: str) -> None:
    if not target.exists():
        try:
            temporary.rename(target)
            return
        except OSError:
            # another process was first; anything else shows in what follows
            if not target.is_dir():
                raise
    # the folder has other dtypes already: everything but the weights is the same
    weights = f"weights-{dtype}.safetensors"
    (temporary / weights).rename(target / weights)
    (temporary / "manifest.json").rename(target / "manifest.json")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.models.prepare", description="Prepare a model once.")
    parser.add_argument("source", help="Hugging Face directory, hub id or .gguf file")
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--dtype", default="auto", choices=["auto", *DTYPES])
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"], help="what --dtype auto is for")
    options = parser.parse_args()

    shown = -1

    def progress(what: str, done: int, total: int) -> None:
        nonlocal shown
        percent = 100 * done // max(total, 1)
        if percent > shown and (sys.stderr.isatty() or done >= total):
            shown = percent
            end = "\n" if done >= total else ""
            print(f"\r{what} {done / 2**20:,.0f} / {total / 2**20:,.0f} MiB", end=end, file=sys.stderr, flush=True)

    try:
        dtype = resolve_dtype(options.dtype, options.device)
        model = prepare(options.source, options.state_dir, dtype, progress)
    except ModelNotSupported as e:
        print(e, file=sys.stderr)
        return 1
    print(model.path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
