"""An assistant that is edited fifty times while twenty chats run and the pin budget is full."""

import asyncio
from dataclasses import dataclass, field

import pytest

from engine.protocol import END, PinTrunk, RequestOutput, Scope, TrunkPin, TrunkState, UnpinTrunk
from engine.trunk_pins import TrunkPins
from tests.engine.fake_runner import Bench
from tests.engine.sequences import make_sequence

NUM_VERSIONS = 50
NUM_CHATS = 20
BUDGET_BLOCKS = 8
OTHER_TRUNK = list(range(500, 535))
"""Five blocks of the budget of eight: two versions of the edited one, of two blocks at least, do not fit beside it."""


@dataclass
class Version:
    number: int
    chats: set[str] = field(default_factory=set)
    """Those that began with it and have not ended."""
    state: TrunkState | None = None

    @property
    def trunk_id(self) -> str:
        return f"guide@{self.number}"

    @property
    def token_ids(self) -> list[int]:
        """All versions begin alike; lengths go round the block borders."""
        return [*range(12), 900 + self.number, *range(self.number % 9)]

    @property
    def key(self) -> bytes:
        return b"guide, version %d" % self.number

    def scopes(self, tenant: str) -> list[Scope]:
        return [Scope(len(self.token_ids), self.key), Scope(END, tenant.encode())]


class PinningBench(Bench):
    """With a client's side of pins, as a gateway has it. Looks at pins and old versions after every step."""

    def __init__(self, num_blocks: int, num_host_blocks: int) -> None:
        budget = BUDGET_BLOCKS / num_blocks
        super().__init__(
            num_blocks, max_num_seqs=24, max_waiting=200, pin_budget=budget, num_host_blocks=num_host_blocks
        )
        self.pins = TrunkPins(self._send)
        self.versions: list[Version] = []
        self.unpinned: list[Version] = []
        self.most_pinned = 0

    def _send(self, message: PinTrunk | UnpinTrunk) -> None:
        if isinstance(message, UnpinTrunk):
            self.core.unpin(message.trunk_id)
        elif (state := self.core.pin(message)) is not None:
            self.pins.take(state)

    async def turn(self) -> None:
        num_news = len(self.trunk_news)
        self.step()
        for state in self.trunk_news[num_news:]:
            self.pins.take(state)
        for version in self.versions:
            version.chats = {chat for chat in version.chats if self.outputs_of(chat).finish_reason is None}
        self.look()
        await asyncio.sleep(0)

    def outputs_of(self, chat: str) -> RequestOutput:
        return self.outputs.get(chat) or RequestOutput(request_id=chat)

    def look(self) -> None:
        blocks = self.core.stats().blocks
        assert blocks.pinned <= BUDGET_BLOCKS, blocks
        self.most_pinned = max(self.most_pinned, blocks.pinned)
        for version in self.unpinned:
            if not version.chats:
                held = [block for block in self.find_blocks(version) if block.ref_count]
                assert not held, f"version {version.number} has ended, but {held} are in use"

    def find_blocks(self, version: Version):
        sequence = make_sequence("look", [*version.token_ids, 1], scopes=tuple(version.scopes("nobody")))
        return self.core.scheduler.kv.find_longest_prefix(sequence).blocks

    async def pin(self, trunk_id: str, token_ids: list[int], key: bytes) -> TrunkState:
        task = asyncio.create_task(self.pins.pin(trunk_id, token_ids, [Scope(END, key)]))
        await asyncio.sleep(0)
        while not task.done():
            await self.turn()
        return task.result()


@pytest.mark.parametrize(
    ("num_blocks", "num_host_blocks"), [(60, 0), (60, 300), (200, 0)], ids=["tight pool", "with a host", "large pool"]
)
async def test_an_assistant_edited_fifty_times_while_twenty_chats_run_and_the_budget_is_full(
    num_blocks, num_host_blocks
):
    bench = PinningBench(num_blocks, num_host_blocks)
    assert (await bench.pin("other", OTHER_TRUNK, b"other")).state is TrunkPin.PINNED
    prompts: dict[str, tuple[list[int], int]] = {}
    firsts: list[str] = []

    def start_chat(version: Version) -> str:
        name = f"chat {len(prompts)}"
        prompt, num_tokens = [*version.token_ids, 700 + len(prompts) % 200], 8 + 5 * len(prompts) % 23
        assert bench.add(name, prompt, num_tokens, scopes=version.scopes("ab"[len(prompts) % 2])) is None
        prompts[name] = prompt, num_tokens
        version.chats.add(name)
        return name

    for number in range(NUM_VERSIONS):
        version = Version(number)
        bench.versions.append(version)
        firsts.append(start_chat(version))  # before anybody has computed it
        await bench.turn()
        if firsts[-1] not in bench.running:
            firsts.pop()  # it had to wait, and may find what is computed meanwhile for the trunk
        version.state = await bench.pin(version.trunk_id, version.token_ids, version.key)
        if number:
            old = bench.versions[number - 1]
            bench.pins.unpin(old.trunk_id)
            bench.unpinned.append(old)
        while sum(len(v.chats) for v in bench.versions) < NUM_CHATS:
            start_chat(version)
        for _ in range(3):
            await bench.turn()
            assert sum(len(v.chats) for v in bench.versions) > NUM_CHATS // 2
    # none fitted beside the one before it, and each had its place when that one was gone
    states = [version.state.state for version in bench.versions if version.state is not None]
    assert states == [TrunkPin.PINNED] + [TrunkPin.OVER_BUDGET] * (NUM_VERSIONS - 1)
    assert bench.most_pinned == BUDGET_BLOCKS
    while bench.core.has_work:
        await bench.turn()
    for name, (prompt, num_tokens) in prompts.items():
        bench.assert_complete(name, prompt, num_tokens)
    assert len(firsts) > NUM_VERSIONS // 2
    assert [bench.outputs[name].num_cached_tokens for name in firsts] == [0] * len(firsts), "a stale hit"
    assert (bench.core.stats().preemptions > 0) == (num_blocks == 60)
    assert (bench.core.stats().host.swapped_in > 0) == (num_host_blocks > 0)
    last = bench.versions[-1]
    assert (await bench.pin(last.trunk_id, last.token_ids, last.key)).state is TrunkPin.PINNED
    blocks = bench.core.stats().blocks
    assert blocks.referenced == blocks.pinned == 5 + -(-len(last.token_ids) // 8)
    for trunk_id in ("other", last.trunk_id):
        bench.pins.unpin(trunk_id)
    assert bench.core.stats().blocks.referenced == 0
    bench.core.check_integrity()
