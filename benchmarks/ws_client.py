"""A websocket client that costs little: a plain socket, read when it is readable; no event loop, no compression.

Text frames come out as bytes; what they say can be looked at after the measurement. Pings are answered.
"""

import base64
import os
import socket
import struct
from collections.abc import Mapping

TEXT, CLOSE, PING, PONG = 0x81, 0x88, 0x89, 0x8A
READ_BYTES = 1 << 18


class Closed(Exception):
    """The server has closed the websocket."""

    def __init__(self, code: int | None) -> None:
        super().__init__(f"closed with {code}")
        self.code = code
        """None: without a close frame."""


class WsClient:
    """One connection, open from the start. Raises OSError, or RuntimeError where the server refuses it."""

    def __init__(
        self,
        host: str,
        port: int,
        path: str = "/v1/responses",
        *,
        headers: Mapping[str, str] | None = None,
        source: str | None = None,
        receive_buffer_bytes: int | None = None,
    ) -> None:
        """`source`: the address to connect from, where one has not enough ports."""
        self._end: Closed | None = None
        self._socket = socket.socket()
        if receive_buffer_bytes is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        if source is not None:
            self._socket.setsockopt(socket.IPPROTO_IP, socket.IP_BIND_ADDRESS_NO_PORT, 1)
            self._socket.bind((source, 0))
        try:
            self._socket.connect((host, port))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._rest = self._shake_hands(f"{host}:{port}", path, headers or {})
        except BaseException:
            self._socket.close()
            raise

    def _shake_hands(self, host: str, path: str, headers: Mapping[str, str]) -> bytes:
        """What came after the server's answer."""
        said = {
            "Host": host,
            "Upgrade": "websocket",
            "Connection": "Upgrade",
            "Sec-WebSocket-Key": base64.b64encode(os.urandom(16)).decode(),
            "Sec-WebSocket-Version": "13",
            **headers,
        }
        head = f"GET {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in said.items()) + "\r\n"
        self._socket.sendall(head.encode())
        answer = b""
        while b"\r\n\r\n" not in answer:
            data = self._socket.recv(65536)
            if not data:
                raise RuntimeError(f"the connection ended within the handshake, after {answer!r}")
            answer += data
        status, _, rest = answer.partition(b"\r\n\r\n")
        if b" 101 " not in status.split(b"\r\n")[0]:
            raise RuntimeError(f"expected 101, got {status[:200]!r} {rest[:300]!r}")
        return rest

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, text: str) -> None:
        self._send_frame(TEXT, text.encode())

    def _send_frame(self, opcode: int, data: bytes) -> None:
        self._socket.sendall(masked_frame(opcode, data, os.urandom(4)))

    def receive(self) -> list[bytes]:
        """The text frames that are there, after waiting for some bytes. Raises Closed, after the last of them."""
        if self._end is not None:
            raise self._end
        data = self._socket.recv(READ_BYTES)
        if not data:
            raise Closed(None)
        buffer = self._rest + data if self._rest else data
        frames, at, size = [], 0, len(buffer)
        while size - at >= 2:
            opcode, length = buffer[at], buffer[at + 1]
            start = at + 2
            if length >= 126:
                start += 2 if length == 126 else 8
                if start > size:
                    break
                length = int.from_bytes(buffer[at + 2 : start], "big")
            end = start + length
            if end > size:
                break
            if opcode == TEXT:
                frames.append(buffer[start:end])
            elif opcode == PING:
                self._send_frame(PONG, buffer[start:end])
            elif opcode == CLOSE:
                self._end = Closed(int.from_bytes(buffer[start : start + 2], "big"))
                if not frames:
                    raise self._end
                break
            else:
                raise RuntimeError(f"expected a whole text frame, a ping or a close, got {opcode:#x}")
            at = end
        self._rest = buffer[at:]
        return frames

    def close(self) -> None:
        """Without the closing handshake."""
        self._socket.close()


def masked_frame(opcode: int, data: bytes, mask: bytes) -> bytes:
    """As clients send them."""
    length = len(data)
    if length < 126:
        head = struct.pack("!BB", opcode, 0x80 | length)
    elif length < 1 << 16:
        head = struct.pack("!BBH", opcode, 0x80 | 126, length)
    else:
        head = struct.pack("!BBQ", opcode, 0x80 | 127, length)
    repeated = (mask * (length // 4 + 1))[:length]
    body = (int.from_bytes(data, "big") ^ int.from_bytes(repeated, "big")).to_bytes(length, "big")
    return head + mask + body
