"""What the text of an answer stands for: kept beside its events in the log, for whoever has to go on with it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from app.cached_tokens import CachedTokens
from engine.protocol import TokenLogprobs


class FirstToken(msgspec.Struct, frozen=True, array_like=True):
    """What was known once the first token was there."""

    cached: CachedTokens
    queue_ms: float
    prefill_ms: float


class Progress(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One stretch of an answer, or all of it up to some place.

    A detokenizer that gets all `token_ids` up to an event says exactly the text that is logged up to it: ids whose text
    is held back, or only in part there, are among them. Ids that came after the last text are not: they are seen by
    nobody, and are computed again.
    """

    token_ids: list[int] = []
    unsettled: list[TokenLogprobs] = []
    """Of the last ids, where asked for: log-probabilities that were not logged, as their text is not whole yet."""
    first: FirstToken | None = None
    """With the first stretch."""
    finish_reason: Literal["stop", "length"] | None = None
    """With the last one, if its text came together with the end."""
    stop_token_id: int | None = None
    """The end or stop id, the last of `token_ids`, if such a one ended it."""


@dataclass(frozen=True, slots=True)
class Midway:
    """Where an answer stands that has begun at another gateway."""

    so_far: Progress
    text: str
    """That is logged."""
    block_size: int
    """Of the engine's KV blocks, in tokens."""
    age_s: float
    """Since it was submitted first."""


def joined(stretches: Sequence[Progress]) -> Progress:
    """One stretch that says all of these, in order; at least one."""
    last = stretches[-1]
    return Progress(
        token_ids=[token_id for stretch in stretches for token_id in stretch.token_ids],
        unsettled=last.unsettled,
        first=next((stretch.first for stretch in stretches if stretch.first is not None), None),
        finish_reason=last.finish_reason,
        stop_token_id=last.stop_token_id,
    )


to_bytes = msgspec.msgpack.Encoder().encode
from_bytes = msgspec.msgpack.Decoder(Progress).decode
"""Raises msgspec.MsgspecError."""
