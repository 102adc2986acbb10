"""`trunkline usage export`: the usage ledger as CSV or JSON lines."""

import asyncio
import datetime
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

from app.embedded_redis import find_running_url
from app.ledger import read_usage
from app.redis_commands import RedisCommands
from app.usage_record import CSV_HEAD, to_csv, to_json


class Format(StrEnum):
    csv = "csv"
    jsonl = "jsonl"


def export(
    redis_url: str | None,
    state_dir: Path,
    since: datetime.date,
    tenant: str | None,
    form: Format,
    write: Callable[[str], None],
) -> None:
    """`redis_url` None: the embedded server that runs on `state_dir`. `write` takes one line.

    Raises NoRedisError or SessionsUnavailable.
    """
    url = redis_url if redis_url is not None else find_running_url(state_dir / "valkey")
    asyncio.run(_export(url, since, tenant, form, write))


async def _export(
    url: str, since: datetime.date, tenant: str | None, form: Format, write: Callable[[str], None]
) -> None:
    commands = RedisCommands.connect(url, max_connections=2)
    # a gateway's clock may be ahead of this one
    until = datetime.datetime.now(datetime.UTC).date() + datetime.timedelta(days=1)
    try:
        if form is Format.csv:
            write(CSV_HEAD)
        async for record in read_usage(commands, since=since, until=until, tenant=tenant):
            write(to_csv(record) if form is Format.csv else to_json(record).decode())
    finally:
        await commands.close()
