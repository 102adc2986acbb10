"""Waves of answers through a whole gateway and through the plain server, a small one of each."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.crowd import Crowd
from benchmarks.gateway_load import medians
from benchmarks.gateway_processes import Served, gateway, plain
from benchmarks.sse_client import SseClient
from benchmarks.wave import Wave, body, record_frames, wave
from benchmarks.ws_client import WsClient

STREAMS, TOKENS = 3, 5


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tl") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with gateway(folder) as found:
        yield found


def check(found: Wave) -> None:
    assert (found.num_tokens, found.tally.errors) == (STREAMS * TOKENS, [])
    assert len(found.latencies_ms) <= found.num_deltas <= found.num_tokens
    assert all(latency >= 0 for latency in found.latencies_ms)
    assert found.cpu_s >= 0


@pytest.mark.parametrize("store", [False, True])
def test_a_wave_through_the_gateway(served: Served, *, store: bool) -> None:
    check(wave(served, STREAMS, TOKENS, interval_s=0.001, store=store))
    check(wave(served, STREAMS, TOKENS, store=store))


def test_a_wave_of_server_sent_events(served: Served) -> None:
    check(wave(served, STREAMS, TOKENS, connect=SseClient))


def test_the_plain_server_sends_the_gateways_frames(served: Served, folder: Path) -> None:
    with plain(folder, record_frames(served, TOKENS)) as theirs:
        found = wave(theirs, STREAMS, TOKENS, interval_s=0.001)
        check(found)
        assert len(found.latencies_ms) == STREAMS * TOKENS
        check(wave(theirs, STREAMS, TOKENS))


def test_one_of_a_crowd_is_asked(served: Served) -> None:
    clients = [WsClient("127.0.0.1", served.port) for _ in range(3)]
    crowd = Crowd(clients)
    assert crowd.ask(clients[1], body(TOKENS)) > 0
    crowd.rest(0.0)
    for client in clients:
        client.close()


def test_medians_are_taken_of_each_figure_by_itself() -> None:
    assert medians([{"a": 1, "b": 9}, {"a": 2, "b": 7}, {"a": 3, "b": 8}]) == {"a": 2, "b": 8}
