"""Figures of a served model, taken from outside: throughput, latencies, cold and hot time to first token, start, idle.

    python -m benchmarks.served W1 W4 cold-hot start idle --output benchmarks/results/NAME.json
        [--peer PEER.json] [--serve "--threads 1"] [--also "--deterministic"]

Starts `trunkline serve` on a free port with the state folder given (or one of its own), drives it with
`benchmarks/load.py`, and prints one JSON document. Each workload is run once to warm up and then `--runs` times; the
document holds every run, the medians, and the bars that they are held to; with another server's figures
(`benchmarks/peers.py` says how they are written) the ratios too, and a table in Markdown on standard error. With
`--also` the workloads run a second time on a server with these further options, to say what those cost. The workloads
are named in docs/benchmarks.md.
"""

import argparse
import json
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.document import new_document, write
from benchmarks.peers import own_bars, peer_bars, table
from benchmarks.workloads import WORKLOADS

LOAD = Path(__file__).with_name("load.py")
SYSTEM_SEED = 7
HOT_LENGTHS = (250, 4000)
MEDIANS = ("tok_s", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "latency_p50_ms", "peak_rss_mib")


class Server:
    """`trunkline serve` as a child, on a free port."""

    def __init__(self, state_dir: Path, extra: list[str]) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port: int = s.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "app", "serve", "--port", str(self.port), "--state-dir", str(state_dir)]
        started = time.monotonic()
        self.process = subprocess.Popen([*command, *extra], stdout=sys.stderr)
        while not self.is_ready():
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode} before it was ready")
            time.sleep(0.02)
        self.seconds_to_ready = time.monotonic() - started

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    @property
    def model(self) -> str:
        with urllib.request.urlopen(self.url + "/ready", timeout=30) as answer:
            return str(json.load(answer)["model"])

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)


@contextmanager
def served(state_dir: Path, extra: list[str]) -> Any:
    server = Server(state_dir, extra)
    try:
        yield server
    finally:
        server.stop()


def load(server: Server, arguments: str, *, seed: int, user_seed: int) -> dict[str, Any]:
    command = [sys.executable, str(LOAD), "--url", server.url, "--model", server.model, *arguments.split()]
    command += ["--seed", str(seed), "--user-seed", str(user_seed), "--rss-pid", str(server.process.pid)]
    result: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return result


def workload(server: Server, name: str, runs: int) -> dict[str, Any]:
    work, fresh = WORKLOADS[name], int(time.time())
    results = []
    for run in range(runs + 1):
        seed = fresh + run if work.is_cold else SYSTEM_SEED
        results.append(load(server, work.arguments, seed=seed, user_seed=fresh + run))
    timed = results[1:]
    medians = {k: statistics.median(r[k] for r in timed) for k in MEDIANS if all(r.get(k) for r in timed)}
    return {"arguments": work.arguments, "median": medians, "warm_up": results[0], "runs": timed}


def cold_hot(server: Server, runs: int) -> dict[str, Any]:
    """Time to first token of one request with a prompt never seen, then with its system prompt cached."""
    arguments = "--tenants 1 --system-tokens 1000 --concurrency 1 --requests 1 --max-tokens 8"
    cold, hot = [], []
    for run in range(runs):
        seed = int(time.time()) + 1000 * run
        cold.append(load(server, arguments, seed=seed, user_seed=seed)["ttft_p50_ms"])
        hot.append(load(server, arguments, seed=seed, user_seed=seed + 1)["ttft_p50_ms"])
    return {
        "cold_ttft_ms": statistics.median(cold),
        "hot_ttft_ms": statistics.median(hot),
        "hot_over_cold": round(statistics.median(h / c for h, c in zip(hot, cold, strict=True)), 3),
        "runs": {"cold": cold, "hot": hot},
    }


