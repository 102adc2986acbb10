"""Why a prompt was cached no further: each reason, by hand and at the door, and what it must not tell."""

import contextlib
from collections.abc import Sequence

import pytest

from app.cache_report import Explainer, FirstMiss, Reason, explain
from app.cached_tokens import CachedTokens
from app.config import AssistantConfig, FileConfig, TenantConfig, hash_key
from app.prompt_history import Comparison, PromptHistory, PromptRecord
from app.prompts import BuiltPrompt
from engine.inproc_client import InprocEngineClient
from engine.protocol import END, Scope
from tests.app.session_store import session_server
from tests.app.stateful_gateway import KEY_A, KEY_B, create, receive_until, running_gateway, send_create
from tests.engine.fake_runner import Bench
from tests.scripted_engine import Pause, say

BLOCK = 16


def decode(token_ids: Sequence[int]) -> str:
    return bytes(token_ids).decode()


def record(
    text: str,
    answer: str = "",
    *,
    scope: bytes = b"private",
    trunk: int = 0,
    trunk_key: bytes = b"assistant",
    mark: int = 0,
    num_trunk_tokens: int | None = None,
    ended: bool = True,
    **fields: object,
) -> PromptRecord:
    """A token for each byte."""
    scopes = [Scope(trunk, trunk_key)] if trunk else []
    scopes += [Scope(mark, scope)] if mark else []
    prompt = BuiltPrompt(
        list(text.encode()),
        [*scopes, Scope(END, scope)],
        owner_key=b"owner",
        num_trunk_tokens=trunk if num_trunk_tokens is None else num_trunk_tokens,
        **fields,  # type: ignore[arg-type]
    )
    return PromptRecord.of(prompt, list(answer.encode()), ended=ended and bool(answer))


def first_miss(
    prompt: PromptRecord,
    num_cached: int,
    in_scope: PromptRecord | None = None,
    in_any_scope: PromptRecord | None = None,
    of_assistant: PromptRecord | None = None,
) -> FirstMiss:
    comparison = Comparison(prompt, in_scope, in_any_scope or in_scope, of_assistant)
    return explain(comparison, num_cached, BLOCK, decode)


def miss(position: int, reason: Reason, expected_text: str | None, actual_text: str) -> FirstMiss:
    return FirstMiss(position=position, reason=reason, expected_text=expected_text, actual_text=actual_text)


OPENS = "The small shop opens at nine o'clock."
"""37 tokens, of which the first 24 are "The small shop opens at "."""


def test_text_that_was_never_asked_shows_where_it_parts() -> None:
    other = record("The small shop opens at eleven.")
    assert first_miss(other, 16, record(OPENS)) == miss(16, Reason.NEVER_SEEN, "t nine o'c", "t eleven.")
    assert first_miss(other, 0) == miss(0, Reason.NEVER_SEEN, None, "The smal"), "nothing to compare with"


def test_what_is_longer_than_all_that_was_asked_is_compared_with_nothing() -> None:
    longer = record(OPENS + " Is it near?")
    assert first_miss(longer, 37, record(OPENS)) == miss(37, Reason.NEVER_SEEN, None, "k. Is it n")
    next_turn = record(OPENS + "Good.|Why?")
    assert first_miss(next_turn, 41, record(OPENS, "Good.")) == miss(41, Reason.NEVER_SEEN, None, "od.|Why?"), (
        "the token that was drawn last was never computed"
    )


def test_only_the_last_token_is_left() -> None:
    for known in (None, record(OPENS)):
        assert first_miss(record(OPENS), 36, known) == miss(36, Reason.LAST_TOKEN, None, "ck.")


@pytest.mark.parametrize(
    ("num_cached", "is_evicted"),
    [(31, True), (32, False), (0, True)],
)
def test_whole_blocks_that_were_computed_before_were_evicted(num_cached: int, is_evicted: bool) -> None:
    prompt = record(OPENS[:35] + "...")
    reason = first_miss(prompt, num_cached, record(OPENS)).reason
    assert (reason is Reason.EVICTED) == is_evicted, "32 of 35 in common: what ends in mid-block has no tail there"


def test_tails_at_the_ends_of_scopes_prompts_and_turns_can_be_evicted_too() -> None:
    longer = record(OPENS + "Good. Is it near?")
    for known, num_most in (
        (record(OPENS), 37),
        (record(OPENS, "Good."), 41),
        (record(OPENS, "Good.", ended=False), 37),
    ):
        assert first_miss(longer, num_most - 1, known).reason is Reason.EVICTED
        assert first_miss(longer, num_most, known).reason is Reason.NEVER_SEEN
    marked = record("The small shop opens at eleven.", mark=24)
    assert first_miss(marked, 23, record(OPENS, mark=24)).reason is Reason.EVICTED
    assert first_miss(marked, 24, record(OPENS, mark=24)).reason is Reason.NEVER_SEEN


