"""Whose pages may speak to this server, and under which names it may be reached."""

from collections.abc import Iterable
from urllib.parse import urlsplit

from app.config import is_loopback, try_split
from app.errors import ApiError, Forbidden


class Origins:
    """A page may speak to the host that served it, and a page of the configuration's origins may open a websocket: no
    CORS headers are sent, so that over HTTP a browser does not let it read the answers. On an open loopback server the
    Host header must name this machine too, or a foreign name that resolves to 127.0.0.1 would be let in.
    """

    def __init__(self, allowed: Iterable[str], *, is_open: bool) -> None:
        self._allowed = frozenset(origin.rstrip("/").lower() for origin in allowed)
        self._allowed_hosts = frozenset(urlsplit(origin).netloc for origin in self._allowed)
        self._is_open = is_open

    def find_refusal(self, host: str | None, origin: str | None) -> ApiError | None:
        """Why a connection with these headers is refused; None if it is not."""
        host = (host or "").lower()
        parts = try_split(f"//{host}")
        if parts is None:
            return Forbidden("The Host header is no host.", code="host_not_allowed")
        if self._is_open and host and host not in self._allowed_hosts and not is_loopback(parts.hostname or ""):
            return Forbidden("An open server answers to loopback names only.", code="host_not_allowed")
        if origin is None or origin.rstrip("/").lower() in self._allowed:
            return None
        origin_parts = try_split(origin)
        if origin_parts is not None and origin_parts.netloc.lower() == host and host:
            return None
        return Forbidden("This origin is not allowed here.", code="origin_not_allowed")
