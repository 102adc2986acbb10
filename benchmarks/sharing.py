"""What sharing saves and what it costs, each figure beside the bar it is held to.

    python -m benchmarks.sharing --output benchmarks/results/NAME.json

Serves two tenants with assistants of 250, 1,000 and 4,000 tokens; `gateway` and `blocks` need no server. What the names
mean stands in docs/benchmarks.md. Exit code 1 if a bar does not hold.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.demo_model import ensure_demo_model
from benchmarks.api_client import POLL_S, Answer, ApiClient, clients
from benchmarks.document import Document, all_hold, bar, new_document, write
from benchmarks.gateway_time import gateway_time
from benchmarks.kv_memory import kv_memory
from benchmarks.load import question, system_prompt
from benchmarks.served import served
from benchmarks.tenants import ADMIN_KEY, KEYS, Prompts, SharedAssistant, num_own, num_shared, write_configuration
from engine.models.prepare import prepare

SMALL, MIDDLE, LARGE = (SharedAssistant(num_tokens) for num_tokens in (250, 1000, 4000))
ASSISTANTS = (SMALL, MIDDLE, LARGE)
COLD_TOKENS = 1000
COLD_FACTOR = 1.05
BLOCK_SIZE = 16
MEMORY_OUTPUT_TOKENS = 96
MAX_BEYOND_OWN = 1 + (BLOCK_SIZE - 1) / BLOCK_SIZE
"""In blocks a chat: the copy of the block in which its trunk ends, and what its own last block has left."""
FLOOD_OUTPUT_TOKENS = 64
NEED_NO_SERVER = {"gateway", "blocks"}
WHAT = ("gateway", "blocks", "prefill", "cold", "memory", "fair-share")


@dataclass(frozen=True)
class Probe:
    """One request for one token."""

    ttft_s: float
    num_steps: int
    """Of the engine, from before it was sent until after it was answered."""
    num_waiting: int
    """Requests in the queue before."""


class Sharing:
    """The measurements over one server. Each ends with it idle."""

    def __init__(self, prompts: Prompts, a: ApiClient, b: ApiClient) -> None:
        self._prompts = prompts
        self._a = a
        self._b = b
        self._num_questions = 0
        self._seed = int(time.time())  # questions and prompts that no earlier run has asked

    def _ask(self) -> list[dict[str, str]]:
        self._num_questions += 1
        return [{"role": "user", "content": question(self._num_questions, 0, self._seed)}]

    async def prefill(self, num_chats: int) -> Document:
        """Tokens computed for the prompts of 2nd and further chats of each assistant, one after the other."""
        figures = {}
        for assistant in ASSISTANTS:
            await self._a.chat(self._ask(), assistant=assistant.id, max_tokens=1)
            beyond, lengths = [], []
            for _ in range(num_chats - 1):
                messages = self._ask()
                own = num_own(prompt := await self._prompts.build(messages, assistant))
                before = await self._a.prefill_tokens()
                answer = await self._a.chat(messages, assistant=assistant.id, max_tokens=1)
                computed = await self._a.prefill_tokens() - before
                _need_equal("prompt tokens", answer.prompt_tokens, len(prompt.token_ids))
                _need_equal("tokens not cached, by usage", answer.prompt_tokens - answer.cached_tokens, computed)
                beyond.append(computed - own)
                lengths.append(own)
            figures[assistant.id] = {
                "trunk_tokens": num_shared(prompt),
                "own_tokens": {"median": statistics.median(lengths), "most": max(lengths)},
                "computed_beyond_own": bar(max(beyond), at_most=1),
            }
        return {"chats": num_chats, **figures}

    async def cold(self, num_chats: int) -> Document:
        """Chats that arrive together under a system prompt which nobody has sent before."""
        self._seed += 1
        system = {"role": "system", "content": str(system_prompt(COLD_TOKENS, 0, self._seed))}
        chats = [[system, *self._ask()] for _ in range(num_chats)]
        prompts = [await self._prompts.build(messages) for messages in chats]
        shared, own = num_shared(prompts[0]), sum(num_own(prompt) for prompt in prompts)
        before = await self._a.prefill_tokens()
        answers = await asyncio.gather(*(self._a.chat(messages, max_tokens=4) for messages in chats))
        computed = (await self._a.wait_until_idle())["engine"]["prefill_tokens"] - before
        _need_equal("tokens not cached, by usage", sum(a.prompt_tokens - a.cached_tokens for a in answers), computed)
        return {
            "chats": num_chats,
            "shared_tokens": shared,
            "own_tokens": own,
            "computed_tokens": bar(computed, at_most=COLD_FACTOR * (shared + own)),
            "computed_beyond": computed - shared - own,
        }

    async def memory(self, num_chats: int) -> Document:
        """KV that running chats hold beside their assistant's trunk, against the tokens that are their own."""
        return {"chats": num_chats, **{a.id: await self._memory_of(a, num_chats) for a in ASSISTANTS}}

    async def _memory_of(self, assistant: SharedAssistant, num_chats: int) -> Document:
        chats = [self._ask() for _ in range(num_chats)]
        prompts = [await self._prompts.build(messages, assistant) for messages in chats]
        own_prompts, trunk = sum(num_own(prompt) for prompt in prompts), num_shared(prompts[0])
        before = await self._a.wait_until_idle()
        fields = {"assistant": assistant.id, "max_tokens": MEMORY_OUTPUT_TOKENS, "ignore_eos": True}
        running = asyncio.gather(*(self._a.chat(messages, **fields) for messages in chats))
        samples = []
        while not running.done():
            stats = await self._a.stats()
            generated = stats["engine"]["generation_tokens"] - before["engine"]["generation_tokens"]
            if stats["requests"]["running"] == num_chats and generated >= num_chats:
                blocks = stats["blocks"]["referenced"] - before["blocks"]["referenced"]
                # of the tokens drawn last KV is written only in the next step
                own = own_prompts + generated - num_chats
                samples.append((blocks * BLOCK_SIZE - own) / (BLOCK_SIZE * num_chats))
            await asyncio.sleep(POLL_S)
        await running
        if not samples:
            raise RuntimeError(f"{num_chats} chats never ran all at once")
        return {
            "trunk_tokens": trunk,
            "trunk_tokens_in_its_last_block": trunk % BLOCK_SIZE,
            "samples": len(samples),
            "mean_blocks_a_chat_beyond_own": round(statistics.mean(samples), 3),
            "most_blocks_a_chat_beyond_own": bar(max(samples), at_most=MAX_BEYOND_OWN),
        }

    async def fair_share(self, num_queued: int, num_probes: int, max_steps: int) -> Document:
        """Time and steps to first token of one tenant alone, and while the other has requests waiting all the time."""
        alone = [await self._probe() for _ in range(num_probes)]
        flood = [asyncio.create_task(self._flood()) for _ in range(num_queued)]
        beside: list[Probe] = []
        try:
            while (await self._b.stats())["requests"]["waiting"] < num_queued // 2:
                await asyncio.sleep(POLL_S)
                _raise_first(flood)
            while len(beside) < num_probes:
                probe = await self._probe()
                if probe.num_waiting == 0:
                    break
                beside.append(probe)
        finally:
            for task in flood:
                task.cancel()
            await asyncio.gather(*flood, return_exceptions=True)
        _raise_first(flood)
        await self._b.wait_until_idle()
        alone += [await self._probe() for _ in range(num_probes)]
        if not beside:
            raise RuntimeError("the queue was empty before anybody else asked: give a larger one")
        ratio = statistics.median(p.ttft_s for p in beside) / statistics.median(p.ttft_s for p in alone)
        return {
            "queued": num_queued,
            "waiting_when_asked": [probe.num_waiting for probe in beside],
            "alone": _describe(alone),
            "beside": _describe(beside),
            "ratio_of_times": round(ratio, 3),
            "most_steps": bar(max(p.num_steps for p in beside), at_most=max_steps),
        }

    async def _probe(self) -> Probe:
        before = await self._b.stats()
        answer = await self._b.chat(self._ask(), assistant=MIDDLE.id, max_tokens=1)
        after = await self._b.stats()
        return Probe(answer.ttft_s, after["engine"]["steps"] - before["engine"]["steps"], before["requests"]["waiting"])

    async def _flood(self) -> Answer:
        return await self._a.chat(self._ask(), assistant=MIDDLE.id, max_tokens=FLOOD_OUTPUT_TOKENS, ignore_eos=True)


