"""Which gateways want which trunks: a trunk stays as long as one of them does."""

from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

from engine.protocol import PinTrunk, TrunkPin, TrunkState


class PinningCore(Protocol):
    def pin(self, message: PinTrunk) -> TrunkState | None: ...
    def unpin(self, trunk_id: str) -> None: ...


Holder = TypeVar("Holder", bound=Hashable)


class TrunkHolders(Generic[Holder]):
    """Counts each holder of a trunk once, however often it asked."""

    def __init__(self, core: PinningCore) -> None:
        self._core = core
        self._holders: dict[str, set[Holder]] = {}
        self._held: dict[Holder, set[str]] = {}

    def __contains__(self, holder: Holder) -> bool:
        """It holds some trunk."""
        return holder in self._held

    def pin(self, holder: Holder, message: PinTrunk) -> TrunkState | None:
        """The trunk's state, if it is known at once. One that failed is held by nobody."""
        state = self._core.pin(message)
        if state is None or state.state is not TrunkPin.FAILED:
            self._holders.setdefault(message.trunk_id, set()).add(holder)
            self._held.setdefault(holder, set()).add(message.trunk_id)
        return state

    def unpin(self, holder: Holder, trunk_id: str) -> None:
        """No error if it does not hold it."""
        holders = self._holders.get(trunk_id, set())
        if holder in holders:
            holders.remove(holder)
            self._forget(holder, trunk_id)
            if not holders:
                del self._holders[trunk_id]
                self._core.unpin(trunk_id)

    def drop(self, holder: Holder) -> list[str]:
        """The holder has gone. Returns what it held."""
        trunk_ids = sorted(self._held.get(holder, ()))
        for trunk_id in trunk_ids:
            self.unpin(holder, trunk_id)
        return trunk_ids

    def take_news(self, state: TrunkState) -> list[Holder]:
        """Who is to hear of this change."""
        holders = list(self._holders.get(state.trunk_id, ()))
        if state.state is TrunkPin.FAILED and holders:
            del self._holders[state.trunk_id]
            for holder in holders:
                self._forget(holder, state.trunk_id)
        return holders

    def _forget(self, holder: Holder, trunk_id: str) -> None:
        held = self._held[holder]
        held.remove(trunk_id)
        if not held:
            del self._held[holder]
