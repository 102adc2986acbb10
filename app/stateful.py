"""Everything behind the stateful routes of one gateway, put together and taken apart again."""

import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from app.announcements import Announcements
from app.conversation_store import ConversationStore
from app.event_log import MemoryEventLog
from app.orphans import Orphans
from app.readers import Readers
from app.recovery import Recovery
from app.redis_commands import RedisCommands
from app.redis_log import RedisEventLog
from app.response_service import ResponseService
from app.running_index import RunningIndex
from app.runs import Runs
from app.services import Services
from app.sessions import LEASE_MS, Sessions
from app.shared_log import SharedEventLog

STORED_ANSWERS_GRACE_S = 5.0
"""At the end, for answers that nobody waits for."""


@dataclass(frozen=True, slots=True)
class Stateful:
    service: ResponseService
    readers: Readers
    sessions: Sessions
    conversations: ConversationStore
    log: SharedEventLog
    near: MemoryEventLog
    commands: RedisCommands


class OpenStateful(Protocol):
    """What `response_service` is to a gateway."""

    def __call__(
        self, services: Services, redis_url: str, *, owner: str
    ) -> contextlib.AbstractAsyncContextManager[Stateful]: ...


@contextlib.asynccontextmanager
async def response_service(
    services: Services,
    redis_url: str,
    *,
    owner: str,
    lease_ms: int = LEASE_MS,
    grace_s: float = STORED_ANSWERS_GRACE_S,
    clock: Callable[[], float] = time.monotonic,
    **log_bounds: Any,
) -> AsyncIterator[Stateful]:
    """`owner` names this gateway's life: no other process, earlier or beside it, may use the same name. `grace_s`: of
    answers that run at the end. `clock` gives seconds; `log_bounds`: as `MemoryEventLog` takes them."""
    commands = RedisCommands.connect(redis_url)
    announcements = Announcements(commands.redis)
    index = RunningIndex(commands, owner=owner, lease_s=lease_ms / 1000)
    sessions = Sessions(commands, owner=owner, lease_ms=lease_ms, server_life=lambda: index.server_life)
    far = RedisEventLog(commands, announcements, owner=owner)
    near = MemoryEventLog(clock=clock, **log_bounds)
    log = SharedEventLog(near, far)
    conversations = ConversationStore(commands, owner=owner, lease_ms=lease_ms)
    readers = Readers(clock)
    runs = Runs(services, sessions, log, announcements, conversations, index, readers, services.now)
    recovery = Recovery(services, sessions, far, runs)
    orphans = Orphans(index, sessions, recovery)
    service = ResponseService(services, sessions, log, runs, recovery, conversations, readers, now=services.now)
    await orphans.start()
    try:
        yield Stateful(service, readers, sessions, conversations, log, near, commands)
    finally:
        await service.close(grace_s=grace_s)
        await orphans.close()
        await log.close()
        await announcements.close()
        await commands.close()