async def measure(what: list[str], prompts: Prompts, options: argparse.Namespace) -> Document:
    figures: dict[str, Any] = {}
    if "gateway" in what:
        figures["gateway"] = await gateway_time(prompts, SMALL, LARGE, options.rounds)
    if "blocks" in what:
        figures["blocks"] = kv_memory(options.chats, MIDDLE.num_tokens, seed=1)
    if not set(what) - NEED_NO_SERVER:
        return figures
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "benchmark.toml"
        write_configuration(config, ASSISTANTS)
        with served(options.state_dir, ["--config", str(config), *options.serve.split()]) as server:
            async with clients(server, *KEYS, admin_key=ADMIN_KEY) as (a, b):
                sharing = Sharing(prompts, a, b)
                for assistant in ASSISTANTS:  # until the trunks are there
                    await a.chat([{"role": "user", "content": "Hello"}], assistant=assistant.id, max_tokens=1)
                await a.wait_until_idle()
                if "prefill" in what:
                    figures["prefill"] = await sharing.prefill(options.chats)
                if "cold" in what:
                    figures["cold"] = [await sharing.cold(options.cold_chats) for _ in range(options.runs)]
                if "memory" in what:
                    figures["memory"] = await sharing.memory(options.chats)
                if "fair-share" in what:
                    figures["fair_share"] = await sharing.fair_share(
                        options.queued, options.probes, options.max_fair_steps
                    )
    return figures


