"""A gateway process: `python -m app.gateway`, started by the supervisor with its settings in the environment."""

import asyncio
import contextlib
import gc
import logging
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Generator, Sequence

import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.routing import BaseRoute

from app import page
from app.asgi import create_app
from app.caps import Caps
from app.config import ConfigError, FileConfig, GatewayConfig, check_open_mode, load_file_config
from app.conversations import Conversations
from app.disconnect import cancel_and_wait
from app.drain import Drain
from app.engine_pool import EnginePool
from app.frame_socket import FrameSocket
from app.idempotency import IdempotencyKeys
from app.ledger import Ledger
from app.live_config import Configured, LiveConfig
from app.metrics import Metrics
from app.prefill import Prefill
from app.prompt_history import PromptHistory
from app.prompts import PromptBuilder
from app.rate_limits import RateLimits
from app.redis_commands import RedisCommands
from app.reload import Reloader
from app.responses import Responses
from app.resubmission import Resubmission
from app.scopes import Scopes, ensure_secret
from app.send_once import SendOnce
from app.services import Services
from app.stateful import OpenStateful, response_service
from app.tenant_store import TenantStore
from app.tickets import Tickets
from engine.client import EngineClient
from engine.errors import EngineError
from engine.prepared import PreparedModel
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from engine.zmq_client import ZmqEngineClient

MAX_FRAME_BYTES = 256 * 1024
"""Of one websocket message; a longer one closes the socket with 1009."""
WS_PING_S = 20.0
TCP_USER_TIMEOUT_MS = 120_000
LAST_WORDS_S = 5.0
"""After the time for running answers, for what those are told that did not end in it."""
FIRST_REQUEST_S = 1.0
"""At the end, for connections on which nothing has been asked yet."""
ENGINE_WAIT_S = 5.0
"""A gateway beside others accepts nothing for so long until it has an engine."""
BACKLOG = 2048
NO_TEMPLATE = "{{ raise_exception('this model has no chat template: use /v1/completions') }}"

logger = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """At a signal it drains and ends; at a second one it ends at once. Either way with the loop's result instead of
    raising the signal again, so that the exit code is 0."""

    def __init__(self, config: uvicorn.Config, drain: Drain) -> None:
        super().__init__(config)
        self._drain = drain

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, self._on_signal)
        try:
            yield
        finally:
            for signum in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(signum)

    def _on_signal(self) -> None:
        if self._drain.is_draining:
            self.should_exit = True
        else:
            self._drain.begin()

    async def end_drained(self, timeout_s: float, *, stops_accepting: bool) -> None:
        """Waits for the signal, then for what is under way, at most for `timeout_s`, and ends the server."""
        await self._drain.wait_begun()
        logger.info("draining: %d requests and websockets are under way", self._drain.num_under_way)
        try:
            if stops_accepting:
                for server in self.servers:
                    server.close()
            await self._drain.run(timeout_s)
            await self._hear_first_requests()
        finally:
            self.should_exit = True

    async def _hear_first_requests(self) -> None:
        """Whoever connected at the last moment gets an answer, if only a refusal, not the connection's reset."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_REQUEST_S):
                while True:
                    await asyncio.sleep(FIRST_REQUEST_S / 100)  # uvicorn tells nobody
                    if all(getattr(c, "cycle", c) is not None for c in self.server_state.connections):
                        return


def uvicorn_config(app: Starlette, *, shutdown_s: float = LAST_WORDS_S, log_level: str = "warning") -> uvicorn.Config:
    """How the app is served, in production and in tests alike."""
    return uvicorn.Config(
        app,
        http="httptools",
        ws=FrameSocket,
        ws_max_size=MAX_FRAME_BYTES,
        ws_ping_interval=WS_PING_S,
        ws_ping_timeout=WS_PING_S,
        ws_per_message_deflate=False,
        lifespan="off",
        access_log=False,
        server_header=False,
        log_level=log_level,
        timeout_graceful_shutdown=round(shutdown_s),
        backlog=BACKLOG,
    )


def listening_socket(config: GatewayConfig) -> socket.socket:
    """The supervisor's socket, or one of our own."""
    if config.listen_fd is not None:
        sock = socket.socket(fileno=config.listen_fd)
    else:
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        sock = socket.create_server((config.host, config.port), family=family, backlog=BACKLOG, reuse_port=False)
    sock.setblocking(False)
    if sys.platform == "linux":
        # Inherited by what it accepts: a peer that takes nothing for so long is gone, and its buffers with it.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, TCP_USER_TIMEOUT_MS)
    return sock


