"""uvicorn's websocket protocol, with bounds on what a client makes it keep: the pieces of a message, and the pongs that
it does not read. What is no UTF-8 is the client's mistake and one line in the log, not an error with a traceback. And
whoever is refused is told why: what it still sends is thrown away for a while, as closing at once would reset the
connection, and it would lose the close code and every event that it had not read yet.
"""

import logging

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame

logger = logging.getLogger(__name__)

MAX_PIECES = 4096
"""Of one message. Its bytes are bounded by themselves, but a piece may be empty."""
LINGER_S = 2.0
"""For so long at most what a refused client sends is thrown away."""
QUIET_S = 0.1
"""And until it has sent nothing for so long."""


class WebSocketProtocol(WebSocketsSansIOProtocol):
    late_pong = b""
    """For the last pings that came while the client read nothing; those before them are not answered any more, as
    RFC 6455 (5.5.3) allows."""
    is_refused = False
    goes_on = False
    """Whether it has sent something since it was refused, or since that was looked at last."""

    def data_received(self, data: bytes) -> None:
        if self.is_refused:
            self.goes_on = True
        else:
            super().data_received(data)

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) >= MAX_PIECES:
            self._refuse(CloseCode.MESSAGE_TOO_BIG, f"a message of more than {MAX_PIECES} pieces")
        elif not self.is_refused:
            super().handle_cont(event)

    def handle_ping(self) -> None:
        if self.is_refused:
            return
        if self.writable.is_set():
            super().handle_ping()
        else:
            self.late_pong = b"".join(self.conn.data_to_send()) or self.late_pong

    def resume_writing(self) -> None:
        super().resume_writing()
        late, self.late_pong = self.late_pong, b""
        if late and not self.close_sent and not self.transport.is_closing():
            self.transport.write(late)

    def send_receive_event_to_app(self) -> None:
        if self.curr_msg_data_type == "text" and not self.close_sent:
            self.frames = [b"".join(self.frames)]
            try:
                self.frames[0].decode()
            except UnicodeDecodeError as e:
                self._refuse(CloseCode.INVALID_DATA, f"no UTF-8: {e.reason} at byte {e.start}")
                return
        super().send_receive_event_to_app()

    def handle_parser_exception(self) -> None:
        """Something was sent that ends the connection; why stands in the close frame that is to be sent."""
        close = self.conn.close_sent
        assert close is not None
        logger.info("websocket closed by the server: %d %s", close.code, close.reason)
        self.is_refused = self.close_sent = True
        self.frames = []
        self.stop_keepalive()
        self.queue.put_nowait({"type": "websocket.disconnect", "code": close.code, "reason": close.reason})
        self.transport.write(b"".join(self.conn.data_to_send()))
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()
        # not half closed meanwhile: asyncio's transports fail in a client that has still something to send then
        self.close_timer = self.loop.call_later(QUIET_S, self._close_when_quiet, self.loop.time() + LINGER_S)

    def _close_when_quiet(self, latest: float) -> None:
        if not self.goes_on or self.loop.time() >= latest:
            self.transport.close()
            return
        self.goes_on = False
        self.close_timer = self.loop.call_later(QUIET_S, self._close_when_quiet, latest)

    def _refuse(self, code: CloseCode, reason: str) -> None:
        self.conn.send_close(code, reason)
        self.handle_parser_exception()
