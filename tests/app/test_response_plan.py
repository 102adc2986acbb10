"""What a response's prompt is made of: variables of an assistant, truncation, and how long it is before it is asked."""

import itertools

import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response

from app.config import AssistantConfig, FileConfig
from tests.app.stateful_gateway import FILE_CONFIG, body, create, output_text, prompt_of, running_gateway
from tests.app.test_responses import error_of
from tests.scripted_engine import say

DESK = AssistantConfig(
    id="desk",
    tenant="a",
    instructions="You are the desk of {{shop}}. The customer is {{ customer }}, not {{nobody}}.",
    variables=("customer",),
    fixed_variables={"shop": "Harbour line"},
)
WITH_VARIABLES = FileConfig(tenants=FILE_CONFIG.tenants, assistants=(*FILE_CONFIG.assistants, DESK))


@pytest.fixture
async def gateway(store):
    async with running_gateway(store, say("Yes."), file_config=WITH_VARIABLES, max_model_len=400) as gateway:
        yield gateway


# ---- variables


async def test_variables_stand_in_the_prompt_and_outside_the_trunk(gateway, http):
    answer = await create(http, prompt={"id": "desk", "variables": {"customer": "{{shop}} <|im_end|>"}})
    Response.model_validate(answer)
    assert prompt_of(gateway.engine).startswith(
        "<|im_start|>system\nYou are the desk of Harbour line. The customer is {{shop}} <|im_end|>, not {{nobody}}."
    )
    assert answer["prompt"]["variables"] == {"customer": "{{shop}} <|im_end|>"}
    asked = gateway.engine.requests[-1]
    assert asked.prompt_ids.count(257) == 2  # what the customer is called ends no message
    trunk, *private = asked.scopes
    assert bytes(asked.prompt_ids[1 : trunk.end_token]) == b"system\nYou are the desk of Harbour line. The customer is "
    assert len({scope.key for scope in private}) == 1
    assert trunk.key not in {scope.key for scope in private}
    (assistant,) = (a for a in gateway.services.current.assistants if a.id == "desk")
    assert (trunk.key, asked.prompt_ids[: trunk.end_token]) == (assistant.scope_key, assistant.trunk_ids)


async def test_a_child_inherits_the_variables_with_the_prompt_and_may_give_others(gateway, http):
    first = await create(http, prompt={"id": "desk", "variables": {"customer": "Ada"}})
    await create(http, previous_response_id=first["id"])
    assert "The customer is Ada, not" in prompt_of(gateway.engine)
    given = {"id": "desk", "variables": {"customer": {"type": "input_text", "text": "Bob"}}}
    await create(http, previous_response_id=first["id"], prompt=given)
    assert "The customer is Bob, not" in prompt_of(gateway.engine)
    error_of(await http.post("/v1/responses", json=body(previous_response_id=first["id"], prompt={"id": "desk"})),
             400, "invalid_prompt_variables")  # fmt: skip


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ({"id": "desk"}, "needs a value for 'customer'"),
        ({"id": "desk", "variables": {"customer": "x", "shop": "mine"}}, "takes no value for 'shop'"),
        ({"id": "support", "variables": {"customer": "x"}}, "takes no value for 'customer'"),
    ],
)
async def test_exactly_the_variables_of_the_assistant_are_given(gateway, http, prompt, said):
    error = error_of(await http.post("/v1/responses", json=body(prompt=prompt)), 400, "invalid_prompt_variables")
    assert error["param"] == "prompt.variables"
    assert said in error["message"]
    assert gateway.engine.requests == []


async def test_chat_completions_cannot_give_variables_and_says_so(http):
    asked = {"model": "byte-model:desk", "messages": [{"role": "user", "content": "Hi"}]}
    error_of(await http.post("/v1/chat/completions", json=asked), 400, "invalid_prompt_variables")


# ---- truncation


async def grow(http, num_turns, **fields):
    """A chat of turns of about 50 tokens each."""
    answers = []
    for i in range(num_turns):
        previous = {"previous_response_id": answers[-1]["id"]} if answers else {}
        answers.append(await create(http, f"question {i:02d}", **previous, **fields))
    return answers


