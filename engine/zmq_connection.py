"""One connection to an engine: a DEALER, and the monitor that tells when the other side comes and goes."""

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

RECONNECT_MS = 50
HEARTBEAT_MS = 2000


class ZmqConnection:
    """One DEALER and the monitor that tells what happens to it."""

    def __init__(self, context: zmq.asyncio.Context, address: str) -> None:
        self.socket: zmq.asyncio.Socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 200)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued for an engine that is not there
        self.socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        if not address.startswith("ipc://"):
            self.socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
        self._monitor: zmq.asyncio.Socket = self.socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self.socket.connect(address)

    async def connected(self) -> None:
        """Returns when the other side has been reached and speaks ZeroMQ."""
        await self._wait_for(zmq.EVENT_HANDSHAKE_SUCCEEDED)

    async def disconnected(self) -> None:
        """Returns when the other side has gone."""
        await self._wait_for(zmq.EVENT_DISCONNECTED)

    async def _wait_for(self, wanted: int) -> None:
        while True:
            event = parse_monitor_message(await self._monitor.recv_multipart())
            if event["event"] == wanted:
                return

    def __enter__(self) -> "ZmqConnection":
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.disable_monitor()
        self._monitor.close(0)  # else the context could never end
        self.socket.close()
