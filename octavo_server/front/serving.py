"""Lifecycle of a serving process: socket, engine, HTTP server, signals, drain.

SIGTERM and SIGINT drain: ``/ready`` fails and new requests get 503, while running ones have ``shutdown_timeout``
seconds to finish. A second signal stops the server at once. A successor (``takeover``) makes it drain,
too, but gets the new requests.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from octavo.backend_settings import WITHOUT_MODEL
from octavo.config import ServeConfig
from octavo.errors import ConfigError
from octavo.plugins import ENGINE_BACKENDS, ENGINE_GROUPS, FRONTS, load, parts
from octavo.server_settings import ServerSettings
from octavo.system.garbage_collection import collect_seldom, leave_out_what_exists
from octavo.telemetry.logs import log_to_stderr
from octavo.telemetry.phases import Phases
from octavo_server.engines.async_engine import AsyncEngine
from octavo_server.engines.kv_publisher import KVEventPublisher, parse_kv_events_config
from octavo_server.engines.several_engines import SeveralEngines
from octavo_server.front.front_supervisor import listen
from octavo_server.front.service_manager import ServiceManager
from octavo_server.front.takeover import Predecessor, Successor, TakeoverSocket, find_predecessor
from octavo_server.model_name import with_local_model
from octavo_server.observe.tracing import Tracing, make_tracing

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from octavo.text.tokenizer import Tokenizer

    # Imported at run time while the engine process starts, which takes longer.
    from octavo_server.http.server import HTTPServer
    from octavo_server.services import ServerServices

MAX_OPEN_FILES = 65536
HAND_OVER_SECONDS = 0.02
"""Interval at which idle connections are given to a successor."""

logger = logging.getLogger("octavo.server")


def run(
    config: ServeConfig,
    engine_argv: list[str] | None = None,
    others: Sequence[ServeConfig] = (),
    listener: socket.socket | None = None,
) -> int:
    """Serve until a signal stops the server; return the exit code. Raises ``ConfigError`` and ``CheckpointError``.

    ``engine_argv`` replaces the default command of the engine process. ``others`` has the settings of further models.
    ``listener`` is a socket that is bound already.
    """
    log_to_stderr(config.server.log_level, config.server.log_format)
    _raise_file_limit()
    # Each text is tokenised in the calling thread; the library's thread pool only adds overhead.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    place = config.server.takeover_socket
    predecessor = None if place is None else find_predecessor(Path(place))
    with (
        listener or _listening_socket(config.server, predecessor) as listener,
        asyncio.Runner(loop_factory=_new_event_loop) as runner,
    ):
        front = make_front(config, engine_argv, others)
        return runner.run(_Serving(config.server, listener, front, predecessor).run())


class Startable(Protocol):
    """An engine, several engines, or an upstream server."""

    @property
    def num_live(self) -> int: ...
    async def start(self) -> None: ...
    async def stop(self, timeout: float) -> None:
        """Drain: reject new requests, and wait up to ``timeout`` seconds for live ones."""
        ...


class Front(Protocol):
    """What a serving process serves."""

    @property
    def engine(self) -> Startable: ...
    def load(self, predecessor: Predecessor | None) -> Starlette:
        """Import the HTTP stack and build the application, in a thread while the engine starts."""
        ...

    def startup_message(self, url: str) -> str: ...
    def has_request(self, folder: str, owner: str, key: str) -> bool:
        """Whether the journal in a folder has a request of this key."""
        ...

    async def leave_jobs(self) -> None:
        """Stop batches, with which the successor continues."""
        ...

    def close(self) -> None: ...


class EngineFront:
    """An application in front of one or several engine processes."""

    def __init__(self, config: ServeConfig, engine_argv: list[str] | None, others: Sequence[ServeConfig] = ()) -> None:
        self._configs = [with_local_model(each) for each in (config, *others)]
        self._publishers: list[KVEventPublisher] = []
        self.engine: AsyncEngine | SeveralEngines
        self._has_several = bool(others)
        if others:
            self.engine = load(ENGINE_GROUPS, "several_models")(self._configs, engine_argv)
        else:
            self.engine, self._publishers = make_engine(self._configs[0], engine_argv)
        self._tracings: list[Tracing] = []
        for engine in _engines(self.engine):
            engine.tracing = make_tracing(config.server, engine.metrics.model_name)
            self._tracings += [] if engine.tracing is None else [engine.tracing]
        self._app: Starlette | None = None

    @property
    def _services(self) -> ServerServices:
        assert self._app is not None
        services: ServerServices = self._app.state.services
        return services

    def load(self, predecessor: Predecessor | None) -> Starlette:
        """Build the application and warm it up."""
        phases = Phases()
        from octavo_server.app import Served, create_app

        phases.done("imports of the front process")
        engine: Any = self.engine  # those of a group are ``EngineClient``s, and one for data parallelism is itself
        group, engines = (engine, engine.engines) if self._has_several else (None, [engine])
        tokenizers = map(_tokenizer, self._configs)
        first, *others = map(Served, self._configs, engines, tokenizers)
        self._app = app = create_app(*first, others, group, predecessor)
        self._services.warm_up()
        phases.done("tokenizer and chat template")
        return app

    def startup_message(self, url: str) -> str:
        """What is printed when the server is ready: an example request."""
        return _startup_message(self._services, url)

    def has_request(self, folder: str, owner: str, key: str) -> bool:
        """Whether a journal has a request of this key."""
        journals = (each for each in self._services.journals if str(each.folder.resolve()) == folder)
        return any(journal.has_request(owner, key) for journal in journals)

    async def leave_jobs(self) -> None:
        """Stop batches."""
        assert self._app is not None
        await self._app.state.batches.stop()

    def close(self) -> None:
        """Stop child processes, and close what was published and stored."""
        if self._app is not None:
            self._services.close()
        # At once: each may take a second or more when nothing takes what it still has to send.
        ends = [*(each.close for each in self._publishers), *(each.close for each in self._tracings)]
        closing = [threading.Thread(target=end) for end in ends]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()


def make_front(config: ServeConfig, engine_argv: list[str] | None, others: Sequence[ServeConfig] = ()) -> Front:
    """What the backend of the settings serves."""
    if config.model.backend not in parts(FRONTS):
        return EngineFront(config, engine_argv, others)
    front: Front = load(FRONTS, config.model.backend)(config)
    return front


class _Serving:
    """One serving process from start to exit code."""

    def __init__(
        self, settings: ServerSettings, listener: socket.socket, front: Front, predecessor: Predecessor | None = None
    ) -> None:
        self.settings = settings
        self.listener = listener
        self.front = front
        self.predecessor = predecessor
        self.manager = ServiceManager()
        self.takeover: TakeoverSocket | None = None
        self.has_successor = False
        self.engine = front.engine
        self.server: HTTPServer | None = None
        self.starting: asyncio.Task[HTTPServer] | None = None
        self.drain: asyncio.Task[None] | None = None

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        self.manager.starting()
        self.starting = asyncio.create_task(self._start())
        try:
            self.server = await self.starting
            await self._serve(self.server)
        except asyncio.CancelledError:
            logger.info("stopped before it was ready")
        finally:
            if self.drain is not None:
                await asyncio.wait([self.drain])
            if self.drain is None or self.drain.cancelled():  # cancelled before it began
                await self.engine.stop(timeout=0)
            self.front.close()
            for end in (self.predecessor, self.takeover):  # last: the successor then continues with the journal
                if end is not None:
                    end.close()
        return 0

    async def _start(self) -> HTTPServer:
        """Start the engine process while loading the front process's own modules and tokenizer."""
        engine = asyncio.create_task(self.engine.start())
        try:
            server = await asyncio.to_thread(self._load)
            await engine
        finally:
            engine.cancel()
            await asyncio.gather(engine, return_exceptions=True)
        leave_out_what_exists()
        collect_seldom()
        return server

    def _load(self) -> HTTPServer:
        app = self.front.load(self.predecessor)
        from octavo_server.http.server import HTTPServer

        return HTTPServer(app, self.settings)

    async def _serve(self, server: HTTPServer) -> None:
        announced = asyncio.create_task(self._announce(server))
        await server.serve(sockets=[self.listener])
        announced.cancel()

    async def _announce(self, server: HTTPServer) -> None:
        while not server.started:
            await asyncio.sleep(0.01)
        if self.predecessor is not None:
            self.predecessor.start(server.adopt)
        if self.settings.takeover_socket is not None:
            self._wait_for_successor(Path(self.settings.takeover_socket))
        url = _url(self.listener, self.settings.ssl_certfile is not None)
        print(self.front.startup_message(url), flush=True)
        self.manager.ready()

    def _wait_for_successor(self, path: Path) -> None:
        try:
            self.takeover = TakeoverSocket(path, self.listener, self.front.has_request, self._on_successor)
        except OSError as error:
            logger.error("takeover_socket: no server will be able to take over: %s: %s", path, error.strerror or error)

    def _on_signal(self) -> None:
        if self.server is None:
            assert self.starting is not None
            self.starting.cancel()
        elif self.has_successor:
            self.has_successor = False
            logger.info("draining already: the next server has taken over")
        elif self.drain is None:
            num_live, seconds = self.engine.num_live, self.settings.shutdown_timeout
            logger.info("stopping; running requests: %d%s", num_live, f", which have {seconds:g} s" if num_live else "")
            self.drain = asyncio.create_task(self._drain(self.server))
        elif not self.server.force_exit:
            logger.info("stopping at once")
            self.server.should_exit = self.server.force_exit = True
            self.drain.cancel()

    def _on_successor(self, successor: Successor) -> None:
        if self.server is not None and self.drain is None:
            self.has_successor = True
            logger.info("the next server has taken over; %d requests are left", self.engine.num_live)
            self.drain = asyncio.create_task(self._drain(self.server, successor))

    async def _hand_over(self, server: HTTPServer, successor: Successor) -> None:
        """Complete the running requests within ``shutdown_timeout``, and let ``successor`` have all others."""
        server.stop_accepting()
        await self.front.leave_jobs()
        deadline = time.monotonic() + self.settings.shutdown_timeout
        while True:
            server.release_idle(successor.take)
            is_over = not (self.engine.num_live or server.server_state.connections) and successor.has_all
            if is_over or time.monotonic() > deadline:
                return
            await asyncio.sleep(HAND_OVER_SECONDS)

    async def _drain(self, server: HTTPServer, successor: Successor | None = None) -> None:
        self.manager.stopping()
        timeout = self.settings.shutdown_timeout
        try:
            if successor is not None:
                await self._hand_over(server, successor)
                timeout = 0
            await self.engine.stop(timeout)
        except asyncio.CancelledError:
            await self.engine.stop(timeout=0)
        finally:
            server.should_exit = True


