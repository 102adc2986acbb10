"""uvicorn's websocket, on which what is ready goes out at once: as text frames, without a turn of the event loop.

An ASGI application can only await its sends, which costs a coroutine, a message and a decoding and encoding for each
event. The protocol object stands in the connection's scope under `EXTENSION`; everything but the sending of events
goes through ASGI as ever.
"""

import asyncio
from collections.abc import Iterable

from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.http11 import Request
from websockets.protocol import State

from app.websocket_protocol import WebSocketProtocol

EXTENSION = "trunkline.frames"


class FrameSocket(WebSocketProtocol):
    """To be used from when the websocket has been accepted."""

    @classmethod
    def of(cls, websocket: WebSocket) -> "FrameSocket":
        found = websocket.scope["extensions"][EXTENSION]
        assert isinstance(found, cls), found
        return found

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if not self.close_sent:  # else the handshake was refused, and there is no scope
            self.scope["extensions"][EXTENSION] = self  # type: ignore[assignment]

    @property
    def is_writable(self) -> bool:
        """Whether the client takes what is sent; else it is slow, or has gone."""
        return self.writable.is_set() and not self._has_gone

    @property
    def _has_gone(self) -> bool:
        # uvicorn closes by itself too: 1007, 1009, 1011, 1012
        return self.close_sent or self.conn.state is not State.OPEN or self.transport.is_closing()

    def send_now(self, texts: Iterable[bytes]) -> None:
        """Each is one message, in UTF-8. Only while it is writable; what a client then does not take is buffered."""
        self.transport.write(b"".join(map(text_frame, texts)))

    async def send_text(self, text: bytes, timeout_s: float) -> None:
        """Raises TimeoutError when the client takes nothing for so long, WebSocketDisconnect when it has gone."""
        if not self.writable.is_set():
            async with asyncio.timeout(timeout_s):
                await self.writable.wait()
        if self._has_gone:
            raise WebSocketDisconnect(1006)
        self.send_now((text,))


def text_frame(data: bytes) -> bytes:
    """One unmasked text message (RFC 6455, section 5.2)."""
    length = len(data)
    if length < 126:
        return b"\x81%c%b" % (length, data)
    if length < 1 << 16:
        return b"\x81\x7e%b%b" % (length.to_bytes(2, "big"), data)
    return b"\x81\x7f%b%b" % (length.to_bytes(8, "big"), data)