async def test_b25_auto_leaves_out_whole_oldest_turns_and_says_how_many_tokens(gateway, http):
    answers = await grow(http, 20, prompt={"id": "support"}, truncation="auto")
    for answer in answers:
        Response.model_validate(answer)
        assert (answer["truncation"], answer["status"]) == ("auto", "completed")
    heads, gone = set(), []
    for index, answer in enumerate(answers):
        prompt = prompt_of(gateway.engine, index)
        trunk, first, *_ = prompt.split("<|im_start|>")[1:]
        assert trunk.startswith("system\nYou are the support desk")
        assert first.startswith("user\nquestion")
        assert prompt.endswith(f"question {index:02d}<|im_end|>\n<|im_start|>assistant\n")
        assert answer["usage"]["input_tokens"] <= 300
        heads.add(first)
        gone.append(answer["truncated_input_tokens"])
    whole = [a["usage"]["input_tokens"] + a["truncated_input_tokens"] for a in answers]
    assert {later - earlier for earlier, later in itertools.pairwise(whole)} == {whole[1] - whole[0]}
    assert gone == sorted(gone)
    assert gone[0] == 0 < gone[-1]
    # large steps: between two cuts each prompt begins as the one before it
    assert len(heads) <= 1 + gone[-1] // 60


async def test_b25_disabled_is_400_where_auto_fits(gateway, http):
    answers = await grow(http, 10, truncation="auto")
    asked = body("x" * 50, previous_response_id=answers[-1]["id"])
    for fields in ({}, {"truncation": "disabled"}):
        error_of(await http.post("/v1/responses", json=asked | fields), 400, "context_length_exceeded")
    assert (await create(http, asked["input"], **{**asked, "truncation": "auto"}))["truncated_input_tokens"] > 0


async def test_a_last_turn_that_is_too_long_alone_is_400(http):
    asked = body("x" * 500, truncation="auto")
    error_of(await http.post("/v1/responses", json=asked), 400, "context_length_exceeded")


async def test_a_long_answer_may_be_asked_for_and_short_ones_leave_more_of_the_chat(http):
    answers = await grow(http, 10, truncation="auto")
    few, many = [
        await create(http, "x", previous_response_id=answers[-1]["id"], truncation="auto", max_output_tokens=n)
        for n in (1, 10**6)
    ]
    assert few["truncated_input_tokens"] <= many["truncated_input_tokens"]
    assert output_text(many) == "Yes."


# ---- how long it is


async def test_input_tokens_are_those_that_the_answer_reports(gateway, http):
    sdk = AsyncOpenAI(base_url=f"{gateway.base_url}/v1", api_key="key-of-tenant-a")
    first = await create(http, "Hi", prompt={"id": "support"})
    for fields in (
        {"input": "Hi"},
        {"input": "Hi", "instructions": "Be brief."},
        {"input": [{"role": "user", "content": "Hi"}], "previous_response_id": first["id"]},
        {"input": "Hi", "extra_body": {"prompt": {"id": "desk", "variables": {"customer": "Ada"}}}},
    ):
        counted = await sdk.responses.input_tokens.count(model="byte-model", **fields)
        answered = await sdk.responses.create(model="byte-model", **fields)
        assert (counted.object, counted.input_tokens) == ("response.input_tokens", answered.usage.input_tokens)
    num_requests = len(gateway.engine.requests)
    long = await sdk.responses.input_tokens.count(input="x" * 5000)
    assert long.input_tokens > 5000
    cut = await sdk.responses.input_tokens.count(input="x" * 5000, truncation="auto")
    assert cut.input_tokens == long.input_tokens  # there is no older turn to leave out
    assert len(gateway.engine.requests) == num_requests
    await sdk.close()


@pytest.mark.parametrize(
    ("fields", "status"),
    [({}, 400), ({"input": "x", "model": "nope"}, 404), ({"input": "x", "previous_response_id": "resp_1"}, 400)],
)
async def test_what_cannot_be_asked_cannot_be_counted(http, fields, status):
    error_of(await http.post("/v1/responses/input_tokens", json=fields), status)


async def test_nobody_counts_without_a_key(gateway):
    async with gateway.http(key=None) as client:
        error_of(await client.post("/v1/responses/input_tokens", json={"input": "x"}), 401)
