"""Tickets: how a browser, which cannot send a key with a websocket, says who it is. Each is for one socket, and soon.

A ticket is 72 bytes in base64url: an id (16), a mark of the key it was given for (16), when it was given (8, seconds
since 1970), and a signature (32) with a key that is derived from the server's secret. It holds nothing else, so there
is nothing in it to be parsed, and whoever reads it learns no key. It is worth as much as its key: once that is
revoked, it is not valid any more.
"""

import base64
import binascii
import hashlib
import hmac
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from app.errors import Unauthorized
from app.redis_commands import SessionsUnavailable
from app.tenant_store import TenantStore
from app.tenants import Tenants

logger = logging.getLogger(__name__)

TICKET_S = 60
"""How long a ticket is valid."""
MAX_SKEW_S = 5
"""A ticket may be from so far ahead: the clocks of gateways differ a little."""
MAX_KNOWN_USES = 65_536
ID_BYTES = 16
MARK_BYTES = 16
TIME_BYTES = 8
SIGNATURE_BYTES = 32
TICKET_BYTES = ID_BYTES + MARK_BYTES + TIME_BYTES + SIGNATURE_BYTES


@dataclass(frozen=True, slots=True)
class Ticket:
    text: str
    expires_at: int
    """Seconds since 1970."""


class Tickets:
    """`now` gives seconds since 1970. Without a store, or while it is away, a ticket is used up here only."""

    def __init__(self, secret: bytes, store: TenantStore | None, *, now: Callable[[], float] = time.time) -> None:
        self._key = hmac.digest(secret, b"tickets", hashlib.sha256)
        self._store = store
        self._now = now
        self._used: OrderedDict[bytes, None] = OrderedDict()
        """Ids of those used here, the oldest first."""

    def issue(self, key: bytes | None) -> Ticket:
        """`key`: the digest of the key that its owner has shown; None on an open server."""
        now = int(self._now())
        said = secrets.token_bytes(ID_BYTES) + self._mark(key) + now.to_bytes(TIME_BYTES)
        text = base64.urlsafe_b64encode(said + self._sign(said)).decode()
        return Ticket(text, now + TICKET_S)

    async def redeem(self, text: str, tenants: Tenants) -> bytes | None:
        """The digest of the key that the ticket was given for, one of those in `tenants`; None on an open server.

        Uses it up. Raises Unauthorized.
        """
        ticket_id, key = self.check(text, tenants.key_digests)
        if ticket_id in self._used:
            raise _invalid("has been used")
        self._used[ticket_id] = None
        if len(self._used) > MAX_KNOWN_USES:
            self._used.popitem(last=False)
        if self._store is not None:
            try:
                tenant = tenants.tenant_of(key).id
                is_first = await self._store.try_use_ticket(tenant, ticket_id.hex())
            except SessionsUnavailable as e:
                logger.warning("whether a ticket was used at another gateway is not known: %s", e)
            else:
                if not is_first:
                    raise _invalid("has been used")
        return key

    def check(self, text: str, keys: Iterable[bytes | None]) -> tuple[bytes, bytes | None]:
        """The ticket's id and which of `keys` it was given for. Raises Unauthorized for one that is not valid now."""
        try:
            raw = base64.b64decode(text.encode(), altchars=b"-_", validate=True)
        except (binascii.Error, UnicodeEncodeError):
            raise _invalid("is none of this server's") from None
        said, signature = raw[:-SIGNATURE_BYTES], raw[-SIGNATURE_BYTES:]
        if len(raw) != TICKET_BYTES or not hmac.compare_digest(self._sign(said), signature):
            raise _invalid("is none of this server's")
        ticket_id, mark = said[:ID_BYTES], said[ID_BYTES : ID_BYTES + MARK_BYTES]
        issued_at = int.from_bytes(said[ID_BYTES + MARK_BYTES :])
        if not -MAX_SKEW_S <= self._now() - issued_at < TICKET_S:
            raise _invalid("has expired")
        found = [key for key in keys if hmac.compare_digest(self._mark(key), mark)]
        if not found:
            raise _invalid("was given for a key that is not valid any more")
        return ticket_id, found[0]

    def _mark(self, key: bytes | None) -> bytes:
        return hmac.digest(self._key, b"open" if key is None else b"key" + key, hashlib.sha256)[:MARK_BYTES]

    def _sign(self, said: bytes) -> bytes:
        return hmac.digest(self._key, b"ticket" + said, hashlib.sha256)


def _invalid(why: str) -> Unauthorized:
    return Unauthorized(f"The ticket {why}: get a new one from POST /v1/tickets.", code="invalid_ticket")
