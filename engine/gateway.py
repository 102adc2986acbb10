"""What the engine process knows of one gateway."""

from dataclasses import dataclass, field

from engine.protocol import RequestOutput

MAX_UNACKNOWLEDGED = 8
"""Step messages on their way to one gateway. More than one, so that the round trip of an acknowledgement does not
delay tokens; few, so that a gateway that falls behind gets merged outputs instead of a queue."""


@dataclass(eq=False)
class Gateway:
    """One connection. Its identity was given by the ROUTER and never comes back after the connection has gone."""

    identity: bytes
    last_seen: float
    request_ids: set[str] = field(default_factory=set)
    pending: dict[str, RequestOutput] = field(default_factory=dict)
    """Merged outputs that wait for credit, one for each request."""
    last_step_id: int = 0
    acknowledged_step_id: int = 0

    @property
    def has_credit(self) -> bool:
        return self.last_step_id - self.acknowledged_step_id < MAX_UNACKNOWLEDGED
