"""An answer as server-sent events over a plain socket, to be driven as `WsClient` is."""

import socket

from benchmarks.ws_client import READ_BYTES, Closed

_DATA = b"data: "


class SseClient:
    """One connection for one POST. Raises OSError."""

    def __init__(self, host: str, port: int, path: str = "/v1/responses") -> None:
        self._socket = socket.create_connection((host, port))
        self._head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        self._is_answered = False
        self._raw = b""
        """Chunks that are not whole yet."""
        self._text = b""
        """Events that are not whole yet."""

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, text: str) -> None:
        body = text.encode()
        self._socket.sendall(f"{self._head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    def receive(self) -> list[bytes]:
        """The data of the events that are there, after waiting for some bytes. Raises Closed, RuntimeError for another
        status than 200."""
        data = self._socket.recv(READ_BYTES)
        if not data:
            raise Closed(None)
        self._raw += data
        if not self._is_answered:
            head, found, rest = self._raw.partition(b"\r\n\r\n")
            if not found:
                return []
            if b" 200 " not in head.split(b"\r\n")[0]:
                raise RuntimeError(f"expected 200, got {self._raw[:500]!r}")
            self._is_answered, self._raw = True, rest
        self._take_chunks()
        *events, self._text = self._text.split(b"\n\n")
        return [line[len(_DATA) :] for event in events for line in event.split(b"\n") if line.startswith(_DATA)]

    def _take_chunks(self) -> None:
        """Of HTTP's chunked coding."""
        while True:
            size, found, rest = self._raw.partition(b"\r\n")
            if not found:
                return
            end = int(size, 16)
            if len(rest) < end + 2:
                return
            self._text += rest[:end]
            self._raw = rest[end + 2 :]

    def close(self) -> None:
        self._socket.close()
