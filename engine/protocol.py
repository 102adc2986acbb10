"""What gateway and engine say to each other: msgspec structs over ZeroMQ, DEALER to ROUTER.

One message per engine step and gateway, not one per token and stream. The gateway sends `Hello` on each connection
and gets `EngineReady`; it acknowledges each `StepOutputs`, which is the engine's credit to send further ones: without
credit the engine merges outputs of one request, so that what waits for a slow gateway is bounded by its answers.
While it has requests or pins the gateway renews its lease; an engine whose gateway fell silent aborts its requests and
drops its pins.
"""

import enum
from typing import NamedTuple

import msgspec

from engine.sampling_params import SamplingParams

PROTOCOL_VERSION = 5


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Scope(NamedTuple):
    """Who may share the KV of a stretch of tokens: a block belongs to the first scope whose end it does not pass.

    `end_token` is exclusive; the last scope of a request ends at `END`. KV is found again up to the very token at which
    a scope ends, also where the next one has the same key: so a gateway can mark the end of a text that others repeat.
    """

    end_token: int
    key: bytes


END = 2**62
"""`end_token` of a scope that has no end."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural log-probabilities of one position, before penalties and temperature; `top` is sorted, best first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


# ---- gateway to engine


class Hello(msgspec.Struct, tag="hello", array_like=True):
    protocol_version: int = PROTOCOL_VERSION


class AddRequest(msgspec.Struct, tag="add", array_like=True, kw_only=True):
    """One generation. `n` choices are `n` requests with `choice` 0..n-1 over one prompt."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    scopes: list[Scope]
    choice: int = 0
    """Enters the noise; the prompt counts in the cache's counters for choice 0 only."""
    tenant: str = ""
    priority: int = 0
    """Lower runs first (vLLM's sense), among requests of one tenant."""
    output_ids: list[int] = []
    """What an earlier life of the engine has generated for it already. They count as output, for limits, penalties and
    noise, and are not said again: the answer goes on after them."""


class AbortRequests(msgspec.Struct, tag="abort", array_like=True):
    """Unknown ids are no error: their last output may be on its way."""

    request_ids: list[str]


class Acknowledge(msgspec.Struct, tag="ack", array_like=True):
    """All messages up to `step_id` have been taken; also renews the lease."""

    step_id: int


class Lease(msgspec.Struct, tag="lease", array_like=True):
    """I am alive. Sent every `lease_s / 3` while the gateway has requests or pins."""


class StatsQuery(msgspec.Struct, tag="stats?", array_like=True):
    query_id: int


class PinTrunk(msgspec.Struct, tag="pin", array_like=True):
    """Compute these tokens and keep their KV. Answered by a `TrunkState`, as soon as it is decided.

    Idempotent: an id stands for one text for ever, so an edited trunk has another id. A trunk stays until each gateway
    that asked for it has taken it back or is gone.
    """

    trunk_id: str
    token_ids: list[int]
    scopes: list[Scope]


class UnpinTrunk(msgspec.Struct, tag="unpin", array_like=True):
    """An unknown id is no error."""

    trunk_id: str


class TenantShare(msgspec.Struct, frozen=True, kw_only=True):
    """What one tenant may have of an engine. A tenant that is not named has the defaults."""

    tenant: str
    weight: float = 1.0
    """Service of tenants that wait goes by their weights; from 0.001 to 1000."""
    max_running: int | None = None
    """Sequences that may run at once; further ones wait."""
    guaranteed_blocks: int = 0
    """So many of its cached blocks are evicted only when nobody else's are left."""
    max_blocks: int | None = None
    """Of its own, beyond trunks: those that its running sequences hold and those that are cached for it."""


class SetTenants(msgspec.Struct, tag="tenants", array_like=True):
    """All shares there are, in place of those said before. The last gateway that says it is right."""

    shares: list[TenantShare]


ToEngine = Hello | AddRequest | AbortRequests | Acknowledge | Lease | StatsQuery | PinTrunk | UnpinTrunk | SetTenants


