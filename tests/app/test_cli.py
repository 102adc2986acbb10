"""The command line: options arrive, errors are one sentence, nothing heavy is loaded."""

import os
import socket
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from app import cli
from app.doctor import Finding
from app.embedded_redis import NoRedisError
from app.serve import ServeOptions
from app.usage_export import Format
from engine.config import EngineConfig
from tests.scripted_engine import make_byte_model


@pytest.fixture
def model(tmp_path: Path) -> str:
    """The folder of a prepared model."""
    return str(make_byte_model(tmp_path / "byte-model").path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, arguments)


def failed(result: Result, code: int) -> str:
    """The one sentence that it said."""
    assert result.exit_code == code, result.output
    (line,) = result.stderr.splitlines()
    return line


def test_options_arrive(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[ServeOptions] = []

    def serve(options: ServeOptions, report: object) -> int:
        got.append(options)
        return 0

    monkeypatch.setattr(cli, "run_server", serve)
    config = tmp_path / "t.toml"
    config.touch()
    words = f"--host ::1 --port 9 --model {model} --config {config} --redis-url redis://r --device cpu --dtype float32"
    words += " --kv-dtype int8 --enforce-eager"
    more = "--max-model-len 99 --block-size 32 --num-blocks 7 --max-num-seqs 5 --max-num-batched-tokens 64 --threads 3"
    host = "--host-cache-bytes 512MiB --tensor-parallel 2 --kernels reference --shared-attention always --deterministic"
    processes = (
        "--gateways 2 --engines 3 --engine-address tcp://a:1 --engine-address tcp://b:2 --engine-listen tcp://c:3"
        " --drain-timeout 7.5"
    )
    result = run(
        "serve",
        *words.split(),
        *more.split(),
        *host.split(),
        "--state-dir",
        str(tmp_path / "s"),
        "--check-kv",
        *processes.split(),
    )
    assert result.exit_code == 0, result.output
    (options,) = got
    assert options == ServeOptions(
        model_dir=Path(model),
        state_dir=tmp_path / "s",
        engine=EngineConfig(
            model_dir="",
            device="cpu",
            dtype="float32",
            kv_dtype="int8",
            enforce_eager=True,
            max_model_len=99,
            block_size=32,
            num_blocks=7,
            max_num_seqs=5,
            max_num_batched_tokens=64,
            tensor_parallel=2,
            threads=3,
            host_cache_bytes=512 * 2**20,
            kernels="reference",
            shared_attention="always",
            deterministic=True,
            check_kv=True,
        ),
        host="::1",
        port=9,
        config_path=config,
        redis_url="redis://r",
        num_gateways=2,
        num_engines=3,
        engine_addresses=("tcp://a:1", "tcp://b:2"),
        engine_listen="tcp://c:3",
        drain_timeout_s=7.5,
    )
    run("serve", "--model", model, "--state-dir", str(tmp_path / "s"))
    assert got[1].engine == EngineConfig(model_dir="")
    assert (got[1].host, got[1].port) == ("127.0.0.1", 8000)
    assert (got[1].num_gateways, got[1].num_engines, got[1].engine_addresses) == (1, 1, ())
    run("serve", "--model", model, "--state-dir", str(tmp_path / "s"), "--engine-address", "tcp://a:1")
    assert (got[2].num_engines, got[2].engine_addresses) == (0, ("tcp://a:1",))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--engines 0", "gateways need an engine"),
        ("--gateways 0", "without gateways there must be engines that others can reach"),
        ("--gateways 0 --engines 0 --engine-listen tcp://a:1", "without gateways there must be engines"),
        ("--engine-listen ipc:///a", "engines listen at tcp://host:port, got 'ipc:///a'"),
        ("--engine-listen tcp://a:65535 --engines 2", "engines listen at tcp://host:port"),
    ],
)
def test_processes_that_could_serve_nobody(model: str, tmp_path: Path, words: str, sentence: str) -> None:
    result = run("serve", "--model", model, "--state-dir", str(tmp_path / "s"), *words.split())
    assert sentence in failed(result, 1)


def test_a_size_that_is_none_is_a_usage_error(model: str, tmp_path: Path) -> None:
    result = run("serve", "--model", model, "--state-dir", str(tmp_path / "s"), "--host-cache-bytes", "much")
    assert result.exit_code == 2
    assert "'much' is not a size" in result.output
    assert not (tmp_path / "s").exists(), "before anything starts"


def test_the_exit_code_is_the_servers(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "run_server", lambda options, report: 1)
    assert run("serve", "--model", model, "--state-dir", str(tmp_path)).exit_code == 1


