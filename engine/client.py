"""How a gateway talks to an engine. asyncio, no torch."""

from collections.abc import Sequence
from typing import Protocol

from engine.protocol import AddRequest, EngineInfo, EngineStats, Scope, TenantShare, TrunkState
from engine.token_stream import TokenStream
from engine.zmq_client import ZmqEngineClient

__all__ = ["EngineClient", "ZmqEngineClient"]


class Submitter(Protocol):
    """What takes requests."""

    @property
    def info(self) -> EngineInfo:
        """Raises EngineDeadError while the engine is not ready."""
        ...

    def submit(self, request: AddRequest) -> TokenStream:
        """The stream is registered before the request is sent. Raises EngineDeadError if the engine is not ready.

        The id must be new: outputs of an aborted request may still be on their way. Raises ValueError if it belongs to
        a request that runs. What the engine refuses comes through the stream: one output with finish reason ERROR.
        """
        ...


class EngineClient(Submitter, Protocol):
    """One engine, wherever it runs: in another process, in a thread, or scripted for a test."""

    @property
    def is_ready(self) -> bool: ...

    @property
    def num_running(self) -> int:
        """Requests that were submitted here and have not ended."""
        ...

    async def wait_ready(self) -> None:
        """Returns as soon as requests can be submitted; an engine may come back, so it waits as long as it takes."""
        ...

    async def pin(self, trunk_id: str, token_ids: list[int], scopes: list[Scope]) -> TrunkState:
        """Has the engine compute these tokens and keep their KV, in this life and in each later one, until `unpin`.

        Waits until an engine has answered. An id stands for one text for ever. A trunk that failed is not asked for
        again. Raises EngineDeadError if the client is closed.
        """
        ...

    async def unpin(self, trunk_id: str) -> None:
        """Other gateways may still hold it, and chats that read it keep its blocks. An unknown id is no error."""
        ...

    def set_tenants(self, shares: Sequence[TenantShare]) -> None:
        """What each tenant may have of the engine, in this life and each later one, in place of what was said."""
        ...

    async def stats(self) -> EngineStats:
        """Raises EngineDeadError if the engine is not ready or dies before it answers."""
        ...

    async def close(self) -> None:
        """Ends the connection; streams that still run fail with EngineDeadError."""
        ...
