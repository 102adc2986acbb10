"""The Responses API over HTTP, with a real server on a real port, a real session store and a scripted engine."""

import asyncio
import json
import re

import openai
import pytest
from openai.types.responses import Response, ResponseItemList

from app.ids import try_parse_response_id
from tests.app.clock import Clock
from tests.app.session_store import on_both_servers
from tests.app.stateful_gateway import (
    KEY_A,
    KEY_B,
    SUPPORT,
    TERMINAL,
    assert_contiguous,
    body,
    create,
    deltas,
    output_text,
    prompt_of,
    receive,
    resume,
    running_gateway,
    send_create,
    sse_events,
    stream,
    validate_event,
)
from tests.scripted_engine import Die, Fail, Pause, say

HELLO = "Hällo!"


@pytest.fixture
async def gateway(store):
    async with running_gateway(store, say(HELLO), num_cached_tokens=4) as gateway:
        yield gateway


def error_of(answer, status, code=None):
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    if code is not None:
        assert error["code"] == code
    return error


# ---- create


async def test_a_response_says_everything_the_sdk_expects(http):
    d = await create(http, "Hi", metadata={"a": "b\u2028"}, user="u")
    Response.model_validate(d)
    assert (d["status"], d["error"], d["incomplete_details"]) == ("completed", None, None)
    assert output_text(d) == HELLO
    assert d["output"][0]["status"] == "completed"
    assert d["usage"] == {
        "input_tokens": len("XuserX\nHiX\nXassistant\n") - 1,
        "input_tokens_details": {
            "cached_tokens": 4,
            "cached_tokens_details": {"trunk": 0, "history": 4, "host": 0},
            "cache_write_tokens": 0,
        },
        "output_tokens": len(HELLO.encode()) + 1,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": d["usage"]["input_tokens"] + d["usage"]["output_tokens"],
    }
    assert (d["metadata"], d["user"], d["store"]) == ({"a": "b\u2028"}, "u", True)
    assert (await http.get(f"/v1/responses/{d['id']}")).json() == d