def test_the_same_in_another_scope_of_ones_own() -> None:
    salted = record(OPENS, scope=b"salted")
    assert first_miss(record(OPENS), 0, None, salted) == miss(0, Reason.NARROWER_SCOPE, None, "The smal")
    other = record("The small shop opens at eleven.")
    assert first_miss(other, 16, None, salted).reason is Reason.NEVER_SEEN, "that could not have been of use"
    assert first_miss(other, 16, None, salted).expected_text is None, "another scope's text is not shown"


def test_a_trunk_is_one_scope_for_all_salts() -> None:
    salted, mine = record(OPENS, scope=b"salted", trunk=20), record(OPENS[:30] + "!", trunk=20)
    assert first_miss(mine, 19, None, salted).reason is Reason.EVICTED
    assert first_miss(mine, 20, None, salted).reason is Reason.NEVER_SEEN
    assert first_miss(record(OPENS, trunk=20), 20, None, salted).reason is Reason.NARROWER_SCOPE
    assert first_miss(record(OPENS), 0, None, salted).reason is Reason.NARROWER_SCOPE, "its words alone unlock nothing"


def test_an_edited_assistant() -> None:
    old = record("Be kind. Hello", trunk=8, assistant_id="s", assistant_version="1")
    new = record("Be rude. Hello", trunk=8, trunk_key=b"edited", assistant_id="s", assistant_version="2")
    assert first_miss(new, 0, old, old, old) == miss(0, Reason.ASSISTANT_VERSION, "e kind. He", "e rude. He")
    assert first_miss(new, 8, old, old, old).reason is Reason.NEVER_SEEN, "the new trunk is there"


def test_other_template_options() -> None:
    plain = record("Be kind. Hello", trunk=8, assistant_id="s", assistant_version="1")
    fields = {"num_trunk_tokens": 8, "assistant_id": "s", "assistant_version": "1", "template_digest": "d"}
    thinking = record("Be wise. Hello", trunk=3, **fields)
    assert first_miss(thinking, 3, plain, plain, plain) == miss(3, Reason.TEMPLATE_CHANGED, "e kind. He", "e wise. He")
    at_the_end = record("Be kind. Hi", trunk=8, **fields)
    assert first_miss(at_the_end, 0, plain, plain, plain).reason is Reason.EVICTED
    assert first_miss(at_the_end, 8, plain, plain, plain).reason is Reason.NEVER_SEEN, "they change nothing before"


def test_an_answer_whose_ids_the_template_did_not_take() -> None:
    parent = record(OPENS, "Good.")
    changed = record(OPENS + "good. Why?", template_changed=True)
    assert first_miss(changed, 37, parent) == miss(37, Reason.TEMPLATE_CHANGED, "k.Good.", "k.good. Wh")
    same = record(OPENS + "Good. Why?", template_changed=True)
    assert first_miss(same, 41, parent).reason is Reason.NEVER_SEEN, "its text gave the same ids"


def test_a_report_needs_a_comparison_and_what_came_later_does_not_count() -> None:
    history = PromptHistory()
    prompt = BuiltPrompt(list(OPENS.encode()), [Scope(END, b"p")], owner_key=b"o")
    explainer = Explainer(history, "a", prompt, BLOCK, decode)
    assert explainer.report(CachedTokens()) is None
    explainer.compare()
    history.add("a", PromptRecord.of(prompt))
    report = explainer.report(CachedTokens(trunk=1, history=2, host=3))
    assert report is not None
    assert report.first_miss == miss(3, Reason.NEVER_SEEN, None, "he small s"), "it was computed after this one"
    assert report.to_wire("resp_1") == {
        "response_id": "resp_1",
        "prompt_tokens": 37,
        "cached": {"trunk": 1, "history": 2, "host": 3, "total": 3},
        "first_miss": report.first_miss,
    }


# ---- at the door, over an engine that caches

CONFIG = FileConfig(
    tenants=(
        TenantConfig(id="a", key_hashes=(hash_key(KEY_A),)),
        TenantConfig(id="b", key_hashes=(hash_key(KEY_B),)),
        TenantConfig(id="c", key_hashes=(hash_key("key-of-tenant-c"),), scope="user"),
    ),
    assistants=(AssistantConfig(id="shop", tenant="a", instructions="You are the desk of a small shop. Be brief."),),
)
NUM_MARKUP_TOKENS = len("XuserX" + "XX" + "XassistantX")
SHORT = {"max_output_tokens": 4, "temperature": 0}


