"""Whose gateway has gone is looked for in turns, and nobody is taken for dead too early."""

import asyncio
from types import SimpleNamespace

import pytest

from app.ids import new_response_id
from app.orphans import BATCH, Orphans
from app.redis_commands import SessionsUnavailable


class Stage:
    """What `Orphans` works with, and its clock; a turn ends when it sleeps."""

    lease_s = 15.0

    def __init__(self):
        self.now = 100.0
        self.gone = []
        self.left = {}
        self.is_away = False
        self.held = set()
        self.taken = []
        self.forgotten = []
        self._slept, self._wakes = asyncio.Event(), asyncio.Event()
        self.orphans = Orphans(self, self, self, monotonic=lambda: self.now, sleep=self._sleep)

    async def _sleep(self, seconds):
        self.now += seconds
        self._slept.set()
        await self._wakes.wait()
        self._wakes.clear()

    async def turn(self):
        self._slept.clear()
        self._wakes.set()
        await self._slept.wait()

    # the index

    async def beat(self):
        if self.is_away:
            raise SessionsUnavailable("away")
        return self.gone

    async def some_of(self, owner, count):
        return [(name, "a") for name in self.left.get(owner, [])[:count]]

    async def remove(self, names, owner):
        self.left[owner] = [name for name in self.left[owner] if name not in names]

    async def forget(self, owner):
        self.forgotten.append(owner)

    async def leave(self):
        self.left_at = self.now

    # the sessions

    async def find(self, tenant, response_id):
        return SimpleNamespace(tenant=tenant, id=response_id, response=SimpleNamespace(is_running=True))

    # the recovery

    async def recover(self, node):
        if node.id not in self.held:
            self.taken.append(node.id)
        return node

    def has_taken(self, node):
        return node.id in self.taken


@pytest.fixture
async def stage():
    stage = Stage()
    await stage.orphans.start()
    await stage._slept.wait()
    yield stage
    await stage.orphans.close()


async def test_after_a_lease_all_that_a_gateway_left_is_taken(stage):
    ids = [new_response_id() for _ in range(2 * BATCH + 1)]
    stage.gone, stage.left = ["gone"], {"gone": [str(i) for i in ids]}
    await stage.turn()
    await stage.turn()
    assert stage.taken == [], "others may only just have begun to speak"
    await stage.turn()
    assert stage.taken == ids
    assert (stage.left, stage.forgotten) == ({"gone": []}, ["gone"])


async def test_what_somebody_holds_is_looked_at_again(stage):
    response_id = new_response_id()
    stage.now += stage.lease_s
    stage.gone, stage.left, stage.held = ["slow"], {"slow": [str(response_id)]}, {response_id}
    await stage.turn()
    await stage.turn()
    assert (stage.taken, stage.left, stage.forgotten) == ([], {"slow": [str(response_id)]}, [])
    stage.held.clear()
    await stage.turn()
    assert (stage.taken, stage.left, stage.forgotten) == ([response_id], {"slow": []}, ["slow"])


async def test_after_redis_was_away_nobody_is_taken_for_dead_before_he_could_speak(stage):
    stage.now += stage.lease_s
    stage.is_away, stage.gone, stage.left = True, ["silent"], {"silent": [str(new_response_id())]}
    await stage.turn()
    stage.is_away = False
    await stage.turn()
    await stage.turn()
    assert stage.taken == []
    stage.gone = []
    await stage.turn()
    assert stage.taken == []


async def test_what_is_no_response_is_dropped(stage):
    stage.now += stage.lease_s
    stage.gone, stage.left = ["gone"], {"gone": ["no id"]}
    await stage.turn()
    assert (stage.taken, stage.left) == ([], {"gone": []})
