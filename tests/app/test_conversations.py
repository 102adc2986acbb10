"""/v1/conversations, and responses that go on with one."""

import asyncio

import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.conversations import Conversation, ConversationDeletedResource, ConversationItemList, Message
from openai.types.responses import Response

from tests.app.stateful_gateway import (
    KEY_A,
    KEY_B,
    body,
    create,
    output_text,
    prompt_of,
    receive_until,
    running_gateway,
    send_create,
    stream,
    validate_event,
)
from tests.app.test_responses import error_of
from tests.scripted_engine import Fail, Pause, say

HELLO = "Hällo!"
PATH = "/v1/conversations"


@pytest.fixture
async def gateway(store):
    async with running_gateway(store, say(HELLO)) as gateway:
        yield gateway


async def new(http, *texts, **fields):
    items = [{"role": "user", "content": text} for text in texts]
    answer = await http.post(PATH, json={"items": items, **fields})
    assert answer.status_code == 200, answer.text
    Conversation.model_validate(answer.json())
    return answer.json()["id"]


async def texts_in(http, conversation, **query):
    answer = await http.get(f"{PATH}/{conversation}/items", params={"order": "asc", "limit": 100, **query})
    assert answer.status_code == 200, answer.text
    ConversationItemList.model_validate(answer.json())
    return [(item["role"], item["content"][0]["text"]) for item in answer.json()["data"]]


# ---- the object


async def test_it_is_made_read_changed_and_deleted(http):
    made = (await http.post(PATH, json={"metadata": {"topic": "x"}})).json()
    assert set(made) == {"id", "object", "created_at", "metadata"}
    path = f"{PATH}/{made['id']}"
    assert (await http.get(path)).json() == made
    changed = (await http.post(path, json={"metadata": {"topic": "y", "more": "z"}})).json()
    assert changed == made | {"metadata": {"topic": "y", "more": "z"}}
    assert (await http.get(path)).json() == changed
    deleted = (await http.delete(path)).json()
    ConversationDeletedResource.model_validate(deleted)
    assert (deleted["id"], deleted["deleted"]) == (made["id"], True)
    for answer in (await http.get(path), await http.delete(path), await http.post(path, json={"metadata": {}})):
        error_of(answer, 404, "conversation_not_found")


@pytest.mark.parametrize(
    ("path", "sent", "param"),
    [
        ("", {"metadata": {"k": 1}}, "metadata.k"),
        ("", {"metadata": {str(i): "v" for i in range(17)}}, "metadata"),
        ("", {"items": "Hi"}, "items"),
        ("", {"items": [{"role": "wizard", "content": "x"}]}, "items[0].role"),
        ("", {"items": [{"role": "user", "content": "x"}] * 21}, "items"),
        ("", {"items": [{"type": "function_call"}]}, "items[0].type"),
        ("/{id}", {}, "metadata"),
        ("/{id}/items", {}, "items"),
        ("/{id}/items", {"items": []}, "items"),
    ],
)
async def test_what_is_wrong_is_refused_by_name(http, path, sent, param):
    conversation = await new(http)
    assert error_of(await http.post(PATH + path.format(id=conversation), json=sent), 400)["param"] == param


async def test_items_are_added_listed_in_pages_read_and_deleted(http):
    conversation = await new(http, "one", "two")
    path = f"{PATH}/{conversation}/items"
    more = [{"role": "assistant", "content": "three"}, {"role": "user", "content": "four"}]
    added = (await http.post(path, json={"items": more})).json()
    ConversationItemList.model_validate(added)
    assert [item["content"][0]["text"] for item in added["data"]] == ["three", "four"]
    asc = [("user", "one"), ("user", "two"), ("assistant", "three"), ("user", "four")]
    assert await texts_in(http, conversation) == asc
    newest = (await http.get(path, params={"limit": 1})).json()
    assert (newest["data"][0]["id"], newest["has_more"]) == (added["last_id"], True)
    assert await texts_in(http, conversation, order="desc", after=newest["last_id"]) == asc[2::-1]
    one = (await http.get(f"{path}/{added['first_id']}")).json()
    Message.model_validate(one)
    assert one == added["data"][0]
    left = await http.delete(f"{path}/{added['first_id']}")
    Conversation.model_validate(left.json())
    assert await texts_in(http, conversation) == [asc[0], asc[1], asc[3]]
    for answer in (await http.get(f"{path}/{added['first_id']}"), await http.delete(f"{path}/{added['first_id']}")):
        error_of(answer, 404, "item_not_found")
    empty = (await http.get(f"{PATH}/{await new(http)}/items")).json()
    ConversationItemList.model_validate(empty)


