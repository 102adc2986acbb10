"""How long one websocket lives: some time before its end the client is asked for a new connection, then it is over.

Sockets that were opened together, as after a restart, do not end together: each lives for up to a tenth less.
"""

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from app.errors import BadRequest
from app.limits import Limits

SPREAD = 0.1


class Timer(Protocol):
    def cancel(self) -> None: ...


Later = Callable[[float, Callable[[], None]], Timer]
"""Has a function called after so many seconds; `AbstractEventLoop.call_later` is one."""


class LifetimeOver(BadRequest):
    """To a message that came after the client was asked for a new connection; as OpenAI calls it."""

    def __init__(self) -> None:
        super().__init__(
            "This connection is as old as it may become: open a new one and send the message there.",
            code="websocket_connection_limit_reached",
        )


@dataclass(frozen=True, slots=True)
class Lifetime:
    lifetime_s: float
    farewell_s: float
    """So long before the end the client is told."""

    @classmethod
    def of(cls, limits: Limits) -> "Lifetime":
        return cls(limits.socket_lifetime_s, limits.socket_farewell_s)

    @contextlib.contextmanager
    def running(
        self,
        later: Later,
        farewell: Callable[[], None],
        over: Callable[[], None],
        shortened: Callable[[], float] = random.random,
    ) -> Iterator[None]:
        """Calls both, in this order, unless it is left before. `shortened` says how much of the tenth is taken off."""
        lives_s = self.lifetime_s * (1 - SPREAD * shortened())
        timers = [later(max(lives_s - self.farewell_s, 0.0), farewell), later(lives_s, over)]
        try:
            yield
        finally:
            for timer in timers:
                timer.cancel()
