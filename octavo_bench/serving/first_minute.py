"""The first minute of a server: output tokens and the time between tokens, second by second since it was started.

A closed loop of clients begins in the moment in which the server is ready, without a warm-up. It shows what a user
sees who starts a server and uses it: compilation and captures of graphs delay the first steps, and batch sizes that
are not prepared are slow.
"""

from __future__ import annotations

import itertools
import os
import random
import shlex
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from octavo.config import cache_dir
from octavo.errors import ConfigError
from octavo_bench.dummy_models import model_folder
from octavo_bench.serving.peer_process import vllm_environment
from octavo_bench.serving.server_process import OCTAVO, Server
from octavo_bench.serving.stream_reader import Streamed, TimedRequest, completion, read_streams
from octavo_fleet.sim.shapes import SHAPES

START_SECONDS = 400.0
EARLY_SECONDS, LATE_SHARE = 10.0, 0.5
"""The first seconds of traffic, and the last part of it, which they are compared with."""


class FirstMinute(NamedTuple):
    """The load: ``clients`` at a time, each with a prompt of ``prompt`` tokens for ``decode`` tokens."""

    clients: int
    prompt: int
    decode: int
    seconds: float
    """For which clients send requests."""
    vocab_size: int = 20_000
    """Prompts are random tokens below this."""


def run(
    model: str,
    load: FirstMinute,
    starts: int,
    octavo_args: str,
    vllm_args: str,
    keep: Callable[[dict[str, Any]], object],
    vllm: str | None = None,
    python_path: str | None = None,
    logs: Path | None = None,
) -> dict[str, Any]:
    """A row for each of ``starts`` starts of Octavo, the first with empty caches, and for one of vLLM, if an
    interpreter that has it is given."""
    folder = model_folder(model, cache_dir() / "shapes") if model in SHAPES else model
    flags = ("--load-format", "dummy") if model in SHAPES else ()
    logs = logs or Path(tempfile.mkdtemp(prefix="octavo_logs_"))
    logs.mkdir(parents=True, exist_ok=True)
    rows = []
    with tempfile.TemporaryDirectory(prefix="octavo_caches_") as empty:
        caches = {"OCTAVO_CACHE_DIR": f"{empty}/octavo", "TRITON_CACHE_DIR": f"{empty}/triton"}
        command = (*OCTAVO, str(folder), *flags, *shlex.split(octavo_args))
        own = Server(command, env={**os.environ, **caches})
        cases = [(f"octavo, start {number}", own) for number in range(1, starts + 1)]
        if vllm is not None:
            env = {**vllm_environment(python_path), "VLLM_CACHE_ROOT": f"{empty}/vllm", **caches}
            cases.append(("vllm", Server.of_vllm(vllm, [str(folder), *flags, *shlex.split(vllm_args)], env)))
        for number, (case, server) in enumerate(cases):
            rows.append({"case": case, **measure(server, model, load, logs / f"{number}.log")})
            keep({"model": model, "rows": rows})
    return {"model": model, **load._asdict(), "rows": rows}


def measure(server: Server, model: str, load: FirstMinute, log: Path) -> dict[str, Any]:
    """Start a server, load it from its first ready second on, stop it. Raises ``ConfigError`` if it fails."""
    started = time.perf_counter()
    with server.start("--served-model-name", model, log=log) as process:
        ready = process.wait_ready(START_SECONDS)
        try:
            answers = _load(process.port, model, load)
        except RuntimeError as error:
            raise ConfigError(f"the load failed: {error}; see {log}") from None
    return {"ready_s": round(ready, 2), **figures_of(answers, started + ready, load.seconds)}


def _load(port: int, model: str, load: FirstMinute) -> list[Streamed]:
    """All answers of a closed loop."""
    rng = random.Random(0)
    until = time.perf_counter() + load.seconds

    def ask() -> TimedRequest:
        prompt = rng.choices(range(load.vocab_size), k=load.prompt)
        return TimedRequest(0.0, completion(prompt, load.decode, model=model))

    def following() -> TimedRequest | None:
        return ask() if time.perf_counter() < until else None

    return read_streams(port, [ask() for _ in range(load.clients)], following)


def figures_of(answers: Sequence[Streamed], ready: float, seconds: float) -> dict[str, Any]:
    """Figures of the answers to requests that were sent from ``ready`` on, for ``seconds``.

    ``by_second`` has a row for each second of traffic: tokens, and the median and the 99th percentile of the time
    between pieces. ``ratio_of_first_10_s``: the throughput of the first seconds, compared with that of the second half.
    """
    count = int(seconds)
    tokens = np.zeros(count)
    gaps: list[list[float]] = [[] for _ in range(count)]
    for answer in answers:
        for at, events in zip(answer.times, answer.counts, strict=True):
            if 0 <= (second := int(at - ready)) < count:
                tokens[second] += events
        for at, gap in zip(answer.times[1:], answer.gaps, strict=True):
            if 0 <= (second := int(at - ready)) < count:
                gaps[second].append(1e3 * gap)
    late = int(count * (1 - LATE_SHARE))
    early = min(count, int(EARLY_SECONDS))
    late_tok_s, early_tok_s = float(tokens[late:].mean()), float(tokens[:early].mean())
    early_gaps, late_gaps = (list(itertools.chain(*part)) or [0.0] for part in (gaps[:early], gaps[late:]))
    return {
        "first_10_s_output_tok_s": round(early_tok_s, 1),
        "later_output_tok_s": round(late_tok_s, 1),
        "ratio_of_first_10_s": round(early_tok_s / late_tok_s, 3) if late_tok_s else 0.0,
        "first_10_s_itl_p99_ms": round(float(np.percentile(early_gaps, 99)), 2),
        "minute_itl_p99_ms": round(float(np.percentile([*itertools.chain(*gaps)] or [0.0], 99)), 2),
        "later_itl_p99_ms": round(float(np.percentile(late_gaps, 99)), 2),
        "later_itl_p50_ms": round(statistics.median(late_gaps), 2),
        "ttft_first_ms": round(1e3 * min(answer.times[0] - answer.sent for answer in answers), 1),
        "by_second": [
            {
                "second": second,
                "tokens": int(tokens[second]),
                "itl_p50": round(statistics.median(part), 2) if part else None,
                "itl_p99": round(float(np.percentile(part, 99)), 2) if part else None,
            }
            for second, part in enumerate(gaps)
        ],
    }