async def test_items_that_are_deleted_at_once_are_all_gone(http):
    conversation = await new(http, *(str(i) for i in range(12)))
    path = f"{PATH}/{conversation}/items"
    ids = [item["id"] for item in (await http.get(path)).json()["data"]]
    answers = await asyncio.gather(*(http.delete(f"{path}/{item_id}") for item_id in ids))
    assert {answer.status_code for answer in answers} == {200}
    assert await texts_in(http, conversation) == []


# ---- responses in it


async def test_responses_read_it_and_add_to_it(gateway, http):
    conversation = await new(http, "My name is Ada.")
    first = await create(http, "Hi", conversation=conversation)
    Response.model_validate(first)
    assert first["conversation"] == {"id": conversation}
    assert (await http.get(f"/v1/responses/{first['id']}")).json() == first
    answered = [("user", "My name is Ada."), ("user", "Hi"), ("assistant", HELLO)]
    assert await texts_in(http, conversation) == answered
    second = await create(http, "Who am I?", conversation={"id": conversation}, instructions="Be brief.")
    assert prompt_of(gateway.engine) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nMy name is Ada.<|im_end|>\n"
        f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{HELLO}<|im_end|>\n"
        "<|im_start|>user\nWho am I?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert await texts_in(http, conversation) == [*answered, ("user", "Who am I?"), ("assistant", HELLO)]
    assert second["output"][0]["id"] == (await http.get(f"{PATH}/{conversation}/items")).json()["data"][0]["id"]
    pages = (await http.get(f"/v1/responses/{second['id']}/input_items")).json()["data"]
    assert [item["content"][0]["text"] for item in pages] == ["Who am I?"]


async def test_what_follows_goes_on_with_the_ids_the_engine_gave(gateway, http):
    conversation = await new(http)
    await create(http, "Hi", conversation=conversation)
    first = gateway.engine.requests[-1].prompt_ids
    await create(http, "Ho", conversation=conversation)
    second = gateway.engine.requests[-1].prompt_ids
    assert second[: len(first) + len(HELLO.encode())] == [*first, *HELLO.encode()]


async def test_a_deleted_item_is_not_in_the_next_prompt(gateway, http):
    conversation = await new(http, "SECRET")
    (item,) = (await http.get(f"{PATH}/{conversation}/items")).json()["data"]
    first = await create(http, "Hi", conversation=conversation)
    await http.delete(f"{PATH}/{conversation}/items/{item['id']}")
    await create(http, "Ho", conversation=conversation)
    assert "SECRET" not in prompt_of(gateway.engine)
    await create(http, "Hm", previous_response_id=first["id"])
    assert "SECRET" not in prompt_of(gateway.engine)


async def test_a_branch_off_a_conversation_is_no_part_of_it(gateway, http):
    conversation = await new(http, "zero")
    first = await create(http, "one", conversation=conversation)
    await create(http, "two", conversation=conversation)
    branch = await create(http, "other", previous_response_id=first["id"])
    assert branch["conversation"] is None
    asked = [part.split("<|im_end|>")[0] for part in prompt_of(gateway.engine).split("user\n")[1:]]
    assert asked == ["zero", "one", "other"]
    await create(http, "further", previous_response_id=branch["id"])
    asked = [part.split("<|im_end|>")[0] for part in prompt_of(gateway.engine).split("user\n")[1:]]
    assert asked == ["zero", "one", "other", "further"]
    assert len(await texts_in(http, conversation)) == 5
    await http.delete(f"{PATH}/{conversation}")
    error_of(await http.post("/v1/responses", json=body(previous_response_id=first["id"])), 400,
             "previous_response_not_found")  # fmt: skip
    assert (await http.get(f"/v1/responses/{first['id']}")).status_code == 200
    await create(http, "and on", previous_response_id=branch["id"])


async def test_an_unknown_conversation_starts_nothing(gateway, http):
    for unknown in ("conv_1", f"conv_{'0' * 22}"):
        error_of(await http.post("/v1/responses", json=body(conversation=unknown)), 404, "conversation_not_found")
    assert gateway.engine.requests == []


async def test_one_response_at_a_time(store):
    async with running_gateway(store, lambda request: [b"Hel", Pause(), b"lo"]) as gateway, gateway.http() as http:
        conversation, other = await new(http), await new(http)
        first = await create(http, "one", conversation=conversation, background=True)
        await gateway.engine.wait_paused()
        locked = await http.post("/v1/responses", json=body("two", conversation=conversation))
        error_of(locked, 409, "conversation_locked")
        await create(http, "elsewhere", conversation=other, background=True)
        assert await texts_in(http, conversation) == []
        gateway.engine.release()
        await gateway.wait_no_runs()
        assert await texts_in(http, conversation) == [("user", "one"), ("assistant", "Hello")]
        second = await create(http, "two", conversation=conversation, background=True)
        await http.post(f"/v1/responses/{second['id']}/cancel")
        assert first["id"] != second["id"]


