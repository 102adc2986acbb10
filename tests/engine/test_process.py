"""The loop of the engine process, run in a thread, with plain DEALER sockets as its gateways."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import zmq

from engine.errors import EngineDeadError
from engine.gateway import MAX_UNACKNOWLEDGED
from engine.process import EngineProcess
from engine.protocol import (
    END,
    PROTOCOL_VERSION,
    AbortRequests,
    Acknowledge,
    AddRequest,
    EngineReady,
    FinishReason,
    FromEngine,
    Hello,
    LastWords,
    Lease,
    PinTrunk,
    Scope,
    StatsQuery,
    StatsReply,
    StepOutputs,
    ToEngine,
    TrunkPin,
    TrunkState,
    UnpinTrunk,
    decode_from_engine,
    encode,
)
from engine.sampling_params import SamplingParams
from tests.scripted_engine import (
    IM_END,
    Pause,
    Script,
    ScriptedCore,
    ScriptedProcessCore,
    byte_model_info,
    echo,
    release_request,
)

GUARD_MS = 30_000


class Peer:
    """A gateway that does only what the test says."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, GUARD_MS)
        self.socket.connect(address)

    def send(self, *messages: ToEngine) -> None:
        for message in messages:
            self.socket.send(encode(message))

    def receive(self) -> FromEngine:
        return decode_from_engine(self.socket.recv())

    def step(self, *, acknowledge: bool = True) -> StepOutputs:
        message = self.receive()
        assert isinstance(message, StepOutputs), message
        if acknowledge:
            self.send(Acknowledge(message.step_id))
        return message

    def answer(self, request_id: str) -> list[int]:
        """All ids up to the end of this request; outputs of others are passed over."""
        token_ids: list[int] = []
        while True:
            for output in self.step().outputs:
                if output.request_id != request_id:
                    continue
                token_ids += output.token_ids
                if output.finish_reason is not None:
                    return token_ids

    def num_running(self) -> int:
        """Asks the engine; step messages that come before the reply are acknowledged and dropped."""
        self.send(StatsQuery(1))
        while True:
            message = self.receive()
            if isinstance(message, StatsReply):
                return message.stats.running
            if isinstance(message, StepOutputs):
                self.send(Acknowledge(message.step_id))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Running:
    def __init__(self, tmp_path: Path, script: Script, clock: Callable[[], float], lease_s: float) -> None:
        self.address = f"ipc://{tmp_path}/e"
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.core = ScriptedProcessCore(byte_model_info(), script)
        self.process = EngineProcess(self.core, self.core.info, self.address, lease_s=lease_s, clock=clock)
        self.peers: list[Peer] = []
        self.executor = ThreadPoolExecutor(1)
        self.ended = self.executor.submit(self.process.run)

    def close(self) -> None:
        self.process.stop()
        self.executor.shutdown()
        self.context.destroy(0)

    def peer(self) -> Peer:
        self.peers.append(Peer(self.context, self.address))
        return self.peers[-1]


Serve = Callable[..., Running]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    with contextlib.ExitStack() as stack:

        def start(script: Script = echo, clock: Callable[[], float] | None = None, lease_s: float = 3600.0) -> Running:
            running = Running(tmp_path, script, clock or Clock(), lease_s)
            stack.callback(running.close)
            return running

        yield start


def request(request_id: str, text: str = "abc", **params: object) -> AddRequest:
    return AddRequest(
        request_id=request_id,
        prompt_ids=list(text.encode()),
        params=SamplingParams(**{"max_tokens": None, "eos_token_ids": (IM_END,), **params}),  # type: ignore[arg-type]
        scopes=[Scope(END, b"test")],
    )


def test_hello_is_answered_and_a_request_streams(serve: Serve) -> None:
    engine = serve()
    peer = engine.peer()
    peer.send(Hello(), request("a"))
    ready = peer.receive()
    assert isinstance(ready, EngineReady)
    assert (ready.protocol_version, ready.epoch) == (PROTOCOL_VERSION, engine.process.epoch)
    assert ready.info == byte_model_info()
    assert peer.answer("a") == [*b"abc", IM_END]
    assert peer.num_running() == 0


def test_step_ids_count_from_one_for_each_connection(serve: Serve) -> None:
    engine = serve()
    first, second = engine.peer(), engine.peer()
    for peer in (first, second):
        peer.send(request("a" if peer is first else "b", max_tokens=2))
        assert [peer.step().step_id, peer.step().step_id] == [1, 2]


def test_without_credit_outputs_are_merged_and_nothing_is_lost(serve: Serve) -> None:
    engine = serve()
    peer = engine.peer()
    text = "x" * 100
    peer.send(request("a", text))
    steps = [peer.step(acknowledge=False) for _ in range(MAX_UNACKNOWLEDGED)]
    assert [s.step_id for s in steps] == list(range(1, MAX_UNACKNOWLEDGED + 1))
    while peer.num_running() != 0:  # it runs to its end although nobody takes the outputs
        pass
    peer.send(Acknowledge(steps[-1].step_id))
    rest = peer.step()
    assert rest.step_id == MAX_UNACKNOWLEDGED + 1
    ids = [t for s in [*steps, rest] for o in s.outputs for t in o.token_ids]
    assert ids == [*text.encode(), IM_END]
    assert rest.outputs[0].finish_reason == FinishReason.STOP


