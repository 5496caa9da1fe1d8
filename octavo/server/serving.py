"""The life of a serving process: socket, engine, HTTP server, signals, drain.

SIGTERM and SIGINT drain: ``/ready`` turns false and new requests get 503, while those that run have
``shutdown_timeout`` seconds to end. A second signal ends everything at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from octavo.config import ServeConfig
from octavo.errors import ConfigError
from octavo.server.async_engine import AsyncEngine
from octavo.text.chat_template import ChatTemplate
from octavo.text.detokenizer import Detokenizer
from octavo.text.tokenizer import Tokenizer, load_tokenizer
from octavo.weights.hub import resolve_model

BACKLOG = 4096
KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep idle connections, so that it is they who close them and no request is lost."""
FLUSH_SECONDS = 2
"""Time for the last bytes of answers to leave after the drain."""
MAX_OPEN_FILES = 65536

CreateApp = Callable[[ServeConfig, AsyncEngine, Tokenizer | None], Starlette]

logger = logging.getLogger("octavo.server")


def run(config: ServeConfig, create_app: CreateApp, model_name: str, engine_argv: list[str] | None = None) -> int:
    """Serve until told to stop; return the exit code. Raises ``ConfigError`` and ``CheckpointError``.

    ``engine_argv`` is the command of another engine process than the usual one.
    """
    _log_to_stderr(config.server.log_level)
    _raise_file_limit()
    with _listening_socket(config.server.host, config.server.port) as listener:
        path = resolve_model(config.model)
        tokenizer = load_tokenizer(Path(config.model.tokenizer) if config.model.tokenizer else path)
        model = dataclasses.replace(config.model, model=str(path))
        server = dataclasses.replace(config.server, served_model_name=model_name)
        config = dataclasses.replace(config, model=model, server=server)
        with asyncio.Runner(loop_factory=_new_event_loop) as runner:
            return runner.run(_Serving(config, create_app, tokenizer, listener, engine_argv).run())


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers, which would end streams before they are drained."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Serving:
    """One serving process from start to exit code."""

    def __init__(
        self,
        config: ServeConfig,
        create_app: CreateApp,
        tokenizer: Tokenizer | None,
        listener: socket.socket,
        engine_argv: list[str] | None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.listener = listener
        self.engine = AsyncEngine(config, engine_argv)
        self.app = create_app(config, self.engine, tokenizer)
        self.chat_template: ChatTemplate = self.app.state.front.chat_template
        self.server: _Server | None = None
        self.starting: asyncio.Task[None] | None = None
        self.drain: asyncio.Task[None] | None = None

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        self.starting = asyncio.create_task(self._start())
        try:
            await self.starting
            await self._serve()
        except asyncio.CancelledError:
            logger.info("stopped before it was ready")
        finally:
            if self.drain is None:
                await self.engine.stop(timeout=0)
            else:
                await self.drain
            self.chat_template.close()
        return 0

    async def _start(self) -> None:
        """Start the engine process; what the front process computes once is computed beside it."""
        checked = asyncio.create_task(asyncio.to_thread(self._warm_up))
        await self.engine.start()
        try:
            await checked
        except ConfigError as error:
            if self.config.model.chat_template is not None:
                raise
            # The model's own template: all but chat can still be served.
            logger.warning("there will be no chat completions: %s", error)

    def _warm_up(self) -> None:
        """Build the tokenizer's tables and start the template's process, so that no request pays for them."""
        if self.tokenizer is not None:
            Detokenizer(self.tokenizer)
        self.chat_template.check()

    async def _serve(self) -> None:
        self.server = _Server(
            uvicorn.Config(
                self.app,
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=FLUSH_SECONDS,
            )
        )
        announced = asyncio.create_task(self._announce(self.server))
        await self.server.serve(sockets=[self.listener])
        announced.cancel()

    async def _announce(self, server: _Server) -> None:
        while not server.started:
            await asyncio.sleep(0.01)
        print(_greeting(self.config, self.tokenizer, _url(self.listener)), flush=True)

    def _on_signal(self) -> None:
        if self.server is None:
            assert self.starting is not None
            self.starting.cancel()
        elif self.drain is None:
            logger.info("draining: %d requests have %g s", self.engine.num_live, self.config.server.shutdown_timeout)
            self.drain = asyncio.create_task(self._drain(self.server))
        else:
            logger.info("stopping at once")
            self.server.should_exit = self.server.force_exit = True
            self.drain.cancel()

    async def _drain(self, server: _Server) -> None:
        try:
            await self.engine.stop(self.config.server.shutdown_timeout)
        except asyncio.CancelledError:
            await self.engine.stop(timeout=0)
        finally:
            server.should_exit = True


# --- pieces ---


def _new_event_loop() -> asyncio.AbstractEventLoop:
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()


def _listening_socket(host: str, port: int) -> socket.socket:
    """Bound at once, so that a port in use is found before a model is loaded for minutes. Raises ``ConfigError``."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}") from None
    listener.setblocking(False)
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _greeting(config: ServeConfig, tokenizer: Tokenizer | None, url: str) -> str:
    """What a person needs to send a first request."""
    model = config.server.served_model_name
    if tokenizer is not None and (tokenizer.chat_template or config.model.chat_template):
        path, asked = "/v1/chat/completions", {"messages": [{"role": "user", "content": "What is 2+2?"}]}
    else:
        prompt = "Once upon a time" if tokenizer is not None else [1, 2, 3]
        path, asked = "/v1/completions", {"prompt": prompt}  # type: ignore[dict-item]
    body = json.dumps({"model": model, **asked, "max_tokens": 50})
    key = " -H 'Authorization: Bearer YOUR_KEY'" if config.server.api_key else ""
    curl = f"curl {url}{path}{key} -H 'Content-Type: application/json' -d '{body}'"
    return f"Serving {model} on {url}\nTry:\n  {curl}"


def _raise_file_limit() -> None:
    """Every connection is an open file, and the usual soft limit of 1,024 is soon reached."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _log_to_stderr(level: str) -> None:
    logging.basicConfig(format="%(asctime)s %(levelname).1s %(name)s: %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("octavo").setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel("WARNING")
