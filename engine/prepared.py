"""A prepared model: the folder that the engine side writes once and that gateway and engine read. No torch.

manifest.json            `Manifest`
tokenizer.json           the tokenizer, whole
chat_template.jinja      if the model has one
weights-<dtype>.safetensors   Hugging Face names, one file for each dtype that was asked for
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine.config import ModelConfig
from engine.errors import ModelNotSupported

FORMAT_VERSION = 1


def default_state_dir() -> Path:
    """Where prepared models, the server's secret and the embedded database live unless told otherwise."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "trunkline"


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    format_version: int
    name: str
    """What clients call the model."""
    source: str
    fingerprint: str
    """Of the source: hash of headers, sizes and times; the root of every block hash."""
    config: ModelConfig
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Union of what configuration, generation configuration and template end a turn with."""
    add_bos: bool = False
    """Whether plain text (not a chat) is encoded with a leading BOS."""
    sampling_defaults: dict[str, Any] = {}
    """From generation_config.json: temperature, top_k, top_p, min_p, repetition_penalty."""


@dataclass(frozen=True)
class PreparedModel:
    path: Path
    manifest: Manifest

    @classmethod
    def load(cls, path: str | Path) -> "PreparedModel":
        """Raises ModelNotSupported, in one sentence, if there is no usable prepared model at `path`."""
        path = Path(path)
        try:
            manifest = msgspec.json.decode((path / "manifest.json").read_bytes(), type=Manifest)
        except FileNotFoundError:
            raise ModelNotSupported(f"{path} is not a prepared model: it has no manifest.json") from None
        except msgspec.MsgspecError as e:
            raise ModelNotSupported(f"{path}/manifest.json cannot be read: {e}") from None
        if manifest.format_version != FORMAT_VERSION:
            raise ModelNotSupported(
                f"{path} was prepared in format {manifest.format_version}, expected {FORMAT_VERSION}: prepare it again"
            )
        return cls(path, manifest)

    @property
    def tokenizer_path(self) -> Path:
        return self.path / "tokenizer.json"

    @property
    def chat_template(self) -> str | None:
        path = self.path / "chat_template.jinja"
        return path.read_text() if path.exists() else None

    def weights_path(self, dtype: str) -> Path:
        return self.path / f"weights-{dtype}.safetensors"
