"""Who may share KV with whom: keys of cache scopes, derived by the server from a secret of its own.

A client can narrow its scope (`cache_salt`, `prompt_cache_key`), never widen it or name another's. A tenant can be told
to have a scope for each of its end users.
"""

import hashlib
import hmac
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from app.config import ConfigError
from app.tenants import Tenant

SECRET_BYTES = 32
SECRET_FILE = "secret"


@dataclass(frozen=True, slots=True)
class Narrowing:
    """What a request says of who may share its KV. Each field can only make its scope another, smaller one."""

    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    user: str | None = None
    """The end user who asks. Of consequence only for a tenant that is scoped by user; there all requests that name
    none have one scope in common, the tenant's own beside those of its users."""


NOT_NARROWED = Narrowing()


class Scopes:
    """Derives scope keys: HMAC-SHA256 over length-prefixed fields."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < SECRET_BYTES:
            raise ValueError(f"the secret must have at least {SECRET_BYTES} bytes, got {len(secret)}")
        self._secret = secret

    def private_key(self, tenant: Tenant, narrowing: Narrowing = NOT_NARROWED) -> bytes:
        """Of everything that a request computes beyond a trunk."""
        salts = (narrowing.cache_salt, narrowing.prompt_cache_key)
        if tenant.is_scoped_by_user:
            return self._derive("user", tenant.id, narrowing.user, *salts)
        return self._derive("private", tenant.id, *salts)

    def owner_key(self, tenant: Tenant, user: str | None) -> bytes:
        """Whose request it is, salts aside: the tenant's, or one of its users' where it is scoped by user."""
        if tenant.is_scoped_by_user:
            return self._derive("owner user", tenant.id, user)
        return self._derive("owner", tenant.id)

    def assistant_key(self, tenant: str | None, assistant_id: str, content: str) -> bytes:
        """Of an assistant's trunk; `tenant` None: shared by all. `content` is all that the trunk is made from: edited,
        it is another scope."""
        return self._derive("assistant", tenant, assistant_id, hashlib.sha256(content.encode()).hexdigest())

    def _derive(self, *fields: str | None) -> bytes:
        mac = hmac.new(self._secret, digestmod=hashlib.sha256)
        for field in fields:
            # None is unlike every string, the empty one included
            data = b"" if field is None else b"\x01" + field.encode()
            mac.update(len(data).to_bytes(8, "little") + data)
        return mac.digest()


def ensure_secret(state_dir: Path) -> bytes:
    """The server's secret, made at the first start and readable by its owner only. Raises ConfigError."""
    path = state_dir / SECRET_FILE
    state_dir.mkdir(parents=True, exist_ok=True)
    try:
        return _read(path)
    except FileNotFoundError:
        pass
    temporary = path.with_name(f"{SECRET_FILE}.{os.getpid()}.{secrets.token_hex(4)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as f:
        f.write(secrets.token_bytes(SECRET_BYTES))
        f.flush()
        os.fsync(f.fileno())
    try:
        # link, not rename: of two gateways that start together the first one's secret stays
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        temporary.unlink()
    return _read(path)


def _read(path: Path) -> bytes:
    secret = path.read_bytes()
    if len(secret) < SECRET_BYTES:
        raise ConfigError(f"{path} must hold {SECRET_BYTES} bytes, got {len(secret)}: remove it to get a new one")
    return secret