def test_a_wrong_configuration_is_a_usage_error(model: str, tmp_path: Path) -> None:
    result = run("serve", "--model", model, "--state-dir", str(tmp_path / "s"), "--host", "0.0.0.0")
    assert "loopback" in failed(result, 2)


def test_a_wrong_redis_is_a_usage_error(model: str, tmp_path: Path) -> None:
    result = run("serve", "--model", model, "--state-dir", str(tmp_path / "s"), "--redis-url", "http://r")
    assert failed(result, 2).startswith("trunkline: --redis-url: ")
    assert not (tmp_path / "s").exists(), "before anything starts"


def test_a_port_in_use_fails(model: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = run("serve", "--model", model, "--state-dir", str(tmp_path / "s"), "--port", port)
    assert failed(result, 1).startswith(f"trunkline: cannot listen on 127.0.0.1 port {port}")


def test_a_state_folder_that_cannot_be_made(model: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run("serve", "--model", model, "--state-dir", str(tmp_path / "file" / "s"))
    assert "--state-dir" in failed(result, 1)


def test_a_clash_of_packages_is_told(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "find_kernels_clash", lambda: "`import kernels` finds another")
    result = run("serve", "--model", model, "--state-dir", str(tmp_path))
    assert failed(result, 1) == "trunkline: `import kernels` finds another"


def test_a_database_error_of_the_server_is_told(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(options: ServeOptions, report: object) -> int:
        raise NoRedisError("no Redis: install one")

    monkeypatch.setattr(cli, "run_server", serve)
    assert failed(run("serve", "--model", model, "--state-dir", str(tmp_path)), 1) == "trunkline: no Redis: install one"


def test_a_wrong_configuration_is_told_before_a_model_is_looked_for(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("tenants = 1")
    result = run("serve", "--model", "/nowhere", "--state-dir", str(tmp_path / "s"), "--config", str(config))
    assert failed(result, 2).startswith(f"trunkline: {config}: tenants")
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    "wrong",
    [
        "--block-size 7",
        "--port 0",
        "--max-num-seqs 0",
        "--device tpu",
        "--shared-attention often",
        "--config /nowhere",
        "--nonsense 1",
    ],
)
def test_usage_errors(wrong: str) -> None:
    result = run("serve", *wrong.split())
    assert result.exit_code == 2
    assert wrong.split()[0] in result.stderr


def test_a_model_that_cannot_be_served_is_one_sentence(tmp_path: Path) -> None:
    """Through the whole command, as the sentence comes from the process that prepares."""
    command = [sys.executable, "-m", "app", "model", "prepare", str(tmp_path / "no.gguf"), "--state-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert "no.gguf" in line


def test_a_prepared_folder_is_taken_as_it_is(model: str, tmp_path: Path) -> None:
    result = run("model", "prepare", model, "--state-dir", str(tmp_path))
    assert result.stdout == f"{model}\n"


def test_a_broken_prepared_folder_is_one_sentence(model: str, tmp_path: Path) -> None:
    (Path(model) / "manifest.json").write_text("{}")
    assert "manifest.json" in failed(run("model", "prepare", model, "--state-dir", str(tmp_path)), 1)


def test_doctor_prints_a_line_for_each_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = Finding("redis", "good", "Valkey 9"), Finding("torch", "bad", "torch cannot be loaded")
    monkeypatch.setattr(cli, "examine", lambda state_dir: [good])
    assert run("doctor").stdout == "ok    redis      Valkey 9\n"
    monkeypatch.setattr(cli, "examine", lambda state_dir: [good, bad])
    result = run("doctor")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[1] == "BAD   torch      torch cannot be loaded"


def test_nothing_heavy_is_loaded() -> None:
    program = (
        "import sys, app.cli; "
        "sys.exit(', '.join({'torch', 'transformers', 'tokenizers', 'numpy', 'uvicorn'} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr


def test_usage_export_arrives_and_says_where_it_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = failed(run("usage", "export", "--state-dir", str(tmp_path)), 1)
    assert f"no trunkline runs on {tmp_path}" in message
    got: list[object] = []

    def export(*arguments: object) -> None:
        got.extend(arguments[:-1])

    monkeypatch.setattr(cli, "export", export)
    options = ("--since", "2026-11-30", "--tenant", "acme", "--format", "jsonl", "--redis-url", "redis://db:1/0")
    result = run("usage", "export", *options, "--state-dir", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert got == ["redis://db:1/0", tmp_path, date(2026, 11, 30), "acme", Format.jsonl]


def test_a_kv_dtype_that_there_is_not(model: str) -> None:
    result = run("serve", "--model", model, "--kv-dtype", "int4")
    assert result.exit_code == 2
    assert "'int4' is not one of 'auto', 'int8', 'fp8'" in result.stderr