# --- helpers ---


def make_engine(
    config: ServeConfig, argv: list[str] | None
) -> tuple[AsyncEngine | SeveralEngines, list[KVEventPublisher]]:
    """The engine, or the engines, that the settings ask for, and a publisher of each one's KV events, if any."""
    is_fleet = config.server.data_parallel_size > 1
    engine = load(ENGINE_GROUPS, "data_parallel")(config, argv) if is_fleet else AsyncEngine(config, argv)
    settings = config.server.kv_events_config
    events = None if settings is None else parse_kv_events_config(settings)
    publishers = []
    if events is not None:
        for rank, each in enumerate(_engines(engine)):
            publishers.append(KVEventPublisher(events, rank))
            each.send_kv_events_to(publishers[-1])
    return engine, publishers


def _engines(engine: AsyncEngine | SeveralEngines) -> list[AsyncEngine]:
    return [engine] if isinstance(engine, AsyncEngine) else engine.engines


def _tokenizer(config: ServeConfig) -> Tokenizer | None:
    from octavo.text.tokenizer import load_tokenizer

    if config.model.backend in WITHOUT_MODEL:
        made: Tokenizer = load(ENGINE_BACKENDS, config.model.backend).word_tokenizer()
        return made
    return load_tokenizer(Path(config.model.tokenizer or config.model.model))


