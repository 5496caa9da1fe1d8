"""The names of the package ``llm_engine``: its page's program and its example run with one import changed."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from octavo_fleet.backends.toy_models import VOCAB_SIZE
from octavo_fleet.llm_engine import EngineConfig, InferenceEngine, KVCacheError, RequestStatus, external_fragmentation


def expected(prompt: list[int], count: int) -> list[int]:
    """By the formula of its page: of the last token and the number of tokens."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append((tokens[-1] * 1103515245 + len(tokens) * 12345 + 17) % 32_000)
    return tokens[len(prompt) :]


def test_the_program_of_its_page() -> None:
    engine = InferenceEngine(
        EngineConfig(max_batch_size=4, max_prefill_tokens_per_step=8, cache_block_size=4, cache_num_blocks=16)
    )
    engine.submit([10, 11, 12], max_new_tokens=5)
    engine.submit([4, 5], max_new_tokens=4)
    results = []
    while engine.has_pending_work:
        results.append(engine.step())
    assert [one.request_id for one in engine.completed_requests] == ["req-2", "req-1"]
    assert engine.request("req-1").generated_tokens == expected([10, 11, 12], 5)
    assert engine.request("req-2").generated_tokens == expected([4, 5], 4)
    assert [event.source for event in results[0].token_events] == ["prefill", "prefill"]
    assert {event.source for result in results[1:] for event in result.token_events} == {"decode"}
    assert results[-1].cache_used_blocks == engine.cache.stats().used_blocks == 0
    snapshot = engine.metrics_snapshot()
    assert (snapshot.submitted_requests, snapshot.completed_requests, snapshot.failed_requests) == (2, 2, 0)
    assert (snapshot.total_generated_tokens, snapshot.total_prefill_tokens, snapshot.total_decode_tokens) == (9, 5, 7)
    assert (snapshot.step_count, snapshot.max_batch_size_seen) == (5, 2)
    assert snapshot.p99_latency_ms >= snapshot.p50_latency_ms >= snapshot.p50_queue_wait_ms >= 0
    assert 0 < snapshot.peak_internal_fragmentation_ratio < 1
    assert len(dataclasses.fields(snapshot)) == 26


def test_a_new_request_is_prefilled_beside_one_that_decodes() -> None:
    engine = InferenceEngine(EngineConfig(2, 4, 4, 8))
    engine.submit([1, 2], max_new_tokens=3, request_id="a")
    assert [event.request_id for event in engine.step().token_events] == ["a"]
    assert engine.request("a").status is RequestStatus.DECODE
    engine.submit([5, 6, 7], max_new_tokens=2, request_id="b")
    second = engine.step()
    assert [work.request_id for work in second.decode] == ["a"]
    assert [work.request_id for work in second.prefill] == ["b"]
    engine.run_until_complete()
    assert not engine.live_requests


def test_pressure_makes_a_prompt_wait() -> None:
    engine = InferenceEngine(EngineConfig(2, 8, 2, 3))
    engine.submit([1, 2, 3, 4, 5], max_new_tokens=1, request_id="large")
    engine.submit([9, 10], max_new_tokens=1, request_id="small")
    assert [work.request_id for work in engine.step().prefill] == ["large"]
    assert engine.request("small").status is RequestStatus.WAITING
    engine.run_until_complete()
    assert [one.request_id for one in engine.completed_requests] == ["large", "small"]


@pytest.mark.parametrize(
    ("error", "given"),
    [
        (ValueError, {"prompt_tokens": [], "max_new_tokens": 1}),
        (ValueError, {"prompt_tokens": [1], "max_new_tokens": 0}),
        (KVCacheError, {"prompt_tokens": [1] * 100, "max_new_tokens": 1}),
    ],
)
def test_mistakes(error: type[Exception], given: dict[str, Any]) -> None:
    with pytest.raises(error):
        InferenceEngine(EngineConfig(2, 8, 2, 3)).submit(**given)
    with pytest.raises(ValueError, match="max_batch_size must be positive"):
        EngineConfig(max_batch_size=0)


def test_its_known_benchmark() -> None:
    """Tokens and steps are the other's to the last. Its prompts may not use what decoding leaves of the budget, so that
    451 steps hold 13,907 of its items and 13,906 of ours; and it takes blocks in another order."""
    engine, rng = InferenceEngine(EngineConfig(32, 512, 16, 4096)), random.Random(7)
    for _ in range(1000):
        num_prompt_tokens, max_new_tokens = rng.randint(4, 96), rng.randint(4, 24)
        prompt = [rng.randrange(1, VOCAB_SIZE) for _ in range(num_prompt_tokens)]
        engine.submit(prompt, max_new_tokens=max_new_tokens)
    engine.run_until_complete()
    found = engine.metrics_snapshot()
    assert (found.completed_requests, found.failed_requests) == (1000, 0)
    assert (found.total_generated_tokens, found.total_prefill_tokens) == (13_904, 50_467)
    assert (found.step_count, found.max_batch_size_seen) == (451, 32)
    assert found.avg_batch_size == pytest.approx(30.836, abs=0.005)
    assert found.peak_memory_utilization == pytest.approx(0.0332, abs=0.0002)
    assert found.avg_internal_fragmentation_ratio == pytest.approx(0.11463, abs=0.0005)
    assert found.peak_internal_fragmentation_ratio <= 0.21
    assert found.peak_external_fragmentation_ratio <= 0.507


def test_external_fragmentation() -> None:
    assert external_fragmentation([]) == 0
    assert external_fragmentation([3, 1, 2]) == 0
    assert external_fragmentation([1, 2, 5, 9]) == 0.5
