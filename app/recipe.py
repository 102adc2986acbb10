"""What a running response is made from, kept in Redis while it runs: any gateway can submit it again, to the letter.

The prompt is kept as ids, since what it was rendered from may be edited meanwhile; scope keys are digests, from which
neither the server's secret nor a client's salt can be told. Its size is bounded by the context: four bytes a token.
"""

from array import array
from typing import Self

import msgspec

from app.prompts import BuiltPrompt
from engine.protocol import Scope
from engine.sampling_params import SamplingParams


class Recipe(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    fingerprint: str
    """Of the model."""
    prompt_ids: bytes
    """Each a native unsigned int."""
    scopes: list[Scope]
    params: SamplingParams
    """With a seed, unless greedy."""
    priority: int
    block_size: int
    """Of the engine's KV blocks, in tokens."""
    created_at: float
    """When it was submitted, in seconds since 1970."""
    num_reserved_tokens: int
    reserved_day: int | None
    """Of the tenant's budget; None where nothing was reserved."""
    owner_key: bytes
    assistant_id: str | None
    assistant_version: str | None
    num_trunk_tokens: int
    template_changed: bool
    template_digest: str

    @classmethod
    def of(
        cls,
        prompt: BuiltPrompt,
        params: SamplingParams,
        *,
        fingerprint: str,
        priority: int,
        block_size: int,
        created_at: float,
        num_reserved_tokens: int,
        reserved_day: int | None,
    ) -> Self:
        """Raises ValueError for params that would not give the same tokens again."""
        if params.seed is None and not params.is_greedy:
            raise ValueError("the seed must be fixed, got None")
        return cls(
            fingerprint=fingerprint,
            prompt_ids=array("I", prompt.token_ids).tobytes(),
            scopes=prompt.scopes,
            params=params,
            priority=priority,
            block_size=block_size,
            created_at=created_at,
            num_reserved_tokens=num_reserved_tokens,
            reserved_day=reserved_day,
            owner_key=prompt.owner_key,
            assistant_id=prompt.assistant_id,
            assistant_version=prompt.assistant_version,
            num_trunk_tokens=prompt.num_trunk_tokens,
            template_changed=prompt.template_changed,
            template_digest=prompt.template_digest,
        )

    @property
    def num_prompt_tokens(self) -> int:
        return len(array("I", self.prompt_ids))

    @property
    def prompt(self) -> BuiltPrompt:
        token_ids = list(array("I", self.prompt_ids))
        return BuiltPrompt(
            token_ids,
            list(self.scopes),
            "input",
            owner_key=self.owner_key,
            assistant_id=self.assistant_id,
            assistant_version=self.assistant_version,
            num_trunk_tokens=self.num_trunk_tokens,
            num_known_tokens=len(token_ids),
            template_changed=self.template_changed,
            template_digest=self.template_digest,
        )


to_bytes = msgspec.msgpack.Encoder().encode
from_bytes = msgspec.msgpack.Decoder(Recipe).decode
"""Raises msgspec.MsgspecError."""
