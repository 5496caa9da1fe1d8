"""What serving costs besides the model: processor time of the front process per streamed token, and even streams.

A front process with the real HTTP server, admission, journal, detokenizer and streams runs in front of a paced
engine. Streams are read over loopback connections; the front process's own user and system time is divided by
the tokens it delivered. While others ask with long prompts or hostile schemas, the gaps of the streams tell what
holds them up. Loads are measured in turns, so that a machine that is busy with other things is so for all of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from octavo.config import cache_dir
from octavo_bench.dummy_models import model_folder
from octavo_bench.serving.paced_engine import MAX_MODEL_LEN, MAX_NUM_SEQS
from octavo_bench.serving.server_process import Server, ServerProcess, free_port, serve_octavo
from octavo_bench.serving.stream_reader import Streamed, TimedRequest, completion, read_streams, with_key

START_SECONDS = 0.3
"""After which others come."""
INSTANT_TOKENS = 1000
"""Of a stream when steps take no time, at most."""
INSTANT_TOTAL = 100_000
"""Of all streams then: some seconds of work."""
MODEL_NAME = "paced"
PACED_VLLM = "octavo_bench.serving.paced_vllm.PacedExecutor"
STEP_VARIABLE = "OCTAVO_PACED_STEP_MS"
WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "how", "many", "birds", "flew", "over", "old", "houses")
MAX_PROMPT_BYTES = 8 << 10


def cpu_seconds(pid: int) -> float:
    """User and system time that a process has used so far, in all its threads (POSIX ``clock_getcpuclockid``)."""
    clock = ctypes.c_int()
    if ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock)) != 0:
        raise ProcessLookupError(f"there is no process {pid}")
    return time.clock_gettime(clock.value)


def text_of(length: int, source: random.Random) -> str:
    """Words of at least ``length`` bytes in all."""
    words: list[str] = []
    size = 0
    while size < length:
        words.append(source.choice(WORDS))
        size += len(words[-1]) + 1
    return " ".join(words)


def newcomers(rate: float, seconds: float, burst: int, seed: int) -> Iterator[TimedRequest]:
    """Requests of 4 tokens with prompts of 0.5 to 8 KiB, ``rate`` a second, ``burst`` at a time."""
    source = random.Random(seed)
    for number in range(int(rate * seconds / burst)):
        for _ in range(burst):
            size = source.choice((512, 1 << 10, 2 << 10, 4 << 10, MAX_PROMPT_BYTES))
            yield TimedRequest(
                START_SECONDS + number * burst / rate,
                completion(text_of(size, source), 4, model=MODEL_NAME),
                watched=False,
            )


def schemas(rate: float, seconds: float, seed: int) -> Iterator[TimedRequest]:
    """Requests with JSON schemas that take as long as any to be refused or compiled; no two are the same."""
    source = random.Random(seed)
    for number in range(int(rate * seconds)):
        salt = str(source.getrandbits(64))
        schema: dict[str, Any] = {"type": "string", "pattern": "((a{0,100}){0,100}){0,100}" + salt}
        if number % 2:
            schema = {"type": "string", "description": salt}
            for _ in range(8):
                schema = {"allOf": [{"anyOf": [schema, {"type": kind}]} for kind in ("integer", "boolean")]}
        wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        yield TimedRequest(
            START_SECONDS + number / rate,
            completion("Say it", 4, model=MODEL_NAME, response_format=wanted),
            watched=False,
        )


class FrontProcess:
    """A process that serves streams of an engine that is a clock, and what it used so far."""

    def __init__(self, server: ServerProcess, has_journal: bool = False) -> None:
        self.server = server
        self.has_journal = has_journal
        """Whether requests have idempotency keys, with which they are written to a journal."""
        self._keys = itertools.count()

    @classmethod
    def of_octavo(cls, step_ms: float, model: Path, journal: str | None = None) -> FrontProcess:
        """Octavo's, before a paced engine; ``journal`` is a folder for one."""
        port = free_port()
        command = [sys.executable, "-m", "octavo_bench.serving.front_process", str(port), str(step_ms), str(model)]
        command += [journal] if journal else []
        return cls(ServerProcess(command, f"http://127.0.0.1:{port}"), journal is not None)

    @classmethod
    def of_proxy(cls, upstream: FrontProcess) -> FrontProcess:
        """Octavo's proxy, before a server that runs already."""
        return cls(serve_octavo("--backend", "openai", "--upstream", upstream.server.url, "--log-level", "error"))

    @classmethod
    def of_vllm(cls, step_ms: float, model: Path, python: str) -> FrontProcess:
        """vLLM's, before a paced executor of its own; ``python`` is an interpreter that has it."""
        settings = f"""--served-model-name {MODEL_NAME} --load-format dummy --max-model-len {MAX_MODEL_LEN}
            --max-num-seqs {MAX_NUM_SEQS} --max-num-batched-tokens 8192 --no-enable-prefix-caching
            --disable-uvicorn-access-log --no-enable-log-requests --disable-log-stats
            --distributed-executor-backend {PACED_VLLM}"""
        command = (python, "-m", "vllm.entrypoints.cli.main", "serve", str(model), *settings.split())
        root = str(Path(__file__).parents[2])
        env = {**os.environ, "PYTHONPATH": root, STEP_VARIABLE: str(step_ms), "HF_HUB_OFFLINE": "1"}
        return cls(Server(command, "/health", env).start(log=Path(os.devnull)))

    def __enter__(self) -> FrontProcess:
        self.server.wait_ready()
        read_streams(self.server.port, [TimedRequest(0.0, completion("Once upon a time", 20, model=MODEL_NAME))] * 4)
        return self

    def __exit__(self, *error: object) -> None:
        self.server.stop()

    def measure(self, streams: int, tokens: int, others: Iterable[TimedRequest] = ()) -> dict[str, Any]:
        """One row: what ``streams`` at a time cost and saw while ``others`` came."""
        pid = self.server.process.pid
        asks = [TimedRequest(0.0, completion("Once upon a time", tokens, model=MODEL_NAME))] * streams
        if self.has_journal:
            asks = [TimedRequest(0.0, with_key(ask.body, f"{pid}-{next(self._keys)}")) for ask in asks]
        before, start = cpu_seconds(pid), time.perf_counter()
        answers = read_streams(self.server.port, [*asks, *others])
        used, seconds = cpu_seconds(pid) - before, time.perf_counter() - start
        watched = [one for one in answers if one.ask.watched]
        total = streams * tokens
        return {
            "others": len(answers) - streams,
            "tokens": total,
            "events_per_token": round(sum(one.num_events for one in watched) / total, 4),
            "tokens_per_second": round(total / seconds, 1),
            "front_cpu_us_per_token": round(used / total * 1e6, 2),
            "front_cpu_share": round(used / seconds, 3),
            "gap_ms": gaps_ms(watched),
        }


