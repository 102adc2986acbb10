"""Who may share KV with whom: keys of cache scopes, derived by the server from a secret of its own.

A client can narrow its scope (`cache_salt`, `prompt_cache_key`), never widen it or name another's.
"""

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from app.config import ConfigError

SECRET_BYTES = 32
SECRET_FILE = "secret"


class Scopes:
    """Derives scope keys: HMAC-SHA256 over length-prefixed fields."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < SECRET_BYTES:
            raise ValueError(f"the secret must have at least {SECRET_BYTES} bytes, got {len(secret)}")
        self._secret = secret

    def private_key(self, tenant: str, *narrowing: str | None) -> bytes:
        """Of everything a tenant's requests compute beyond a trunk. Each of `narrowing` makes it another scope."""
        return self._derive("private", tenant, *narrowing)

    def assistant_key(self, tenant: str | None, assistant_id: str, instructions: str) -> bytes:
        """Of an assistant's trunk; `tenant` None: shared by all. Edited instructions are another scope."""
        return self._derive("assistant", tenant, assistant_id, hashlib.sha256(instructions.encode()).hexdigest())

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
