"""Answers over engines that die: one unbroken stream, and an end for those by which engines die again and again."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.resubmission import Answer, Resubmission, SubmitterOfAccepted, judge, with_seed
from engine.errors import EngineDeadError
from engine.protocol import END, AddRequest, ErrorInfo, FinishReason, RequestOutput, Scope
from engine.sampling_params import SamplingParams
from engine.token_stream import TokenStream
from tests.app.serving import finish_reasons, joined, serving
from tests.scripted_engine import IM_END, Die, Item, Pause, Script, ScriptedEngineClient, say

PATIENCE_S = 3600.0
"""Never ends in a test."""


def request(text: str = "a", **params: Any) -> AddRequest:
    return AddRequest(
        request_id=text,
        prompt_ids=list(text.encode()),
        params=SamplingParams(**{"max_tokens": None, "eos_token_ids": (IM_END,), **params}),
        scopes=[Scope(END, b"test")],
    )


async def read(stream: TokenStream) -> RequestOutput:
    whole = await stream.next()
    async for more in stream:
        whole.merge(more)
    return whole


def text_of(output: RequestOutput) -> str:
    return bytes(token for token in output.token_ids if token != IM_END).decode()


class Engine(ScriptedEngineClient):
    """Comes back after each death, until it is told not to; ends in order where it was asked to."""

    def __init__(self, script: Script, **more: Any) -> None:
        super().__init__(script=script, **more)
        self.comes_back = True
        self.num_deaths = 0

    def die(self, reason: str = "the engine died", *, is_crash: bool = True) -> None:
        super().die(reason, is_crash=is_crash)
        self.num_deaths += 1
        if self.comes_back:
            self.revive()


@pytest.fixture
async def closing() -> AsyncIterator[list[Resubmission]]:
    made: list[Resubmission] = []
    yield made
    for one in made:
        assert one.num_answers == 0, "something is kept of what has ended"
        await one.close()


def over(engine: ScriptedEngineClient, closing: list[Resubmission], patience_s: float = PATIENCE_S) -> Resubmission:
    closing.append(Resubmission(engine, patience_s=patience_s))
    return closing[-1]


def dies_once_in(*texts: str, after: str) -> Script:
    """Whoever says one of these texts first dies once, behind `after`."""
    left = iter([Die()])

    def script(request: AddRequest) -> Iterator[Item]:
        for text in texts:
            if text.startswith(bytes(request.prompt_ids).decode()):
                yield from after.encode()
                yield from itertools.islice(left, 1)
                yield from text.removeprefix(after).encode()

    return script


# ---- one unbroken stream


@pytest.mark.parametrize("after", ["", "a", "abcd", "abcdefgh"])
async def test_a_reader_gets_every_token_once(closing: list[Resubmission], after: str) -> None:
    engine = Engine(dies_once_in("abcdefgh", after=after), num_cached_tokens=1)
    output = await read(over(engine, closing).submit(request("ab")))
    assert (text_of(output), output.finish_reason, output.request_id) == ("abcdefgh", FinishReason.STOP, "ab")
    assert output.num_cached_tokens == 1
    assert engine.num_deaths == 1
    first, second = engine.requests
    assert second.output_ids == list(after.encode())
    assert second.request_id != first.request_id, "an output of the first life could be taken for one of the second"
    changed = {"request_id": None, "output_ids": None}
    assert {**as_dict(first), **changed} == {**as_dict(second), **changed}
    assert first.params.seed is not None, "without a seed the second life would draw other tokens"


def as_dict(request: AddRequest) -> dict[str, Any]:
    return {name: getattr(request, name) for name in request.__struct_fields__}


async def test_what_was_cached_of_the_prompt_is_said_once(closing: list[Resubmission]) -> None:
    """The second life finds another part of it, which is nobody's hit."""
    engine = ScriptedEngineClient(script=lambda r: [b"a", Pause(), b"b"], num_cached_tokens=1)
    stream = over(engine, closing).submit(request("four", prompt_logprobs=1))
    await engine.wait_paused()
    first = await stream.next()
    assert (first.num_cached_tokens, len(first.prompt_logprobs or [])) == (1, 4)
    engine.die()
    engine.core.num_cached_tokens = 3
    engine.revive()
    await engine.wait_paused()
    engine.release()
    rest = await read(stream)
    assert (rest.num_cached_tokens, rest.num_cached_trunk_tokens, rest.prompt_logprobs) == (None, None, None)
    assert text_of(rest) == "b"


