"""The workloads that a served model is measured with, and the decode step that each of them comes to."""

from dataclasses import dataclass

from benchmarks.step_work import DecodeShape

QUESTION_TOKENS = 40
"""A user's message of `benchmarks/load.py` with the markup around it, in SmolLM2's tokens."""


@dataclass(frozen=True, slots=True)
class Workload:
    num_tenants: int
    system_tokens: int
    concurrency: int
    num_chats: int
    max_tokens: int
    """Of an answer."""
    num_turns: int = 1
    ignores_eos: bool = True
    is_cold: bool = False
    """Its prompts are new in every run; otherwise only the users' questions change."""

    @property
    def arguments(self) -> str:
        """Of `benchmarks/load.py`."""
        parts = [f"--tenants {self.num_tenants} --system-tokens {self.system_tokens}"]
        parts += [f"--concurrency {self.concurrency} --requests {self.num_chats} --max-tokens {self.max_tokens}"]
        parts += [f"--turns {self.num_turns}"] * (self.num_turns > 1)
        parts += ["--ignore-eos"] * self.ignores_eos
        return " ".join(parts)

    def decode_shape(self) -> DecodeShape:
        """Of a step in the middle of an answer in the middle of a chat, all answers being as long as they may be."""
        turn_tokens = QUESTION_TOKENS + self.max_tokens
        own_tokens = turn_tokens * (self.num_turns - 1) // 2 + QUESTION_TOKENS + self.max_tokens // 2
        if self.num_tenants >= self.concurrency > 1:
            return DecodeShape(self.concurrency, 0, self.system_tokens + own_tokens, num_trunks=0)
        return DecodeShape(self.concurrency, self.system_tokens, own_tokens, self.num_tenants)


WORKLOADS = {
    "W1": Workload(1, 1000, 32, 64, 64),
    "W2": Workload(8, 500, 32, 64, 64),
    "W3": Workload(1, 500, 16, 16, 48, num_turns=4, ignores_eos=False),
    "W4": Workload(1, 1000, 1, 8, 128, ignores_eos=False),
    "W5": Workload(32, 500, 16, 32, 64, is_cold=True),
    "W6": Workload(1, 4000, 32, 64, 64),
    "W7": Workload(1, 250, 32, 64, 64),
}