async def test_events_come_in_openais_order_and_agree(http):
    events = await stream(http, "Hi")
    for event in events:
        validate_event(event)
    assert_contiguous(events)
    kinds = [e["type"].removeprefix("response.") for e in events]
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * kinds.count("output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    final = events[-1]["response"]
    assert deltas(events) == HELLO == output_text(final) == events[-4]["text"] == events[-3]["part"]["text"]
    assert {e["item_id"] for e in events if "item_id" in e} == {final["output"][0]["id"]}
    assert {e["response"]["id"] for e in events if "response" in e} == {final["id"]}


async def test_a_length_limit_makes_it_incomplete(http):
    d = await create(http, max_output_tokens=3)
    assert (d["status"], d["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (d["usage"]["output_tokens"], d["output"][0]["status"]) == (3, "incomplete")


async def test_an_answer_without_text_is_a_message_without_text(store):
    async with running_gateway(store, say("")) as gateway, gateway.http() as http:
        events = await stream(http)
        assert [e["type"] for e in events][2:4] == ["response.output_item.added", "response.content_part.added"]
        assert output_text(events[-1]["response"]) == ""
        assert events[-1]["response"]["status"] == "completed"


async def test_log_probabilities_come_where_they_were_asked_for(http):
    events = await stream(http, "Hi", top_logprobs=2, include=["message.output_text.logprobs"])
    for event in events:
        validate_event(event)
    entries = [entry for e in events if e["type"].endswith("text.delta") for entry in e["logprobs"]]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == HELLO
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == entries


@pytest.mark.parametrize(
    "given",
    [
        "Hi",
        [{"role": "user", "content": "Hi"}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
        [{"role": "user", "content": [{"type": "input_text", "text": "H"}, {"type": "input_text", "text": "i"}]}],
    ],
)
async def test_all_forms_of_input_make_one_prompt(gateway, http, given):
    await create(http, given)
    assert prompt_of(gateway.engine) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


async def test_output_items_can_be_sent_back(gateway, http):
    first = await create(http, "Hi")
    await create(http, [{"role": "user", "content": "Hi"}, *first["output"], {"role": "user", "content": "Go on."}])
    assert f"<|im_start|>assistant\n{HELLO}<|im_end|>" in prompt_of(gateway.engine)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": 3}, "input"),
        ({"input": [{}]}, "input[0].role"),
        ({"input": [[]]}, "input[0]"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": []}]}, "input[0].content"),
        ({"input": [{"type": "nope"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": True}, "max_output_tokens"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"metadata": {str(i): "v" for i in range(17)}}, "metadata"),
        ({"metadata": {"k": 1}}, "metadata.k"),
        ({"metadata": []}, "metadata"),
        ({"n": 2}, "n"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"truncation": "always"}, "truncation"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"conversation": "conv_1", "store": False}, "conversation"),
        ({"conversation": "conv_1", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": {"name": "x"}}, "conversation"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"reasoning": "high"}, "reasoning"),
        ({"reasoning": []}, "reasoning"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": "low"}, "text"),
        ({"prompt": {"id": "everyones"}, "model": "byte-model:support"}, "prompt"),
        ({"include": [1]}, "include[0]"),
        ({"include": ["x"] * 65}, "include"),
        ({"prompt": {"id": "support", "variables": {"a": "b"}}}, "prompt.variables"),
        ({"prompt": {"id": "support", "variables": {"a": 1}}}, "prompt.variables.a"),
        ({"prompt": {"id": "support", "variables": {"a": {"type": "input_image"}}}}, "prompt.variables"),
        ({"prompt": {"id": "support", "version": 3}}, "prompt.version"),
        ({"chat_template_kwargs": {"enable_thinking": None}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs"),
        ({"background": True, "store": False}, "background"),
        ({"temperature": -1}, "temperature"),
    ],
)
async def test_what_is_wrong_or_not_built_is_refused_by_name(gateway, http, change, param):
    answer = await http.post("/v1/responses", json=body() | change)
    assert error_of(answer, 400)["param"] == param
    assert gateway.engine.requests == []


async def test_unknown_names_and_harmless_fields_are_taken(http):
    await create(http, reasoning={"effort": None}, tools=[], truncation="disabled",
                 text={"format": {"type": "text"}, "verbosity": "medium"},
                 include=["reasoning.encrypted_content"], no_such_field=1, tool_choice="auto",
                 return_token_ids=False, model="byte-model:support", prompt={"id": "support"})  # fmt: skip


async def test_an_unknown_model_is_404(http):
    error_of(await http.post("/v1/responses", json=body(model="nope")), 404, "model_not_found")


async def test_a_prompt_that_can_never_fit_is_refused_before_anything_is_stored(gateway, http):
    error_of(await http.post("/v1/responses", json=body("x" * 5000)), 400, "context_length_exceeded")
    assert await gateway.sessions._redis.keys("{s:*") == []  # the tenant's counters stay


# ---- chains


async def test_a_chain_goes_on_with_the_ids_the_engine_gave(gateway, http):
    """prompt(t+1) starts with prompt(t) + output(t)."""
    a = await create(http, "My name is Ada.")
    b = await create(http, "What is my name?", previous_response_id=a["id"])
    await create(http, "And again?", previous_response_id=b["id"])
    first, second, third = [request.prompt_ids for request in gateway.engine.requests]
    output = [*HELLO.encode(), 257]
    assert second[: len(first) + len(output)] == first + output
    assert third[: len(second) + len(output)] == second + output
    assert b["previous_response_id"] == a["id"]
    assert a["id"][:27] == b["id"][:27]


async def test_branches_do_not_see_each_other(gateway, http):
    a = await create(http, "Green.")
    b = await create(http, "Tell me.", previous_response_id=a["id"])
    await create(http, "Red. " * 5, previous_response_id=a["id"])
    c = await create(http, "Tell me.", previous_response_id=a["id"])
    assert gateway.engine.requests[1].prompt_ids == gateway.engine.requests[3].prompt_ids
    assert b["id"] != c["id"]
    assert (await http.get(f"/v1/responses/{a['id']}")).json() == a


async def test_instructions_are_not_inherited_and_a_prompt_is(gateway, http):
    a = await create(http, "Hi", instructions="Be a pirate.", prompt={"id": "support"})
    assert f"{SUPPORT}<|im_end|>" in prompt_of(gateway.engine)
    assert "Be a pirate." in prompt_of(gateway.engine)
    b = await create(http, "Hi", previous_response_id=a["id"])
    assert f"{SUPPORT}<|im_end|>" in prompt_of(gateway.engine)
    assert "pirate" not in prompt_of(gateway.engine)
    assert (a["instructions"], b["instructions"]) == ("Be a pirate.", None)
    assert a["prompt"]["id"] == b["prompt"]["id"] == "support"
    await create(http, "Hi", previous_response_id=b["id"], prompt={"id": "everyones"})
    assert "everyone's helper" in prompt_of(gateway.engine)
    assert SUPPORT not in prompt_of(gateway.engine)


async def test_an_assistant_by_model_name_is_the_same_prompt(gateway, http):
    await create(http, "Hi", prompt={"id": "support"})
    await create(http, "Hi", model="byte-model:support")
    assert gateway.engine.requests[0].prompt_ids == gateway.engine.requests[1].prompt_ids
    assert gateway.engine.requests[0].scopes == gateway.engine.requests[1].scopes


async def test_a_response_names_the_version_of_its_assistant_and_takes_no_other(http):
    first = await create(http, "Hi", prompt={"id": "support"})
    version = first["prompt"]["version"]
    assert re.fullmatch("[0-9a-f]{16}", version)
    again = await create(http, "Hi", prompt={"id": "support", "version": version}, model="byte-model:support")
    assert again["prompt"] == {"id": "support", "version": version, "variables": None}
    for asked in (body(prompt={"id": "support", "version": "1"}),
                  body(prompt={"id": "support", "version": "1"}, model="byte-model:support")):  # fmt: skip
        error = error_of(await http.post("/v1/responses", json=asked), 404, "prompt_not_found")
        assert error["param"] == "prompt.version"
        assert version in error["message"]
    child = await create(http, "And?", previous_response_id=first["id"])
    assert child["prompt"]["version"] == version


async def test_an_unknown_assistant_is_404(http):
    answer = await http.post("/v1/responses", json=body(prompt={"id": "nope"}))
    assert error_of(answer, 404, "prompt_not_found")["param"] == "prompt"


@pytest.mark.parametrize("previous", ["resp_0", "resp_" + "0" * 44, "", "x\r\n"])
async def test_an_unknown_parent_starts_nothing(gateway, http, previous):
    answer = await http.post("/v1/responses", json=body(previous_response_id=previous))
    assert error_of(answer, 400, "previous_response_not_found")["param"] == "previous_response_id"
    assert gateway.engine.requests == []


async def test_a_running_parent_is_409_and_its_siblings_may_start(store):
    async with running_gateway(store, lambda r: [b"a", Pause(), b"b"]) as gateway, gateway.http() as http:
        first = await create(http, background=True)
        await gateway.engine.wait_paused()
        answer = await http.post("/v1/responses", json=body(previous_response_id=first["id"]))
        error_of(answer, 409, "response_in_progress")
        gateway.engine.release()
        await gateway.wait_no_runs()
        siblings = [await create(http, previous_response_id=first["id"], background=True) for _ in range(2)]
        await gateway.engine.wait_paused(2)
        assert {s["status"] for s in siblings} == {"in_progress"}
        gateway.engine.release()
        await gateway.wait_no_runs()


@on_both_servers
async def test_a_conversation_survives_a_restart_of_everything(store):
    async with running_gateway(store, say("one")) as gateway, gateway.http() as http:
        a = await create(http, "My name is Ada.")
        first = gateway.engine.requests[0].prompt_ids
    await store.kill()
    await store.start()
    async with running_gateway(store, say("two"), owner="gateway-2") as gateway, gateway.http() as http:
        assert (await http.get(f"/v1/responses/{a['id']}")).json() == a
        b = await create(http, "What is my name?", previous_response_id=a["id"])
        assert gateway.engine.requests[0].prompt_ids[: len(first) + 4] == [*first, *b"one", 257]
        assert output_text(b) == "two"


async def test_a_response_that_its_gateway_left_behind_is_found_failed(store):
    script = lambda r: [b"a", Pause()]  # noqa: E731
    async with running_gateway(store, script) as gateway, gateway.http() as http:
        d = await create(http, background=True)
        await gateway.engine.wait_paused()
        running = await gateway.sessions.find("a", try_parse_response_id(d["id"]))
    # as after a kill -9: the node says that it runs, and nobody holds its lease
    async with running_gateway(store, script, owner="gateway-2") as gateway, gateway.http() as http:
        await gateway.sessions.create(running)
        await gateway.sessions._redis.delete(*await gateway.sessions._redis.keys("*:o:*"))
        found = (await http.get(f"/v1/responses/{d['id']}")).json()
        assert found["status"] == "failed"
        Response.model_validate(found)


# ---- streams that are cut


@on_both_servers
async def test_b36_a_cut_stream_is_resumed_exactly(store):
    text = "The lighthouse keeper's storm. " * 4
    async with running_gateway(store, say(text)) as gateway, gateway.http() as http:
        for most in (1, 2, 4, 5, 9, 25):
            async with http.stream("POST", "/v1/responses", json=body(stream=True)) as answer:
                seen = await sse_events(answer, most)
            response_id = seen[0]["response"]["id"]
            events = seen + await resume(http, response_id, seen[-1]["sequence_number"])
            assert_contiguous(events)
            assert events[-1]["type"] in TERMINAL
            stored = (await http.get(f"/v1/responses/{response_id}")).json()
            assert deltas(events) == output_text(stored) == text
            assert stored == events[-1]["response"]


@on_both_servers
async def test_b36_two_listeners_see_the_same(store):
    async with running_gateway(store, lambda r: [b"a", Pause(), b"b"]) as gateway, gateway.http() as http:
        d = await create(http, background=True)
        await gateway.engine.wait_paused()
        listeners = [asyncio.create_task(resume(http, d["id"], after)) for after in (-1, -1, 1)]
        gateway.engine.release()
        first, second, third = await asyncio.gather(*listeners)
        assert first == second
        assert first[2:] == third
        assert_contiguous(first)


async def test_a_finished_answer_is_replayed_until_ten_minutes_after_its_end(store):
    clock = Clock(0.0)
    async with running_gateway(store, say("hello"), clock=clock) as gateway, gateway.http() as http:
        events = await stream(http)
        response_id = events[-1]["response"]["id"]
        clock.now = 599.0
        for after in (-1, 0, 3, len(events) - 2, len(events) - 1, 99_999):
            assert await resume(http, response_id, after) == events[after + 1 :]
        clock.now = 601.0
        assert await resume(http, response_id, 3) == events[4:], "from Redis"
        (log_key,) = await gateway.sessions._redis.keys("*:e:*")
        assert 590 < await gateway.sessions._redis.ttl(log_key) <= 600
        await gateway.sessions._redis.delete(log_key)
        answer = await http.get(f"/v1/responses/{response_id}?stream=true")
        error_of(answer, 404, "response_not_found")
        assert (await http.get(f"/v1/responses/{response_id}")).status_code == 200


async def test_a_reader_is_told_when_the_events_it_waits_for_are_held_no_more(store):
    """As where the response was deleted while it was read: the same error as for whoever comes later."""
    async with running_gateway(store, lambda r: [b"a", Pause(), b"b"]) as gateway, gateway.http() as http:
        d = await create(http, background=True)
        await gateway.engine.wait_paused()
        async with http.stream("GET", f"/v1/responses/{d['id']}?stream=true") as answer:
            lines = answer.aiter_lines()
            while "output_text.delta" not in await anext(lines):
                pass
            await gateway.log.drop(d["id"])
            (event,) = [json.loads(line[6:]) async for line in lines if line.startswith('data: {"type":"error"')]
        validate_event(event)
        assert (event["code"], event["sequence_number"]) == ("response_not_found", 0)
        error_of(await http.get(f"/v1/responses/{d['id']}?stream=true"), 404, "response_not_found")
        gateway.engine.release()
        await gateway.wait_no_runs()


@pytest.mark.parametrize("after", ["-2", "x", "1.5", "1e3", "", "9" * 30])
async def test_an_odd_place_to_resume_from_is_refused(http, after):
    d = await create(http)
    answer = await http.get(f"/v1/responses/{d['id']}?stream=true&starting_after={after}")
    assert error_of(answer, 400)["param"] == "starting_after"


async def test_a_stored_response_runs_to_its_end_without_its_client(store):
    async with running_gateway(store, lambda r: [b"a", Pause(), b"b"]) as gateway, gateway.http() as http:
        async with http.stream("POST", "/v1/responses", json=body(stream=True)) as answer:
            (created,) = await sse_events(answer, 1)
        waiting = asyncio.create_task(create(http, "not streamed"))
        await gateway.engine.wait_paused(2)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        response_id = created["response"]["id"]
        running = (await http.get(f"/v1/responses/{response_id}")).json()
        assert (running["status"], output_text(running)) == ("in_progress", "a")
        gateway.engine.release()
        await gateway.wait_no_runs()
        assert gateway.engine.aborted == []
        assert output_text((await http.get(f"/v1/responses/{response_id}")).json()) == "ab"


@pytest.mark.parametrize("is_stream", [True, False])
async def test_an_unstored_response_ends_with_its_client(store, is_stream):
    async with running_gateway(store, lambda r: [b"a", Pause()]) as gateway:
        async with gateway.http() as http:
            if is_stream:
                async with http.stream("POST", "/v1/responses", json=body(stream=True, store=False)) as answer:
                    await sse_events(answer, 5)
            else:
                waiting = asyncio.create_task(http.post("/v1/responses", json=body(store=False)))
                await gateway.engine.wait_paused()
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
        await gateway.engine.wait_aborted()
        await gateway.wait_no_runs()
        assert await gateway.sessions._redis.keys("{s:*") == []  # the tenant's counters stay


async def test_an_unstored_response_cannot_be_come_back_to(http):
    events = await stream(http, store=False)
    assert_contiguous(events)
    d = events[-1]["response"]
    assert (output_text(d), d["store"]) == (HELLO, False)
    for path in ("", "?stream=true", "/input_items"):
        error_of(await http.get(f"/v1/responses/{d['id']}{path}"), 404, "response_not_found")
    answer = await http.post("/v1/responses", json=body(previous_response_id=d["id"]))
    error_of(answer, 400, "previous_response_not_found")


# ---- cancel, delete, items, background


@pytest.mark.parametrize("attached", [True, False])
async def test_cancel_keeps_the_text_so_far(store, attached):
    async with running_gateway(store, lambda r: [b"part", Pause(), b"never"]) as gateway, gateway.http() as http:
        async with http.stream("POST", "/v1/responses", json=body(stream=True)) as answer:
            if attached:
                reading = asyncio.create_task(sse_events(answer))
                await gateway.engine.wait_paused()
                response_id = gateway.service.runs.ids[0]
            else:
                seen = await sse_events(answer, 5)
                response_id = seen[0]["response"]["id"]
                await answer.aclose()
            cancelled = (await http.post(f"/v1/responses/{response_id}/cancel")).json()
            assert gateway.engine.num_running == 0
            if attached:
                events = await reading
                assert_contiguous(events)
                assert (events[-1]["type"], events[-1]["response"]) == ("response.incomplete", cancelled)
        assert (cancelled["status"], output_text(cancelled)) == ("cancelled", "part")
        Response.model_validate(cancelled)
        assert (await http.get(f"/v1/responses/{response_id}")).json() == cancelled
        assert (await http.post(f"/v1/responses/{response_id}/cancel")).json() == cancelled
        child = await create(http, "Go on.", previous_response_id=response_id, background=True)
        assert "assistant\npart<|im_end|>" in prompt_of(gateway.engine)
        await http.post(f"/v1/responses/{child['id']}/cancel")


async def test_cancel_at_any_moment_ends_the_run(store):
    async with running_gateway(store, lambda r: [*b"some text", Pause()]) as gateway, gateway.http() as http:
        for turns in range(12):
            d = await create(http, background=True)
            for _ in range(turns):
                await asyncio.sleep(0)
            first, second = await asyncio.gather(*(http.post(f"/v1/responses/{d['id']}/cancel") for _ in range(2)))
            assert first.json()["status"] == second.json()["status"] == "cancelled"
            assert (await http.get(f"/v1/responses/{d['id']}")).json()["status"] == "cancelled"
            assert (gateway.engine.num_running, gateway.service.num_running) == (0, 0)


async def test_cancelling_what_has_ended_changes_nothing(http):
    d = await create(http)
    assert (await http.post(f"/v1/responses/{d['id']}/cancel")).json() == d


async def test_a_background_response_goes_on_without_a_client(store):
    async with running_gateway(store, lambda r: [b"a", Pause(), b"b"]) as gateway, gateway.http() as http:
        d = await create(http, background=True)
        assert (d["status"], d["background"]) == ("in_progress", True)
        await gateway.engine.wait_paused()
        gateway.engine.release()
        await gateway.wait_no_runs()
        assert (await http.get(f"/v1/responses/{d['id']}")).json()["status"] == "completed"


async def test_delete_leaves_nothing(gateway, http):
    d = await create(http)
    answer = await http.delete(f"/v1/responses/{d['id']}")
    assert answer.json() == {"id": d["id"], "object": "response", "deleted": True}
    for method, path in (("GET", ""), ("GET", "?stream=true"), ("GET", "/input_items"), ("POST", "/cancel"),
                         ("DELETE", "")):  # fmt: skip
        error_of(await http.request(method, f"/v1/responses/{d['id']}{path}"), 404, "response_not_found")
    answer = await http.post("/v1/responses", json=body(previous_response_id=d["id"]))
    error_of(answer, 400, "previous_response_not_found")
    assert await gateway.sessions._redis.keys("{s:*") == []  # the tenant's counters stay
    assert gateway.near.num_answers == 0


async def test_delete_ends_a_running_response(store):
    async with running_gateway(store, lambda r: [b"a", Pause()]) as gateway, gateway.http() as http:
        d = await create(http, background=True)
        await gateway.engine.wait_paused()
        async with http.stream("GET", f"/v1/responses/{d['id']}?stream=true") as answer:
            reading = asyncio.create_task(sse_events(answer))
            assert (await http.delete(f"/v1/responses/{d['id']}")).status_code == 200
            assert gateway.engine.num_running == gateway.service.num_running == 0
            assert await gateway.sessions._redis.keys("{s:*") == []  # the tenant's counters stay
            await reading  # it ends, wherever it was


async def test_input_items_are_listed_in_pages(http):
    d = await create(http, [{"role": "user", "content": f"Number {i}."} for i in range(3)])
    url = f"/v1/responses/{d['id']}/input_items"
    whole = (await http.get(url)).json()
    ResponseItemList.model_validate(whole)
    assert [i["content"][0]["text"] for i in whole["data"]] == ["Number 2.", "Number 1.", "Number 0."]
    first = (await http.get(url + "?order=asc&limit=2")).json()
    assert (first["has_more"], first["data"][0]["content"][0]) == (
        True,
        {"type": "input_text", "text": "Number 0."},
    )
    rest = (await http.get(url + f"?order=asc&limit=2&after={first['last_id']}")).json()
    assert ([i["content"][0]["text"] for i in rest["data"]], rest["has_more"]) == (["Number 2."], False)
    for query in ("limit=0", "limit=101", "limit=x", "order=up", "after=nope"):
        error_of(await http.get(f"{url}?{query}"), 400)


# ---- failures


async def test_b19_a_failure_after_the_200_ends_with_an_error(store):
    async with running_gateway(store, lambda r: [*b"abc", Fail("the batch failed")]) as gateway, gateway.http() as http:
        events = await stream(http)
        assert_contiguous(events)
        for event in events:
            validate_event(event)
        last = events[-1]
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert last["response"]["error"]["message"]
        assert "Traceback" not in str(last)
        stored = (await http.get(f"/v1/responses/{last['response']['id']}")).json()
        assert (stored["status"], output_text(stored)) == ("failed", "abc")
        assert stored["output"][0]["status"] == "incomplete"
        assert gateway.service.num_running == 0


async def test_b19_a_failure_without_a_stream_is_an_error(store):
    async with running_gateway(store, lambda r: [*b"abc", Die()]) as gateway, gateway.http() as http:
        for fields in ({}, {"store": False}):
            answer = asyncio.create_task(http.post("/v1/responses", json=body(**fields)))
            await gateway.engine.wait_for(lambda: not gateway.engine.is_ready)
            error_of(await http.post("/v1/responses", json=body()), 503, "engine_unavailable")
            gateway.engine.revive()  # and dies of it again
            error_of(await answer, 500, "request_crashes_engine")
            gateway.engine.revive()


async def test_all_streams_go_on_when_the_engine_dies(store):
    async with running_gateway(store, lambda r: [b"a", Pause(), b"b"]) as gateway, gateway.http() as http:
        streams = [asyncio.create_task(stream(http, store=i % 2 == 0)) for i in range(6)]
        await gateway.engine.wait_paused(6)
        gateway.engine.die()
        gateway.engine.revive()
        await gateway.engine.wait_paused(6)
        gateway.engine.release()
        for events in await asyncio.gather(*streams):
            assert events[-1]["type"] == "response.completed"
            assert "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta") == "ab"
            assert events[-1]["response"]["usage"]["output_tokens"] == 3
            assert_contiguous(events)
        await gateway.wait_no_runs()


@on_both_servers
async def test_b39_without_a_session_store_new_state_is_503_and_unstored_answers_go_on(store):
    async with running_gateway(store, say("ok")) as gateway, gateway.http() as http:
        d = await create(http)
        await store.kill()
        answer = await http.post("/v1/responses", json=body())
        error_of(answer, 503, "session_store_unavailable")
        assert int(answer.headers["Retry-After"]) > 0
        error_of(await http.get(f"/v1/responses/{d['id']}"), 503, "session_store_unavailable")
        assert output_text(await create(http, store=False)) == "ok"
        await store.start()
        assert (await http.get(f"/v1/responses/{d['id']}")).json() == d


@on_both_servers
async def test_b39_an_answer_that_ends_while_the_store_restarts_is_stored(store):
    async with running_gateway(store, lambda r: [b"a", Pause(), b"b"]) as gateway, gateway.http() as http:
        reading = asyncio.create_task(stream(http))
        await gateway.engine.wait_paused()
        await store.kill()
        gateway.engine.release()
        await gateway.engine.wait_idle()
        await store.start()
        events = await reading
        assert events[-1]["type"] == "response.completed"
        assert (await http.get(f"/v1/responses/{events[-1]['response']['id']}")).json() == events[-1]["response"]


async def test_closing_the_service_leaves_what_runs_to_others(store):
    async with running_gateway(store, lambda r: [b"a", Pause()]) as gateway, gateway.http() as http:
        d = await create(http, background=True)
        await gateway.engine.wait_paused()
        await gateway.service.close()
        found = (await http.get(f"/v1/responses/{d['id']}")).json()
        assert found["status"] == "in_progress"
        assert await gateway.sessions._redis.keys("*:o:*") == []
        assert (gateway.service.num_running, gateway.engine.num_running) == (0, 0)
        error_of(await http.post("/v1/responses", json=body()), 503, "shutting_down")


async def test_a_renewal_on_its_way_does_not_bring_back_a_lease_that_is_given_up(store, monkeypatch):
    async with running_gateway(store, lambda r: [b"a", Pause()]) as gateway, gateway.http() as http:
        renew, on_its_way, may_arrive = gateway.sessions.renew_leases, asyncio.Event(), asyncio.Event()
        renewals = []

        async def arrive(ids, **said):
            await may_arrive.wait()
            return await renew(ids, **said)

        async def renew_slowly(ids, **said):
            renewals.append(asyncio.create_task(arrive(ids, **said)))
            on_its_way.set()
            return await asyncio.shield(renewals[-1])  # as a command that Redis has been sent already

        monkeypatch.setattr(gateway.sessions, "renew_leases", renew_slowly)
        await create(http, background=True)
        gateway.service.runs.look_at_leases()
        await on_its_way.wait()
        closing = asyncio.create_task(gateway.service.close())
        await gateway.wait_no_runs()
        may_arrive.set()
        await asyncio.gather(closing, *renewals)
        assert await gateway.sessions._redis.keys("*:o:*") == []


async def test_no_renewal_goes_on_where_news_come_as_the_last_answer_ends(store):
    async with running_gateway(store, lambda r: [b"a", Pause()]) as gateway, gateway.http() as http:
        await create(http, background=True)
        await gateway.engine.wait_paused()
        leases = gateway.service.runs._leases
        [run] = leases._runs
        await leases.settle()
        leases.look()
        leases.release(run)
        for _ in range(10):
            await asyncio.sleep(0)
        assert "lease renewal" not in {task.get_name() for task in asyncio.all_tasks()}
        leases.keep(run)
        gateway.engine.release()
        await gateway.wait_no_runs()


PATTERNS = [
    {"guided_regex": "foo**"},
    {"guided_regex": "["},
    {"guided_regex": "(?<x"},
    {"guided_grammar": "root ::= root"},
    {"guided_json": {"type": "nope"}},
    {"guided_json": {"properties": {f"p{i}": {"type": "string"} for i in range(5000)}}},
    {"structured_outputs": {"regex": "(a*)*b"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "http://nowhere"}}}},
]


async def test_b46_no_pattern_reaches_the_engine_and_a_neighbour_is_unharmed(store):
    """Grammars are not built: each is refused by its name on every route, valid or not, and none is ignored."""
    async with running_gateway(store, lambda r: [b"Hel", Pause(), b"lo"]) as gateway:  # noqa: SIM117
        async with gateway.http() as http, gateway.socket() as ws:
            neighbour = asyncio.create_task(stream(http))
            await gateway.engine.wait_paused()
            asked = {
                "/v1/chat/completions": {"model": "byte-model", "messages": [{"role": "user", "content": "Hi"}]},
                "/v1/completions": {"model": "byte-model", "prompt": "Hi"},
                "/v1/responses": body(),
            }
            for pattern in PATTERNS:
                for path, fields in asked.items():
                    for is_stream in (False, True):
                        answer = await http.post(path, json={**fields, "stream": is_stream, **pattern})
                        error = error_of(answer, 400, "unsupported_parameter")
                        assert error["param"] == next(iter(pattern))
                await send_create(ws, **pattern)
                event = await receive(ws)
                assert (event["status"], event["error"]["param"]) == (400, next(iter(pattern)))
            as_text = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nope"}}}
            error_of(await http.post("/v1/responses", json=body(text=as_text)), 400, "unsupported_parameter")
            assert len(gateway.engine.requests) == 1
            gateway.engine.release()
            assert deltas(await neighbour) == "Hello"


# ---- tenants


async def test_b42_another_tenants_id_is_answered_like_an_unknown_one(gateway, http):
    d = await create(http, "My secret is 42.")
    unknown = "resp_" + "0" * (len(d["id"]) - 5)
    async with gateway.http(KEY_B) as other:

        async def tries(response_id):
            url = f"/v1/responses/{response_id}"
            return [
                await other.get(url),
                await other.get(url + "?stream=true&starting_after=0"),
                await other.get(url + "/input_items"),
                await other.get(url + "/cache"),
                await other.post(url + "/cancel"),
                await other.delete(url),
                await other.post("/v1/responses", json=body(previous_response_id=response_id)),
            ]

        for theirs, none in zip(await tries(d["id"]), await tries(unknown), strict=True):
            assert theirs.status_code == none.status_code
            assert theirs.status_code in (400, 404)
            assert theirs.text.replace(d["id"], "ID") == none.text.replace(unknown, "ID")
    assert len(gateway.engine.requests) == 1
    assert (await http.get(f"/v1/responses/{d['id']}")).json() == d


@on_both_servers
async def test_b42_another_tenant_cannot_stop_or_read_a_running_answer(store):
    async with running_gateway(store, lambda r: [b"a", Pause(), b"b"]) as gateway, gateway.http() as http:
        d = await create(http, background=True)
        await gateway.engine.wait_paused()
        async with gateway.http(KEY_B) as other:
            for method, path in (("POST", "/cancel"), ("DELETE", ""), ("GET", ""), ("GET", "?stream=true")):
                error_of(await other.request(method, f"/v1/responses/{d['id']}{path}"), 404, "response_not_found")
        gateway.engine.release()
        await gateway.wait_no_runs()
        assert output_text((await http.get(f"/v1/responses/{d['id']}")).json()) == "ab"


async def test_no_key_no_answer(gateway):
    async with gateway.http(None) as nobody:
        for method, path in (("POST", ""), ("GET", "/x"), ("GET", "/x/input_items"), ("POST", "/x/cancel"),
                             ("DELETE", "/x")):  # fmt: skip
            error_of(await nobody.request(method, f"/v1/responses{path}"), 401)


async def test_an_assistant_of_another_tenant_is_unknown(gateway):
    async with gateway.http(KEY_B) as other:
        error_of(await other.post("/v1/responses", json=body(prompt={"id": "support"})), 404, "prompt_not_found")


# ---- the official client


async def test_the_sdks_helpers_work(gateway):
    client = openai.AsyncOpenAI(base_url=f"{gateway.base_url}/v1", api_key=KEY_A, max_retries=0,
                                http_client=openai.DefaultAsyncHttpxClient(trust_env=False))  # fmt: skip
    async with client:
        whole = await client.responses.create(model="byte-model", input="Hi")
        assert whole.output_text == HELLO
        assert (await client.responses.retrieve(whole.id)).output_text == HELLO
        async with client.responses.stream(model="byte-model", input="Hi") as events:
            async for _ in events:
                pass
            assert (await events.get_final_response()).output_text == HELLO
        text = ""
        async for event in await client.responses.retrieve(whole.id, stream=True, starting_after=3):
            if event.type == "response.output_text.delta":
                text += event.delta
        assert text
        assert HELLO.endswith(text)
        await client.responses.delete(whole.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(whole.id)


async def test_many_streams_are_not_mixed_up(store):
    async with running_gateway(store, lambda r: list(r.prompt_ids[-40:-11])) as gateway, gateway.http() as http:
        texts = [f"this is the text of stream {i:02d}" for i in range(32)]
        for text, events in zip(texts, await asyncio.gather(*(stream(http, t) for t in texts)), strict=True):
            assert_contiguous(events)
            assert text[-2:] in deltas(events)
        await gateway.wait_no_runs()