def _new_event_loop() -> asyncio.AbstractEventLoop:
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()


def _listening_socket(settings: ServerSettings, predecessor: Predecessor | None) -> socket.socket:
    """The predecessor's socket, or one bound before the model is loaded, so that a port in use fails early.

    Raises ``ConfigError``.
    """
    if predecessor is None:
        return listen(settings.host, settings.port)
    taken = predecessor.listener.getsockname()[1]
    if settings.port not in (0, taken):
        raise ConfigError(f"takeover_socket: the server there listens on port {taken}, and not on {settings.port}")
    return predecessor.listener


def _url(listener: socket.socket, is_secure: bool) -> str:
    host, port = listener.getsockname()[:2]
    scheme = "https" if is_secure else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _startup_message(server: ServerServices, url: str) -> str:
    """The startup message: where people, and programs, can ask the first question."""
    model, tokenizer = server.first.model_name, server.first.tokenizer
    if tokenizer is not None and (tokenizer.chat_template or server.config.model.chat_template):
        path, asked = "/v1/chat/completions", {"messages": [{"role": "user", "content": "What is 2+2?"}]}
    else:
        prompt = "Once upon a time" if tokenizer is not None else [1, 2, 3]
        path, asked = "/v1/completions", {"prompt": prompt}  # type: ignore[dict-item]
    body = json.dumps({"model": model, **asked, "max_tokens": 50})
    key = " -H 'Authorization: Bearer YOUR_KEY'" if server.keys.are_asked_for else ""
    curl = f"curl {url}{path}{key} -H 'Content-Type: application/json' -d '{body}'"
    names = ", ".join(each.model_name for each in server.models)
    lines = [f"Serving {names} on {url}"]
    if server.config.server.console:
        lines.append(f"  in a browser:   {url}/")
    if path == "/v1/chat/completions":
        lines.append(f"  in a terminal:  octavo chat {url}")
    return "\n".join([*lines, f"  in a program:   {curl}"])


def _raise_file_limit() -> None:
    """Raise the soft limit of open files: each connection takes one, and the usual limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
