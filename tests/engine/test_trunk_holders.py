"""Gateways that share trunks."""

from engine.protocol import END, PinTrunk, Scope, TrunkPin, TrunkState
from engine.trunk_holders import TrunkHolders


class Core:
    def __init__(self) -> None:
        self.state: TrunkState | None = None
        self.unpinned: list[str] = []

    def pin(self, message: PinTrunk) -> TrunkState | None:
        return self.state

    def unpin(self, trunk_id: str) -> None:
        self.unpinned.append(trunk_id)


def message(trunk_id: str) -> PinTrunk:
    return PinTrunk(trunk_id, [1], [Scope(END, b"")])


def test_a_trunk_stays_until_its_last_holder_has_gone():
    core = Core()
    holders: TrunkHolders[str] = TrunkHolders(core)
    for holder in ("a", "a", "b"):
        assert holders.pin(holder, message("t")) is None
    holders.pin("a", message("u"))
    assert sorted(holders.take_news(TrunkState("t", TrunkPin.PINNED, 1, 1))) == ["a", "b"]
    holders.unpin("a", "t")
    holders.unpin("a", "t")
    assert (core.unpinned, "a" in holders) == ([], True)
    assert holders.drop("b") == ["t"]
    assert core.unpinned == ["t"]
    assert holders.drop("a") == ["u"]
    assert core.unpinned == ["t", "u"]
    assert ("a" in holders, "b" in holders, holders.drop("a")) == (False, False, [])


def test_what_has_failed_is_held_by_nobody():
    core = Core()
    holders: TrunkHolders[str] = TrunkHolders(core)
    holders.pin("a", message("t"))
    failed = TrunkState("t", TrunkPin.FAILED, 0, 0)
    assert holders.take_news(failed) == ["a"]
    assert holders.take_news(failed) == []
    core.state = failed
    assert holders.pin("a", message("t")) is failed
    assert "a" not in holders
    assert core.unpinned == []
