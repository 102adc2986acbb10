"""Answers that all stream at the same time, one on each connection, and how long their tokens were on their way."""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.document import Document
from benchmarks.gateway_processes import Served
from benchmarks.load import pct
from benchmarks.load_ws import Chat, Client, Tally, create, drive
from benchmarks.numbered_engine import number_in, seed_of
from benchmarks.ws_client import WsClient


@dataclass(frozen=True)
class Wave:
    """As many answers as there are websockets, all streaming at the same time."""

    tally: Tally
    cpu_s: float
    latencies_ms: list[float]
    """Of each delta that has one token: from the step in which its token was made."""
    num_deltas: int
    num_tokens: int
    streaming_s: float
    """From the first delta to the last one, of all."""

    def document(self) -> Document:
        one_token = len(self.latencies_ms)
        latencies = {
            f"latency_p{p}_ms": round(pct(self.latencies_ms, p), 2)  # type: ignore[no-untyped-call]
            for p in (50, 99)
            if self.latencies_ms
        }
        return {
            "deltas_per_s": round(self.num_deltas / self.streaming_s, 1),
            "tokens_per_s": round(self.num_tokens / self.streaming_s, 1),
            "one_token_deltas": round(one_token / self.num_deltas, 4),
            **latencies,
            "cpu_us_per_delta": round(1e6 * self.cpu_s / self.num_deltas, 1),
        }


def body(num_tokens: int, *, num_together: int = 1, interval_s: float = 0.0, store: bool = False) -> str:
    return create(
        "numbered",
        "Where is my parcel?",
        max_output_tokens=num_tokens,
        ignore_eos=True,
        store=store,
        stream=True,
        seed=seed_of(num_together, interval_s),
    )


def wave(
    served: Served,
    num_streams: int,
    num_tokens: int,
    *,
    interval_s: float = 0.0,
    store: bool = False,
    connect: Callable[[str, int], Client] = WsClient,
) -> Wave:
    """Raises RuntimeError if an answer is not whole."""
    said = body(num_tokens, num_together=num_streams, interval_s=interval_s, store=store)
    chats = [Chat(connect("127.0.0.1", served.port), [lambda _: said]) for _ in range(num_streams)]
    before = served.cpu_s
    tally = drive(chats, timeout_s=60)
    cpu_s = served.cpu_s - before
    for chat in chats:
        chat.client.close()
    whole, errors = tally.measured()
    if errors:
        raise RuntimeError(f"{len(errors)} of {num_streams} answers are not whole: {errors[0]}")
    latencies = []
    num_tokens_seen = 0
    for measured in whole:
        for delta, at in zip(measured.answer.deltas, measured.delta_times, strict=True):
            words = delta.split()
            num_tokens_seen += len(words)
            if len(words) == 1:
                latencies.append(1000 * (at - served.times[number_in(delta)]))
    times = [at for measured in whole for at in measured.delta_times]
    return Wave(tally, cpu_s, latencies, len(times), num_tokens_seen, max(times) - min(times))


def record_frames(served: Served, num_tokens: int) -> list[str]:
    """The events of one answer as they were sent, each delta one token."""
    while True:
        chat = Chat(WsClient("127.0.0.1", served.port), [lambda _: body(num_tokens, interval_s=0.002)])
        whole, errors = drive([chat]).measured()
        if errors:
            raise RuntimeError(errors[0])
        chat.client.close()
        if len(whole[0].delta_times) == num_tokens:  # else the machine was busy for a moment, and some were merged
            return [frame.decode() for _, frame in chat.exchanges[0].frames]