async def test_a_request_that_began_with_output_keeps_it(closing: list[Resubmission]) -> None:
    engine = Engine(dies_once_in("abcdef", after="abcd"))
    begun = request("ab")
    begun.output_ids = list(b"ab")
    output = await read(over(engine, closing).submit(begun))
    assert text_of(output) == "cdef"
    assert [r.output_ids for r in engine.requests] == [list(b"ab"), list(b"abcd")]


async def test_seeds_of_clients_are_kept_and_greedy_needs_none(closing: list[Resubmission]) -> None:
    engine = Engine(say("x"))
    resubmission = over(engine, closing)
    for number, params in enumerate(({"seed": 5}, {"temperature": 0.0})):
        await read(resubmission.submit(request(str(number), **params)))
    assert [r.params.seed for r in engine.requests] == [5, None]


async def test_an_end_that_was_asked_for_blames_nobody(closing: list[Resubmission]) -> None:
    engine = ScriptedEngineClient(script=lambda r: [b"a", Pause(), b"b"])
    stream = over(engine, closing).submit(request())
    for _ in range(5):
        await engine.wait_paused()
        engine.die("the engine was told to stop", is_crash=False)
        engine.revive()
    await engine.wait_paused()
    engine.release()
    assert text_of(await read(stream)) == "ab"


async def test_what_the_engine_gave_up_while_this_process_was_stopped_goes_on(closing: list[Resubmission]) -> None:
    engine = ScriptedEngineClient(script=lambda r: [b"a", Pause(), b"b"])
    stream = over(engine, closing).submit(request())
    for life in range(1, 5):
        await engine.wait_paused()
        [running] = engine.core.running
        expired = ErrorInfo("the gateway was silent", "lease_expired")
        engine.core.abort([running])
        engine._dispatch([RequestOutput(request_id=running, finish_reason=FinishReason.ERROR, error=expired)])
        await engine.wait_submitted(life + 1)
    await engine.wait_paused()
    engine.release()
    assert text_of(await read(stream)) == "ab"


async def test_other_errors_are_the_requests_own(closing: list[Resubmission]) -> None:
    engine = ScriptedEngineClient(script=say("x"))
    output = await read(over(engine, closing).submit(request(top_p=2.0)))
    assert output.error is not None
    assert len(engine.requests) == 1


# ---- pauses


async def test_a_paused_answer_leaves_the_engine_and_goes_on_where_it_stopped(closing: list[Resubmission]) -> None:
    engine = ScriptedEngineClient(script=lambda r: [b"a", Pause(), b"b", Pause(), b"c"], num_cached_tokens=1)
    resubmission = over(engine, closing)
    stream = resubmission.submit(request("xy"))
    for num_lives, text in enumerate(("a", "b"), 1):
        await engine.wait_paused()
        output = await stream.next()
        assert (text_of(output), output.num_cached_tokens) == (text, 1 if text == "a" else None)
        for _ in range(2):
            resubmission.pause("xy")
        assert (engine.num_running, len(engine.aborted)) == (0, num_lives)
        resubmission.go_on("xy")
        resubmission.go_on("xy")
        await engine.wait_submitted(num_lives + 1)
        await engine.wait_paused()
        engine.release()
    assert text_of(await read(stream)) == "c"
    assert [r.output_ids for r in engine.requests] == [[], list(b"a"), list(b"ab")]
    assert len({r.request_id for r in engine.requests}) == 3
    resubmission.pause("xy")
    resubmission.go_on("xy")


async def test_a_paused_answer_waits_for_no_engine_and_may_be_left(closing: list[Resubmission]) -> None:
    engine = ScriptedEngineClient(script=lambda r: [b"a", Pause(), b"b"])
    resubmission = over(engine, closing, patience_s=0.0)
    paused, waits, left = (resubmission.submit(request(name)) for name in ("paused", "waits", "left"))
    await engine.wait_paused(3)
    resubmission.pause("paused")
    resubmission.pause("left")
    engine.die()
    with pytest.raises(EngineDeadError):
        await read(waits)
    left.close()
    engine.revive()
    resubmission.go_on("paused")
    await engine.wait_paused()
    engine.release()
    assert text_of(await read(paused)) == "ab"
    assert len(engine.requests) == 4


