"""Whether a server's front process grows: many requests of all kinds, and the memory that it holds in between.

The engine gives words without a model, so that nearly all of the time is spent in what is looked at.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from octavo.errors import ConfigError
from octavo_bench.chaos.processes import held
from octavo_bench.server_process import serve_octavo
from octavo_fleet.proxy.connections import ConnectionFailed, Connections, Headers

NUM_SAMPLES = 100
WARM_UP = 0.4
"""Share of the requests after which the server holds all that it is meant to hold: caches are full, and as much is
forgotten as is added."""
RETENTION_SECONDS = 20
"""For which the journal keeps ended requests. All of these are held, so it is far less than the time of the run."""
NUM_TEXTS = 1000
"""The tokenizer library keeps the tokens of 10,000 words or, without a rule for words as here, of so many texts."""
JSON = (b"content-type", b"application/json")
TOOL = {"type": "function", "function": {"name": "lend", "parameters": {"type": "object", "properties": {}}}}


class MemorySample(NamedTuple):
    """What the front process holds once so many requests were answered."""

    requests: int
    memory: int
    descriptors: int
    threads: int


class _Kind(NamedTuple):
    path: str
    body: dict[str, Any]
    status: int = 200
    is_durable: bool = False
    leaves: bool = False
    """Whether the client goes away after the first piece."""


COMPLETION = {"max_tokens": 8, "ignore_eos": True}
KINDS = {
    "completion": _Kind("v1/completions", COMPLETION),
    "stream": _Kind("v1/completions", {**COMPLETION, "stream": True}),
    "durable": _Kind("v1/completions", COMPLETION, is_durable=True),
    "durable_stream": _Kind("v1/completions", {**COMPLETION, "stream": True}, is_durable=True),
    "choices": _Kind("v1/completions", {**COMPLETION, "n": 2, "logprobs": 1, "stop": ["never"]}, is_durable=True),
    "chat": _Kind("v1/chat/completions", {"max_tokens": 8}),
    "chat_stream": _Kind("v1/chat/completions", {"max_tokens": 8, "stream": True}, is_durable=True),
    "tools": _Kind("v1/chat/completions", {"max_tokens": 8, "tools": [TOOL]}),
    "response": _Kind("v1/responses", {"max_output_tokens": 8, "store": False}),
    "response_stream": _Kind("v1/responses", {"max_output_tokens": 8, "store": False, "stream": True}),
    "refused": _Kind("v1/completions", {"temperature": -1}, status=400),
    "gone": _Kind("v1/completions", {"max_tokens": 500, "ignore_eos": True, "stream": True}, leaves=True),
}


class Soak:
    """The requests of one run. Those of a number are the same in each run."""

    def __init__(self, url: str, pid: int, num_requests: int, num_clients: int, say: Callable[[str], None]) -> None:
        self.samples: list[MemorySample] = []
        self.answers: Counter[str] = Counter()
        self.seconds = 0.0
        self._connections = Connections(url + "/")
        self._pid = pid
        self._num_requests = num_requests
        self._num_clients = num_clients
        self._say = say
        self._numbers = iter(range(num_requests))
        self._num_answered = 0

    async def run(self) -> None:
        """Raises ``ConfigError`` if a request is not answered as it must be."""
        begun = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(self._num_clients):
                group.create_task(self._ask())
        self._connections.close()
        self.seconds = time.perf_counter() - begun

    async def _ask(self) -> None:
        names = [*KINDS]
        for number in self._numbers:
            name = names[number % len(names)]
            try:
                await self._ask_one(KINDS[name], number)
            except ConnectionFailed as error:
                raise ConfigError(f"soak: {name}: {error}") from None
            self.answers[name] += 1
            self._num_answered += 1
            if self._num_answered % max(1, self._num_requests // NUM_SAMPLES) == 0:
                self._look()

    async def _ask_one(self, kind: _Kind, number: int) -> None:
        text = f"{number % NUM_TEXTS} An octavo is a book"
        asked: dict[str, Any] = {"prompt": text}
        if "chat" in kind.path:
            asked = {"messages": [{"role": "user", "content": text}]}
        elif "responses" in kind.path:
            asked = {"input": text}
        headers: Headers = [JSON]
        if kind.is_durable:
            headers.append((b"idempotency-key", b"soak-%d" % number))
        body = json.dumps({**asked, **kind.body}).encode()
        async with self._connections.request("POST", kind.path, headers, body) as connection:
            if connection.status != kind.status:
                said = (await connection.read()).decode(errors="replace")
                raise ConfigError(f"soak: {kind.path}: status {connection.status}: {said[:300]}")
            while await connection.read() and not kind.leaves:
                pass

    def _look(self) -> None:
        found = held(self._pid)
        self.samples.append(MemorySample(self._num_answered, found.memory, found.descriptors, found.threads))
        self._say(f"{self._num_answered} requests: {found.memory / 2**20:.1f} MiB, {found.descriptors} files")


def growth(samples: list[MemorySample]) -> float:
    """Bytes for each further request after the warm-up: the median of the slopes between samples (Theil-Sen), which a
    few samples at the height of a wave do not move."""
    settled = [sample for sample in samples if sample.requests >= WARM_UP * samples[-1].requests]
    slopes = [(b.memory - a.memory) / (b.requests - a.requests) for a, b in itertools.combinations(settled, 2)]
    return float(np.median(slopes))


def measure(num_requests: int, num_clients: int, flags: list[str], say: Callable[[str], None]) -> dict[str, Any]:
    """Serve an engine without a model with a journal, ask, and look. Raises ``ConfigError``."""
    with tempfile.TemporaryDirectory(prefix="octavo_soak_") as place:
        own = ["--backend", "instant", "--max-num-seqs", "64", "--log-level", "warning"]
        own += ["--journal", f"{place}/journal", "--state-dir", f"{place}/state"]
        own += ["--journal-retention", str(RETENTION_SECONDS)]
        with serve_octavo(*own, *flags, log=Path(place) / "log") as server:
            server.wait_ready()
            soak = Soak(server.url, server.process.pid, num_requests, num_clients, say)
            try:
                asyncio.run(soak.run())
            except* ConfigError as failures:
                raise failures.exceptions[0] from None
    slope = growth(soak.samples)
    return {
        "requests": num_requests,
        "clients": num_clients,
        "seconds": round(soak.seconds, 1),
        "answers": dict(soak.answers),
        "mib_per_100000": round(slope * 1e5 / 2**20, 3),
        "mib_first": round(soak.samples[0].memory / 2**20, 2),
        "mib_last": round(soak.samples[-1].memory / 2**20, 2),
        "mib_most": round(max(sample.memory for sample in soak.samples) / 2**20, 2),
        "samples": [[*sample] for sample in soak.samples],
    }
