"""Offline throughput: every prompt is there at the start, and the engine decides how to batch them."""

from __future__ import annotations

import time

from octavo.engine.engine import Engine
from octavo.errors import ConfigError
from octavo.types import EngineInfo
from octavo_bench.offline import checked_step, random_requests

Figures = dict[str, float]


def run_all(engine: Engine, info: EngineInfo, prompts: int, input_len: int, output_len: int, first_id: int) -> Figures:
    """Requests, tokens in all and output tokens per second, for ``prompts`` requests of equal lengths.

    Raises ``ConfigError`` when a request fails or gives another number of tokens.
    """
    requests = random_requests(prompts, input_len, output_len, info.vocab_size, first_id, seed=first_id)
    for request in requests:
        engine.add(request)
    tokens, steps = 0, 0
    start = time.perf_counter()
    while engine.has_work:
        tokens += sum(len(output.tokens) for output in checked_step(engine))
        steps += 1
    seconds = time.perf_counter() - start
    if tokens != prompts * output_len:
        raise ConfigError(f"{tokens} tokens were made, {prompts * output_len} were asked for")
    return {
        "seconds": seconds,
        "steps": steps,
        "requests_s": prompts / seconds,
        "total_tok_s": prompts * (input_len + output_len) / seconds,
        "output_tok_s": tokens / seconds,
    }