async def test_an_answer_that_waits_for_an_engine_can_be_paused_and_goes_on_when_one_is_back(
    closing: list[Resubmission],
) -> None:
    engine = ScriptedEngineClient(script=lambda r: [b"a", Pause(), b"b"])
    resubmission = over(engine, closing)
    stream = resubmission.submit(request("x"))
    await engine.wait_paused()
    engine.die()
    resubmission.pause("x")
    engine.revive()
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(engine.requests) == 1
    engine.die()
    resubmission.go_on("x")
    engine.revive()
    await engine.wait_paused()
    engine.release()
    assert text_of(await read(stream)) == "ab"


async def test_a_suspect_stays_one_over_a_pause(closing: list[Resubmission]) -> None:
    """Two ran in two crashes; the one on trial is paused, so the other one has its turn, and neither runs beside it."""
    engine = ScriptedEngineClient(script=lambda r: [Pause(), b"x"])
    resubmission = over(engine, closing)
    streams = [resubmission.submit(request(name)) for name in "ab"]
    await engine.wait_paused(2)
    for num_paused in (2, 1):
        engine.die()
        engine.revive()
        await engine.wait_submitted(len(engine.requests) + num_paused)
        await engine.wait_paused(num_paused)
    assert [bytes(r.prompt_ids) for r in engine.requests] == [b"a", b"b", b"a", b"b", b"a"]
    resubmission.pause("a")
    await engine.wait_submitted(6)
    resubmission.go_on("a")
    await engine.wait_paused()
    assert [engine.num_running, bytes(engine.requests[-1].prompt_ids)] == [1, b"b"]
    engine.release()
    assert text_of(await read(streams[1])) == "x"
    await engine.wait_submitted(7)
    await engine.wait_paused()
    engine.release()
    assert text_of(await read(streams[0])) == "x"


async def test_a_paused_answer_fails_when_the_gateway_ends(closing: list[Resubmission]) -> None:
    engine = ScriptedEngineClient(script=lambda r: [b"a", Pause()])
    resubmission = over(engine, closing)
    stream = resubmission.submit(request("x"))
    await engine.wait_paused()
    resubmission.pause("x")
    await resubmission.close()
    with pytest.raises(EngineDeadError, match="shuts down"):
        await read(stream)


# ---- leaving, waiting, closing


async def test_nothing_is_resubmitted_for_a_reader_that_left_meanwhile(closing: list[Resubmission]) -> None:
    engine = ScriptedEngineClient(script=lambda r: [b"a", Pause()])
    resubmission = over(engine, closing)
    gone, stays = resubmission.submit(request("gone")), resubmission.submit(request("stays"))
    await engine.wait_paused(2)
    engine.die()
    gone.close()
    engine.revive()
    await engine.wait_paused()
    assert [bytes(r.prompt_ids) for r in engine.requests] == [b"gone", b"stays", b"stays"]
    stays.close()
    assert engine.num_running == 0


async def test_an_engine_that_stays_away_fails_what_waits_for_it(closing: list[Resubmission]) -> None:
    engine = ScriptedEngineClient(script=lambda r: [b"a", Pause()])
    stream = over(engine, closing, patience_s=0.0).submit(request())
    await engine.wait_paused()
    engine.die()
    with pytest.raises(EngineDeadError, match="did not come back within 0 s"):
        await read(stream)


async def test_closing_fails_what_waits_and_what_is_lost_later(closing: list[Resubmission]) -> None:
    engines = [ScriptedEngineClient(script=lambda r: [b"a", Pause()]) for _ in range(2)]
    for engine, is_lost_first in zip(engines, (True, False), strict=True):
        resubmission = over(engine, closing)
        stream = resubmission.submit(request())
        await engine.wait_paused()
        if is_lost_first:
            engine.die()
            await asyncio.sleep(0)
        await resubmission.close()
        if not is_lost_first:
            engine.die()
        with pytest.raises(EngineDeadError, match="shuts down"):
            await read(stream)


