"""The command line. Light: nothing here loads torch, so that a second start takes no longer than the engine's own."""

import subprocess
import sys
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from app.byte_size import parse_byte_size
from app.config import ConfigError, find_redis_url, load_file_config
from app.demo_model import DemoModelError, ensure_demo_model
from app.doctor import examine
from app.embedded_redis import NoRedisError
from app.kernels_package import find_kernels_clash
from app.redis_commands import SessionsUnavailable
from app.serve import ServeError, ServeOptions, check_configuration, python
from app.serve import serve as run_server
from app.usage_export import Format, export
from engine.config import EngineConfig
from engine.errors import ModelNotSupported
from engine.prepared import PreparedModel, default_state_dir

EXIT_FAILED = 1
EXIT_USAGE = 2

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
model_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Models in the state folder.")
app.add_typer(model_app, name="model")
usage_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="The usage ledger.")
app.add_typer(usage_app, name="usage")


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Dtype(StrEnum):
    auto = "auto"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class KVDtype(StrEnum):
    auto = "auto"
    int8 = "int8"
    fp8 = "fp8"


class Kernels(StrEnum):
    auto = "auto"
    cpu = "cpu"
    reference = "reference"
    triton = "triton"


class SharedAttention(StrEnum):
    auto = "auto"
    always = "always"
    never = "never"


class BlockSize(StrEnum):
    tokens_8 = "8"
    tokens_16 = "16"
    tokens_32 = "32"
    tokens_64 = "64"


StateDir = Annotated[
    Path | None,
    typer.Option(help="Models, data and the server's secret; by default ~/.local/state/trunkline.", show_default=False),
]


def _byte_size(text: str | int) -> int:
    try:
        return parse_byte_size(str(text))
    except ValueError as e:
        raise typer.BadParameter(str(e)) from e


@app.callback()
def trunkline() -> None:
    """An asyncio streaming chat backend in which many chats share one system prompt."""


@app.command()
def serve(
    host: Annotated[str, typer.Option(help="Address to listen on; other than loopback needs tenants.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    model: Annotated[
        str | None,
        typer.Option(
            help="Hugging Face directory or hub id, .gguf file or prepared folder; by default a small demo model.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="TOML file with tenants, assistants and limits.", exists=True, dir_okay=False),
    ] = None,
    redis_url: Annotated[
        str | None,
        typer.Option(
            help="A Redis of your own; by default one is started. With a password better in TRUNKLINE_REDIS_URL, or as"
            " redis_url in the configuration: others can read a command line.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[Device, typer.Option()] = Device.auto,
    dtype: Annotated[Dtype, typer.Option(help="auto: bfloat16 where the hardware has it.")] = Dtype.auto,
    kv_dtype: Annotated[
        KVDtype, typer.Option(help="Of keys and values; int8 or fp8: twice as many fit, for a little accuracy.")
    ] = KVDtype.auto,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Context length in tokens; by default the model's.")
    ] = None,
    block_size: Annotated[BlockSize, typer.Option(help="Tokens in a KV block.")] = BlockSize.tokens_16,
    num_blocks: Annotated[
        int | None, typer.Option(min=1, help="KV blocks; by default from the memory that is free.")
    ] = None,
    host_cache_bytes: Annotated[
        int,
        typer.Option(
            parser=_byte_size,
            metavar="SIZE",
            help="Host memory for KV blocks that have to make room, such as 8GiB; of use with a GPU.",
        ),
    ] = 0,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests that run at a time; others wait.")] = 64,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Tokens computed in one step.")] = 576,
    tensor_parallel: Annotated[
        int,
        typer.Option(
            min=1,
            max=64,
            metavar="N",
            help="Each engine's model is split by heads over so many processes, a GPU each where there are GPUs.",
        ),
    ] = 1,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="CPU threads of each engine, or each of its N processes; by default all cores."),
    ] = None,
    kernels: Annotated[
        Kernels, typer.Option(help="auto: the fastest that work here; triton: on a GPU; reference: plain torch, slow.")
    ] = Kernels.auto,
    shared_attention: Annotated[
        SharedAttention, typer.Option(help="Read KV blocks once for all chats that share them; auto: where it pays.")
    ] = SharedAttention.auto,
    enforce_eager: Annotated[
        bool,
        typer.Option("--enforce-eager", help="On a GPU: no graphs of decode steps; starts sooner, steps take longer."),
    ] = False,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Logits to the same bits in any company and order; some speed.")
    ] = False,
    gateways: Annotated[
        int, typer.Option(min=0, max=64, help="Gateway processes; 0: only engines, for gateways elsewhere.")
    ] = 1,
    engines: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=64,
            help="Engine processes here, between which the cores are divided; by default 1, or none if there is an"
            " --engine-address.",
            show_default=False,
        ),
    ] = None,
    engine_address: Annotated[
        list[str] | None,
        typer.Option(
            help="An engine on another machine, such as tcp://10.0.0.7:7001; may be given several times.",
            show_default=False,
        ),
    ] = None,
    engine_listen: Annotated[
        str | None,
        typer.Option(
            help="Where engines started here can be reached from other machines, such as tcp://10.0.0.7:7001; each"
            " further one a port higher. Whoever reaches them may use them: for a trusted network only.",
            show_default=False,
        ),
    ] = None,
    drain_timeout: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="At the end, running answers have this long.")
    ] = 20.0,
    state_dir: StateDir = None,
    check_kv: Annotated[bool, typer.Option("--check-kv", help="Check every KV slot before it is read (slow).")] = False,
) -> None:
    """Starts everything and serves until Ctrl-C: database, engine, gateway and the chat page."""
    clash = find_kernels_clash()
    if clash is not None:
        fail(clash)
    try:
        redis_url = find_redis_url(redis_url, check_configuration(host, config))
    except ConfigError as e:
        fail(str(e), EXIT_USAGE)
    if engines is None:
        engines = 0 if engine_address else 1
    folder = _state_dir(state_dir)
    prepared = _find_or_prepare(model, folder, dtype, device)
    engine = EngineConfig(
        model_dir="",
        device=device.value,
        dtype=dtype.value,
        kv_dtype=kv_dtype.value,
        max_model_len=max_model_len,
        block_size=int(block_size),  # type: ignore[arg-type]
        num_blocks=num_blocks,
        host_cache_bytes=host_cache_bytes,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        tensor_parallel=tensor_parallel,
        threads=threads,
        kernels=kernels.value,
        shared_attention=shared_attention.value,
        enforce_eager=enforce_eager,
        deterministic=deterministic,
        check_kv=check_kv,
    )
    say(f"model: {prepared.manifest.name} ({prepared.path})")
    try:
        options = ServeOptions(
            model_dir=prepared.path,
            state_dir=folder,
            engine=engine,
            host=host,
            port=port,
            config_path=None if config is None else config.absolute(),
            redis_url=redis_url,
            num_gateways=gateways,
            num_engines=engines,
            drain_timeout_s=drain_timeout,
            engine_addresses=tuple(engine_address or ()),
            engine_listen=engine_listen,
        )
        code = run_server(options, say)
    except (ServeError, NoRedisError) as e:
        fail(str(e))
    raise typer.Exit(code)


