import asyncio
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from engine.errors import EngineDeadError
from engine.protocol import END, AddRequest, FinishReason, PinTrunk, RequestOutput, Scope
from engine.sampling_params import SamplingParams
from engine.token_stream import TokenStream
from tests.scripted_engine import (
    IM_END,
    IM_START,
    Die,
    Fail,
    Pause,
    ScriptedEngineClient,
    byte_model_info,
    make_byte_model,
    say,
    script_from_json,
)


def request(text: str = "abc", request_id: str = "r", **params: object) -> AddRequest:
    wanted = {"max_tokens": None, "eos_token_ids": (IM_END,), **params}
    return AddRequest(
        request_id=request_id,
        prompt_ids=list(text.encode()),
        params=SamplingParams(**wanted),  # type: ignore[arg-type]
        scopes=[Scope(END, b"test")],
    )


async def read(stream: TokenStream) -> RequestOutput:
    whole = await stream.next()
    async for more in stream:
        whole.merge(more)
    return whole


async def test_echo_ends_as_a_model_does() -> None:
    engine = ScriptedEngineClient(num_cached_tokens=2)
    with engine.submit(request()) as stream:
        whole = await read(stream)
    assert whole.token_ids == [*b"abc", IM_END]
    assert (whole.finish_reason, whole.stop_token_id, whole.num_cached_tokens) == (FinishReason.STOP, IM_END, 2)
    assert (await engine.stats()).blocks.referenced == 0


async def test_limits_and_logprobs() -> None:
    engine = ScriptedEngineClient(script=say("hello"))
    with engine.submit(request(max_tokens=2, logprobs=1, prompt_logprobs=0)) as stream:
        whole = await read(stream)
    assert (whole.token_ids, whole.finish_reason) == ([*b"he"], FinishReason.LENGTH)
    assert whole.logprobs is not None
    assert [p.top for p in whole.logprobs] == [[(ord("h"), -0.5)], [(ord("e"), -0.5)]]
    assert whole.prompt_logprobs is not None
    assert len(whole.prompt_logprobs) == 3


async def test_order_is_forced_by_release() -> None:
    engine = ScriptedEngineClient(script=lambda r: [b"He", Pause(), b"llo"])
    with engine.submit(request(request_id="a")) as a, engine.submit(request(request_id="b")) as b:
        await engine.wait_paused(2)
        assert [(await a.next()).token_ids, (await b.next()).token_ids] == [[*b"He"], [*b"He"]]
        engine.release("b")
        assert (await read(b)).token_ids == [*b"llo", IM_END]
        assert engine.num_running == 1
    assert engine.aborted == ["a"]
    await engine.wait_idle()


async def test_failure_refusal_and_death() -> None:
    engine = ScriptedEngineClient(byte_model_info(max_model_len=8), script=lambda r: [1, Fail("broken")])
    failed = await read(engine.submit(request()))
    assert (failed.token_ids, failed.finish_reason, failed.error and failed.error.message) == ([1], "error", "broken")
    refused = await read(engine.submit(request("12345678")))
    assert refused.error is not None
    assert refused.error.code == "context_length_exceeded"

    engine = ScriptedEngineClient(script=lambda r: [1, Die()])
    with pytest.raises(EngineDeadError):
        await read(engine.submit(request()))
    with pytest.raises(EngineDeadError):
        engine.submit(request())
    ready = asyncio.create_task(engine.wait_ready())
    engine.revive()
    await ready
    assert engine.info == byte_model_info()


def test_a_script_in_json_may_depend_on_the_request() -> None:
    script = script_from_json(b'[{"by_choice": [[{"echo": 0.5}], [65, {"pause": null}, "b"]]}, "."]')
    chat = request()
    chat.prompt_ids = [IM_START, *b"user\nno", IM_END, IM_START, *b"user\nhi", IM_END, IM_START, *b"assistant\n"]
    assert list(script(chat)) == [ord("h"), Pause(0.5), ord("i"), Pause(0.5), b"."]
    chat.choice = 1
    assert list(script(chat)) == [65, Pause(), b"b", b"."]


async def test_pins_come_again_after_a_death() -> None:
    engine = ScriptedEngineClient()
    scopes = [Scope(END, b"assistant")]
    assert (await engine.pin("t", [1, 2], scopes)).state == "pinned"
    engine.die()
    assert engine.trunks == []
    engine.revive()
    assert engine.trunks == [PinTrunk("t", [1, 2], scopes)]
    await engine.unpin("t")
    assert engine.trunks == []
    await engine.close()


def test_byte_model_needs_no_torch_and_maps_bytes_to_themselves(tmp_path: Path) -> None:
    model = make_byte_model(tmp_path / "m")
    tokenizer = Tokenizer.from_file(str(model.tokenizer_path))
    every_byte = "".join(map(chr, range(0x250)))
    assert tokenizer.encode(every_byte).ids == list(every_byte.encode())
    assert tokenizer.encode("<|im_end|>").ids == [IM_END]
    assert tokenizer.decode(list("été".encode())) == "été"
    assert model.chat_template is not None
    assert sys.modules.get("tests.scripted_engine") is not None
