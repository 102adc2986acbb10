"""Which model a source is, told from headers, sizes and times within milliseconds. No torch.

A prepared model is found again by this fingerprint, so that a second start need not look at the weights.
"""

import hashlib
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.errors import ModelNotSupported
from engine.prepared import FORMAT_VERSION, PreparedModel

HEADER_BYTES = 2**20
"""As much of each weight file enters the fingerprint; the headers of safetensors (up to this) and GGUF are in it."""
HUB_PATTERNS = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model")
HUB_IGNORED = ("consolidated*",)
"""The same weights once more, in another layout."""
_TEXT_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("chat_template.jinja", "chat_template.json", "special_tokens_map.json", "added_tokens.json"),
    "model.safetensors.index.json",
)
_QUANTISATION = re.compile(r"[.\-_](?:I?Q\d+(?:_[A-Z0-9]+)*|F16|F32|BF16|FP16|FP32|MXFP4)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ModelSource:
    kind: Literal["huggingface", "gguf"]
    path: Path
    """The directory, or the GGUF file."""
    name: str
    """What clients call the model."""
    fingerprint: str
    """Hex SHA-256."""

    def prepared_path(self, state_dir: Path) -> Path:
        return state_dir / "models" / f"{self.name.replace('/', '--')}-{self.fingerprint[:12]}"


def find_source(source: str) -> ModelSource:
    """A Hugging Face directory, a GGUF file or a hub id (downloaded into the hub's own cache if it is not there).

    Raises ModelNotSupported, in one sentence.
    """
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelNotSupported(f"{path} is neither a directory nor a .gguf file")
        return ModelSource("gguf", path, gguf_model_name(path), _fingerprint([path], []))
    if path.is_dir():
        return _find_directory(path, path.resolve().name)
    if re.fullmatch(r"[\w.\-]+/[\w.\-]+", source) and not source.startswith((".", "/")):
        return _find_directory(_download(source), source)
    raise ModelNotSupported(f"{source} is neither a directory, a .gguf file nor a hub id of the form owner/name")


def find_prepared(source: ModelSource, state_dir: Path, dtype: str) -> PreparedModel | None:
    """The prepared model if its folder is there, complete and has weights of this dtype."""
    path = source.prepared_path(state_dir)
    if not (path / "manifest.json").exists() or not (path / f"weights-{dtype}.safetensors").exists():
        return None
    return PreparedModel.load(path)


def gguf_model_name(path: Path) -> str:
    """SmolLM2-135M-Instruct.Q4_1.gguf -> SmolLM2-135M-Instruct."""
    return _QUANTISATION.sub("", path.name[: -len(".gguf")]) or path.stem


def _find_directory(path: Path, name: str) -> ModelSource:
    if not (path / "config.json").is_file():
        raise ModelNotSupported(f"{path} has no config.json")
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        raise ModelNotSupported(f"{path} has no .safetensors file")
    texts = [path / file for file in _TEXT_FILES if (path / file).is_file()]
    return ModelSource("huggingface", path, name, _fingerprint(weights, texts))


def _fingerprint(weights: list[Path], texts: list[Path]) -> str:
    digest = hashlib.sha256()

    def add(field: bytes) -> None:
        digest.update(struct.pack("<Q", len(field)))
        digest.update(field)

    add(str(FORMAT_VERSION).encode())
    for path in weights:
        stat = path.stat()
        add(path.name.encode())
        add(struct.pack("<Qq", stat.st_size, stat.st_mtime_ns))
        with path.open("rb") as file:
            add(file.read(HEADER_BYTES))
    for path in texts:
        add(path.name.encode())
        add(path.read_bytes())
    return digest.hexdigest()


def _download(repository: str) -> Path:
    # not at the top: the hub's client takes longer to load than the whole check of a local model
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = list(HUB_PATTERNS)
    try:
        path = Path(snapshot_download(repository, allow_patterns=patterns, local_files_only=True))
        if (path / "config.json").is_file() and any(path.glob("*.safetensors")):
            return path
    except LocalEntryNotFoundError:
        pass
    try:
        return Path(snapshot_download(repository, allow_patterns=patterns, ignore_patterns=list(HUB_IGNORED)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as e:
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise ModelNotSupported(f"{repository} cannot be downloaded from the hub: {reason}") from e


def processor_flags() -> frozenset[str]:
    """CPU features as Linux names them; empty where /proc/cpuinfo does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    return frozenset(found.group(1).split()) if found else frozenset()


def resolve_dtype(dtype: str, device: str) -> str:
    """auto: bfloat16 on cuda and on processors that multiply it in hardware, else float32.

    `device` is cpu, cuda or auto; auto counts as cuda where a CUDA device file is there.
    """
    if dtype != "auto":
        return dtype
    if device == "cuda" or (device == "auto" and os.path.exists("/dev/nvidiactl")):
        return "bfloat16"
    return "bfloat16" if processor_flags() & {"avx512_bf16", "amx_bf16", "bf16"} else "float32"