async def test_new_requests_are_refused_while_no_engine_is_there(closing: list[Resubmission]) -> None:
    resubmission = over(ScriptedEngineClient(ready=False), closing)
    with pytest.raises(EngineDeadError):
        resubmission.submit(request())


# ---- who is to blame


async def test_one_by_which_two_engines_died_fails_alone(closing: list[Resubmission]) -> None:
    """It is the only one that ran both times: others came between, or ended."""

    def script(request: AddRequest) -> list[Item]:
        return [b"ab", Die()] if bytes(request.prompt_ids) == b"poison" else [b"x", Pause(), b"y"]

    engine = Engine(script)
    resubmission = over(engine, closing)
    poison = await read(resubmission.submit(request("poison")))
    assert poison.error is not None
    assert (poison.error.code, bytes(poison.token_ids)) == ("request_crashes_engine", b"ab")
    assert engine.num_deaths == 2
    good = resubmission.submit(request("good"))
    await engine.wait_paused()
    engine.release()
    assert text_of(await read(good)) == "xy"


async def test_those_that_ran_beside_it_both_times_are_tried_and_go_on(closing: list[Resubmission]) -> None:
    def script(request: AddRequest) -> Iterator[Item]:
        name = bytes(request.prompt_ids)
        yield from name[:1]
        if name == b"poison":
            yield Die()
        elif not request.output_ids:
            yield Pause()
        yield from name[1:]

    engine = Engine(script)
    resubmission = over(engine, closing)
    good = {name: resubmission.submit(request(name)) for name in ("early", "later")}
    await engine.wait_paused(2)
    output = await read(resubmission.submit(request("poison")))
    assert output.error is not None
    assert (output.error.code, text_of(output)) == ("request_crashes_engine", "p")
    assert engine.num_deaths == 3, "of all together, of all together, of it alone"
    for name, stream in good.items():
        assert text_of(await read(stream)) == name


def running(engine: ScriptedEngineClient) -> list[AddRequest]:
    return [r.request for r in engine.core.running.values()]


async def test_a_suspect_that_leaves_lets_the_next_one_be_tried(closing: list[Resubmission]) -> None:
    engine = ScriptedEngineClient(script=lambda r: [Pause(), b"ok"])
    resubmission = over(engine, closing)
    streams = [resubmission.submit(request(name)) for name in "abc"]
    for _ in range(2):
        await engine.wait_paused(3)
        engine.die()
        engine.revive()
        await asyncio.sleep(0)
    for left in range(2):
        await engine.wait_paused()
        assert [bytes(r.prompt_ids) for r in running(engine)] == [b"abc"[left : left + 1]], "one suspect at a time"
        streams[left].close()
    await engine.wait_paused()
    engine.release()
    assert text_of(await read(streams[2])) == "ok"


def answer(num_crashes: int) -> Answer:
    made = Answer(request(), TokenStream("a", lambda _: None))
    made.num_crashes = num_crashes
    return made


@pytest.mark.parametrize(
    ("crashes", "trial", "poison", "suspects", "after"),
    [
        ([0], None, [], [], [1]),
        ([0, 0], None, [], [], [1, 1]),
        ([1], None, [0], [], [1]),
        ([1, 0], None, [0], [], [1, 0]),
        ([1, 1, 0], None, [], [0, 1], [2, 2, 1]),
        ([2, 1, 0], 0, [0], [], [2, 1, 0]),
        ([2, 2, 1], 1, [1], [], [2, 2, 1]),
        ([2, 2, 1], None, [0, 1], [], [2, 2, 1]),
    ],
)
def test_who_is_to_blame_for_a_crash(
    crashes: list[int], trial: int | None, poison: list[int], suspects: list[int], after: list[int]
) -> None:
    answers = [answer(number) for number in crashes]
    innocent = answer(1)
    verdict = judge({**dict.fromkeys(answers, True), innocent: False}, None if trial is None else answers[trial])
    assert [answers.index(a) for a in verdict.poison] == poison
    assert [answers.index(a) for a in verdict.suspects] == suspects
    assert [a.num_crashes for a in answers] == after
    assert verdict.others == [a for i, a in enumerate(answers) if i not in poison + suspects] + [innocent]
    assert innocent.num_crashes == 1


