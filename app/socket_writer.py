"""How frames leave a websocket: one after the other, and never for ever into a client that takes nothing."""

import asyncio
import logging

from starlette.websockets import WebSocket, WebSocketDisconnect

from app.conversation import Close

CLOSE_TIMEOUT_S = 1.0

logger = logging.getLogger(__name__)


class SocketWriter:
    def __init__(self, websocket: WebSocket, timeout_s: float) -> None:
        self._websocket = websocket
        self.timeout_s = timeout_s

    async def send(self, data: bytes) -> None:
        """A text frame. Raises TimeoutError when the client takes nothing for too long, WebSocketDisconnect when it has
        gone."""
        async with asyncio.timeout(self.timeout_s):
            try:
                await self._websocket.send_text(data.decode())
            except RuntimeError:
                # what uvicorn says when it has closed the connection itself (1007, 1009, 1011, 1012)
                raise WebSocketDisconnect(1006) from None

    async def close(self, close: Close) -> None:
        logger.info("websocket closed by the server: %d %s", close.code, close.reason)
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._websocket.close(close.code, close.reason)
        except (TimeoutError, WebSocketDisconnect, RuntimeError):
            return  # it has gone, or will never read this
