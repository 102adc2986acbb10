"""Whatever comes over the described routes, nothing is answered with 5xx, and every refusal has the error envelope."""

import json
import random

import pytest

from app.openapi import OPERATIONS
from tests.app.session_store import session_server
from tests.app.stateful_gateway import create, running_gateway
from tests.scripted_engine import say

NUM_REQUESTS = 200
SCALARS = [None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, -(2**63) - 1, 1.5, 1e308, -0.0, "", "x", "auto", "\x00",
           "\u2028", "😀" * 40, "resp_1", "conv_1", "{{a}}", "message", "user", "input_text", [], {}]  # fmt: skip
NAMES = ["id", "type", "role", "content", "text", "variables", "version", "format", "a", "effort"]
VALUES = ["", "1", "-1", "true", "x" * 300, "٣"]
PATHS = ["resp_1", f"resp_{'0' * 44}", "conv_1", f"conv_{'0' * 22}", "%00", "..%2f..", "a" * 3000, "%F0%9F%98%80", "-"]


def anything(chance, depth=0):
    if depth < 3 and chance.random() < 0.3:
        if chance.random() < 0.5:
            return [anything(chance, depth + 1) for _ in range(chance.randrange(4))]
        return {chance.choice(NAMES): anything(chance, depth + 1) for _ in range(chance.randrange(4))}
    return chance.choice(SCALARS)


def a_body(chance, model, known):
    """Mostly right, with some fields that are not."""
    right = {"model": "byte-model", "input": "Hi", "max_output_tokens": 2, "max_tokens": 2, "prompt": None,
             "messages": [{"role": "user", "content": "Hi"}]}  # fmt: skip
    body = {name: value for name, value in right.items() if chance.random() < 0.9}
    names = sorted(model.model_fields)
    for name in chance.sample(names, min(len(names), chance.randrange(4))):
        body[name] = anything(chance)
    if "previous_response_id" in model.model_fields and chance.random() < 0.2:
        body["previous_response_id"] = known["response"]
    if "conversation" in model.model_fields and chance.random() < 0.2:
        body["conversation"] = known["conversation"]
    if chance.random() < 0.1:
        body["client_message_id"] = anything(chance)
    return body


@pytest.fixture
async def gateway():
    async with session_server() as store, running_gateway(store, say("Hi.")) as gateway:
        yield gateway


async def test_nothing_that_is_sent_is_a_servers_error(gateway, caplog):
    chance = random.Random(5)
    async with gateway.http() as http:
        response = (await create(http))["id"]
        conversation = (await http.post("/v1/conversations", json={})).json()["id"]
        known = {"response": response, "conversation": conversation}
        for _ in range(NUM_REQUESTS):
            (method, path), operation = chance.choice(list(OPERATIONS.items()))
            if "{" in path:
                name = path[path.index("{") + 1 : path.index("}")]
                right = known.get(name.removesuffix("_id"), "x")
                path = path.replace(f"{{{name}}}", chance.choice([right, *PATHS]) if method != "DELETE" else "resp_1")
                path = path.replace("{item_id}", chance.choice(PATHS))
            for name in operation.query:
                if chance.random() < 0.5:
                    path += f"{'&' if '?' in path else '?'}{name}={chance.choice(VALUES)}"
            content = None
            if operation.body is not None:
                content = json.dumps(a_body(chance, operation.body, known)).encode()
                if chance.random() < 0.1:
                    place = chance.randrange(len(content))
                    content = content[:place] + bytes([chance.randrange(256)]) + content[place + 1 :]
            headers = {"Idempotency-Key": chance.choice(["k", "x" * 300])} if chance.random() < 0.05 else {}
            answer = await http.request(method, path, content=content, headers=headers)
            assert answer.status_code < 500, (method, path, content, answer.text)
            if answer.status_code >= 400:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}, (method, path, content)
        assert (await create(http))["status"] == "completed"
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
