"""What a block of KV is known by: a chained SHA-256 over everything that its values depend on. Pure.

SHA-256 and not a language's own hash: a collision would hand one user's conversation to another, and a tenant who can
guess hashes could look for them. Every field is length-prefixed, so that no two inputs run together.
"""

import struct
from collections.abc import Sequence
from hashlib import sha256

from engine.protocol import Scope

_length = struct.Struct("<Q").pack


def root_hash(*fields: str) -> bytes:
    """Where the chains of one model start: fingerprint, dtype, RoPE setting, KV dtype, tokenizer. 32 bytes.

    Equal tokens under two roots share nothing.
    """
    digest = sha256(b"trunkline kv")
    for text in fields:
        data = text.encode()
        digest.update(_length(len(data)) + data)
    return digest.digest()


def hash_block(parent: bytes, scope: bytes, token_ids: Sequence[int]) -> bytes:
    """The 32-byte hash of a block of `token_ids` behind the block (or root) `parent`, for readers in `scope`."""
    num_tokens = len(token_ids)
    return sha256(
        b"".join(
            (
                _length(len(parent)),
                parent,
                _length(len(scope)),
                scope,
                _length(num_tokens),
                struct.pack(f"<{num_tokens}I", *token_ids),
            )
        )
    ).digest()


def scope_of_block(scopes: Sequence[Scope], end_token: int) -> bytes:
    """The key of the first scope that the block ending at `end_token` (exclusive) does not pass.

    Raises ValueError if it passes them all: the last scope of a request has no end.
    """
    for scope in scopes:
        if end_token <= scope.end_token:
            return scope.key
    raise ValueError(f"a block that ends at token {end_token} lies in none of the {len(scopes)} scopes")
