"""A limit on waiting, for a process that may be stopped meanwhile: the loop's clock is the test's."""

import asyncio

import pytest

from app.patience import NUM_LOOKS, Patience


class StoppableLoop(asyncio.SelectorEventLoop):
    """Its clock stands still but for what `go_on` adds, and for timers that are waited for: then it jumps to them."""

    def __init__(self):
        super().__init__()
        self.now_s = 1000.0

    def time(self):
        return self.now_s

    def _run_once(self):
        if not self._ready and self._scheduled:
            self.now_s = max(self.now_s, min(handle.when() for handle in self._scheduled if not handle.cancelled()))
        super()._run_once()


def run(main):
    """With the loop's clock; gives how much time went by."""
    with asyncio.Runner(loop_factory=StoppableLoop) as runner:
        loop = runner.get_loop()
        begun = loop.now_s
        runner.run(main(loop))
        return loop.now_s - begun


def test_what_takes_too_long_is_given_up_after_the_time():
    async def main(loop):
        with pytest.raises(TimeoutError):
            async with Patience(8.0):
                await asyncio.Event().wait()

    assert run(main) == 8.0


def test_what_comes_in_time_is_left_alone():
    async def main(loop):
        async with Patience(8.0):
            await asyncio.sleep(7.9)
        await asyncio.sleep(1.0)

    assert run(main) == pytest.approx(8.9)


@pytest.mark.parametrize("look", range(NUM_LOOKS))
def test_time_in_which_the_process_was_stopped_does_not_count(look):
    async def main(loop):
        async def stop():
            await asyncio.sleep(2.0 * look + 1.0)
            loop.now_s += 3600.0

        stopping = asyncio.create_task(stop())
        with pytest.raises(TimeoutError):
            async with Patience(8.0):
                await asyncio.Event().wait()
        await stopping

    # the look that came late is not counted; from then on the rest of the time
    assert 3600.0 + 8.0 <= run(main) <= 3600.0 + 8.0 + 2.0


def test_the_callers_own_cancellation_is_no_timeout():
    async def main(loop):
        async def wait():
            async with Patience(8.0):
                await asyncio.Event().wait()

        waiting = asyncio.create_task(wait())
        await asyncio.sleep(1.0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    assert run(main) == 1.0
