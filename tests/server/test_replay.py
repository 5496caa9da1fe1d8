"""Kills at random, over the real scheduler and cache: whatever was lost is computed again, and comes out the same.

``OCTAVO_KILLS=300`` makes it a long run.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal

import msgspec
import pytest

from octavo.config import ModelSettings, ServeConfig
from octavo.errors import RequestError
from octavo.sampling_params import SamplingParams
from octavo.telemetry.counts import Timing
from octavo.types import Output, Request, TokenLogprobs
from octavo_server.engines.async_engine import AsyncEngine
from octavo_server.engines.live_request import LiveRequest
from tests.oracle import VOCAB_SIZE, digest, empty_digest, expected_output, logprob_at
from tests.server.forked_engine import forked
from tests.tiers import nightly_after

NUM_KILLS = int(os.environ.get("OCTAVO_KILLS", "5"))
NUM_LIVE = 24


class Recorder:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self.done = asyncio.Event()

    def on_output(self, output: Output) -> None:
        self.tokens += output.tokens
        if output.prompt_logprobs:
            assert output.prompt_logprobs_start == len(self.prompt_logprobs) + 1
            self.prompt_logprobs += output.prompt_logprobs
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            self.done.set()

    def on_error(self, error: RequestError) -> None:
        pytest.fail(f"{error}")


def make_request(rng: random.Random, request_id: int) -> Request:
    params = SamplingParams(
        prompt_logprobs=0 if rng.random() < 0.5 else None,
        stop_token_ids=(rng.randrange(VOCAB_SIZE),) if rng.random() < 0.3 else (),
        min_tokens=rng.choice([0, 5]),
    )
    return Request(
        request_id,
        [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 150))],
        params,
        max_tokens=rng.randint(5, 120),
        eos_token_ids=(1,),
        cache_salt=rng.choice(["", "a"]),
    )


def expected_prompt_logprobs(request: Request) -> list[TokenLogprobs]:
    if request.params.prompt_logprobs is None:
        return []
    prefix, rows = empty_digest(request.cache_salt), []
    for position, token in enumerate(request.prompt_tokens):
        if position:
            rows.append(logprob_at(prefix, token))
        prefix = digest(prefix, token)
    return rows


@pytest.mark.slow
@pytest.mark.timeout(120 + 10 * NUM_KILLS)
@pytest.mark.parametrize("depth", nightly_after(1, (2, 1)))
def test_random_kills_change_no_token_and_no_logprob(depth: int) -> None:
    rng = random.Random(depth)

    async def main() -> None:
        engine = AsyncEngine(ServeConfig(model=ModelSettings(seed=depth)), forked("oracle_engine"))
        await engine.start()
        streams = []
        for death in range(NUM_KILLS):
            while engine.num_live < NUM_LIVE:
                request, recorder = make_request(rng, engine.next_id()), Recorder()
                engine.add(request, recorder)
                streams.append((request, recorder))
            await asyncio.sleep(rng.random() * 0.15)
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            while engine.num_restarts == death:
                await asyncio.sleep(0.005)
        async with asyncio.timeout(40):
            for _, recorder in streams:
                await recorder.done.wait()
        while engine.stats.num_used_blocks:
            await asyncio.sleep(0.005)
        await engine.stop(1)
        assert engine.metrics.poison_requests == 0
        for request, recorder in streams:
            assert (recorder.tokens, recorder.finish_reason) == expected_output(request)
            assert recorder.prompt_logprobs == expected_prompt_logprobs(request)

    asyncio.run(main())


def test_prompt_logprobs_are_delivered_once() -> None:
    request = Request(1, [1] * 9, SamplingParams(prompt_logprobs=0), 5)
    live = LiveRequest(request, Recorder(), Timing(0.0))
    rows = [logprob_at(position, 1) for position in range(9)]

    def deliver(start: int, end: int) -> tuple[int, list[TokenLogprobs] | None]:
        output = Output(1, [], prompt_logprobs=rows[start:end], prompt_logprobs_start=start)
        live.drop_delivered_prompt_logprobs(output)
        return output.prompt_logprobs_start, output.prompt_logprobs

    assert deliver(1, 4) == (1, rows[1:4])
    assert deliver(1, 3) == (3, None)
    assert deliver(3, 6) == (4, rows[4:6])
    assert deliver(6, 9) == (6, rows[6:9])


def test_a_replay_is_the_request_with_its_output_so_far() -> None:
    request = Request(1, [1], SamplingParams(), 5, output_tokens=[7])
    live = LiveRequest(request, Recorder(), Timing(0.0))
    assert live.replay() is request
    live.tokens.append(8)
    assert live.replay() == msgspec.structs.replace(request, output_tokens=[7, 8])
    assert request.output_tokens == [7]
