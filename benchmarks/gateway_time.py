"""What a chat costs the gateway before the engine has it, and the engine to hash it: measured in this process."""

import asyncio
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from app.chat_request import ChatRequest
from app.config import Limits
from app.json_body import parse_json
from app.prompts import BuiltPrompt
from app.request_params import parse_request
from benchmarks.document import Document, bar
from benchmarks.load import question
from benchmarks.tenants import Prompts, SharedAssistant, num_shared
from engine.block_hash import root_hash
from engine.kv_cache_manager import KVCacheManager
from engine.protocol import AddRequest, encode
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence

BLOCK_SIZE = 16
MAX_RATIO = 1.3
PARTS = ("validate", "render_and_encode", "message", "hash")


class GatewayTime:
    """Each `measure` is one new chat of the assistant; seconds of each part."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        self._kv = KVCacheManager(1, BLOCK_SIZE, root_hash("benchmark"))
        self._limits = Limits()
        self._num_chats = 0
        self.trunk_tokens: dict[SharedAssistant, int] = {}

    async def measure(self, assistant: SharedAssistant) -> dict[str, float]:
        self._num_chats += 1
        message = {"role": "user", "content": question(self._num_chats, 0, 0)}
        body = json.dumps({"model": f"m:{assistant.id}", "messages": [message], "stream": True}).encode()
        seconds = {}

        start = time.perf_counter()
        params = self._validate(body)
        seconds["validate"] = time.perf_counter() - start

        start = time.perf_counter()
        prompt = await self._prompts.build([message], assistant)
        seconds["render_and_encode"] = time.perf_counter() - start
        self.trunk_tokens[assistant] = num_shared(prompt)

        request = AddRequest(request_id="r", prompt_ids=prompt.token_ids, params=params, scopes=prompt.scopes)
        seconds["message"] = _seconds(lambda: encode(request))
        sequence = _sequence(prompt, params)
        seconds["hash"] = _seconds(lambda: self._kv.shareable_hashes(sequence))
        return seconds

    def _validate(self, body: bytes) -> SamplingParams:
        prompts = self._prompts
        chat = parse_request(ChatRequest, parse_json(body))
        chat.check(self._limits)
        return chat.to_params(prompts.tokenizer, prompts.model.manifest.sampling_defaults, chat.token_limit)


async def gateway_time(prompts: Prompts, small: SharedAssistant, large: SharedAssistant, num_rounds: int) -> Document:
    """Chats of both assistants by turns; medians in microseconds, and their ratio."""
    gateway = GatewayTime(prompts)
    taken: dict[SharedAssistant, list[dict[str, float]]] = {small: [], large: []}
    for _ in range(num_rounds + 1):
        for assistant, rounds in taken.items():
            rounds.append(await gateway.measure(assistant))
            await asyncio.sleep(0)
    figures: dict[str, Any] = {}
    totals = {}
    for assistant, rounds in taken.items():
        timed = rounds[1:]  # the first one makes what is made once for each assistant
        totals[assistant] = statistics.median(sum(seconds.values()) for seconds in timed)
        figures[assistant.id] = {
            "trunk_tokens": gateway.trunk_tokens[assistant],
            "total_us": round(1e6 * totals[assistant], 1),
            **{f"{part}_us": round(1e6 * statistics.median(s[part] for s in timed), 1) for part in PARTS},
        }
    return {"rounds": num_rounds, **figures, "ratio": bar(totals[large] / totals[small], at_most=MAX_RATIO)}


def _sequence(prompt: BuiltPrompt, params: SamplingParams) -> Sequence:
    return Sequence("r", prompt.token_ids, params, tuple(prompt.scopes), seed=1, max_output_tokens=1)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
