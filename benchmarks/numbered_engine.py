"""An engine without a model whose every token says when it was made: for what a gateway adds.

    python -m benchmarks.numbered_engine --address ipc:///tmp/x --times FILE

It is the real engine's loop around another core. A token is a word, " 0000" to " 9999": the number of its step, and
FILE, `StepTimes`, has the moment at which each step was made. How a request is paced is said in its seed (`seed_of`):
so many requests are waited for and then answered together, a token for each in every step; a step is made every so
many microseconds, or as soon as the gateway has taken the last one.
"""

import argparse
import json
import mmap
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from engine.parent_death import die_with_parent
from engine.prepared import PreparedModel
from engine.process import EngineProcess
from engine.protocol import (
    AddRequest,
    BlockStats,
    EngineInfo,
    EngineStats,
    FinishReason,
    PinTrunk,
    RequestOutput,
    TenantShare,
    TrunkPin,
    TrunkState,
)
from tests.byte_model import BYTE_VOCAB_SIZE, make_byte_model

NUM_WORDS = 10_000
MAX_MODEL_LEN = 32_768
REST_S = 0.5
"""Before the first step of requests that are answered together: taking them in is another thing than streaming."""
_SECOND_US = 1_000_000


def seed_of(num_together: int = 1, interval_s: float = 0.0) -> int:
    """`interval_s`: 0 for steps that follow one another at once; below a second."""
    return num_together * _SECOND_US + round(interval_s * _SECOND_US)


def pace_of(seed: int | None) -> tuple[int, float]:
    """How many requests are answered together, and the seconds between their steps."""
    num_together, interval_us = divmod(seed or 0, _SECOND_US)
    return max(1, num_together), interval_us / _SECOND_US


def number_in(text: str) -> int:
    """Of the step that a token was made in."""
    return int(text)


class StepTimes:
    """When each step was made, in seconds of `time.monotonic`, by its number: a file that processes share."""

    def __init__(self, path: Path) -> None:
        """Made if it is not there."""
        with path.open("a+b") as file:
            file.truncate(8 * NUM_WORDS)
            self._map = mmap.mmap(file.fileno(), 8 * NUM_WORDS)
        self._times = memoryview(self._map).cast("d")

    def __getitem__(self, number: int) -> float:
        return self._times[number]

    def __setitem__(self, number: int, at: float) -> None:
        self._times[number] = at


def make_numbered_model(path: Path) -> PreparedModel:
    """The byte model with a token for each number of a step."""
    make_byte_model(path, name="numbered", max_model_len=MAX_MODEL_LEN)
    tokenizer = json.loads((path / "tokenizer.json").read_bytes())
    tokenizer["model"]["vocab"] |= {f"Ġ{i:04}": BYTE_VOCAB_SIZE + i for i in range(NUM_WORDS)}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    manifest = json.loads((path / "manifest.json").read_bytes())
    manifest["config"]["vocab_size"] = BYTE_VOCAB_SIZE + NUM_WORDS
    (path / "manifest.json").write_text(json.dumps(manifest))
    return PreparedModel.load(path)


@dataclass(eq=False)
class _Group:
    """Requests that are answered together, and how many tokens each of them still gets."""

    interval_s: float
    due: float
    left: dict[str, int]
    is_new: bool = True


@dataclass(eq=False)
class NumberedCore:
    """What `engine.core.EngineCore` is to the loop of the engine process."""

    info: EngineInfo
    times: StepTimes
    is_taken: Callable[[], bool] = lambda: True
    """Whether the gateways have what was made."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    num_steps: int = 0
    num_generated: int = 0
    _gathering: dict[tuple[int, float], dict[str, int]] = field(default_factory=dict)
    _groups: list[_Group] = field(default_factory=list)

    def add(self, request: AddRequest) -> RequestOutput | None:
        num_together, interval_s = pace = pace_of(request.params.seed)
        left = self._gathering.setdefault(pace, {})
        left[request.request_id] = request.params.max_tokens or MAX_MODEL_LEN - len(request.prompt_ids)
        if len(left) >= num_together:
            del self._gathering[pace]
            rest_s = REST_S if num_together > 1 else 0.0
            self._groups.append(_Group(interval_s, self.clock() + rest_s, left))
        return None

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            for left in (*self._gathering.values(), *(group.left for group in self._groups)):
                left.pop(request_id, None)
        self._groups = [group for group in self._groups if group.left]

    @property
    def has_work(self) -> bool:
        return any(group.interval_s for group in self._groups) or (bool(self._groups) and self.is_taken())

    def step(self) -> list[RequestOutput]:
        """One token for each request of the groups that are due. Waits for the first of them."""
        is_taken = self.is_taken()
        may_step = [group for group in self._groups if group.interval_s or is_taken]
        first = min(group.due for group in may_step)
        if (pause_s := first - self.clock()) > 0:
            self.sleep(pause_s)
        now, number = self.clock(), self.num_steps % NUM_WORDS
        self.num_steps += 1
        self.times[number] = now
        outputs: list[RequestOutput] = []
        for group in may_step:
            if group.due <= now:
                outputs += self._advance(group, BYTE_VOCAB_SIZE + number)
                # what was missed is not made up for
                group.due = max(group.due + group.interval_s, now - group.interval_s)
        self._groups = [group for group in self._groups if group.left]
        self.num_generated += len(outputs)
        return outputs

    def _advance(self, group: _Group, token_id: int) -> list[RequestOutput]:
        outputs = [RequestOutput(request_id=request_id, token_ids=[token_id]) for request_id in group.left]
        if group.is_new:
            group.is_new = False
            for output in outputs:
                output.num_cached_tokens = output.num_cached_trunk_tokens = 0
        for output in outputs:
            left = group.left[output.request_id] - 1
            if left:
                group.left[output.request_id] = left
            else:
                del group.left[output.request_id]
                output.finish_reason = FinishReason.LENGTH
        return outputs

    def stats(self) -> EngineStats:
        running = sum(len(group.left) for group in self._groups)
        total = self.info.num_blocks
        blocks = BlockStats(total=total, free=total - running, cached=0, referenced=running, pinned=0)
        return EngineStats(
            blocks=blocks,
            running=running,
            waiting=sum(map(len, self._gathering.values())),
            query_tokens=0,
            hit_tokens=0,
            prompt_tokens_computed=0,
            generation_tokens=self.num_generated,
            preemptions=0,
            steps=self.num_steps,
        )

    def pin(self, message: PinTrunk) -> TrunkState | None:
        return TrunkState(message.trunk_id, TrunkPin.OVER_BUDGET, len(message.token_ids), 0)

    def unpin(self, trunk_id: str) -> None: ...

    def take_trunk_news(self) -> list[TrunkState]:
        return []

    def set_tenants(self, shares: Iterable[TenantShare]) -> None: ...

    def check_integrity(self) -> None: ...


def numbered_info() -> EngineInfo:
    return EngineInfo(
        model_name="numbered",
        fingerprint="scripted-numbered",
        vocab_size=BYTE_VOCAB_SIZE + NUM_WORDS,
        max_model_len=MAX_MODEL_LEN,
        block_size=16,
        num_blocks=1 << 20,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", required=True)
    parser.add_argument("--times", type=Path, required=True)
    arguments = parser.parse_args()
    die_with_parent()
    core = NumberedCore(numbered_info(), StepTimes(arguments.times))
    process = EngineProcess(core, core.info, arguments.address)
    gateways = process._gateways
    core.is_taken = lambda: all(g.acknowledged_step_id == g.last_step_id for g in gateways.values())
    process.handle_signals()
    process.run()


if __name__ == "__main__":
    main()
