"""Whatever comes over the described routes is answered as described: nothing with 5xx, every refusal with the error
envelope, and what is accepted with the schema that the document names. Requests are drawn from the document itself."""

import collections
import json
import re
from typing import Any
from urllib.parse import quote

import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from app.openapi import document
from tests.app.clean_log import clean_log
from tests.app.stateful_gateway import create, running_gateway
from tests.scripted_engine import say

DESCRIBED = json.loads(json.dumps(document()))
SCHEMAS = DESCRIBED["components"]["schemas"]
OPERATIONS = [
    (method.upper(), path, what) for path, all_ in DESCRIBED["paths"].items() for method, what in all_.items()
]
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
RIGHT = {"model": "byte-model", "input": "Hi", "prompt": "Hi", "max_tokens": 2, "max_output_tokens": 2,
         "messages": [{"role": "user", "content": "Hi"}], "items": [{"role": "user", "content": "Hi"}]}  # fmt: skip
LONGEST = 40
"""Of texts; longer ones are for the tests of their limits."""

CHARACTERS = st.characters(exclude_categories=["Cs"])
TEXTS = st.text(CHARACTERS, max_size=LONGEST)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False, allow_infinity=False), TEXTS,
    st.sampled_from(["auto", "\x00", "\u2028", "resp_1", "conv_1", "{{a}}", "message", "user", "input_text"]),
)  # fmt: skip
KEYS = st.one_of(TEXTS, st.sampled_from(["id", "type", "role", "content", "text", "variables", "format", "effort"]))
ANYTHING = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
                        max_leaves=8)  # fmt: skip
ODD_PARTS = st.one_of(
    TEXTS.filter(bool), st.sampled_from(["resp_1", "resp_" + "0" * 44, "conv_" + "0" * 22, "\x00", "../..", "a" * 3000])
)


def allowed(schema: dict[str, Any] | bool) -> st.SearchStrategy[Any]:
    """What the schema allows, or nearly: lengths of texts in characters, small lists."""
    if isinstance(schema, bool):
        return ANYTHING if schema else st.nothing()
    if "$ref" in schema:
        return st.deferred(lambda: allowed(SCHEMAS[schema["$ref"].rpartition("/")[2]]))
    if "anyOf" in schema:
        return st.one_of(*map(allowed, schema["anyOf"]))
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kind = schema.get("type")
    if isinstance(kind, list):
        return st.one_of(*(allowed({**schema, "type": one}) for one in kind))
    match kind:
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "integer":
            return st.integers(schema.get("minimum"), schema.get("maximum"))
        case "number":
            return st.floats(schema.get("minimum"), schema.get("maximum"), allow_nan=False, allow_infinity=False)
        case "string":
            most = max(schema.get("minLength", 0), min(schema.get("maxLength", LONGEST), LONGEST))
            return st.text(CHARACTERS, min_size=schema.get("minLength", 0), max_size=most)
        case "array":
            return st.lists(allowed(schema.get("items", {})), min_size=schema.get("minItems", 0), max_size=3)
        case "object" if "properties" in schema:
            required = {name: allowed(schema["properties"][name]) for name in schema.get("required", [])}
            return st.fixed_dictionaries(required).flatmap(lambda made: some_fields(schema, made))
        case "object":
            return st.dictionaries(KEYS, allowed(schema.get("additionalProperties", {})), max_size=3)
    return ANYTHING


