"""Which answers a websocket can go on from though they are not stored."""

from types import SimpleNamespace
from typing import Any

from app import unstored_lanes
from app.unstored_lanes import UnstoredLanes


def answer(name: str, *, is_stored: bool = False, is_running: bool = False) -> Any:
    response = SimpleNamespace(id=name, is_running=is_running)
    return SimpleNamespace(
        run=SimpleNamespace(is_stored=is_stored, response=response), as_parent=lambda: f"parent of {name}"
    )


def test_the_latest_of_each_lane_can_be_continued() -> None:
    lanes = UnstoredLanes()
    for lane, name in ((None, "a"), ("left", "b"), (None, "c")):
        lanes.ended(lane, answer(name))
    assert lanes.parents == {"b": "parent of b", "c": "parent of c"}


def test_one_that_is_stored_or_was_lost_takes_the_place_of_the_one_before() -> None:
    for latest in (answer("b", is_stored=True), answer("b", is_running=True), None):
        lanes = UnstoredLanes()
        lanes.ended(None, answer("a"))
        lanes.ended(None, latest)
        assert lanes.parents == {}


def test_there_are_not_more_than_so_many() -> None:
    lanes = UnstoredLanes()
    for number in range(unstored_lanes.MAX_LANES + 2):
        lanes.ended(str(number), answer(f"resp_{number}"))
    assert len(lanes.parents) == unstored_lanes.MAX_LANES
    assert next(iter(lanes.parents)) == "resp_2"
