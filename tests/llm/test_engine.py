"""``Engine``: what each step computes and holds, over the toy backend, and its metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, ContextLengthExceeded, Engine, InvalidParameter, SamplingParams, Unavailable
from tests.llm.tiny import SETTINGS


def make(**settings: Any) -> Engine:
    """An engine without weights, with blocks of 4 tokens."""
    defaults = {"block_size": 4, "num_kv_blocks": 16, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    return Engine(backend="toy", **defaults | settings)


def tokens(max_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, **fields)


def used(engine: Engine) -> int:
    return engine.stats().num_used_blocks


def test_blocks_are_taken_as_a_sequence_grows_and_the_last_may_be_partial() -> None:
    engine = make()
    engine.add([1, 2, 3], tokens(4))
    assert used(engine) == 0
    held = []
    while engine.has_work:
        stats = engine.step().stats
        held.append((stats.num_used_blocks, stats.num_empty_slots))
    assert held == [(1, 1), (1, 0), (2, 3), (0, 0)]
    usage = engine.metrics()
    assert usage.max_kv_cache_usage == 2 / 16
    assert usage.max_kv_cache_fragmentation == 3 / 8


def test_a_request_that_could_never_fit_is_refused_and_changes_nothing() -> None:
    engine = make()
    engine.add([1, 2, 3], tokens(8), request_id="a")
    engine.step()
    before = engine.stats()
    for prompt, length in (([5] * 60, 8), ([5] * 8, 60)):
        with pytest.raises(ContextLengthExceeded):
            engine.add(prompt, tokens(length), request_id="b")
    assert engine.stats() == before
    engine.add([1, 2], tokens(1), request_id="b")
    assert [result.request_id for result in engine.run()] == ["b", "a"]


def test_a_step_decodes_one_request_and_prefills_another() -> None:
    engine = make()
    engine.add([1, 2, 3], tokens(4), request_id="a")
    first = engine.step()
    assert [(part.request_id, part.start, part.num_tokens, part.is_prompt) for part in first.computed] == [
        ("a", 0, 3, True)
    ]
    engine.add([7, 8], tokens(4), request_id="b")
    second = engine.step()
    assert [(part.request_id, part.start, part.num_tokens, part.is_prompt) for part in second.computed] == [
        ("a", 3, 1, False),
        ("b", 0, 2, True),
    ]
    assert [(name, len(piece.token_ids)) for name, piece in second.outputs] == [("a", 1), ("b", 1)]
    assert second.step == 2


def test_a_long_prompt_is_computed_in_chunks_without_output() -> None:
    engine = make(max_num_batched_tokens=8)
    engine.add(list(range(20)), tokens(2))
    steps = [engine.step() for _ in range(3)]
    assert [[part.num_tokens for part in step.computed] for step in steps] == [[8], [8], [4]]
    assert [len(step.outputs) for step in steps] == [0, 0, 1]


def test_all_blocks_are_free_when_all_is_done() -> None:
    engine = make()
    for number in range(6):
        engine.add([number, 1, 2], tokens(5))
    assert len(engine.run()) == 6
    assert (used(engine), engine.has_work) == (0, False)
    assert engine.step().computed == []


def test_a_request_waits_until_there_are_blocks_for_its_prompt() -> None:
    engine = make(num_kv_blocks=4, enable_prefix_caching=False)
    engine.add(list(range(12)), tokens(4), request_id="a")
    engine.add(list(range(20, 28)), tokens(2), request_id="b")
    together = [{part.request_id for part in engine.step().computed} for _ in range(6)]
    assert together == [{"a"}] * 4 + [{"b"}] * 2
    assert engine.request("b").finished


@pytest.mark.parametrize(("max_tokens", "started"), [(3, {"a", "b"}), (4, {"a"})])
def test_prompts_that_do_not_fit_together_are_not_started_together(max_tokens: int, started: set[str]) -> None:
    """Two fill all blocks, and with a fourth token each needs one more."""
    engine = make(num_kv_blocks=4, enable_prefix_caching=False)
    for name in "abc":
        engine.add([ord(name)] * 6, tokens(max_tokens), request_id=name)
    assert {part.request_id for part in engine.step().computed} == started
    assert engine.stats().num_waiting == 3 - len(started)
    assert {result.request_id for result in engine.run()} == {"a", "b", "c"}


def test_every_choice_of_a_request_is_in_its_result_and_pieces_concatenate() -> None:
    engine = make()
    request_id = engine.add([1, 2, 3], tokens(5, n=3))
    pieces = [[0] * 0, [0] * 0, [0] * 0]
    while engine.has_work:
        result = engine.step()
        assert sorted(part.index for part in result.computed) == [0, 1, 2]
        for _, piece in result.outputs:
            pieces[piece.index] += piece.token_ids
    assert [output.token_ids for output in result.finished[0].outputs] == pieces
    assert engine.completed[request_id] == result.finished[0]


def test_ids_are_unique_and_aborted_requests_are_completed() -> None:
    engine = make()
    engine.add([1], tokens(9), request_id="1")
    assert [engine.add([1], tokens(9)), engine.add([1], tokens(9))] == ["0", "2"]
    with pytest.raises(InvalidParameter, match="in use"):
        engine.add([1], tokens(9), request_id="1")
    engine.step()
    engine.abort("1")
    engine.abort("unknown")
    assert engine.completed["1"].outputs[0].finish_reason == "abort"
    assert len(engine.request("0").outputs[0].token_ids) == 1
    with pytest.raises(KeyError):
        engine.request("unknown")
    with pytest.raises(TimeoutError, match="2 requests"):
        engine.run(max_steps=2)
    engine.run()
    with pytest.raises(InvalidParameter):
        engine.add([1], tokens(9), request_id="1")
    assert (engine.metrics().num_completed, engine.metrics().num_aborted) == (2, 1)


@pytest.mark.parametrize(
    "field",
    [{"request_id": 5}, *({"priority": value} for value in ("a", None, 1.5, True, 2**31, 10**400))],
)
def test_a_bad_field_is_refused_by_name(field: dict[str, Any]) -> None:
    with make() as engine:
        with pytest.raises(InvalidParameter) as refused:
            engine.add([10], **field)
        assert refused.value.param in field
        assert not engine.has_work


def test_metrics_add_up() -> None:
    engine = make(max_num_seqs=2)
    assert engine.metrics().requests_per_second == 0
    results = [engine.add([number, 1, 2], tokens(4)) for number in range(4)]
    engine.run()
    metrics = engine.metrics()
    assert (metrics.num_submitted, metrics.num_completed, metrics.num_failed) == (4, 4, 0)
    assert (metrics.num_prompt_tokens, metrics.num_output_tokens, metrics.num_steps) == (12, 16, 8)
    assert (metrics.mean_batch_size, metrics.max_batch_size) == (2, 2)
    assert metrics.requests_per_second == pytest.approx(4 / metrics.elapsed_time)
    latencies = sorted(engine.completed[name].metrics.e2e_latency for name in results)
    assert 0 < metrics.e2e_latency.p50 <= metrics.e2e_latency.p95 <= metrics.e2e_latency.p99 <= latencies[-1]
    assert 0 < metrics.queued_time.p50 < metrics.e2e_latency.p50


def test_a_thousand_requests_give_the_same_tokens_in_any_batch() -> None:
    def run(max_num_seqs: int) -> dict[str, list[int]]:
        engine = make(max_num_seqs=max_num_seqs, max_num_batched_tokens=256, num_kv_blocks=1024)
        for number in range(1000):
            engine.add([number % 250, number // 250, 3], tokens(1 + number % 3), request_id=str(number))
        return {result.request_id: result.outputs[0].token_ids for result in engine.run()}

    assert run(7) == run(32)


def test_it_generates_what_llm_generates(llm: LLM, tiny_checkpoint: Path) -> None:
    params = SamplingParams(seed=3, max_tokens=8, n=2, stop=("\x00",))
    expected = llm.generate(["Hello", "you"], params)
    with Engine(tiny_checkpoint, **SETTINGS) as engine:
        first = engine.add("Hello", params)
        engine.step()
        second = engine.add("you", params)
        engine.run()
        for request_id, result in zip((first, second), expected, strict=True):
            assert engine.completed[request_id].outputs == result.outputs
    with pytest.raises(Unavailable):
        engine.step()
