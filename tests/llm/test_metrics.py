"""The times of a request: in their order, and the durations between them."""

from __future__ import annotations

import time

import pytest

from octavo import LLM, RequestMetrics, SamplingParams


def test_the_times_of_a_result_are_in_their_order(llm: LLM) -> None:
    started, wall = time.monotonic(), time.time()
    (result,) = llm.generate("Hello", SamplingParams(max_tokens=6, ignore_eos=True, n=2))
    metrics = result.metrics
    times = [started, metrics.queued_ts, metrics.scheduled_ts, metrics.first_token_ts, metrics.last_token_ts]
    assert times == sorted(times)
    assert times[-1] <= time.monotonic()
    assert metrics.first_token_ts < metrics.last_token_ts
    assert metrics.num_generation_tokens == 12
    assert metrics.arrival_time == pytest.approx(wall, abs=1)
    assert metrics.queued_time + metrics.prefill_time == pytest.approx(metrics.first_token_latency)
    assert metrics.first_token_latency + metrics.decode_time == pytest.approx(metrics.e2e_latency)


def test_a_request_without_tokens_has_no_durations(llm: LLM) -> None:
    (result,) = llm.generate("Hello", SamplingParams(max_tokens=0, prompt_logprobs=1))
    assert result.metrics.scheduled_ts > 0
    assert (result.metrics.first_token_ts, result.metrics.decode_time, result.metrics.e2e_latency) == (0, 0, 0)


def test_durations() -> None:
    metrics = RequestMetrics(1.0, 3.0, 6.0, 10.0, 5)
    assert (metrics.queued_time, metrics.prefill_time, metrics.decode_time) == (2, 3, 4)
    assert (metrics.inference_time, metrics.first_token_latency, metrics.e2e_latency) == (7, 5, 9)