def test_credit_cannot_be_forged(serve: Serve) -> None:
    engine = serve()
    peer = engine.peer()
    peer.send(Acknowledge(1000), request("a", "x" * 100))
    for _ in range(MAX_UNACKNOWLEDGED):
        peer.step(acknowledge=False)
    peer.send(Acknowledge(-5))
    while peer.num_running() != 0:
        pass
    peer.send(Acknowledge(MAX_UNACKNOWLEDGED))
    assert peer.step().step_id == MAX_UNACKNOWLEDGED + 1


def test_abort_frees_and_unknown_or_foreign_ids_are_passed_over(serve: Serve) -> None:
    engine = serve(lambda r: [1, Pause()])
    peer, other = engine.peer(), engine.peer()
    peer.send(request("a"), request("b"))
    peer.step()
    other.send(AbortRequests(["a", "b"]))
    assert other.num_running() == 2
    peer.send(AbortRequests(["nobody", "a"]))
    assert peer.num_running() == 1
    assert engine.core.aborted == ["a"]


def test_malformed_messages_never_kill_the_engine(serve: Serve) -> None:
    engine = serve()
    peer = engine.peer()
    junk = [b"", b"\x00", b"junk", os.urandom(1000), encode(Hello())[:-1], b"\x92\xa3add\xc0", b"\x91\xa5ready"]
    for data in junk:
        peer.socket.send(data)
    peer.socket.send_multipart([b"", encode(Hello())])
    peer.socket.send_multipart([encode(Hello())] * 3)
    wrong_type = json.dumps(["add", "a", "not a list"]).encode()
    peer.socket.send(wrong_type)
    peer.send(request("a"))
    assert peer.answer("a") == [*b"abc", IM_END]


def test_an_id_in_use_is_refused_and_the_first_request_goes_on(serve: Serve) -> None:
    engine = serve(lambda r: [1, Pause(), 2])
    peer, other = engine.peer(), engine.peer()
    peer.send(request("a"))
    peer.step()
    other.send(request("a"))
    (refusal,) = other.step().outputs
    assert (refusal.request_id, refusal.finish_reason) == ("a", FinishReason.ERROR)
    peer.send(request("a"))
    assert other.num_running() == 1
    peer.send(release_request())
    assert peer.answer("a") == [2, IM_END]


def test_a_refused_request_ends_with_its_error(serve: Serve) -> None:
    engine = serve()
    peer = engine.peer()
    peer.send(request("a", max_tokens=0))
    (output,) = peer.step().outputs
    assert output.finish_reason == FinishReason.ERROR
    assert output.error is not None
    assert output.error.param == "max_tokens"


def test_requests_of_a_silent_gateway_are_aborted_when_its_lease_ends(serve: Serve) -> None:
    clock = Clock()
    engine = serve(lambda r: [1, Pause()], clock, lease_s=10.0)
    silent, alive = engine.peer(), engine.peer()
    silent.send(request("a"))
    silent.step()
    assert silent.num_running() == 1  # its last message has been taken, at 0
    alive.send(request("b"))
    alive.step()
    clock.now = 6.0
    alive.send(Lease())
    assert alive.num_running() == 2
    clock.now = 11.0  # 11 s after the silent one's last message, 5 s after the other's
    while alive.num_running() != 1:  # leases are looked at after the messages that are there
        pass
    assert engine.core.aborted == ["a"]
    # it was only stopped for a while: its stream learns that it has ended, and the next message follows without a gap
    (output,) = silent.step().outputs
    assert (output.request_id, output.finish_reason) == ("a", FinishReason.ERROR)
    assert output.error is not None
    assert output.error.code == "lease_expired"


def test_a_new_gateway_frees_what_a_dead_one_had(serve: Serve) -> None:
    engine = serve(lambda r: [1, Pause()])
    dead = engine.peer()
    dead.send(Hello(), request("a"))
    dead.receive()
    dead.step()
    dead.socket.close()
    fresh = engine.peer()
    while fresh.num_running() == 1:  # the closing of a connection reaches the ROUTER when it does
        fresh.send(Hello())
        assert isinstance(fresh.receive(), EngineReady)
    assert engine.core.aborted == ["a"]


def test_a_fault_of_the_core_is_told_and_ends_the_loop(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: ScriptedCore) -> None:
        raise RuntimeError("blocks are lost")

    monkeypatch.setattr(ScriptedProcessCore, "step", broken)
    engine = serve()
    peer = engine.peer()
    peer.send(request("a"))
    words = peer.receive()
    assert words == LastWords("RuntimeError: blocks are lost", is_crash=True)
    with pytest.raises(RuntimeError, match="blocks are lost"):
        engine.ended.result(GUARD_MS / 1000)


