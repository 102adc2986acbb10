"""Who follows an answer of another gateway is looked after from before it watches until it does not any more."""

import asyncio
from types import SimpleNamespace

from app.follows import Follows
from app.ids import new_response_id
from app.sessions import SessionsUnavailable


class Stage:
    """What `Follows` works with; `turns` holds what it asked for in each turn."""

    lease_s = 0.003

    def __init__(self):
        self.followed = []
        self.without_lease = []
        self.turns = []
        self.recovered = []
        self.woken = []
        self.said_read = []
        self.is_away = False
        self.follows = Follows(self, self, self)

    async def find_without_lease(self, ids):
        self.turns.append(list(ids))
        if self.is_away:
            raise SessionsUnavailable("away")
        return [name for name in ids if name in self.without_lease]

    async def say_read(self, ids):
        self.said_read = list(ids)

    async def find(self, tenant, response_id):
        return SimpleNamespace(tenant=tenant, id=response_id)

    async def recover(self, node):
        self.recovered.append((node.tenant, node.id))

    def wake_followers(self, name):
        self.woken.append(name)

    async def turn(self):
        """One more look."""
        num = len(self.turns)
        async with asyncio.timeout(30):
            while len(self.turns) == num:  # noqa: ASYNC110
                await asyncio.sleep(0)


async def test_an_answer_that_is_not_watched_yet_is_not_forgotten_at_once():
    stage, response_id = Stage(), new_response_id()
    stage.follows.add("a", response_id)
    await stage.turn()
    assert stage.turns[-1] == [response_id]
    stage.followed = [str(response_id)]
    stage.without_lease = [response_id]
    await stage.turn()
    await stage.turn()
    assert stage.recovered[0] == ("a", response_id)
    assert stage.said_read == [response_id]
    assert str(response_id) in stage.woken
    await stage.follows.close()


async def test_nobody_is_looked_after_for_ever():
    stage = Stage()
    stage.follows.add("a", new_response_id())
    async with asyncio.timeout(30):
        while any(task.get_name() == "followed answers" for task in asyncio.all_tasks()):  # noqa: ASYNC110
            await asyncio.sleep(0)
    later = new_response_id()
    stage.follows.add("b", later)
    await stage.turn()
    assert stage.turns[-1] == [later]
    await stage.follows.close()


async def test_while_redis_is_away_it_looks_again_and_followers_are_woken():
    stage, response_id = Stage(), new_response_id()
    stage.followed, stage.is_away = [str(response_id)], True
    stage.follows.add("a", response_id)
    await stage.turn()
    await stage.turn()
    assert str(response_id) in stage.woken
    stage.is_away, stage.without_lease = False, [response_id]
    await stage.turn()
    await stage.turn()
    assert ("a", response_id) in stage.recovered
    await stage.follows.close()
