"""The suites that GPT-2 is measured by, in this process and over HTTP, with figures that another engine published.

In this process: one answer alone, many together, uneven ones, and with too little memory. Over HTTP: many at a time,
and arrivals at once, evenly and at random; the client is that of the proxy: at 64 at a time, a general library took
10 ms of processor time for each, more than the server.

The figures are those of https://github.com/achi9629/llm-inference-engine for GPT-2 124M in float32 on an A100 of 80 GB,
with its contiguous cache in this process and its paged one over HTTP. The work is as it describes it; where it does not
say how long prompts are, they are short.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from octavo.cli.settings import setting_flags
from octavo.config import EngineConfig, cache_dir, to_flat
from octavo.engine.engine import Engine
from octavo.errors import ConfigError
from octavo.types import EngineInfo, Request
from octavo_bench.dummy_models import model_folder
from octavo_bench.figure_table import meaning
from octavo_bench.offline import build_prepared, complete, random_requests
from octavo_bench.report import Say, spread
from octavo_bench.server_process import serve_octavo
from octavo_fleet.proxy.connections import Connections, Headers

PUBLISHED: dict[str, dict[str, float]] = {
    "latency s": {"64": 0.277, "256": 0.279, "512": 0.286},
    "throughput tok/s": {"200": 173.1, "500": 172.5, "1000": 172.0},
    "batch tok/s": {"1": 155, "8": 1138, "128": 11368, "512": 18346},
    "memory ratio": {"1": 0.2, "16": 0.8, "32": 1.5, "64": 2.6, "256": 8.7},
    "http tok/s": {"short, 64": 1840, "medium, 64": 1749, "long, 64": 1582},
}
"""By suite and case. Of ``latency s`` less is better, of all others more."""

PROMPT_WORDS = {"short": 5, "medium": 40, "long": 150}


class SuiteSizes(NamedTuple):
    """What each suite asks for."""

    output: int
    """Tokens of each answer, where a suite does not say otherwise."""
    prompts: tuple[int, ...]
    """Latency: lengths of a prompt computed alone."""
    outputs: tuple[int, ...]
    """Throughput: lengths of an answer made alone."""
    batches: tuple[int, ...]
    """Batch, memory: answers made together."""
    uneven: int
    """Continuous: answers of lengths from a fifth to nine fifths of ``output``, a few at a time."""
    places: int
    """Continuous: how many at a time."""
    pressed: int
    """Pressure: answers made together, with blocks for a quarter of them."""
    arrivals: int
    """HTTP: requests of each pattern of arrivals."""
    concurrencies: tuple[int, ...]
    """HTTP: requests under way at once."""
    repeats: int
    """HTTP: requests of each place."""
    published: Mapping[str, Mapping[str, float]] = {}
    """Figures for these sizes, as in ``PUBLISHED``."""


FULL = SuiteSizes(
    output=50,
    prompts=(64, 256, 512),
    outputs=(200, 500, 1000),
    batches=(1, 8, 16, 32, 64, 128, 256, 512),
    uneven=24,
    places=4,
    pressed=64,
    arrivals=100,
    concurrencies=(1, 4, 8, 16, 32, 64),
    repeats=4,
    published=PUBLISHED,
)
SMALL = SuiteSizes(
    output=8,
    prompts=(16, 64),
    outputs=(20, 60),
    batches=(1, 4, 16),
    uneven=8,
    places=4,
    pressed=8,
    arrivals=6,
    concurrencies=(1, 4),
    repeats=2,
)
"""For trying out, and for machines without a GPU."""


SHORT_PROMPT = 10
Row = dict[str, Any]


def row(sizes: SuiteSizes, suite: str, case: object, values: Sequence[float], **more: Any) -> Row:
    """A figure, beside the published one if there is one, and how many times better it is."""
    figure = spread(values)
    found: Row = {"suite": suite, "case": str(case), "value": figure, **more}
    published = sizes.published.get(suite, {}).get(str(case))
    if published is not None:
        times = figure["median"] / published
        times = times if meaning(suite).better == "more" else 1 / times
        found |= {"published": published, "times_better": round(times, 3)}
    return found


class Bench:
    """One engine, and requests for it with ids of their own."""

    def __init__(self, config: EngineConfig, **changes: Any) -> None:
        self.engine: Engine
        self.info: EngineInfo
        settings = {**to_flat(config), "enable_prefix_caching": False, **changes}
        self.engine, self.info = build_prepared(EngineConfig.from_flat(settings))
        self.next_id = 1

    def requests(self, count: int, prompt: int, output: int) -> list[Request]:
        first, self.next_id = self.next_id, self.next_id + count
        return random_requests(count, prompt, output, self.info.vocab_size, first, seed=first)

    def most_blocks(self, requests: Sequence[Request]) -> int:
        """The most blocks in use while they are served."""
        used: list[int] = []
        complete(self.engine, requests, lambda: used.append(self.engine.stats().num_used_blocks))
        return max(used)

    def timed(self, count: int, prompt: int, output: int, rounds: int) -> list[float]:
        """Seconds of each round, after one that does not count."""
        complete(self.engine, self.requests(count, prompt, min(output, 8)))
        return [complete(self.engine, self.requests(count, prompt, output)) for _ in range(rounds)]


def alone_and_together(config: EngineConfig, sizes: SuiteSizes, rounds: int) -> Iterator[Row]:
    """Latency of one answer, tokens per second of one and of many, and the memory of keys and values."""
    bench = Bench(config, max_num_seqs=max(sizes.batches))
    for prompt in sizes.prompts:
        yield row(sizes, "latency s", prompt, bench.timed(1, prompt, sizes.output, rounds))
    for output in sizes.outputs:
        seconds = bench.timed(1, SHORT_PROMPT, output, rounds)
        yield row(sizes, "throughput tok/s", output, [output / each for each in seconds])
    for count in sizes.batches:
        seconds = bench.timed(count, SHORT_PROMPT, sizes.output, rounds)
        yield row(sizes, "batch tok/s", count, [count * sizes.output / each for each in seconds])
    info = bench.info
    per_block = info.memory["kv_cache"] / info.num_kv_blocks
    for count in sizes.batches:
        most = bench.most_blocks(bench.requests(count, SHORT_PROMPT, sizes.output))
        paged = info.memory["weights"] + most * per_block
        whole = info.memory["weights"] + count * info.max_model_len / info.block_size * per_block
        yield row(
            sizes,
            "memory ratio",
            count,
            [whole / paged],
            paged_mib=round(paged / 2**20),
            whole_mib=round(whole / 2**20),
        )


def uneven(config: EngineConfig, sizes: SuiteSizes, rounds: int) -> Iterator[Row]:
    """Answers of uneven lengths, a few at a time: batches that are refilled step by step beside such as are not."""
    for policy, name in (("static", "static"), ("fcfs", "continuous")):
        yield row(sizes, "continuous tok/s", name, _uneven(config, sizes, rounds, policy))


def _uneven(config: EngineConfig, sizes: SuiteSizes, rounds: int, policy: str) -> list[float]:
    """Tokens per second of each round. The engine goes with the call, and its memory, which the next one needs."""
    bench = Bench(config, max_num_seqs=sizes.places, scheduling_policy=policy)
    bench.timed(sizes.places, SHORT_PROMPT, 8, 1)
    values = []
    for _ in range(rounds):
        requests = bench.requests(sizes.uneven, SHORT_PROMPT, sizes.output)
        lengths = [sizes.output * (1 + i * 8 // (sizes.uneven - 1)) // 5 for i in range(sizes.uneven)]
        mixed = [lengths[i * 7 % sizes.uneven] for i in range(sizes.uneven)]
        changed = [
            Request(request.id, request.prompt_tokens, request.params, length)
            for request, length in zip(requests, mixed, strict=True)
        ]
        values.append(sum(mixed) / complete(bench.engine, changed))
    return values


def pressed(config: EngineConfig, sizes: SuiteSizes, rounds: int) -> Iterator[Row]:
    """More answers together than there are blocks for: nobody fails, and who has to wait is counted."""
    block_size = 16
    each = -(-(SHORT_PROMPT + sizes.output) // block_size)
    for share in (1, 4):
        length = max(SHORT_PROMPT + sizes.output, sizes.pressed // share * each * block_size)
        blocks = max(sizes.pressed // share, 1) * each
        limits = {"max_model_len": min(length, 512), "num_kv_blocks": blocks, "block_size": block_size}
        values, preemptions = _pressed(config, sizes, rounds, limits)
        yield row(sizes, "pressure tok/s", f"{blocks} blocks", values, preemptions=preemptions)


def _pressed(config: EngineConfig, sizes: SuiteSizes, rounds: int, limits: dict[str, int]) -> tuple[list[float], int]:
    """Tokens per second of each round, and preemptions; as for ``_uneven``, the engine goes with the call."""
    bench = Bench(config, max_num_seqs=sizes.pressed, **limits)
    seconds = bench.timed(sizes.pressed, SHORT_PROMPT, sizes.output, rounds)
    return [sizes.pressed * sizes.output / one for one in seconds], bench.engine.stats().num_preemptions


STEADY_SECONDS = 0.1
POISSON_RATE = 10.0
HEADERS: Headers = [(b"content-type", b"application/json")]


def served(config: EngineConfig, sizes: SuiteSizes, rounds: int) -> Iterator[Row]:
    """Start a server, and load it. Raises ``ConfigError``."""
    most = ("--max-num-seqs", str(max(*sizes.concurrencies, sizes.arrivals)))
    with contextlib.ExitStack() as running:
        log = Path(running.enter_context(tempfile.TemporaryDirectory())) / "server.log"
        flags = (config.model.model, *setting_flags(config), *most)
        server = running.enter_context(serve_octavo(*flags, log=log))
        server.wait_ready()
        port = server.port
        asyncio.run(_at_once(port, _text("short"), sizes.output, max(sizes.concurrencies), 1))
        for length in PROMPT_WORDS:
            for places in sizes.concurrencies:
                values = [
                    asyncio.run(_at_once(port, _text(length), sizes.output, places, sizes.repeats))
                    for _ in range(rounds)
                ]
                yield row(sizes, "http tok/s", f"{length}, {places}", values)
        for pattern in ("burst", "steady", "poisson"):
            seconds = asyncio.run(_arrivals(port, pattern, sizes))
            tail = statistics.quantiles(seconds, n=100, method="inclusive")[98]
            yield row(
                sizes, "http latency ms", pattern, [1e3 * statistics.median(seconds)], p99_ms=round(1e3 * tail, 1)
            )


def _text(length: str) -> str:
    rng = random.Random(length)
    return " ".join("".join(rng.choices("bdgklmnprst", k=2)) + "a" for _ in range(PROMPT_WORDS[length]))


async def _ask(client: Connections, text: str, output: int) -> int:
    """Tokens that were made. Raises ``ConfigError`` for an answer that is none."""
    body = json.dumps({"prompt": text, "max_tokens": output}).encode()
    async with client.request("POST", "generate", HEADERS, body) as connection:
        answer = await connection.read_all()
        if connection.status != 200:
            raise ConfigError(f"the server answered {connection.status}: {answer[:200].decode(errors='replace')}")
    return int(json.loads(answer)["token_count"])


@contextlib.contextmanager
def _connected(port: int) -> Iterator[Connections]:
    client = Connections(f"http://127.0.0.1:{port}/")
    try:
        yield client
    finally:
        client.close()


async def _at_once(port: int, text: str, output: int, places: int, repeats: int) -> float:
    """Tokens per second while ``places`` clients ask ``repeats`` times each, one after the other."""

    async def keep_asking() -> int:
        with _connected(port) as client:
            return sum([await _ask(client, f"{text} {i}", output) for i in range(repeats)])

    start = time.perf_counter()
    counts = await asyncio.gather(*(keep_asking() for _ in range(places)))
    return sum(counts) / (time.perf_counter() - start)


async def _arrivals(port: int, pattern: str, sizes: SuiteSizes) -> list[float]:
    """Seconds of each request, whenever it arrives."""
    rng = random.Random(42)
    gaps = {"burst": lambda: 0.0, "steady": lambda: STEADY_SECONDS, "poisson": lambda: rng.expovariate(POISSON_RATE)}

    async def timed(delay: float) -> float:
        await asyncio.sleep(delay)
        start = time.perf_counter()
        with _connected(port) as client:
            await _ask(client, _text("short"), sizes.output)
        return time.perf_counter() - start

    delays, at = [], 0.0
    for _ in range(sizes.arrivals):
        delays.append(at)
        at += gaps[pattern]()
    return list(await asyncio.gather(*(timed(delay) for delay in delays)))


SUITES = {"alone": alone_and_together, "uneven": uneven, "pressed": pressed, "http": served}


def measure(
    config: EngineConfig,
    shape: str,
    suites: Sequence[str],
    small: bool,
    rounds: int,
    say: Say,
    keep: Callable[[dict[str, Any]], object],
) -> dict[str, Any]:
    """The rows of some suites; what there is so far is kept after each. Raises ``ConfigError``."""
    if unknown := [name for name in suites if name not in SUITES]:
        raise ConfigError(f"suites: {unknown[0]!r} is not one of {', '.join(SUITES)}")
    folder = str(model_folder(shape, cache_dir() / "shapes"))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, model=folder, load_format="dummy"))
    result: dict[str, Any] = {"model": shape, "size": "small" if small else "full", "rows": []}
    sizes = SMALL if small else FULL if shape == "gpt2" else FULL._replace(published={})
    for name in suites:
        for found in SUITES[name](config, sizes, rounds):
            result["rows"].append(found)
            keep(result)
            say(f"{found['suite']} {found['case']}: {found['value']['median']}")
    return result