@contextlib.asynccontextmanager
async def caching_gateway(num_blocks: int = 200, file_config: FileConfig = CONFIG):
    bench = Bench(num_blocks, block_size=BLOCK, max_num_batched_tokens=512)
    engine = InprocEngineClient(bench.core, bench.info)
    await engine.start()
    async with session_server() as store, running_gateway(store, say(""), engine=engine, file_config=file_config) as g:
        yield g
        await g.wait_no_runs()
        stats = await engine.stats()
        assert stats.blocks.referenced == stats.blocks.pinned == 0


async def report(http, response, status=200):
    answer = await http.get(f"/v1/responses/{response['id']}/cache")
    assert answer.status_code == status, answer.text
    return answer.json()


async def ask(http, text, **fields):
    """The report of an answer; it agrees with its usage."""
    response = await create(http, text, **SHORT, **fields)
    told = await report(http, response)
    details = response["usage"]["input_tokens_details"]
    cached = told["cached"]
    assert told["response_id"] == response["id"]
    assert told["prompt_tokens"] == response["usage"]["input_tokens"]
    assert cached["total"] == cached["trunk"] + cached["history"] == details["cached_tokens"]
    assert {name: cached[name] for name in ("trunk", "history", "host")} == details["cached_tokens_details"]
    assert told["first_miss"]["position"] == cached["total"] < told["prompt_tokens"]
    return told


TEXT = "The small shop around the corner opens at nine o'clock in the morning."


async def test_new_repeated_and_parting_texts():
    async with caching_gateway() as gateway, gateway.http() as http:
        new = await ask(http, TEXT)
        assert new["cached"]["total"] == 0
        assert new["first_miss"] == {
            "position": 0,
            "reason": "never_seen",
            "expected_text": None,
            "actual_text": "<|im_start|>user\nTh",
        }
        again = await ask(http, TEXT)
        assert again["first_miss"]["reason"] == "last_token"
        assert again["first_miss"]["position"] == again["prompt_tokens"] - 1
        parting = (await ask(http, TEXT.replace("nine", "eleven")))["first_miss"]
        assert (parting["reason"], parting["position"]) == ("never_seen", 48)
        assert ("nine" in parting["expected_text"], "eleven" in parting["actual_text"]) == (True, True)


async def test_the_next_turn_misses_what_is_new_in_it():
    async with caching_gateway() as gateway, gateway.http() as http:
        first = await create(http, TEXT, **SHORT)
        turn = await ask(http, "Why?", previous_response_id=first["id"])
        num_computed = first["usage"]["total_tokens"] - 1
        assert turn["first_miss"]["position"] == turn["cached"]["history"] == num_computed
        assert turn["first_miss"]["reason"] == "never_seen"
        fork = await ask(http, "Why?", previous_response_id=first["id"])
        assert fork["first_miss"]["reason"] == "last_token"


async def test_what_had_to_make_room_was_evicted():
    async with caching_gateway(num_blocks=12) as gateway, gateway.http() as http:
        assert (await ask(http, TEXT))["first_miss"]["reason"] == "never_seen"
        for word in ("one", "two", "three"):
            await ask(http, word * 30)
        again = await ask(http, TEXT)
        assert again["first_miss"]["reason"] == "evicted"
        assert again["first_miss"]["position"] < 48
        assert again["first_miss"]["expected_text"] is None


async def test_salts_and_users_are_narrower_scopes():
    async with caching_gateway() as gateway:
        async with gateway.http() as http:
            await ask(http, TEXT)
            salted = await ask(http, TEXT, cache_salt="s")
            assert (salted["cached"]["total"], salted["first_miss"]["reason"]) == (0, "narrower_scope")
            keyed = await ask(http, TEXT, prompt_cache_key="k")
            assert (keyed["cached"]["total"], keyed["first_miss"]["reason"]) == (0, "narrower_scope")
        async with gateway.http("key-of-tenant-c") as http:
            await ask(http, TEXT, user="ada")
            others = await ask(http, TEXT, user="bob")
            nobodys = await ask(http, TEXT)
            for told in (others, nobodys):
                assert (told["cached"]["total"], told["first_miss"]["reason"]) == (0, "never_seen"), "of another user"
                assert told["first_miss"]["expected_text"] is None
            assert (await ask(http, TEXT, user="ada", cache_salt="s"))["first_miss"]["reason"] == "narrower_scope"


