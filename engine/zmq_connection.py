"""One connection to an engine: a DEALER, and the monitor that tells when the other side comes and goes."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

POLLIN, POLLOUT = int(zmq.POLLIN), int(zmq.POLLOUT)
RECONNECT_MS = 50
HEARTBEAT_MS = 2000


class ZmqConnection:
    """One DEALER and the monitor that tells what happens to it.

    The DEALER is no socket of zmq.asyncio: futures and tasks for each message cost more than all else that a step costs
    its reader.
    """

    def __init__(self, context: zmq.asyncio.Context, address: str) -> None:
        self._arrival = asyncio.Event()
        self.socket: zmq.Socket[bytes] = zmq.Context.shadow(context).socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 200)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued for an engine that is not there
        self.socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        if not address.startswith("ipc://"):
            self.socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self._monitor_socket: zmq.Socket[bytes] = self.socket.get_monitor_socket(events)
        self._monitor: zmq.asyncio.Socket = zmq.asyncio.Socket.from_socket(self._monitor_socket)
        self.socket.connect(address)

    def send(self, data: bytes) -> None:
        """Never waits. An engine that has just gone gets nothing: `disconnected` is about to return."""
        # asked for its state a socket takes notice of its connection, which in sending it does only now and then
        if int(self.socket.getsockopt(zmq.EVENTS)) & POLLOUT:
            with contextlib.suppress(zmq.Again):
                self.socket.send(data, zmq.NOBLOCK)
        # looking and sending both may take away the sign that something can be read
        self._arrival.set()

    def take_arrived(self) -> Iterator[bytes]:
        """All that is there."""
        while int(self.socket.getsockopt(zmq.EVENTS)) & POLLIN:
            yield self.socket.recv(zmq.NOBLOCK)

    async def receive(self, take: Callable[[bytes], None]) -> None:
        """Hands over each message, until it is cancelled or `take` raises."""
        loop, file = asyncio.get_running_loop(), int(self.socket.getsockopt(zmq.FD))
        loop.add_reader(file, self._arrival.set)
        try:
            while True:
                self._arrival.clear()
                for data in self.take_arrived():
                    take(data)
                await self._arrival.wait()
        finally:
            loop.remove_reader(file)

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
        for monitor in (self._monitor, self._monitor_socket):
            monitor.close(0)  # else the context could never end
        self.socket.close()