def hot_by_length(server: Server, runs: int) -> dict[str, Any]:
    """Time to first token of one request whose system prompt is cached, long and short ones in turn."""

    def ttft_ms(num_tokens: int, user_seed: int) -> float:
        arguments = f"--tenants 1 --system-tokens {num_tokens} --concurrency 1 --requests 1 --max-tokens 8"
        return float(load(server, arguments, seed=SYSTEM_SEED, user_seed=user_seed)["ttft_p50_ms"])

    fresh = int(time.time())
    taken: dict[int, list[float]] = {length: [] for length in HOT_LENGTHS}
    for run in range(runs + 1):
        for length, times in taken.items():
            times.append(ttft_ms(length, fresh + run))
    hot = {length: times[1:] for length, times in taken.items()}  # the first of each computed the system prompt
    short, long = (hot[length] for length in HOT_LENGTHS)
    ratio = statistics.median(b / a for a, b in zip(short, long, strict=True))
    return {
        "ttft_ms": {length: statistics.median(times) for length, times in hot.items()},
        "ratio": round(ratio, 3),
        "runs": hot,
    }


def idle(server: Server, seconds: float) -> dict[str, Any]:
    """CPU time of the whole process tree while nobody asks anything."""

    def used() -> dict[int, tuple[str, float]]:
        tree = [root, *root.children(recursive=True)]
        return {p.pid: (name(p.cmdline()), sum(p.cpu_times()[:2])) for p in tree}

    def name(command: list[str]) -> str:
        """Without folders and settings."""
        if "-m" in command:
            return command[command.index("-m") + 1]
        return Path(command[0].split()[0]).name

    root = psutil.Process(server.process.pid)
    time.sleep(2)  # what the last request left behind
    before, start = used(), time.monotonic()
    time.sleep(seconds)
    after, wall = used(), time.monotonic() - start
    each = {name: round(100 * (t - before[pid][1]) / wall, 3) for pid, (name, t) in after.items() if pid in before}
    return {"percent_of_a_core": round(sum(each.values()), 3), "processes": each, "seconds": round(wall, 1)}


def costs(document: dict[str, Any], also: dict[str, Any]) -> dict[str, Any]:
    """Of the further options: the share of tokens a second that is left."""
    names = WORKLOADS.keys() & also.keys()
    return {name: round(also[name]["median"]["tok_s"] / document[name]["median"]["tok_s"], 3) for name in sorted(names)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["W1", "W4", "cold-hot", "start", "idle"])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--idle-seconds", type=float, default=20)
    parser.add_argument("--state-dir", type=Path, default=Path(".state"))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--serve", default="", help="further options for `trunkline serve`, in one string")
    parser.add_argument("--also", help="run the workloads with these further options too")
    parser.add_argument("--peer", type=Path)
    args = parser.parse_args()
    measurements: dict[str, Callable[[Server], dict[str, Any]]] = {
        **{name: lambda server, name=name: workload(server, name, args.runs) for name in WORKLOADS},
        "cold-hot": lambda server: cold_hot(server, max(args.runs, 3)),
        "hot-lengths": lambda server: hot_by_length(server, max(args.runs, 3)),
        "idle": lambda server: idle(server, args.idle_seconds),
    }
    if unknown := set(args.what) - {*measurements, "start"}:
        parser.error(f"unknown measurements: {', '.join(sorted(unknown))}; known are {', '.join(measurements)}, start")
    document = {**new_document(), "serve": args.serve}
    with served(args.state_dir, args.serve.split()) as server:
        document |= {what: measurements[what](server) for what in args.what if what != "start"}
    if "start" in args.what:
        seconds = []
        for _ in range(args.runs):
            with served(args.state_dir, args.serve.split()) as server:
                seconds.append(round(server.seconds_to_ready, 2))
        document["start"] = {"seconds_to_ready": statistics.median(seconds), "runs": seconds}
    if args.also:
        with served(args.state_dir, [*args.serve.split(), *args.also.split()]) as server:
            also = {what: workload(server, what, args.runs) for what in args.what if what in WORKLOADS}
        document["also"] = {"serve": args.also, "tok_s_ratio": costs(document, also), **also}
    document["bars"] = own_bars(document)
    if args.peer:
        document["peer"] = peer_bars(document, json.loads(args.peer.read_text()))
    write(document, args.output)
    print(table(document["bars"], document.get("peer", {})), file=sys.stderr)


if __name__ == "__main__":
    main()