def _need_equal(what: str, got: int, expected: int) -> None:
    if got != expected:
        raise RuntimeError(f"{what}: {got}, expected {expected}")


def _raise_first(tasks: list[asyncio.Task[Answer]]) -> None:
    for task in tasks:
        if task.done() and not task.cancelled():
            task.result()


def _describe(probes: list[Probe]) -> Document:
    times = [1000 * probe.ttft_s for probe in probes]
    return {
        "probes": len(probes),
        "ttft_ms": {"median": round(statistics.median(times), 1), "most": round(max(times), 1)},
        "steps": {
            "median": statistics.median(probe.num_steps for probe in probes),
            "most": max(probe.num_steps for probe in probes),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=list(WHAT))
    parser.add_argument("--chats", type=int, default=32, help="of blocks, prefill and memory")
    parser.add_argument("--cold-chats", type=int, default=32)
    parser.add_argument("--runs", type=int, default=3, help="of cold")
    parser.add_argument("--rounds", type=int, default=500, help="of gateway")
    parser.add_argument("--queued", type=int, default=200, help="requests of the tenant that floods")
    parser.add_argument("--probes", type=int, default=10, help="requests of the other one")
    parser.add_argument(
        "--max-fair-steps",
        type=int,
        default=4,
        help="what docs/design.md section 5 promises for the default places and budget, two tenants, a short question",
    )
    parser.add_argument("--state-dir", type=Path, default=Path(".state"))
    parser.add_argument("--serve", default="", help="further options for `trunkline serve`, in one string")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    for name in options.what:
        if name not in WHAT:
            parser.error(f"unknown measurement {name!r}, expected some of {', '.join(WHAT)}")
    model = prepare(str(ensure_demo_model(options.state_dir)), options.state_dir, "auto", lambda *_: None)
    figures = asyncio.run(measure(options.what, Prompts(model, ASSISTANTS), options))
    write({**new_document(), "serve": options.serve, **figures}, options.output)
    sys.exit(not all_hold(figures))


if __name__ == "__main__":
    main()
