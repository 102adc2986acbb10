"""How much of a prompt came from the prefix cache, and from where in it."""

import msgspec

from engine.protocol import RequestOutput


class CachedTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens that were not computed anew."""

    trunk: int = 0
    """Of an assistant's prompt, which all its chats share."""
    history: int = 0
    """The others: of earlier requests in the same private scope."""
    host: int = 0
    """Those of both that came back from the host tier."""

    @classmethod
    def of(cls, output: RequestOutput) -> "CachedTokens":
        """As a first output says it. What it leaves out is none."""
        trunk = output.num_cached_trunk_tokens or 0
        return cls(
            trunk=trunk, history=(output.num_cached_tokens or 0) - trunk, host=output.num_cached_host_tokens or 0
        )

    @property
    def total(self) -> int:
        return self.trunk + self.history

    def __add__(self, other: "CachedTokens") -> "CachedTokens":
        return CachedTokens(
            trunk=self.trunk + other.trunk, history=self.history + other.history, host=self.host + other.host
        )