def gaps_ms(answers: Sequence[Streamed]) -> dict[str, float]:
    """Of all gaps between the pieces of all streams, without the start when they come one after the other."""
    gaps = [gap * 1e3 for one in answers for gap in one.gaps[len(one.gaps) // 20 :]]
    percentiles = statistics.quantiles(gaps, n=1000)
    return {
        "p50": round(percentiles[499], 2),
        "p99": round(percentiles[989], 2),
        "p999": round(percentiles[998], 2),
        "max": round(max(gaps), 2),
    }


class Loads(NamedTuple):
    """What comes while the streams go on; each is measured in turn with the streams alone."""

    newcomers: float = 0.0
    """Requests a second with long prompts."""
    burst: int = 1
    """How many of them come together."""
    schemas: float = 0.0
    """Requests a second with hostile schemas."""

    def asks(self, seconds: float, seed: int) -> Iterator[tuple[str, list[TimedRequest]]]:
        """Each load's name and requests, for a stream of so many seconds."""
        yield "none", []
        if self.newcomers:
            yield "newcomers", list(newcomers(self.newcomers, seconds - START_SECONDS, self.burst, seed))
        if self.schemas:
            yield "schemas", list(schemas(self.schemas, seconds - START_SECONDS, seed))


class FrontPlan(NamedTuple):
    """What is measured: every pace with every number of streams, each load in turns, ``rounds`` times."""

    streams: Sequence[int]
    steps_ms: Sequence[float]
    """0 is an engine that takes no time."""
    seconds: float
    """Length of each stream, if nothing holds it up."""
    rounds: int
    loads: Loads


def measure(
    plan: FrontPlan, vllm: str | None = None, proxy: bool = False, journal: bool = False, model: Path | None = None
) -> dict[str, Any]:
    """Medians and all single runs, of one server after the other in turns.

    With ``proxy`` also through a proxy to Octavo's server, with ``journal`` also of one with a journal; ``vllm``: an
    interpreter that has it. ``model`` has the tokenizer, by default a made-up one.
    """
    medians, runs = [], []
    model = model or model_folder("llama-3.2-1b", cache_dir() / "shapes")
    for step_ms in plan.steps_ms:
        with contextlib.ExitStack() as servers:
            fronts = {"octavo": servers.enter_context(FrontProcess.of_octavo(step_ms, model))}
            if proxy:
                fronts["proxy"] = servers.enter_context(FrontProcess.of_proxy(fronts["octavo"]))
            if journal:
                folder = servers.enter_context(tempfile.TemporaryDirectory(prefix="octavo_journal_"))
                fronts["journal"] = servers.enter_context(FrontProcess.of_octavo(step_ms, model, folder))
            if vllm is not None:
                fronts["vllm"] = servers.enter_context(FrontProcess.of_vllm(step_ms, model, vllm))
            for streams in plan.streams:
                instant = min(INSTANT_TOKENS, INSTANT_TOTAL // streams)
                tokens = round(plan.seconds * 1e3 / step_ms) if step_ms else instant
                found: dict[tuple[str, str], list[dict[str, Any]]] = {}
                for number in range(plan.rounds):
                    for load, others in plan.loads.asks(plan.seconds, number):
                        for engine, front in fronts.items():
                            found.setdefault((engine, load), []).append(front.measure(streams, tokens, others))
                for (engine, load), rows in found.items():
                    place = {"engine": engine, "pace": f"{step_ms:g} ms", "streams": streams, "load": load}
                    runs += [{**place, **row} for row in rows]
                    medians.append({**place, **median_of(rows, found[engine, "none"])})
    return {"plan": {**plan._asdict(), "loads": plan.loads._asdict()}, "rows": medians, "runs": runs}


def median_of(rows: Sequence[dict[str, Any]], alone: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The medians of the runs with one load, and how they compare with those without any."""
    p99 = statistics.median(row["gap_ms"]["p99"] for row in rows)
    return {
        "front_cpu_us_per_token": statistics.median(row["front_cpu_us_per_token"] for row in rows),
        "tokens_per_second": statistics.median(row["tokens_per_second"] for row in rows),
        "events_per_token": statistics.median(row["events_per_token"] for row in rows),
        "gap_ms_p50": statistics.median(row["gap_ms"]["p50"] for row in rows),
        "gap_ms_p99": p99,
        "gap_p99_to_alone": round(p99 / statistics.median(row["gap_ms"]["p99"] for row in alone), 3),
    }