def build_services(config: GatewayConfig, file_config: FileConfig, engine: EngineClient) -> Services:
    """Raises ConfigError or EngineError with one sentence."""
    model = PreparedModel.load(config.model_dir)
    tokenizer = Tokenizer.load(model)
    template = ChatTemplate(model.chat_template or NO_TEMPLATE, tokenizer)
    secret = ensure_secret(config.state_dir)
    scopes = Scopes(secret)
    live = LiveConfig(config, file_config, template if model.chat_template is not None else None, scopes)
    tenant_store = None if config.redis_url is None else TenantStore.connect(config.redis_url)
    caps = Caps(tenant_store)
    return Services(
        config=config,
        live=live,
        model=model,
        tokenizer=tokenizer,
        template=template,
        engine=engine,
        resubmission=Resubmission(engine, patience_s=config.engine_patience_s),
        prompts=PromptBuilder(tokenizer, template, scopes),
        metrics=Metrics(),
        history=PromptHistory(),
        tickets=Tickets(secret, tenant_store),
        caps=caps,
        rate_limits=RateLimits(tenant_store, caps),
        tenant_store=tenant_store,
        ledger=None if config.redis_url is None else _ledger(config.redis_url, live),
    )


def _ledger(redis_url: str, live: LiveConfig) -> Ledger:
    commands = RedisCommands.connect(redis_url, max_connections=2)
    return Ledger(commands, retention_days=lambda: live.current.limits.usage_retention_days)


@contextlib.asynccontextmanager
async def stateful_routes(
    services: Services, open_stateful: OpenStateful = response_service
) -> AsyncIterator[Sequence[BaseRoute]]:
    """The Responses API over the session store."""
    if services.config.redis_url is None:
        yield []
        return
    async with open_stateful(services, services.config.redis_url, owner=secrets.token_hex(16)) as stateful:
        services.drain.add_end(stateful.service.finish)
        sender = SendOnce(stateful.service, IdempotencyKeys(stateful.commands))
        responses = Responses(services, stateful.service, sender)
        yield [*responses.routes(), *Conversations(services, stateful.conversations).routes()]


@contextlib.asynccontextmanager
async def following_configuration(services: Services) -> AsyncIterator[None]:
    """The engine has the trunks and shares of the configuration; that is the file's, whenever it changes or SIGHUP
    comes."""
    prefill = Prefill(services.engine, services.prompts)

    def put_in_force(configured: Configured) -> None:
        services.live.current = configured
        services.engine.set_tenants(configured.tenants.shares)
        prefill.keep(configured.assistants)

    put_in_force(services.current)
    tasks = [asyncio.create_task(prefill.run(), name="prefill")]
    reload: Callable[[], None] = _nothing_to_reload
    path = services.config.config_path
    if path is not None:
        reloader = Reloader(path, services.live, put_in_force)
        tasks.append(asyncio.create_task(reloader.run(), name="reload"))
        reload = reloader.request
    for task in tasks:
        task.add_done_callback(_report_failure)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, reload)
    try:
        yield
    finally:
        # not removed, or a late one would kill this process
        loop.add_signal_handler(signal.SIGHUP, lambda: None)
        await cancel_and_wait(*tasks)


def _nothing_to_reload() -> None:
    logger.info("SIGHUP: there is no configuration file to read again")


def _report_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s failed", task.get_name(), exc_info=error)


async def serve(config: GatewayConfig, open_stateful: OpenStateful = response_service) -> None:
    """Runs until a signal comes. Raises ConfigError or EngineError, with one sentence, if it cannot start."""
    file_config = load_file_config(config.config_path)
    check_open_mode(config.host, file_config)
    fingerprint = PreparedModel.load(config.model_dir).manifest.fingerprint
    engines = {address: ZmqEngineClient(address, fingerprint=fingerprint) for address in config.engine_addresses}
    pool = EnginePool(engines)
    services = build_services(config, file_config, pool)
    for engine in engines.values():
        await engine.start()
    try:
        async with following_configuration(services), stateful_routes(services, open_stateful) as routes:
            app = create_app(services, [*routes, *page.routes()])
            gc.collect()
            gc.freeze()  # what was built here lives as long as the process
            if config.has_siblings:
                # they answer meanwhile; where no engine is there for anybody, it says so itself
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(ENGINE_WAIT_S):
                        await pool.wait_ready()
            server = Server(uvicorn_config(app), services.drain)
            end = server.end_drained(config.drain_timeout_s, stops_accepting=config.has_siblings)
            ending = asyncio.create_task(end, name="drain")
            ending.add_done_callback(_report_failure)
            try:
                await server.serve([listening_socket(config)])
            finally:
                await cancel_and_wait(ending)
    finally:
        await pool.close()
        await services.close()


def main() -> int:
    """Exit code: 0 after a signal, 2 when it cannot start."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("watchfiles").setLevel(logging.WARNING)
    try:
        config = GatewayConfig.from_environment()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(config))
    except (ConfigError, EngineError, OSError) as e:
        logger.error("%s", e)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
