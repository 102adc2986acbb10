"""Sequences in one line, for tests of what holds them; and lookups in the cache of another manager."""

from engine.kv_cache_manager import KVCacheManager
from engine.protocol import END, Scope
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence


def make_sequence(
    request_id: str,
    prompt_ids: list[int],
    *,
    scopes: tuple[Scope, ...] = (Scope(END, b""),),
    tenant: str = "",
    priority: int = 0,
    arrival: int = 0,
    **params: object,
) -> Sequence:
    return Sequence(
        request_id=request_id,
        prompt_ids=prompt_ids,
        params=SamplingParams(**params),  # type: ignore[arg-type]
        scopes=scopes,
        seed=0,
        max_output_tokens=16,
        tenant=tenant,
        priority=priority,
        arrival=arrival,
    )


def look_into(kv: KVCacheManager, other: KVCacheManager) -> KVCacheManager:
    """`kv`, which from now on finds what `other` has published: one cache for both."""
    vars(kv.cache).update(vars(other.cache))
    return kv
