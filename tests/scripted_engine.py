"""An engine that says what a script tells it, behind the same protocol as the real one. No torch.

In process::

    engine = ScriptedEngineClient(byte_model_info(), script=lambda request: [b"Hel", Pause(), b"lo"])
    ...
    await engine.wait_paused()    # the request stands at its Pause: everything before it has been sent
    engine.release()              # and goes on

and as a process, behind the real `engine.process` loop::

    python -m tests.scripted_engine --address ipc:///tmp/x --script script.json --model-dir M

where script.json is a list of items, the same for each request: 65, "text", {"pause": null}, {"pause": 0.01},
{"fail": "message"}, {"die": "reason"}, {"echo": 0.01} (the last message, byte by byte, with that pause after each),
{"by_choice": [[...], [...]]} (the items of each choice); without it the prompt is echoed. `release_request()`,
submitted by any client, lets all that run pass one Pause each.

A script gives, for each request, items: an int (one token id), bytes (their byte tokens, in one output), a list of ids
(in one output), `Pause`, `Fail`, `Die`. After the last item the answer ends as with a model that draws its end token.
"""

import argparse
import asyncio
import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from engine.errors import EngineDeadError
from engine.parent_death import die_with_parent
from engine.prepared import PreparedModel
from engine.process import serve
from engine.protocol import (
    END,
    AddRequest,
    EngineInfo,
    EngineStats,
    PinTrunk,
    RequestOutput,
    Scope,
    TenantShare,
    TrunkState,
    UnpinTrunk,
)
from engine.sampling_params import SamplingParams
from engine.token_stream import TokenStream
from engine.trunk_pins import TrunkPins
from tests.byte_model import BYTE_VOCAB_SIZE, END_OF_TEXT, IM_END, IM_START, byte_model_info, make_byte_model
from tests.scripted_core import Die, Fail, Item, Pause, Script, ScriptedCore, echo, say

__all__ = [
    "BYTE_VOCAB_SIZE",
    "END_OF_TEXT",
    "IM_END",
    "IM_START",
    "Die",
    "Fail",
    "Item",
    "Pause",
    "Script",
    "ScriptedCore",
    "ScriptedEngineClient",
    "byte_model_info",
    "echo",
    "make_byte_model",
    "release_request",
    "say",
]