async def test_of_many_at_once_one_is_answered(store):
    async with running_gateway(store, lambda request: [b"Hel", Pause(), b"lo"]) as gateway, gateway.http() as http:
        conversation = await new(http)
        sends = [http.post("/v1/responses", json=body(str(i), conversation=conversation, background=True))
                 for i in range(10)]  # fmt: skip
        answers = await asyncio.gather(*sends)
        assert sorted(answer.status_code for answer in answers) == [200] + [409] * 9
        gateway.engine.release()
        await gateway.wait_no_runs()
        assert len(await texts_in(http, conversation)) == 2
        assert len(gateway.engine.requests) == 1


async def test_a_gateway_that_died_does_not_keep_it_locked(store):
    """Its lease runs out, whatever it was doing."""
    async with running_gateway(store, say(HELLO)) as gateway, gateway.http() as http:
        conversation = await new(http)
        redis = gateway.sessions._redis
        first = await create(http, "one", conversation=conversation)
        lease = f"{{s:{conversation.removeprefix('conv_')}}}:o:{first['id']}"
        await redis.set(lease, "a gateway that runs it", px=60_000)
        error_of(await http.post("/v1/responses", json=body(conversation=conversation)), 409, "conversation_locked")
        await redis.delete(lease)
        await create(http, "two", conversation=conversation)


async def test_a_cancelled_answer_is_kept_as_far_as_it_came_and_a_failed_one_is_not(store):
    def script(request):
        return [b"Hel", Pause(), b"lo"] if len(request.prompt_ids) < 60 else [b"x", Fail()]

    async with running_gateway(store, script) as gateway, gateway.http() as http:
        conversation = await new(http)
        first = await create(http, "one", conversation=conversation, background=True)
        await gateway.engine.wait_paused()
        await http.post(f"/v1/responses/{first['id']}/cancel")
        assert await texts_in(http, conversation) == [("user", "one"), ("assistant", "Hel")]
        await http.post("/v1/responses", json=body("y" * 100, conversation=conversation))
        assert len(await texts_in(http, conversation)) == 2


async def test_a_conversation_deleted_meanwhile_stays_deleted(store):
    async with running_gateway(store, lambda request: [b"Hel", Pause(), b"lo"]) as gateway, gateway.http() as http:
        conversation = await new(http)
        first = await create(http, "one", conversation=conversation, background=True)
        await gateway.engine.wait_paused()
        await http.delete(f"{PATH}/{conversation}")
        gateway.engine.release()
        await gateway.wait_no_runs()
        assert output_text((await http.get(f"/v1/responses/{first['id']}")).json()) == "Hello"
        error_of(await http.get(f"{PATH}/{conversation}"), 404)
        assert await gateway.sessions._redis.keys("*:c") == []


async def test_a_long_one_is_refused_or_cut(store):
    async with running_gateway(store, say(HELLO), max_model_len=400) as gateway, gateway.http() as http:
        conversation = await new(http, *("x" * 40 for _ in range(10)))
        error_of(await http.post("/v1/responses", json=body(conversation=conversation)), 400,
                 "context_length_exceeded")  # fmt: skip
        # ten messages in a row are one turn: it goes as a whole once it has an answer
        await http.post(f"{PATH}/{conversation}/items", json={"items": [{"role": "assistant", "content": "so?"}]})
        answer = await create(http, "Hi", conversation=conversation, truncation="auto")
        assert answer["truncated_input_tokens"] > 400
        assert prompt_of(gateway.engine) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


async def test_events_name_it_and_it_works_on_a_websocket(gateway, http):
    conversation = await new(http)
    events = await stream(http, "Hi", conversation=conversation)
    for event in events:
        validate_event(event)
    assert {e["response"]["conversation"]["id"] for e in events if "response" in e} == {conversation}
    async with gateway.socket() as ws:
        await send_create(ws, "Ho", conversation=conversation)
        for event in (events := await receive_until(ws)):
            validate_event(event, is_websocket=True)
        assert events[-1]["type"] == "response.completed"
    assert len(await texts_in(http, conversation)) == 4


async def test_a_message_sent_twice_is_in_it_once(gateway, http):
    conversation = await new(http)
    for _ in range(2):
        sent = body("Hi", conversation=conversation, client_message_id="m")
        assert (await http.post("/v1/responses", json=sent)).status_code == 200
    assert len(await texts_in(http, conversation)) == 2


