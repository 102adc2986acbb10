"""The description of the HTTP routes says what the routes do."""

import json

import jsonschema
import pytest
from starlette.routing import Route

from app.asgi import create_app
from app.conversations import Conversations
from app.openapi import OPERATIONS, document, path_of
from app.responses import Responses
from tests.app.session_store import session_server
from tests.app.stateful_gateway import create, running_gateway, stream
from tests.scripted_engine import say


@pytest.fixture
async def gateway():
    async with session_server() as store, running_gateway(store, say("Hi.")) as gateway:
        yield gateway


def refs(value):
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        for inner in value.values():
            yield from refs(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from refs(inner)


def check(described, name, value):
    """The value has the schema of this name."""
    schema = {"$ref": f"#/components/schemas/{name}", "components": described["components"]}
    jsonschema.Draft202012Validator(schema).validate(value)


async def test_every_route_is_described_and_no_other(gateway):
    responses = Responses(gateway.services, gateway.service, None)
    conversations = Conversations(gateway.services, None)
    app = create_app(gateway.services, [*responses.routes(), *conversations.routes()])
    routes = {
        (method, path_of(route))
        for route in app.routes
        if isinstance(route, Route)
        for method in route.methods - {"HEAD"}
    }
    assert routes == set(OPERATIONS)


async def test_it_is_served_without_a_key_and_whole(gateway):
    async with gateway.http(key=None) as client:
        answer = await client.get("/openapi.json")
    described = answer.json()
    assert (answer.status_code, described) == (200, json.loads(json.dumps(document())))
    names = set(described["components"]["schemas"])
    assert {name.removeprefix("#/components/schemas/") for name in refs(described)} <= names
    for schema in described["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    operations = [operation for path in described["paths"].values() for operation in path.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations) == len(OPERATIONS)


async def test_answers_are_as_described(gateway):
    described = document()
    async with gateway.http() as http:
        response = await create(http)
        check(described, "ResponseObject", response)
        check(described, "ItemList", (await http.get(f"/v1/responses/{response['id']}/input_items")).json())
        conversation = (await http.post("/v1/conversations", json={"metadata": {"a": "b"}})).json()
        check(described, "ConversationObject", conversation)
        check(described, "InputTokens", (await http.post("/v1/responses/input_tokens", json={"input": "x"})).json())
        check(described, "Deleted", (await http.delete(f"/v1/responses/{response['id']}")).json())
        check(described, "Error", (await http.get(f"/v1/responses/{response['id']}")).json())
        for body in ({"input": "Hi"}, {"model": 3}):
            valid = jsonschema.Draft202012Validator(
                {"$ref": "#/components/schemas/CreateResponse", "components": described["components"]}
            ).is_valid(body)
            answer = await http.post("/v1/responses", json={"model": "byte-model", "input": "Hi", **body})
            assert valid == (answer.status_code == 200)
        names = {
            schema["properties"]["type"]["enum"][0]: name
            for name, schema in described["components"]["schemas"].items()
            if "enum" in schema.get("properties", {}).get("type", {})
        }
        for event in await stream(http):
            check(described, names[event["type"]], event)
