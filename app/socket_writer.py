"""How frames leave a websocket: one after the other, and never for ever into a client that takes nothing."""

import asyncio
import logging
from collections.abc import Iterable

from starlette.websockets import WebSocket, WebSocketDisconnect

from app.conversation import Close
from app.frame_socket import FrameSocket

CLOSE_TIMEOUT_S = 1.0

logger = logging.getLogger(__name__)


class SocketWriter:
    def __init__(self, websocket: WebSocket, timeout_s: float) -> None:
        self._websocket = websocket
        self._frames = FrameSocket.of(websocket)
        self.timeout_s = timeout_s

    @property
    def can_send(self) -> bool:
        """Whether `send_now` may be called."""
        return self._frames.is_writable

    def send_now(self, texts: Iterable[bytes]) -> None:
        """Text frames, without waiting."""
        self._frames.send_now(texts)

    async def send(self, text: bytes) -> None:
        """A text frame. Raises TimeoutError when the client takes nothing for too long, WebSocketDisconnect when it has
        gone."""
        await self._frames.send_text(text, self.timeout_s)

    async def close(self, close: Close) -> None:
        logger.info("websocket closed by the server: %d %s", close.code, close.reason)
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._websocket.close(close.code, close.reason)
        except (TimeoutError, WebSocketDisconnect, RuntimeError):
            return  # it has gone, or will never read this