# ---- through the gateway


@pytest.mark.parametrize("stream", [True, False])
async def test_an_engine_that_dies_between_two_choices_is_not_noticed(tmp_path: Path, stream: bool) -> None:
    """One choice has ended, the other is in the middle of a character."""
    text = "früh oder spät"
    left = iter([Die()])

    def script(request: AddRequest) -> Iterator[Item]:
        if request.choice == 0:
            yield from b"done"
            return
        yield from text.encode()[:3]
        for _ in range(5):
            yield Pause(0.0)
        yield from itertools.islice(left, 1)
        yield from text.encode()[3:]

    engine = Engine(script, num_cached_tokens=2)
    async with serving(tmp_path, engine) as gateway:
        fields: dict[str, Any] = {"n": 2, "max_tokens": 100}
        if stream:
            chunks = await gateway.stream_chat(**fields, stream_options={"include_usage": True})
            assert [joined(chunks, i) for i in range(2)] == ["done", text]
            assert [finish_reasons(chunks, i) for i in range(2)] == [["stop"], ["stop"]]
            usage = chunks[-1]["usage"]
        else:
            answer = (await gateway.chat(**fields)).json()
            assert [c["message"]["content"] for c in answer["choices"]] == ["done", text]
            usage = answer["usage"]
        assert engine.num_deaths == 1
    assert usage["completion_tokens"] == len("done") + len(text.encode()) + 2
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2
    assert len([r for r in engine.requests if r.choice == 0]) == 1, "a choice that had ended is not asked for again"


async def test_a_beam_search_outlives_its_engine(tmp_path: Path) -> None:
    async def answer(engine: ScriptedEngineClient, path: Path) -> Any:
        async with serving(path, engine) as gateway:
            answer = (await gateway.chat(use_beam_search=True, n=2, max_tokens=6, temperature=0)).json()
            deaths.append(getattr(engine, "num_deaths", 0))
            return answer

    left, deaths = iter([Die()]), list[int]()

    def dies(request: AddRequest) -> Iterator[Item]:
        if len(request.prompt_ids) % 3 == 0:
            yield from itertools.islice(left, 1)
        yield b"ok"

    want = await answer(ScriptedEngineClient(script=say("ok")), tmp_path / "a")
    got = await answer(Engine(dies), tmp_path / "b")
    assert deaths == [0, 1]
    assert (got["choices"], got["usage"]) == (want["choices"], want["usage"])


# ---- what has begun elsewhere


async def test_what_has_begun_elsewhere_waits_for_an_engine(closing: list[Resubmission]) -> None:
    engine = ScriptedEngineClient(script=say("abcd"), ready=False)
    resubmission = over(engine, closing)
    begun = request("x")
    begun.output_ids = list(b"ab")
    stream = SubmitterOfAccepted(resubmission).submit(begun)
    with pytest.raises(EngineDeadError):
        resubmission.submit(request("y"))
    engine.revive()
    assert text_of(await read(stream)) == "cd"
    assert [r.output_ids for r in engine.requests] == [list(b"ab")]


async def test_it_fails_where_none_comes(closing: list[Resubmission]) -> None:
    resubmission = over(ScriptedEngineClient(ready=False), closing, patience_s=0.01)
    with pytest.raises(EngineDeadError, match="did not come back"):
        await read(resubmission.submit_accepted(request()))


async def test_it_is_forgotten_when_its_reader_goes_and_refused_at_the_end(closing: list[Resubmission]) -> None:
    engine = ScriptedEngineClient(script=say("ab"), ready=False)
    resubmission = over(engine, closing)
    with resubmission.submit_accepted(request()):
        assert resubmission.num_answers == 1
    assert resubmission.num_answers == 0
    await resubmission.close()
    with pytest.raises(EngineDeadError):
        resubmission.submit_accepted(request("z"))


def test_a_seed_is_fixed_where_something_is_drawn() -> None:
    assert with_seed(SamplingParams(temperature=1.0)).seed is not None
    assert with_seed(SamplingParams(temperature=1.0, seed=0)).seed == 0
    greedy = SamplingParams(temperature=0.0)
    assert with_seed(greedy) is greedy
