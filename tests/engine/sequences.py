"""Sequences in one line, for tests of what holds them; and lookups in the cache of another manager."""

from collections.abc import Iterable
from collections.abc import Sequence as Rows

from engine.forest import SharedNode
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


def check_nodes(rows: Rows[Sequence], nodes: Iterable[SharedNode], block_size: int) -> list[int]:
    """Each row's nodes follow one another from its first block on and lie before its last token; how many blocks each
    row has in them."""
    ends = [0] * len(rows)
    for node in nodes:
        assert len(node.rows) > 1, node
        assert node.block_ids, node
        assert list(node.rows) == sorted(set(node.rows)), node
        for row in node.rows:
            start, ends[row] = ends[row], ends[row] + len(node.block_ids)
            assert tuple(rows[row].block_table[start : ends[row]]) == node.block_ids, (row, node)
    for sequence, end in zip(rows, ends, strict=True):
        assert end * block_size < sequence.num_tokens, f"{sequence.request_id!r} has its last token in a node"
    return ends