# ---- engine to gateway


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway must know of an engine to refuse what it could never serve."""

    model_name: str
    fingerprint: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    """Usable blocks, the null block not counted."""
    kv_bytes_per_token: int = 0
    """Of all layers, K and V."""
    kv_dtype: str = ""
    """What K and V are kept in: int8, fp8, or the model's dtype."""
    num_host_blocks: int = 0
    """That fit into the host tier."""

    @property
    def max_tokens_in_pool(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def max_sequence_tokens(self) -> int:
        """Prompt and output together, so that a request which runs alone always ends."""
        return min(self.max_model_len, self.max_tokens_in_pool)


class EngineReady(msgspec.Struct, tag="ready", array_like=True):
    protocol_version: int
    epoch: str
    """New with each life of the engine: another epoch means that all earlier requests are gone."""
    info: EngineInfo


class ErrorInfo(msgspec.Struct, frozen=True, array_like=True):
    message: str
    code: str
    param: str | None = None


class RequestOutput(msgspec.Struct, array_like=True, kw_only=True, omit_defaults=True, gc=False):
    """What one step (or several merged ones) brought for one request."""

    request_id: str
    token_ids: list[int] = []
    """New ids only. An end or stop id is the last of them."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The id that ended it, with finish reason STOP."""
    num_cached_tokens: int | None = None
    """Set with the first output: prompt tokens taken from the prefix cache."""
    num_cached_trunk_tokens: int | None = None
    """Set with it: those of them that lie in the first scope of several; the others are the request's own history."""
    num_cached_host_tokens: int | None = None
    """Set with it: those of them that came back from the host tier, wherever they lie."""
    queue_ms: float | None = None
    """Set with it: how long the request waited for its place."""
    logprobs: list[TokenLogprobs] | None = None
    """One entry for each of `token_ids`, if asked for."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One entry for each prompt token (None for the first), with the first output, if asked for."""
    error: ErrorInfo | None = None
    """With finish reason ERROR."""

    def merge(self, later: "RequestOutput") -> None:
        """Takes in what came later for the same request; nothing is lost, in order."""
        if later.request_id != self.request_id:
            raise ValueError(f"cannot merge {later.request_id!r} into {self.request_id!r}")
        if self.finish_reason is not None:
            raise ValueError(f"{self.request_id!r} ended with {self.finish_reason!r}, got more")
        self.token_ids = self.token_ids + later.token_ids
        if later.logprobs is not None:
            self.logprobs = (self.logprobs or []) + later.logprobs
        if later.prompt_logprobs is not None:
            self.prompt_logprobs = later.prompt_logprobs
        if later.num_cached_tokens is not None:
            self.num_cached_tokens = later.num_cached_tokens
            self.num_cached_trunk_tokens = later.num_cached_trunk_tokens
            self.num_cached_host_tokens = later.num_cached_host_tokens
            self.queue_ms = later.queue_ms
        self.finish_reason, self.stop_token_id, self.error = later.finish_reason, later.stop_token_id, later.error


class StepOutputs(msgspec.Struct, tag="step", array_like=True):
    """All that a step brought for one gateway. `step_id` counts from 1 without gaps for each connection."""

    step_id: int
    outputs: list[RequestOutput]


class BlockStats(msgspec.Struct, frozen=True, kw_only=True):
    """free + referenced = total; `free` includes cached blocks that nobody reads; the null block is not counted.

    `referenced` includes the `pinned` ones, so that an idle engine has referenced = pinned.
    """

    total: int
    free: int
    cached: int
    referenced: int
    pinned: int


class TrunkPin(enum.StrEnum):
    PINNED = "pinned"
    OVER_BUDGET = "over_budget"
    """It was computed and is found like any other prompt, as long as blocks last."""
    FAILED = "failed"
    """The engine knows nothing of it: it could never be served, its step failed, or the gateway's lease ended."""


class HostStats(msgspec.Struct, frozen=True, kw_only=True):
    """The host tier, in blocks; all zero where there is none."""

    total: int = 0
    used: int = 0
    swapped_out: int = 0
    swapped_in: int = 0


class TrunkStats(msgspec.Struct, frozen=True, kw_only=True):
    trunk_id: str
    state: TrunkPin | None
    """None while it is computed for the first time."""
    num_tokens: int
    num_blocks: int
    readers: int
    """Running sequences that hold its first block."""


class TenantStats(msgspec.Struct, frozen=True, kw_only=True):
    """One that has requests, or blocks of its own."""

    tenant: str
    running: int
    waiting: int
    blocks: int
    """Of its own: held by its sequences, or cached for it."""
    service: float
    """Its virtual token counter. Only differences mean something: all are set back together now and then."""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    blocks: BlockStats
    running: int
    waiting: int
    query_tokens: int
    hit_tokens: int
    """Each request's prompt counts once, at its first admission, and of n choices the first."""
    prompt_tokens_computed: int
    generation_tokens: int
    preemptions: int
    steps: int
    blocks_not_read: int = 0
    """Of K and V in all steps, because decode rows that share blocks had them read once for all."""
    prefill_tokens_per_s: float | None = None
    """Measured while prompts were computed; None before the first."""
    slots_allocated: int = 0
    """KV slots of the blocks that sequences and pins hold."""
    slots_used: int = 0
    """Those of them that are there for a token."""
    not_duplicated_blocks: int = 0
    """That the running sequences would hold more if nothing were shared between them."""
    host: HostStats = HostStats()
    trunks: list[TrunkStats] = []
    tenants: list[TenantStats] = []


class StatsReply(msgspec.Struct, tag="stats", array_like=True):
    query_id: int
    stats: EngineStats


class TrunkState(msgspec.Struct, tag="trunk", array_like=True, frozen=True):
    """Comes once for each `PinTrunk`, and again whenever it changes."""

    trunk_id: str
    state: TrunkPin
    num_tokens: int
    num_blocks: int
    """That hold its tokens; shared ones count for each trunk."""


class LastWords(msgspec.Struct, tag="dead", array_like=True):
    """The engine ends because of this."""

    reason: str
    is_crash: bool
    """It broke; else it was told to end."""


FromEngine = EngineReady | StepOutputs | StatsReply | TrunkState | LastWords


def encode(message: ToEngine | FromEngine) -> bytes:
    return msgspec.msgpack.encode(message)


_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def decode_to_engine(data: bytes) -> ToEngine:
    """Raises msgspec.ValidationError or DecodeError on anything that is not a message to an engine."""
    return _to_engine.decode(data)


def decode_from_engine(data: bytes) -> FromEngine:
    """Raises msgspec.ValidationError or DecodeError on anything that is not a message from an engine."""
    return _from_engine.decode(data)
