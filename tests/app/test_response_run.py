"""One run, with a generation that does what the test says: how it ends, and that it always does."""

import asyncio

import pytest

from app.cached_tokens import CachedTokens
from app.errors import EngineUnavailable
from app.event_writer import Mailbox
from app.events import InputText, Item, ResponseError, ResponseObject
from app.generation import ChoiceDelta
from app.ids import new_response_id
from app.progress import Progress
from app.response_node import ResponseNode
from app.response_run import ResponseRun


class FakeGeneration:
    """Gives the deltas of a queue; an exception in it is raised, None ends it."""

    num_prompt_tokens = 7
    cached = CachedTokens(trunk=3, history=1)
    is_computed = True

    def __init__(self):
        self.queue = asyncio.Queue()
        self.text = ""
        self.is_open = False
        self.was_left = False

    def say(self, text, finish_reason=None):
        self.queue.put_nowait(ChoiceDelta(0, text, [1], None, finish_reason=finish_reason))

    @property
    def num_output_tokens(self):
        return len(self.text)

    def take_progress(self):
        return Progress()

    def disown(self):
        self.is_disowned = True

    def kept_ids(self, index=0):
        return [ord(c) for c in self.text]

    def __enter__(self):
        self.is_open = True
        return self

    def __exit__(self, *exc):
        self.is_open, self.was_left = False, True

    async def run(self, give):
        while (item := await self.queue.get()) is not None:
            if isinstance(item, Exception):
                raise item
            self.text += item.text
            give(item)


class Stage:
    """A run and all that it needs; `stored` are the nodes whose end was stored."""

    def __init__(self, lost=None):
        self.generation = FakeGeneration()
        self.mailbox = Mailbox()
        self.stored = []
        self.lost = lost
        response_id = new_response_id()
        response = ResponseObject(id=str(response_id), created_at=1, status="in_progress", model="m")
        item = Item(id="msg_1", role="user", content=[InputText(text="Hi")])
        self.run = ResponseRun(
            ResponseNode(id=response_id, tenant="a", input=(item,), response=response),
            self.generation,
            self.mailbox,
            store_end=self.store_end,
            now=lambda: 5,
            to_logprob=lambda entry: None,
        )

    async def store_end(self, node):
        # what is stored is stored before anybody is told of it
        assert not any(e.is_terminal for e in (await self.mailbox.read(100))[0])
        self.stored.append(node)
        return self.lost

    async def last_event(self):
        events, ended = await self.mailbox.read(100)
        assert ended
        return events[-1].type


async def turns(count=5):
    for _ in range(count):
        await asyncio.sleep(0)


async def test_an_answer_is_stored_with_its_ids_and_then_told():
    stage = Stage()
    stage.run.start()
    stage.generation.say("He")
    stage.generation.say("llo", "stop")
    stage.generation.queue.put_nowait(None)
    response = await stage.run.wait()
    assert (response.status, response.completed_at, response.output[0].text) == ("completed", 5, "Hello")
    assert (response.usage.input_tokens, response.usage.input_tokens_details.cached_tokens) == (7, 4)
    assert response.usage.input_tokens_details.cached_tokens_details == FakeGeneration.cached
    assert stage.stored == [stage.run.node]
    assert stage.run.node.kept_ids == tuple(map(ord, "Hello"))
    assert await stage.last_event() == "response.completed"
    assert stage.generation.was_left


async def test_while_it_runs_it_shows_the_text_so_far():
    stage = Stage()
    stage.run.start()
    assert stage.run.response.output == []
    stage.generation.say("Hel")
    await turns()
    assert (stage.run.response.status, stage.run.response.output[0].text) == ("in_progress", "Hel")
    stage.run.stop()
    await stage.run.wait()


@pytest.mark.parametrize("num_turns", range(6))
async def test_a_stop_at_any_moment_cancels_once_and_leaves_the_generation(num_turns):
    stage = Stage()
    stage.run.start()
    stage.generation.say("par")
    await turns(num_turns)
    stage.run.stop()
    stage.run.stop("shutdown")
    response = await stage.run.wait()
    assert response.status == "cancelled"
    assert not stage.generation.is_open
    assert await stage.last_event() == "response.incomplete"
    assert [node.response for node in stage.stored] == [response]
    assert response.output == [] or response.output[0].text == "par"
    stage.run.stop()
    assert (await stage.run.wait()) == response


async def test_a_stop_after_the_last_token_changes_nothing():
    stage = Stage()
    stage.run.start()
    stage.generation.say("Hello", "length")
    await turns()
    stage.run.stop()
    stage.generation.queue.put_nowait(None)
    response = await stage.run.wait()
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")


async def test_a_shutdown_fails_it():
    stage = Stage()
    stage.run.start()
    await turns()
    stage.run.stop("shutdown")
    response = await stage.run.wait()
    assert (response.status, await stage.last_event()) == ("failed", "response.failed")


async def test_b19_an_engine_that_dies_fails_it_and_the_text_is_kept():
    stage = Stage()
    stage.run.start()
    stage.generation.say("abc")
    stage.generation.queue.put_nowait(EngineUnavailable("The engine died while it answered."))
    response = await stage.run.wait()
    assert (response.status, response.error.message) == ("failed", "The engine died while it answered.")
    assert (response.output[0].text, response.output[0].status) == ("abc", "incomplete")
    assert isinstance(stage.run.error, EngineUnavailable)
    assert stage.stored == [stage.run.node]


async def test_an_end_that_cannot_be_stored_is_a_failure():
    stage = Stage(lost=ResponseError(message="not stored"))
    stage.run.start()
    stage.generation.say("abc", "stop")
    stage.generation.queue.put_nowait(None)
    response = await stage.run.wait()
    assert (response.status, response.error.message) == ("failed", "not stored")
    assert await stage.last_event() == "response.failed"


async def test_a_fault_of_ours_still_ends_the_stream():
    stage = Stage()
    stage.run.start()
    stage.generation.say("abc")
    stage.generation.queue.put_nowait(ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        await stage.run.wait()
    assert await stage.last_event() == "response.failed"


async def test_who_waits_can_go_and_the_run_goes_on():
    stage = Stage()
    stage.run.start()
    waiting = asyncio.create_task(stage.run.wait())
    await turns()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    stage.generation.say("Hello", "stop")
    stage.generation.queue.put_nowait(None)
    assert (await stage.run.wait()).status == "completed"
    with pytest.raises(RuntimeError, match="has been started"):
        stage.run.start()
