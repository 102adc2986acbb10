"""Many websockets on which little happens."""

import select
import time
from collections.abc import Sequence

from benchmarks.load_ws import Chat, measure
from benchmarks.ws_client import WsClient


class Crowd:
    """Websockets of which one at a time is asked something; the pings on all of them are answered."""

    def __init__(self, clients: Sequence[WsClient]) -> None:
        self._clients = {client.fileno(): client for client in clients}
        self._poll = select.epoll()
        for number in self._clients:
            self._poll.register(number, select.EPOLLIN)

    def ask(self, client: WsClient, said: str) -> float:
        """Seconds to the first delta. Returns after the end of the answer. Raises BrokenStream."""
        chat = Chat(client, [lambda _: said])
        chat.ask()
        is_over = False
        while not is_over:
            for number, _ in self._poll.poll():
                if number == client.fileno():
                    is_over = chat.read()
                else:
                    self._clients[number].receive()
        ttft = measure(chat.exchanges[0]).ttft
        assert ttft is not None
        return ttft

    def rest(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            for number, _ in self._poll.poll(left):
                self._clients[number].receive()