@model_app.command()
def prepare(
    source: Annotated[str, typer.Argument(help="Hugging Face directory, hub id or .gguf file.")],
    dtype: Annotated[Dtype, typer.Option(help="auto: bfloat16 where the hardware has it.")] = Dtype.auto,
    state_dir: StateDir = None,
) -> None:
    """Prepares a model once, so that `serve --model SOURCE` starts at once; prints its folder."""
    prepared = _find_or_prepare(source, _state_dir(state_dir), dtype, Device.auto)
    print(prepared.path)


@usage_app.command("export")
def export_usage(
    since: Annotated[
        datetime, typer.Option(formats=["%Y-%m-%d"], help="First day, in UTC; by default all that is kept.")
    ] = datetime(1970, 1, 1),
    tenant: Annotated[str | None, typer.Option(help="Only of this one.", show_default=False)] = None,
    form: Annotated[Format, typer.Option("--format")] = Format.csv,
    redis_url: Annotated[str | None, typer.Option(help="As for `serve`.", show_default=False)] = None,
    config: Annotated[
        Path | None, typer.Option(help="As for `serve`, for its redis_url.", exists=True, dir_okay=False)
    ] = None,
    state_dir: StateDir = None,
) -> None:
    """Prints one row for each generation: who asked, prompt tokens by where they came from, output tokens, times."""
    folder = default_state_dir() if state_dir is None else state_dir.absolute()
    try:
        url = find_redis_url(redis_url, load_file_config(config))
        export(url, folder, since.date(), tenant, form, print)
    except ConfigError as e:
        fail(str(e), EXIT_USAGE)
    except (NoRedisError, SessionsUnavailable) as e:
        fail(str(e))


@app.command()
def doctor(state_dir: StateDir = None) -> None:
    """Says what this machine has and what is wrong; exit code 1 if trunkline cannot serve here."""
    is_bad = False
    marks = {"good": "ok  ", "note": "note", "bad": "BAD "}
    for finding in examine(default_state_dir() if state_dir is None else state_dir.absolute()):
        print(f"{marks[finding.state]}  {finding.what:<10} {finding.text}", flush=True)
        is_bad = is_bad or finding.state == "bad"
    raise typer.Exit(EXIT_FAILED if is_bad else 0)


def _state_dir(given: Path | None) -> Path:
    path = default_state_dir() if given is None else given.absolute()
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as e:
        fail(f"the state folder {path} cannot be made: {e.strerror}; give another with --state-dir")
    return path


def _find_or_prepare(source: str | None, state_dir: Path, dtype: Dtype, device: Device) -> PreparedModel:
    """In a process of its own, because it may need torch. One that is there is found without."""
    try:
        if source is None:
            source = str(ensure_demo_model(state_dir))
        elif (Path(source) / "manifest.json").is_file():
            return PreparedModel.load(Path(source).absolute())
        command = python("engine.models.prepare", source, "--state-dir", str(state_dir), "--dtype", dtype.value)
        done = subprocess.run([*command, "--device", device.value], stdout=subprocess.PIPE, text=True)
        if done.returncode != 0:  # it has said why
            raise typer.Exit(EXIT_FAILED)
        return PreparedModel.load(done.stdout.strip().splitlines()[-1])
    except (DemoModelError, ModelNotSupported) as e:
        fail(str(e))
    except KeyboardInterrupt:
        fail("interrupted")


def say(sentence: str) -> None:
    print(sentence, flush=True)


def fail(sentence: str, code: int = EXIT_FAILED) -> NoReturn:
    print(f"trunkline: {sentence}", file=sys.stderr, flush=True)
    raise typer.Exit(code)


def main() -> None:
    app()
