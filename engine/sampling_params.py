"""How one request is sampled: the field's own names (vLLM's and OpenAI's)."""

import math
from typing import Self

import msgspec

from engine.errors import InvalidRequest

MAX_LOGPROBS = 20
GREEDY_TEMPERATURE = 1e-5
"""Below this a temperature means greedy: dividing by it would only overflow (vLLM's bound)."""


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What to draw and when to stop.

    The engine works on ids. `n`, `stop`, `include_stop_str_in_output` and `skip_special_tokens` are read by whoever
    turns ids into text (gateway, `LLM`); `eos_token_ids` is filled in there too, as the engine has no tokenizer.
    """

    max_tokens: int | None = 16
    """At most this many output tokens; None means all that the context leaves."""
    min_tokens: int = 0
    """No end or stop id is drawn before this many output tokens."""
    temperature: float = 1.0
    top_k: int = 0
    """0 and -1: off."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and output; 1 is off."""
    presence_penalty: float = 0.0
    """Over output only."""
    frequency_penalty: float = 0.0
    """Over output only."""
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    """None: the server draws one. Noise is Philox(seed, choice, position)."""
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: none. k >= 0: the drawn token's log-probability and the k best alternatives."""
    prompt_logprobs: int | None = None
    """The same for each prompt token; such a request bypasses the prefix cache."""

    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    def validate(self, vocab_size: int) -> Self:
        """Returns itself. Raises InvalidRequest naming the first field that is out of range."""

        def need(ok: bool, param: str, wanted: str) -> None:
            if not ok:
                raise InvalidRequest(f"{param} must be {wanted}, got {getattr(self, param)!r}", param=param)

        def finite(x: float) -> bool:
            return math.isfinite(x)

        need(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "at least 1")
        need(self.min_tokens >= 0, "min_tokens", "at least 0")
        need(self.max_tokens is None or self.min_tokens <= self.max_tokens, "min_tokens", "at most max_tokens")
        need(finite(self.temperature) and self.temperature >= 0, "temperature", "finite and at least 0")
        need(self.top_k >= -1, "top_k", "-1 or 0 (off) or positive")
        need(finite(self.top_p) and 0 <= self.top_p <= 1, "top_p", "between 0 and 1")
        need(finite(self.min_p) and 0 <= self.min_p <= 1, "min_p", "between 0 and 1")
        need(
            finite(self.repetition_penalty) and 0.01 <= self.repetition_penalty <= 100,
            "repetition_penalty",
            "between 0.01 and 100",
        )
        for param in ("presence_penalty", "frequency_penalty"):
            need(finite(getattr(self, param)) and -2 <= getattr(self, param) <= 2, param, "between -2 and 2")
        for token_id, bias in self.logit_bias.items():
            need(0 <= token_id < vocab_size, "logit_bias", f"keyed by token ids from 0 to {vocab_size - 1}")
            need(finite(bias) and -100 <= bias <= 100, "logit_bias", "made of values from -100 to 100")
        need(self.seed is None or -(2**63) <= self.seed < 2**64, "seed", "a 64-bit integer")
        for param in ("stop_token_ids", "eos_token_ids"):
            need(
                all(0 <= t < vocab_size for t in getattr(self, param)),
                param,
                f"made of token ids from 0 to {vocab_size - 1}",
            )
        for param in ("logprobs", "prompt_logprobs"):
            value = getattr(self, param)
            need(value is None or 0 <= value <= MAX_LOGPROBS, param, f"between 0 and {MAX_LOGPROBS}")
        need(1 <= self.n <= 128, "n", "between 1 and 128")
        need(all(self.stop), "stop", "made of strings that are not empty")
        return self