@st.composite
def some_fields(draw: st.DrawFn, schema: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
    """And a few of the others. Of all at once nothing would be accepted."""
    names = draw(st.lists(st.sampled_from(sorted(schema["properties"])), max_size=3, unique=True))
    return {**made, **{name: draw(allowed(schema["properties"][name])) for name in names}}


@st.composite
def bodies(draw: st.DrawFn, schema: dict[str, Any], known: dict[str, str]) -> bytes:
    """Mostly right, with a few fields of any kind."""
    fields = SCHEMAS[schema["$ref"].rpartition("/")[2]]["properties"]
    right = {name: value for name, value in RIGHT.items() if name in fields and draw(st.integers(0, 9))}
    body = {**draw(allowed(schema)), **right} if draw(st.booleans()) else {**right, **draw(allowed(schema))}
    for name in draw(st.lists(st.sampled_from(sorted(fields)), max_size=2)):
        body[name] = draw(ANYTHING)
    for name, value in (("previous_response_id", "response_id"), ("conversation", "conversation_id")):
        if name in fields and draw(st.integers(0, 4)) == 0:
            body[name] = known[value]
    if draw(st.integers(0, 9)) == 0:
        body["client_message_id"] = draw(ANYTHING)
    raw = json.dumps(body).encode()
    if draw(st.integers(0, 9)) == 0:
        place = draw(st.integers(0, len(raw) - 1))
        raw = raw[:place] + draw(st.binary(max_size=2)) + raw[place + 1 :]
    return raw


@st.composite
def requests(draw: st.DrawFn, known: dict[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A request, and the operation that it is of."""
    method, path, operation = draw(st.sampled_from(OPERATIONS))
    query, headers = {}, {}
    for parameter in operation["parameters"]:
        name, schema = parameter["name"], parameter["schema"]
        match parameter["in"]:
            case "path":
                # what is known stays: others go on with it
                is_known = method != "DELETE" and name in known and draw(st.booleans())
                path = path.replace(f"{{{name}}}", quote(known[name] if is_known else draw(ODD_PARTS), safe=""))
            case "query" if draw(st.booleans()):
                value = draw(st.one_of(allowed(schema), SCALARS))
                query[name] = str(value).lower() if isinstance(value, bool) else str(value)
            case "header" if draw(st.integers(0, 9)) == 0:
                headers[name] = draw(st.sampled_from(["k", "x" * 300]))
    sent: dict[str, Any] = {"method": method, "url": path, "params": query, "headers": headers}
    if "requestBody" in operation:
        sent["content"] = draw(bodies(operation["requestBody"]["content"]["application/json"]["schema"], known))
    return sent, operation


def check(schema: dict[str, Any], value: Any) -> None:
    jsonschema.Draft202012Validator({**schema, "components": DESCRIBED["components"]}).validate(value)


def check_answer(answer, operation) -> None:
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        check({"$ref": "#/components/schemas/Error"}, answer.json())
    elif answer.headers["content-type"] == "application/json":
        check(operation["responses"]["200"]["content"]["application/json"]["schema"], answer.json())
    else:
        assert answer.headers["content-type"].partition(";")[0] in ("text/event-stream", "text/plain")


@pytest.fixture
async def gateway(store):
    async with running_gateway(store, say("Hi.")) as gateway:
        yield gateway


async def drawn_requests_are_answered_as_described(gateway, num_requests):
    async with gateway.http() as http:
        with clean_log():
            response = (await create(http))["id"]
            conversation = (await http.post("/v1/conversations", json={})).json()["id"]
            known = {"response_id": response, "conversation_id": conversation, "model": "byte-model"}
            statuses = collections.Counter()
            for sent, operation in drawn(requests(known), num_requests):
                answer = await http.request(**sent)
                statuses[answer.status_code] += 1
                try:
                    check_answer(answer, operation)
                except Exception as e:
                    raise AssertionError(f"{sent}") from e
            assert min(statuses[200], statuses[400], statuses[404]) > num_requests / 50, statuses
            assert (await create(http))["status"] == "completed"
            await gateway.wait_no_runs()
        assert gateway.engine.num_running == 0


def drawn(strategy, count):
    """So many examples, the same ones each time."""
    found = []

    @settings(max_examples=count, derandomize=True, deadline=None, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(strategy)
    def collect(value):
        found.append(value)

    collect()
    return found


async def test_what_is_drawn_from_the_document_is_answered_as_it_says(gateway):
    await drawn_requests_are_answered_as_described(gateway, 80)


@pytest.mark.slow
async def test_two_thousand_requests_drawn_from_the_document(gateway):
    await drawn_requests_are_answered_as_described(gateway, 2_000)


def matches(path: str, url: str) -> bool:
    """Whether this described path, with whatever for its parameters, is the URL."""
    return re.fullmatch(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(path)), url) is not None


async def test_every_other_method_of_a_described_path_is_refused_with_the_envelope(gateway):
    described = {(method, path) for method, path, _ in OPERATIONS}
    async with gateway.http() as http:
        with clean_log():
            for path in DESCRIBED["paths"]:
                url = path.replace("{response_id}", "resp_1").replace("{conversation_id}", "conv_1")
                # "input_tokens" is a response's id to the other methods
                same = {method for method, other in described if other == path or matches(other, url)}
                for method in METHODS:
                    if method in same or (method == "HEAD" and "GET" in same):
                        continue
                    answer = await http.request(method, url.replace("{item_id}", "x").replace("{model}", "byte-model"))
                    assert answer.status_code == 405, (method, path, answer.text)
                    if method != "HEAD":
                        check({"$ref": "#/components/schemas/Error"}, answer.json())
