"""Who asks: bearer keys, kept as hashes only."""

import hmac
from collections.abc import Iterable
from dataclasses import dataclass, fields

from app.config import FileConfig, TenantConfig, hash_key
from app.errors import ApiError, Forbidden, Unauthorized
from app.quota import UNLIMITED, Quota
from engine.protocol import TenantShare

OPEN_TENANT = "default"


@dataclass(frozen=True, slots=True)
class Tenant:
    """One customer of this server. Nothing of another tenant is ever visible to it."""

    id: str
    is_scoped_by_user: bool = False
    """Whether its end users share no KV with one another beyond an assistant's trunk."""
    quota: Quota = UNLIMITED


class Tenants:
    """The tenants of the configuration; without any, everybody is the tenant "default"."""

    def __init__(self, file_config: FileConfig, *, is_loopback: bool = True) -> None:
        """`is_loopback`: whether only this machine reaches the listener."""
        self._keys = [
            (digest, Tenant(t.id, is_scoped_by_user=t.scope == "user", quota=_quota(t)))
            for t in file_config.tenants
            for digest in t.key_hashes
        ]
        self.shares = [
            TenantShare(
                tenant=t.id,
                weight=t.weight,
                max_running=t.max_running,
                guaranteed_blocks=t.guaranteed_blocks,
                max_blocks=t.max_blocks,
            )
            for t in file_config.tenants
        ]
        """What each may have of an engine."""
        self._admin_hashes = file_config.admin_key_hashes
        self._is_loopback = is_loopback

    @property
    def is_open(self) -> bool:
        return not self._keys

    @property
    def key_digests(self) -> list[bytes | None]:
        """Of all keys that are valid; on an open server the one "key" is None."""
        return [None] if self.is_open else [digest for digest, _ in self._keys]

    def authenticate(self, authorization: str | None) -> Tenant:
        """The tenant whose key the Authorization header carries. Raises Unauthorized."""
        return self.tenant_of(digest_of(authorization, is_needed=not self.is_open))

    def tenant_of(self, digest: bytes | None) -> Tenant:
        """The tenant that has a key of this digest; None counts only where no key is asked for. Raises Unauthorized."""
        if self.is_open:
            return Tenant(OPEN_TENANT)
        # Every hash is compared, each in constant time: how long it takes says nothing about the keys.
        found = [tenant for known, tenant in self._keys if hmac.compare_digest(known, digest or b"")]
        if not found:
            raise Unauthorized("The API key is not known here.")
        return found[0]

    def of_id(self, tenant_id: str) -> Tenant:
        """As the configuration has it; one that is not in it (any more) has the defaults."""
        return next((tenant for _, tenant in self._keys if tenant.id == tenant_id), Tenant(tenant_id))

    def authorize_admin(self, authorization: str | None) -> None:
        """Raises Unauthorized or Forbidden unless the caller may read /metrics and /admin."""
        if not self._admin_hashes:
            if self.is_open and self._is_loopback:
                return
            raise Forbidden("No admin key is configured, so that this is closed: set `admin_key` in the configuration.")
        digest = hash_key(_bearer(authorization))
        if any([hmac.compare_digest(known, digest) for known in self._admin_hashes]):
            return
        raise _no_admin(digest, (known for known, _ in self._keys))


def _quota(tenant: TenantConfig) -> Quota:
    return Quota(**{field.name: getattr(tenant, field.name) for field in fields(Quota)})


def digest_of(authorization: str | None, *, is_needed: bool = True) -> bytes | None:
    """The digest of the key in an Authorization header. Raises Unauthorized where there is none but `is_needed`."""
    return hash_key(_bearer(authorization)) if is_needed else None


def _no_admin(digest: bytes, tenant_hashes: Iterable[bytes]) -> ApiError:
    if any([hmac.compare_digest(known, digest) for known in tenant_hashes]):
        return Forbidden("This key is a tenant's, not the admin key.")
    return Unauthorized("The admin key is wrong.")


def _bearer(authorization: str | None) -> str:
    if authorization is None:
        raise Unauthorized("An API key is needed: send the header Authorization: Bearer <key>.")
    scheme, _, key = authorization.strip().partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise Unauthorized("The Authorization header must be: Bearer <key>.")
    return key.strip()
