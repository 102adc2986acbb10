"""Settings of the gateway and the file that its operator writes. The only reader of the environment in app/."""

import hashlib
import ipaddress
import os
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from app.limits import Limits, Section
from app.template_options import TemplateOptions

GATEWAY_VARIABLE = "TRUNKLINE_GATEWAY"
REDIS_URL_VARIABLE = "TRUNKLINE_REDIS_URL"
DEMO_ASSISTANTS_DIR = Path(__file__).parent / "assistants"

PLACEHOLDER = re.compile(r"\{\{[ \t]*([A-Za-z_][A-Za-z0-9_]{0,63})[ \t]*\}\}", re.ASCII)
"""Of a variable in an assistant's instructions: `{{name}}`."""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_SHA256_HEX = re.compile(r"[0-9a-fA-F]{64}")


class ConfigError(Exception):
    """The settings cannot be used; the message is one sentence for a person, with file and field."""


class GatewayConfig(BaseModel):
    """Everything a gateway process is started with."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: int = 8000
    listen_fd: int | None = None
    """A listening socket inherited from the supervisor; then `host` and `port` only say where it listens."""
    model_dir: Path
    engine_addresses: tuple[str, ...] = Field(min_length=1)
    redis_url: str | None = None
    state_dir: Path
    config_path: Path | None = None
    engine_patience_s: float = 300.0
    """Running answers wait so long for an engine that has gone to come back."""
    drain_timeout_s: float = 20.0
    """After a signal, running answers have this long to end."""
    has_siblings: bool = False
    """Other gateways accept on the same socket: one that ends leaves new connections to them."""

    @classmethod
    def from_environment(cls) -> Self:
        """What the supervisor put into the environment. Raises ConfigError."""
        text = os.environ.get(GATEWAY_VARIABLE)
        if text is None:
            raise ConfigError(f"{GATEWAY_VARIABLE} is not set: the gateway is started by `trunkline serve`")
        try:
            return cls.model_validate_json(text)
        except ValidationError as e:
            raise ConfigError(f"{GATEWAY_VARIABLE}: {_sentence(e)}") from None

    def environment(self) -> dict[str, str]:
        """This process's environment with these settings in it, for a child process."""
        return {**os.environ, GATEWAY_VARIABLE: self.model_dump_json()}

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens at `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return False


def try_split(url: str) -> SplitResult | None:
    """The parts of a URL; None for what is none: a bracket that is never closed, a port that is no number."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # read only now, and may fail
    except ValueError:
        return None
    return parts


def _origin(value: str) -> str:
    """As browsers send it."""
    origin = value.removesuffix("/").lower()
    parts = try_split(origin)
    if parts is None or not parts.scheme or not parts.hostname or f"{parts.scheme}://{parts.netloc}" != origin:
        raise ValueError("an origin is written like https://chat.example.com or http://localhost:3000")
    return origin


def _redis_url(value: str) -> str:
    """Raises ValueError, without the value: it may hold a password."""
    parts = try_split(value)
    where = {"redis": "hostname", "rediss": "hostname", "unix": "path"}
    if parts is not None and parts.scheme in where and getattr(parts, where[parts.scheme]):
        return value
    raise ValueError("a Redis is given as redis://host:port/0, rediss://host:port/0 or unix:///path/to/socket")


Origin = Annotated[str, AfterValidator(_origin)]
RedisUrl = Annotated[str, AfterValidator(_redis_url)]


def _one_id(value: object) -> object:
    if isinstance(value, str) and not _ID.fullmatch(value):
        raise ValueError("an id is 1 to 64 letters, digits, '_', '.' or '-' and starts with a letter or digit")
    return value


Id = Annotated[str, BeforeValidator(_one_id)]


def hash_key(key: str) -> bytes:
    """Keys are random and long, so that a plain SHA-256 is enough to keep them."""
    return hashlib.sha256(key.encode()).digest()


class TenantConfig(Section):
    """`key`, `keys` (plain) and `key_sha256` (hex) are merged into hashes; the plain keys are forgotten."""

    id: Id
    key_hashes: tuple[bytes, ...] = Field(repr=False)
    scope: Literal["tenant", "user"] = "tenant"
    """Who shares the KV of what follows an assistant's prompt: the tenant's requests, or those of one end user."""
    weight: float = Field(default=1.0, ge=0.001, le=1000)
    max_running: int | None = Field(default=None, ge=1)
    guaranteed_blocks: int = Field(default=0, ge=0)
    max_blocks: int | None = Field(default=None, ge=1)
    """These four as engine.protocol.TenantShare has them."""
    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_day: int | None = Field(default=None, ge=1)
    max_connections: int | None = Field(default=None, ge=1)
    max_answers: int | None = Field(default=None, ge=1)
    """These as app.quota.Quota has them."""

    @model_validator(mode="before")
    @classmethod
    def _hash_keys(cls, data: Any) -> Any:
        return _with_hashes(data, plain=("key", "keys"), hashed="key_sha256", into="key_hashes")

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if not self.key_hashes:
            raise ValueError("a tenant needs `key`, `keys` or `key_sha256`")
        if self.max_blocks is not None and self.max_blocks < self.guaranteed_blocks:
            raise ValueError(
                f"max_blocks = {self.max_blocks} is less than guaranteed_blocks = {self.guaranteed_blocks}"
            )
        return self


class AssistantConfig(Section):
    id: Id
    instructions: str = Field(min_length=1)
    tenant: Id | None = None
    shared: bool = False
    """Offered to every tenant, and its KV shared between them."""
    template_options: TemplateOptions = Field(default_factory=dict)
    variables: tuple[str, ...] = Field(default=(), max_length=64)
    """Names of placeholders `{{name}}` in the instructions for which each request gives a value: what follows the first
    one is not shared. All other braces are plain text."""
    fixed_variables: dict[str, str] = Field(default_factory=dict)
    """Values for placeholders that are the same in every request."""

    @model_validator(mode="before")
    @classmethod
    def _from_toml(cls, data: Any) -> Any:
        return _tuples(data)

    @model_validator(mode="after")
    def _has_its_placeholders(self) -> Self:
        names = [*self.variables, *self.fixed_variables]
        _need_unique("variables: the name", names)
        there = set(PLACEHOLDER.findall(self.instructions))
        for name in names:
            if name not in there:
                raise ValueError(f"variables: the instructions have no placeholder {{{{{name}}}}}")
        return self

    @model_validator(mode="after")
    def _has_one_owner(self) -> Self:
        if (self.tenant is None) != self.shared:
            raise ValueError("an assistant has either a tenant or shared = true")
        return self


class FileConfig(Section):
    """What the operator writes (TOML)."""

    tenants: tuple[TenantConfig, ...] = ()
    assistants: tuple[AssistantConfig, ...] = ()
    limits: Limits = Limits()
    allowed_origins: tuple[Origin, ...] = ()
    redis_url: RedisUrl | None = Field(default=None, repr=False)
    """May hold a password, which on the command line everybody on the machine could read."""
    admin_key_hashes: tuple[bytes, ...] = Field(default=(), repr=False)

    @model_validator(mode="before")
    @classmethod
    def _hash_keys(cls, data: Any) -> Any:
        return _with_hashes(data, plain=("admin_key",), hashed="admin_key_sha256", into="admin_key_hashes")

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        tenant_ids = [t.id for t in self.tenants]
        _need_unique("tenants: the id", tenant_ids)
        _need_unique("tenants: a key", [h.hex() for t in self.tenants for h in t.key_hashes], shown=False)
        if any(digest in self.admin_key_hashes for t in self.tenants for digest in t.key_hashes):
            raise ValueError("admin_key: it is a tenant's key too")
        for assistant in self.assistants:
            if assistant.tenant is not None and assistant.tenant not in tenant_ids:
                raise ValueError(f"assistants: {assistant.id!r} belongs to the unknown tenant {assistant.tenant!r}")
        _need_unique("assistants: the id", [a.id for a in self.assistants if a.shared])
        for tenant_id in tenant_ids:
            visible = [a.id for a in self.assistants if a.shared or a.tenant == tenant_id]
            _need_unique("assistants: the id", visible)
        return self

    @property
    def is_open(self) -> bool:
        """Whether no key is asked for."""
        return not self.tenants


def load_file_config(path: Path | None) -> FileConfig:
    """The configuration in `path`; without one three demo assistants for everybody. Raises ConfigError."""
    if path is None:
        return FileConfig(assistants=tuple(demo_assistants()))
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"{path} cannot be read: {e.strerror}") from None
    except (ValueError, RecursionError) as e:  # also of nests and numbers that are too large for the parser
        raise ConfigError(f"{path} is not valid TOML: {e}") from None
    try:
        return FileConfig.model_validate(data)
    except ValidationError as e:
        raise ConfigError(f"{path}: {_sentence(e)}") from None


def find_redis_url(option: str | None, file_config: FileConfig) -> str | None:
    """The operator's Redis: of the option, else the environment, else the file; None: there is none.

    Raises ConfigError.
    """
    for where, url in (("--redis-url", option), (REDIS_URL_VARIABLE, os.environ.get(REDIS_URL_VARIABLE))):
        if url:
            try:
                return _redis_url(url)
            except ValueError as e:
                raise ConfigError(f"{where}: {e}") from None
    return file_config.redis_url


def demo_assistants(folder: Path = DEMO_ASSISTANTS_DIR) -> Iterable[AssistantConfig]:
    """One assistant for each Markdown file: its stem is the id, its text the instructions."""
    for path in sorted(folder.glob("*.md")):
        yield AssistantConfig(id=path.stem, instructions=path.read_text(encoding="utf-8").strip(), shared=True)


def check_open_mode(host: str, file_config: FileConfig) -> None:
    """Raises ConfigError where everybody on the network could chat without a key."""
    if file_config.is_open and not is_loopback(host):
        raise ConfigError(
            f"without tenants trunkline listens on loopback only, got host {host!r}: configure [[tenants]]"
        )


def _with_hashes(data: Any, *, plain: tuple[str, ...], hashed: str, into: str) -> Any:
    """`data` with the keys under `plain` (a string or a list) and `hashed` (hex) replaced by digests under `into`."""
    if not isinstance(data, dict) or into in data:
        return _tuples(data)
    rest = {k: v for k, v in data.items() if k not in plain and k != hashed}
    digests = [hash_key(key) for name in plain for key in _strings(data, name)]
    for digest in _strings(data, hashed):
        if not _SHA256_HEX.fullmatch(digest):
            raise ValueError(f"{hashed} must hold SHA-256 digests of 64 hexadecimal digits")
        digests.append(bytes.fromhex(digest))
    return {**_tuples(rest), into: tuple(digests)}


def _strings(data: dict[str, Any], name: str) -> list[str]:
    value = data.get(name, [])
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(v, str) and len(v) >= 8 for v in values):
        raise ValueError(f"{name} must be a string of at least 8 characters, or a list of such")
    return values


def _tuples(data: Any) -> Any:
    # TOML has lists; strict models of frozen settings want tuples
    return {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()} if isinstance(data, dict) else data


def _need_unique(what: str, values: list[str], *, shown: bool = True) -> None:
    seen: set[str] = set()
    for value in values:
        if value in seen:
            raise ValueError(f"{what} {value!r} comes twice" if shown else f"{what} comes twice")
        seen.add(value)


def _sentence(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in first["loc"]).lstrip(".")
    known = {"extra_forbidden": "is no known setting", "tuple_type": "must be a list"}
    message = known.get(first["type"]) or first["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else str(message)
