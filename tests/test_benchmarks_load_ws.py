"""The load generator over websockets, against a gateway with a scripted engine."""

import asyncio
from collections.abc import Callable

from benchmarks.load_ws import Chat, create, drive, report
from benchmarks.ws_client import WsClient
from tests.app.session_store import session_server
from tests.app.stateful_gateway import KEY_A, running_gateway
from tests.scripted_engine import Fail, say

TEXT = "Hello there"


def body(model: str = "byte-model", **fields: object) -> Callable[[str | None], str]:
    return lambda previous_id: create(model, "Hi", previous_response_id=previous_id, **fields)


async def test_chats_of_several_turns_are_told_with_the_names_of_the_other_load_generator() -> None:
    async with session_server() as store, running_gateway(store, say(TEXT)) as gateway:

        def load() -> dict[str, object]:
            headers = {"Authorization": f"Bearer {KEY_A}"}
            chats = [
                Chat(WsClient("127.0.0.1", gateway.port, headers=headers), [body(store=False), body(store=False)])
                for _ in range(3)
            ]
            found = report(drive(chats, concurrency=2), "label")
            for chat in chats:
                chat.client.close()
            return found

        found = await asyncio.to_thread(load)
        assert {name: found[name] for name in ("label", "completed", "errors", "output_tokens")} == {
            "label": "label",
            "completed": 6,
            "errors": 0,
            "output_tokens": 6 * (len(TEXT) + 1),
        }
        assert len(gateway.engine.requests[-1].prompt_ids) > 2 * len(TEXT), "the second turn has the first one's answer"
        assert found["events"] == found["content_chunks"] + 6 * 8
        assert None not in {found[f"{name}_p{p}_ms"] for name in ("ttft", "itl", "latency") for p in (50, 99)}


async def test_an_answer_that_fails_is_an_error() -> None:
    async with session_server() as store, running_gateway(store, lambda _: [b"He", Fail("no")]) as gateway:

        def load() -> dict[str, object]:
            headers = {"Authorization": f"Bearer {KEY_A}"}
            chats = [Chat(WsClient("127.0.0.1", gateway.port, headers=headers), [body(model="none")])]
            found = report(drive(chats))
            chats[0].client.close()
            return found

        found = await asyncio.to_thread(load)
        assert (found["completed"], found["errors"]) == (0, 1)
        assert "an error came" in str(found["first_error"])