async def test_an_assistants_chats_split_what_is_cached():
    async with caching_gateway() as gateway, gateway.http() as http:
        trunk = len("XsystemX" + CONFIG.assistants[0].instructions + "XX" + "XuserX")
        first = await ask(http, TEXT, prompt={"id": "shop"})
        assert (first["cached"]["trunk"], first["cached"]["history"]) == (0, 0), "nobody has prefilled it here"
        second = await ask(http, "Hi", prompt={"id": "shop"})
        assert second["cached"] == {"trunk": trunk, "history": 0, "host": 0, "total": trunk}
        again = await ask(http, TEXT, prompt={"id": "shop"})
        assert again["cached"]["trunk"] == trunk
        assert again["cached"]["history"] == again["prompt_tokens"] - 1 - trunk


async def test_chats_of_one_undeclared_system_prompt_share_it_to_the_token():
    async with caching_gateway() as gateway, gateway.http() as http:
        head = len("XsystemX" + TEXT + "XX" + "XuserX")
        assert head % BLOCK
        await ask(http, "one", instructions=TEXT)
        for word in ("two", "three"):
            told = await ask(http, word, instructions=TEXT)
            assert told["cached"] == {"trunk": 0, "history": head, "host": 0, "total": head}


async def test_reports_outlive_the_gateway_and_are_their_owners_alone():
    bench = Bench(100, block_size=BLOCK)
    async with session_server() as store:
        engine = InprocEngineClient(bench.core, bench.info)
        await engine.start()
        async with (
            running_gateway(store, say(""), engine=engine, file_config=CONFIG) as gateway,
            gateway.http() as http,
        ):
            response = await create(http, TEXT, **SHORT)
            told = await report(http, response)
        async with running_gateway(store, say(""), file_config=CONFIG, owner="gateway-2") as gateway:
            async with gateway.http() as http:
                assert await report(http, response) == told
            async with gateway.http(KEY_B) as http:
                foreign = await report(http, response, 404)
                unknown = await report(http, {"id": response["id"][:-3] + "000"}, 404)
                assert foreign["error"]["code"] == unknown["error"]["code"] == "response_not_found"
                got = await http.get(f"/v1/responses/{response['id']}")
                assert got.json() == foreign, "the same answer as for the response itself"


async def test_while_it_runs_there_is_no_report_and_none_without_a_first_token():
    async with session_server() as store:
        script = {"runs": [b"H", Pause()], "waits": [Pause()]}
        async with (
            running_gateway(
                store,
                lambda request: script[
                    "waits" if b"wait" in bytes(i for i in request.prompt_ids if i < 256) else "runs"
                ],
            ) as gateway,
            gateway.http() as http,
            gateway.socket() as ws,
        ):
            for text, then in (("run", 200), ("wait", 404)):
                await send_create(ws, text)
                created = (await receive_until(ws, lambda e: e["type"] == "response.in_progress"))[-1]["response"]
                await gateway.engine.wait_paused()
                running = await report(http, created, 409)
                assert running["error"]["code"] == "response_in_progress"
                await http.post(f"/v1/responses/{created['id']}/cancel")
                await receive_until(ws)
                ended = await report(http, created, then)
                assert then == 200 or ended["error"]["code"] == "cache_report_not_found"
            unstored = await create(http, "Hi", store=False, max_output_tokens=1)
            assert (await report(http, unstored, 404))["error"]["code"] == "response_not_found"


SECRETS = [f"The secret of tenant a is {n}{n * 7}, said at {n} o'clock in the morning." for n in range(10, 20)]


async def test_reports_tell_nothing_of_what_another_tenant_has_cached():
    """B guesses prompts of A, cached and not: usage and reports are the same pairwise, and so for users of a tenant."""

    async def asked_after(victim: tuple[str, dict], others: Sequence[str]) -> list:
        async with caching_gateway() as gateway:
            key, fields = victim
            async with gateway.http(key) as http:
                for secret in others:
                    await ask(http, secret, **fields)
            told = []
            for key, fields in ((KEY_B, {}), ("key-of-tenant-c", {"user": "eve"}), ("key-of-tenant-c", {})):
                async with gateway.http(key) as http:
                    for guess in SECRETS:
                        for instructions in (None, guess):
                            report = await ask(http, guess, instructions=instructions, **fields)
                            told.append({**report, "response_id": None})
            return told

    nothing = await asked_after((KEY_A, {}), [])
    assert {told["first_miss"]["reason"] for told in nothing} == {"never_seen"}
    assert await asked_after((KEY_A, {}), SECRETS) == nothing
    assert await asked_after(("key-of-tenant-c", {"user": "ada"}), SECRETS) == nothing