def test_a_lost_rank_ends_a_loop_that_blocks_with_its_name(serve: Serve) -> None:
    engine = serve()
    peer = engine.peer()
    peer.send(Hello())
    peer.receive()
    engine.process.stop(EngineDeadError("rank 1 of 2 was killed by SIGKILL", is_crash=True))
    engine.process.stop()  # a signal that comes then does not make it an end in order
    words = peer.receive()
    assert words == LastWords("EngineDeadError: rank 1 of 2 was killed by SIGKILL", is_crash=True)
    with pytest.raises(EngineDeadError, match=r"^rank 1 of 2 was killed by SIGKILL$"):
        engine.ended.result(GUARD_MS / 1000)


def test_stop_ends_a_loop_that_blocks(serve: Serve) -> None:
    engine = serve()
    peer = engine.peer()
    peer.send(Hello())
    peer.receive()
    engine.process.stop()
    assert peer.receive() == LastWords("the engine was told to stop", is_crash=False)
    engine.ended.result(GUARD_MS / 1000)


@pytest.fixture
def child(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Peer]]:
    address = f"ipc://{tmp_path}/e"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    process = subprocess.Popen([sys.executable, "-m", "tests.scripted_engine", "--address", address])
    peer = Peer(context, address)
    peer.send(Hello())
    assert isinstance(peer.receive(), EngineReady)
    yield process, peer
    process.kill()
    process.wait()
    context.destroy(0)


def test_sigterm_ends_an_idle_process_with_exit_code_0(child: tuple[subprocess.Popen[bytes], Peer]) -> None:
    process, peer = child
    process.send_signal(signal.SIGTERM)
    assert isinstance(peer.receive(), LastWords)
    assert process.wait(GUARD_MS / 1000) == 0


def test_an_idle_process_sleeps(child: tuple[subprocess.Popen[bytes], Peer]) -> None:
    """It blocks in poll: from one look to the other it has used no processor time, but for a tick or two that the
    kernel may count for a wake-up of ZeroMQ; polling would use all there is."""
    process, peer = child
    peer.send(request("a"))
    peer.answer("a")
    assert peer.num_running() == 0
    watched = psutil.Process(process.pid)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1.5)  # let it come to rest, and have its pool checked
    before = watched.cpu_times()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1.0)
    after = watched.cpu_times()
    assert after.user - before.user + after.system - before.system <= 0.03
    assert watched.status() == psutil.STATUS_SLEEPING


def test_torch_is_not_needed(child: tuple[subprocess.Popen[bytes], Peer]) -> None:
    process, _ = child
    assert not any("torch" in m.path for m in psutil.Process(process.pid).memory_maps())


# ---- pinned trunks

PIN = PinTrunk("t", list(range(20)), [Scope(END, b"assistant")])
PINNED = TrunkState("t", TrunkPin.PINNED, 20, 2)


def test_a_trunk_is_held_by_each_gateway_that_asked(serve: Serve) -> None:
    engine = serve()
    one, two = engine.peer(), engine.peer()
    for peer in (one, two, one):
        peer.send(PIN)
        assert peer.receive() == PINNED
    one.send(UnpinTrunk("t"), UnpinTrunk("unknown"))
    assert one.num_running() == 0  # it has been taken in
    assert list(engine.core.trunks) == ["t"]
    two.send(UnpinTrunk("t"))
    assert two.num_running() == 0
    assert list(engine.core.trunks) == []


def test_pins_end_with_the_lease_and_their_gateway_learns_of_it(serve: Serve) -> None:
    clock = Clock()
    engine = serve(clock=clock, lease_s=10.0)
    silent, lively = engine.peer(), engine.peer()
    for peer in (silent, lively):
        peer.send(PIN)
        assert peer.receive() == PINNED
    other = PinTrunk("other", [1], [Scope(END, b"assistant")])
    silent.send(other)
    assert isinstance(silent.receive(), TrunkState)
    clock.now = 9.0
    lively.send(Lease())
    assert lively.num_running() == 0
    clock.now = 11.0
    assert lively.num_running() == 0
    lost = {silent.receive().trunk_id, silent.receive().trunk_id}  # type: ignore[union-attr]
    assert lost == {"t", "other"}
    assert list(engine.core.trunks) == ["t"]


def test_pins_go_with_a_gateway_that_has_gone(serve: Serve) -> None:
    engine = serve()
    gone, stays = engine.peer(), engine.peer()
    gone.send(PIN)
    assert gone.receive() == PINNED
    gone.socket.close()
    while engine.core.trunks:
        stays.send(Hello())  # whereupon all are greeted, and the one that has gone is missed
        assert isinstance(stays.receive(), EngineReady)
