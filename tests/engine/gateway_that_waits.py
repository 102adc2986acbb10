"""A process with a request that runs, for a test that kills it: prints a line when its stream has begun."""

import asyncio
import sys

from engine.client import ZmqEngineClient
from engine.protocol import END, AddRequest, Scope
from engine.sampling_params import SamplingParams


async def main(address: str) -> None:
    client = ZmqEngineClient(address)
    await client.start()
    await client.wait_ready()
    params = SamplingParams(max_tokens=None)
    with client.submit(AddRequest(request_id="orphan", prompt_ids=[1], params=params, scopes=[Scope(END, b"")])) as s:
        await s.next()
        print("streaming", flush=True)
        async for _ in s:
            pass


asyncio.run(main(sys.argv[1]))
