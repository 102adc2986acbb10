"""The operator's file, ready for use, and the one that is in force now."""

from dataclasses import dataclass

from app.assistants import Assistants
from app.config import ConfigError, FileConfig, GatewayConfig, check_open_mode, load_file_config
from app.limits import Limits
from app.origins import Origins
from app.scopes import Scopes
from app.tenants import Tenants
from engine.text.chat_template import ChatTemplate


@dataclass(frozen=True)
class Configured:
    """What one file says. It never changes: a reload puts another one in its place."""

    file_config: FileConfig
    assistants: Assistants
    tenants: Tenants
    origins: Origins

    def says_the_same(self, other: "Configured") -> bool:
        """Whether nobody could tell them apart."""
        versions = [[assistant.version for assistant in c.assistants] for c in (self, other)]
        return self.file_config == other.file_config and versions[0] == versions[1]

    @property
    def limits(self) -> Limits:
        return self.file_config.limits


class LiveConfig:
    """Whoever serves a request reads `current` once, at its beginning, and works with that to its end."""

    def __init__(
        self, config: GatewayConfig, file_config: FileConfig, template: ChatTemplate | None, scopes: Scopes
    ) -> None:
        """`template`: None where the model has none, so that there can be no assistants. Raises ConfigError."""
        self._config = config
        self._template = template
        self._scopes = scopes
        self.current = self._build(file_config, Assistants())

    def build(self, file_config: FileConfig) -> Configured:
        """Nothing is in force by this yet. Raises ConfigError."""
        return self._build(file_config, self.current.assistants)

    def load(self) -> Configured:
        """What the file says now; nothing is in force by this yet. Raises ConfigError.

        A file that is empty, as one is for a moment that is being written, is refused, and so is one without tenants
        where keys are asked for now: a server is not opened to everybody while it runs.
        """
        path = self._config.config_path
        file_config = load_file_config(path)
        check_open_mode(self._config.host, file_config)
        if file_config == FileConfig():
            raise ConfigError(f"{path} is empty")
        if file_config.is_open and not self.current.file_config.is_open:
            raise ConfigError(f"{path} has no tenants any more: to let everybody in without a key, start again")
        return self.build(file_config)

    def _build(self, file_config: FileConfig, known: Assistants) -> Configured:
        return Configured(
            file_config=file_config,
            assistants=self._assistants(file_config, known),
            tenants=Tenants(file_config, is_loopback=self._config.is_loopback),
            origins=Origins(file_config.allowed_origins, is_open=file_config.is_open),
        )

    def _assistants(self, file_config: FileConfig, known: Assistants) -> Assistants:
        if self._template is not None:
            return Assistants.build(file_config.assistants, self._template, self._scopes, known)
        if self._config.config_path is not None and file_config.assistants:
            raise ConfigError(f"{self._config.config_path} has assistants, but the model has no chat template")
        return Assistants()