class ScriptedEngineClient:
    """An `EngineClient` on the test's own event loop. One item of each request per turn of the loop."""

    def __init__(
        self, info: EngineInfo | None = None, script: Script = echo, *, num_cached_tokens: int = 0, ready: bool = True
    ) -> None:
        self.core = ScriptedCore(info or byte_model_info(), script, num_cached_tokens)
        self._streams: dict[str, TokenStream] = {}
        self._pins = TrunkPins(self._send_pin)
        self._ready = asyncio.Event()
        self._changed = asyncio.Event()  # set, and replaced, at each change that a wait_* may look for
        self._task: asyncio.Task[None] | None = None
        if ready:
            self._ready.set()

    # -- EngineClient

    @property
    def info(self) -> EngineInfo:
        if not self.is_ready:
            raise EngineDeadError("the engine is not ready")
        return self.core.info

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set()

    async def wait_ready(self) -> None:
        await self._ready.wait()

    def submit(self, request: AddRequest) -> TokenStream:
        if not self.is_ready:
            raise EngineDeadError("the engine is not ready")
        if request.request_id in self._streams:
            raise ValueError(f"request id {request.request_id!r} is in use")
        stream = TokenStream(request.request_id, self._abort)
        self._streams[request.request_id] = stream
        refusal = self.core.add(request)
        if refusal is not None:
            self._dispatch([refusal])
        self._go()
        return stream

    async def pin(self, trunk_id: str, token_ids: list[int], scopes: list[Scope]) -> TrunkState:
        return await self._pins.pin(trunk_id, token_ids, scopes)

    async def unpin(self, trunk_id: str) -> None:
        self._pins.unpin(trunk_id)

    def set_tenants(self, shares: Sequence[TenantShare]) -> None:
        self.core.set_tenants(shares)

    async def stats(self) -> EngineStats:
        if not self.is_ready:
            raise EngineDeadError("the engine is not ready")
        return self.core.stats()

    async def close(self) -> None:
        self._pins.close("the engine client is closed")
        self.die("the engine client is closed", is_crash=False)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # -- for tests

    @property
    def requests(self) -> list[AddRequest]:
        """All that were submitted, in order."""
        return self.core.requests

    @property
    def aborted(self) -> list[str]:
        """Ids of those that were aborted while they ran."""
        return self.core.aborted

    @property
    def trunks(self) -> list[PinTrunk]:
        """What is pinned, in the order in which it came."""
        return list(self.core.trunks.values())

    @property
    def num_running(self) -> int:
        return len(self.core.running)

    def release(self, request_id: str | None = None) -> None:
        """Lets one request (or all that run) pass one Pause: the one it stands at, else the next it comes to."""
        self.core.release(request_id)
        self._go()

    def die(self, reason: str = "the engine died", *, is_crash: bool = True) -> None:
        """All streams fail, `is_ready` is false until `revive`."""
        self._ready.clear()
        self.core.running.clear()
        self.core.trunks.clear()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(EngineDeadError(reason, is_crash=is_crash))
        self._notify()

    def revive(self) -> None:
        self._ready.set()
        self._pins.resend()
        self._notify()

    async def wait_for(self, condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """Returns when the condition, of this engine's state, holds; the time only guards against hanging."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                await self._changed.wait()

    async def wait_submitted(self, num_requests: int = 1) -> None:
        await self.wait_for(lambda: len(self.requests) >= num_requests)

    async def wait_paused(self, num_requests: int = 1) -> None:
        """Until so many requests stand at a Pause: all that came before it has been put into their streams."""
        await self.wait_for(lambda: self.core.num_held >= num_requests)

    async def wait_aborted(self, num_requests: int = 1) -> None:
        await self.wait_for(lambda: len(self.aborted) >= num_requests)

    async def wait_idle(self) -> None:
        await self.wait_for(lambda: not self.core.running)

    async def wait_pinned(self, num_trunks: int = 1) -> None:
        await self.wait_for(lambda: len(self.core.trunks) >= num_trunks)

    # -- inside

    def _send_pin(self, message: PinTrunk | UnpinTrunk) -> None:
        if not self.is_ready:
            return
        if isinstance(message, UnpinTrunk):
            self.core.unpin(message.trunk_id)
        else:
            state = self.core.pin(message)
            assert state is not None
            self._pins.take(state)
        self._notify()

    def _abort(self, request_id: str) -> None:
        self._streams.pop(request_id, None)
        self.core.abort([request_id])
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _go(self) -> None:
        self._notify()
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while (delay_s := self.core.delay_s) is not None:
            await asyncio.sleep(delay_s)
            try:
                self._dispatch(self.core.step())
            except EngineDeadError as e:
                self.die(str(e))
            self._notify()

    def _dispatch(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:  # aborted by the reader of another one, a moment ago
                continue
            if output.finish_reason is not None:
                del self._streams[output.request_id]
            stream.put(output)


# ---- as a process


RELEASE_ID = "scripted-release"


def release_request(number: int = 0) -> AddRequest:
    """Lets everything that runs in a scripted process pass one Pause; itself it ends at once."""
    return AddRequest(
        request_id=f"{RELEASE_ID}-{number}",
        prompt_ids=[0],
        params=SamplingParams(max_tokens=1),
        scopes=[Scope(END, b"scripted")],
    )


class ScriptedProcessCore(ScriptedCore):
    """Waits and dies as a process does."""

    def add(self, request: AddRequest) -> RequestOutput | None:
        refusal = super().add(request)
        if request.request_id.startswith(RELEASE_ID):
            self.release()
        return refusal

    def step(self) -> list[RequestOutput]:
        time.sleep(self.delay_s or 0.0)
        try:
            return super().step()
        except EngineDeadError:
            os.kill(os.getpid(), signal.SIGKILL)
            raise


def echo_last_message(request: AddRequest, pause_s: float) -> Iterable[Item]:
    ids = request.prompt_ids[: max(i for i, token_id in enumerate(request.prompt_ids) if token_id == IM_END)]
    message = bytes(ids[max(i for i, token_id in enumerate(ids) if token_id == IM_START) + 1 :])
    for byte in message.partition(b"\n")[2]:
        yield from (byte, Pause(pause_s))


def script_from_json(data: bytes) -> Script:
    def items(value: object, request: AddRequest) -> Iterable[Item]:
        match value:
            case {"echo": float() | int() as seconds}:
                return echo_last_message(request, seconds)
            case {"by_choice": [*choices]}:
                return itertools.chain.from_iterable(items(value, request) for value in choices[request.choice])
        return [item(value)]

    def item(value: object) -> Item:
        match value:
            case int():
                return value
            case str():
                return value.encode()
            case {"pause": None | float() | int() as seconds}:
                return Pause(seconds)
            case {"fail": str(message)}:
                return Fail(message)
            case {"die": str(reason)}:
                return Die(reason)
        raise ValueError(f"not an item of a script: {value!r}")

    values = json.loads(data)

    def script(request: AddRequest) -> Iterable[Item]:
        if request.request_id.startswith(RELEASE_ID):
            return []
        return itertools.chain.from_iterable(items(value, request) for value in values)

    return script


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.scripted_engine")
    parser.add_argument("--address", required=True)
    parser.add_argument("--script", type=Path, help="a JSON list of items; without it the prompt is echoed")
    parser.add_argument("--model-dir", type=Path, help="a byte model, whose name and fingerprint it takes")
    parser.add_argument("--lease-s", type=float, default=10.0)
    arguments = parser.parse_args()
    die_with_parent()
    info = byte_model_info()
    if arguments.model_dir is not None:
        model = PreparedModel.load(arguments.model_dir)
        info = byte_model_info(model_name=model.manifest.name)
    script = script_from_json(arguments.script.read_bytes()) if arguments.script is not None else echo
    serve(ScriptedProcessCore(info, script), info, arguments.address, lease_s=arguments.lease_s)


if __name__ == "__main__":
    main()
