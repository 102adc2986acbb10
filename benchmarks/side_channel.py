"""Can a tenant tell by the clock what another one has asked? Guesses of its prompts, with a control that must show.

    python -m benchmarks.side_channel --pairs 200 --output benchmarks/results/NAME.json

Tenant B sends guesses in pairs: of each pair one text was sent shortly before, by tenant A, and one by nobody. Both
have as many tokens, and all guesses come in random order. The time to the first token must not tell them apart. The
control is the same with B's own texts in the place of A's: those must be told apart, or the clock is too coarse to
show anything. Beside the clock, the engine's counters and the usage of both guesses of a pair are compared.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.api_client import Answer, ApiClient, clients
from benchmarks.document import Document, all_hold, new_document, write
from benchmarks.rank_statistics import area
from benchmarks.served import served
from benchmarks.tenants import ADMIN_KEY, KEYS, SharedAssistant, write_configuration

ASSISTANT = SharedAssistant(250)
PAIRS_AT_A_TIME = 10
"""So that what was sent before is still cached when it is guessed, and slow times of the machine hit both kinds."""
DIGITS_OF_A_GROUP = 4
LEAST_CONTROL_AUC = 0.9
COUNTERS = (
    ("engine", "prefill_tokens"),
    ("engine", "steps"),
    ("prefix_cache", "query_tokens"),
    ("prefix_cache", "hit_tokens"),
)


@dataclass(frozen=True)
class Guess:
    ttft_s: float
    work: tuple[int, ...]
    """What `COUNTERS` grew by."""
    usage: tuple[int, int]
    """Prompt tokens, cached tokens."""


@dataclass(frozen=True)
class Pair:
    sent: Guess
    """Its text had been sent before."""
    new: Guess

    @property
    def is_equal_in_work(self) -> bool:
        return self.sent.work == self.new.work

    @property
    def is_equal_in_usage(self) -> bool:
        return self.sent.usage == self.new.usage


class Guesser:
    """`b` guesses; the system must be idle but for this."""

    def __init__(self, b: ApiClient, num_groups: int, seed: int) -> None:
        self._b = b
        self._num_groups = num_groups
        self._chance = random.Random(seed)

    async def guess(self, sender: ApiClient, num_pairs: int) -> list[Pair]:
        """`sender` has sent the first text of each pair before; B then sends both."""
        texts = [(self._text(), self._text()) for _ in range(num_pairs)]
        for sent, _ in texts:
            await self._chat(sender, sent)
        order = [(pair, which) for pair in range(num_pairs) for which in (0, 1)]
        self._chance.shuffle(order)
        guesses = {(pair, which): await self._measure(texts[pair][which]) for pair, which in order}
        return [Pair(guesses[pair, 0], guesses[pair, 1]) for pair in range(num_pairs)]

    async def _measure(self, text: str) -> Guess:
        before = await self._b.wait_until_idle()
        answer = await self._chat(self._b, text)
        after = await self._b.wait_until_idle()
        work = tuple(after[part][name] - before[part][name] for part, name in COUNTERS)
        return Guess(answer.ttft_s, work, (answer.prompt_tokens, answer.cached_tokens))

    @staticmethod
    async def _chat(client: ApiClient, text: str) -> Answer:
        return await client.chat([{"role": "user", "content": text}], assistant=ASSISTANT.id, max_tokens=1)

    def _text(self) -> str:
        """Never the same one; the demo model's tokenizer has a token for each digit, so that all have as many."""
        limit = 10**DIGITS_OF_A_GROUP
        return " ".join(f"{self._chance.randrange(limit):0{DIGITS_OF_A_GROUP}}" for _ in range(self._num_groups))


def describe(pairs: Sequence[Pair]) -> Document:
    sent, new = [[1000 * getattr(pair, kind).ttft_s for pair in pairs] for kind in ("sent", "new")]
    return {
        "pairs": len(pairs),
        "ttft_ms": {"sent": _quantiles(sent), "new": _quantiles(new)},
        "pairs_of_equal_work": sum(pair.is_equal_in_work for pair in pairs),
        "pairs_of_equal_usage": sum(pair.is_equal_in_usage for pair in pairs),
        **area(sent, new),
    }


def judge(across: Sequence[Pair], control: Sequence[Pair]) -> Document:
    """`across`: texts of the other tenant; `control`: B's own."""
    lengths = {guess.usage[0] for pair in (*across, *control) for guess in (pair.sent, pair.new)}
    if len(lengths) != 1:
        raise RuntimeError(f"guesses must have as many tokens all, got {sorted(lengths)}")
    other, own = describe(across), describe(control)
    low, high = other["interval"]
    return {
        "prompt_tokens": lengths.pop(),
        "counters": [".".join(counter) for counter in COUNTERS],
        "other_tenants": {
            **other,
            "must": "the interval includes 0.5; work and usage are equal in all pairs",
            "holds": low <= 0.5 <= high
            and other["pairs_of_equal_work"] == other["pairs_of_equal_usage"] == len(across),
        },
        "control": {
            **own,
            "must": f"the interval is above {LEAST_CONTROL_AUC}; work and usage are equal in no pair",
            "holds": own["interval"][0] > LEAST_CONTROL_AUC
            and own["pairs_of_equal_work"] == own["pairs_of_equal_usage"] == 0,
        },
    }


async def measure(options: argparse.Namespace) -> Document:
    across: list[Pair] = []
    control: list[Pair] = []
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "benchmark.toml"
        write_configuration(config, [ASSISTANT])
        with served(options.state_dir, ["--config", str(config), *options.serve.split()]) as server:
            async with clients(server, *KEYS, admin_key=ADMIN_KEY) as (a, b):
                guesser = Guesser(b, options.groups, options.seed)
                await guesser.guess(a, 2)  # warms up
                while len(across) < options.pairs:
                    num_pairs = min(PAIRS_AT_A_TIME, options.pairs - len(across))
                    across += await guesser.guess(a, num_pairs)
                    control += await guesser.guess(b, num_pairs)
                    print(f"{len(across)} of {options.pairs} pairs", file=sys.stderr)
    return judge(across, control)


def _quantiles(values: Sequence[float]) -> Document:
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    return {f"p{percent}": round(cuts[percent // 5 - 1], 1) for percent in (5, 25, 50, 75, 95)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--groups", type=int, default=50, help="groups of four digits in a guess")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--state-dir", type=Path, default=Path(".state"))
    parser.add_argument("--serve", default="", help="further options for `trunkline serve`, in one string")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    figures = asyncio.run(measure(options))
    write({**new_document(), "serve": options.serve, "seed": options.seed, **figures}, options.output)
    sys.exit(not all_hold(figures))


if __name__ == "__main__":
    main()
