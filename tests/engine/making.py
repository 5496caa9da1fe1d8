"""Short ways to make requests and engines for tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from octavo.cache.kv_cache import KVCache
from octavo.config import SchedulerSettings
from octavo.engine.engine import Engine
from octavo.engine.scheduler import Scheduler
from octavo.sampling_params import SamplingParams
from octavo.types import Output, Request
from tests.oracle import OracleRunner, Trouble


def make_request(request_id: int, prompt: list[int] | int = 4, max_tokens: int = 4, **fields: Any) -> Request:
    """A request; a number as ``prompt`` stands for that many tokens that no other request has first."""
    if isinstance(prompt, int):
        prompt = [1000 + request_id, *range(prompt - 1)]
    params = fields.pop("params", None) or SamplingParams(max_tokens=max_tokens)
    return Request(id=request_id, prompt_tokens=prompt, params=params, max_tokens=max_tokens, **fields)


def make_engine(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    settings: SchedulerSettings | None = None,
    policy: str = "fcfs",
    clock: Callable[[], float] = time.monotonic,
    prefix_caching: bool = True,
    trouble: Trouble | None = None,
    depth: int = 1,
    num_stages: int = 1,
) -> tuple[Engine, OracleRunner]:
    runner = OracleRunner(block_size, trouble)
    scheduler = Scheduler(
        KVCache(num_blocks, block_size, prefix_caching),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        settings=settings or SchedulerSettings(scheduling_policy=policy),
        num_stages=num_stages,
        clock=clock,
    )
    return Engine(scheduler, runner, depth=depth), runner


def run_to_end(engine: Engine, max_steps: int = 2000) -> dict[int, list[Output]]:
    """Serve what the engine has. Returns all outputs by request id."""
    outputs: dict[int, list[Output]] = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.check()
        max_steps -= 1
        assert max_steps, "livelock"
    return outputs


def serve(engine: Engine, requests: list[Request]) -> dict[int, list[Output]]:
    """Serve these requests, and all else that the engine has. Returns their outputs by id, in their order."""
    for request in requests:
        engine.add(request)
    outputs = run_to_end(engine)
    return {request.id: outputs.get(request.id, []) for request in requests}


def tokens_of(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


def planned(runner: OracleRunner) -> dict[int, int]:
    """Request id to the number of its tokens in the last plan."""
    return {item.seq.id: len(item.tokens) for item in runner.plans[-1]}