async def test_input_tokens_count_it(http):
    conversation = await new(http, "x" * 100)
    asked = {"input": "Hi", "conversation": conversation}
    counted = (await http.post("/v1/responses/input_tokens", json=asked)).json()["input_tokens"]
    assert (await create(http, "Hi", conversation=conversation))["usage"]["input_tokens"] == counted > 100


# ---- whose it is, and how long it stays


async def test_b42_another_tenants_conversation_is_answered_like_an_unknown_one(gateway, http):
    conversation = await new(http, "mine")
    (item,) = (await http.get(f"{PATH}/{conversation}/items")).json()["data"]
    async with gateway.http(KEY_B) as other:
        for method, path, sent in (
            ("GET", "", None),
            ("POST", "", {"metadata": {}}),
            ("DELETE", "", None),
            ("GET", "/items", None),
            ("POST", "/items", {"items": [{"role": "user", "content": "x"}]}),
            ("GET", f"/items/{item['id']}", None),
            ("DELETE", f"/items/{item['id']}", None),
        ):
            told = [error_of(await other.request(method, f"{PATH}/{name}{path}", json=sent), 404)
                    for name in (conversation, "conv_" + "0" * 22)]  # fmt: skip
            assert told[0]["message"].replace(conversation, "") == told[1]["message"].replace("conv_" + "0" * 22, "")
        error_of(await other.post("/v1/responses", json=body(conversation=conversation)), 404, "conversation_not_found")
    assert await texts_in(http, conversation) == [("user", "mine")]


async def test_nothing_without_a_key(gateway):
    async with gateway.http(key=None) as client:
        error_of(await client.post(PATH, json={}), 401)
        error_of(await client.get(f"{PATH}/conv_{'0' * 22}"), 401)


async def test_it_survives_a_restart_and_every_key_has_a_ttl(store):
    async with running_gateway(store, say(HELLO)) as one, one.http() as http:
        conversation = await new(http, "zero")
        await create(http, "one", conversation=conversation)
        redis = one.sessions._redis
        assert {await redis.ttl(key) > 0 for key in await redis.keys("*")} == {True}
    await store.kill()
    await store.start()
    async with running_gateway(store, say("Two."), owner="gateway-2") as two, two.http() as http:
        await create(http, "two", conversation=conversation)
        said = await texts_in(http, conversation)
    assert [text for _, text in said] == ["zero", "one", HELLO, "two", "Two."]


async def test_without_the_session_store_it_is_503(store):
    async with running_gateway(store, say(HELLO)) as gateway, gateway.http() as http:
        conversation = await new(http)
        await store.kill()
        for answer in (
            await http.post(PATH, json={}),
            await http.get(f"{PATH}/{conversation}"),
            await http.post("/v1/responses", json=body(conversation=conversation)),
        ):
            error_of(answer, 503, "session_store_unavailable")
            assert "Retry-After" in answer.headers
        await store.start()


# ---- the SDK


def talk(client):
    """The whole API, as the SDK calls it."""
    conversation = client.conversations.create(
        metadata={"topic": "demo"}, items=[{"type": "message", "role": "user", "content": "Hello!"}]
    )
    answer = client.responses.create(model="byte-model", input="Hi", conversation=conversation.id)
    client.conversations.update(conversation.id, metadata={"topic": "other"})
    client.conversations.items.create(conversation.id, items=[{"role": "user", "content": "More"}])
    items = list(client.conversations.items.list(conversation.id, order="asc", limit=2))
    client.conversations.items.retrieve(items[0].id, conversation_id=conversation.id)
    client.conversations.items.delete(items[0].id, conversation_id=conversation.id)
    left = client.conversations.items.list(conversation.id).data
    metadata = client.conversations.retrieve(conversation.id).metadata
    return answer, items, left, metadata, client.conversations.delete(conversation.id).deleted


async def test_the_sdk_sync_and_async(gateway):
    options = {"base_url": f"{gateway.base_url}/v1", "api_key": KEY_A, "max_retries": 0}
    with OpenAI(**options) as client:
        answer, items, left, metadata, deleted = await asyncio.to_thread(talk, client)
    assert (answer.output_text, answer.conversation.id[:5], metadata, deleted) == (
        HELLO,
        "conv_",
        {"topic": "other"},
        True,
    )
    assert [item.content[0].text for item in items] == ["Hello!", "Hi", HELLO, "More"]
    assert len(left) == 3
    async with AsyncOpenAI(**options) as client:
        conversation = await client.conversations.create()
        async for _ in await client.responses.create(
            model="byte-model", input="Hi", conversation=conversation.id, stream=True
        ):
            pass
        items = [item async for item in client.conversations.items.list(conversation.id, limit=1)]
        assert [item.content[0].text for item in items] == [HELLO, "Hi"]
