"""The runner that stays one step ahead: what it gives is what the plain runner gives, step for step.

It runs here on the CPU with the reference operations, without graphs but with all of its padding.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from octavo.cache.kv_cache import KVCache
from octavo.engine.engine import Engine
from octavo.engine.runner import graph_dispatcher
from octavo.engine.runner.graph_dispatcher import LONG_CONTEXT_LOST, MOST_OF_STEPS, GraphDispatcher
from octavo.engine.runner.step_encoder import NOT_NUMBERS
from octavo.engine.runner.step_runner import StepRunner
from octavo.engine.scheduler import Scheduler
from octavo.engine.speculative.speculation import Speculation
from octavo.models.layer_cache import kv_groups
from octavo.ops import dispatch
from octavo.ops.attention.attention import LayerCache
from octavo.ops.dispatch import REFERENCE
from octavo.runtime.executors.device_program import with_distinct_layers
from octavo.runtime.kv_storage import KVStorage
from octavo.sampling_params import SamplingParams
from octavo.steps.graph_shapes import (
    LONG_CONTEXT,
    LONG_SEQS,
    MANY_SEQS,
    PLAIN,
    GraphLimits,
    PlanSizes,
    StepKind,
    StepShape,
    early_shapes,
    first_extra_shapes,
    first_shapes,
    graph_shapes,
    kinds,
    longest_shapes,
    next_shapes,
    padded_shape,
    verification_shape,
)
from octavo.steps.limits import StepLimits
from octavo.system.background_threads import ThreadGroup, start_thread
from octavo.types import Output, Plan, Request, Scheduled, Sequence, Status
from octavo_bench.offline import wait_until_prepared
from octavo_fleet.sim.clock import Clock
from tests.runtime.making import CPU, stream_runner
from tests.runtime.test_model_runner import MIXED, VOCAB, Loaded, requests, run, tokens_of
from tests.speculating import speculating
from tests.tiers import one_in


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return Loaded(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def reference_operations() -> Iterator[None]:
    with dispatch.only(REFERENCE):
        yield


def stream_engine(
    loaded: Loaded,
    num_blocks: int = 100,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    depth: int = 2,
    speculation: Speculation | None = None,
) -> Engine:
    storage = KVStorage(
        loaded.config.cache, kv_groups(loaded.config.cache), [num_blocks], block_size, torch.float32, CPU
    )
    storage.pools[0][0].fill_(torch.nan)
    limits = StepLimits(max_num_seqs, max_num_batched_tokens, 120 // block_size, max_drafts=4)
    runner = stream_runner(loaded.model, storage, VOCAB, limits)
    scheduler = Scheduler(
        KVCache(num_blocks, block_size),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        speculation=speculation,
    )
    return Engine(scheduler, runner, depth=depth, threads=runner.threads)


ENGINES: list[dict[str, Any]] = [
    {},
    {"depth": 1},
    {"depth": 3},
    {"block_size": 1, "num_blocks": 300},
    {"block_size": 16, "max_num_batched_tokens": 9},
    {"num_blocks": 22},
    {"max_num_seqs": 3},
]


@one_in(3)
@pytest.mark.parametrize("settings", ENGINES, ids=str)
def test_greedy_tokens_are_those_of_transformers(loaded: Loaded, settings: dict[str, Any]) -> None:
    some = requests(10, temperature=0)
    found = tokens_of(run(stream_engine(loaded, **settings), some))
    assert found == {r.id: loaded.greedy(r.prompt_tokens, r.max_tokens) for r in some}


def requests_of_the_host_and_others() -> list[Request]:
    kinds = [*MIXED, {"temperature": 0, "prompt_logprobs": 1, "frequency_penalty": 0.5}]
    return [
        Request(r.id, r.prompt_tokens, SamplingParams(**kinds[r.id % 6]), r.max_tokens, r.seed) for r in requests(15)
    ]


@pytest.fixture(scope="module")
def tokens_alone(loaded: Loaded) -> list[list[int]]:
    """Of each of ``requests_of_the_host_and_others``, by the plain runner."""
    with dispatch.only(REFERENCE):
        return [tokens_of(run(loaded.engine(), [r]))[r.id] for r in requests_of_the_host_and_others()]


@one_in(3)
@pytest.mark.parametrize("settings", ENGINES, ids=str)
def test_rows_of_the_device_and_of_the_host_together(
    loaded: Loaded, tokens_alone: list[list[int]], settings: dict[str, Any]
) -> None:
    """Some requests ask for what only the host does: the steps behind wait for it, and nobody's tokens change."""
    some = requests_of_the_host_and_others()
    found = tokens_of(run(stream_engine(loaded, **settings), some))
    assert [found[request.id] for request in some] == tokens_alone


def test_requests_that_come_and_go_at_random(loaded: Loaded) -> None:
    rng = random.Random(3)
    some = [
        Request(i, rng.choices(range(VOCAB), k=rng.randint(1, 50)), SamplingParams(**rng.choice(MIXED)), 10, seed=i)
        for i in range(40)
    ]
    expected = {request.id: tokens_of(run(loaded.engine(), [request]))[request.id] for request in some}
    engine = stream_engine(loaded, num_blocks=40)
    found: dict[int, list[int]] = {request.id: [] for request in some}
    aborted = set()
    waiting = list(some)
    while waiting or engine.has_work:
        for _ in range(min(rng.choice([0, 0, 1, 2]), len(waiting))):
            engine.add(waiting.pop())
        if rng.random() < 0.1:
            victim = rng.choice(some).id
            engine.abort(victim)
            aborted.add(victim)
        for output in engine.step():
            found[output.request_id] += output.tokens
        engine.check()
    for request in some:
        if request.id in aborted:
            assert found[request.id] == expected[request.id][: len(found[request.id])]
        else:
            assert found[request.id] == expected[request.id]


def test_a_new_sequence_behind_one_of_the_host_goes_on_from_its_own_token(loaded: Loaded) -> None:
    some = [
        Request(0, [1, 2, 3], SamplingParams(temperature=0, presence_penalty=1.0), 1),
        Request(1, [4, 5, 6, 7], SamplingParams(temperature=0), 8),
    ]
    expected = {request.id: tokens_of(run(loaded.engine(), [request]))[request.id] for request in some}
    assert tokens_of(run(stream_engine(loaded), some)) == expected


def test_results_stay_with_their_items_when_some_are_stale_at_the_start_and_others_later(loaded: Loaded) -> None:
    """Three steps in flight; the second waits for the host. One of its sequences ends before it starts, one after."""
    engine = stream_engine(loaded, depth=3)
    some = [Request(i, [10 * i + 1, 2, 3], SamplingParams(temperature=0), 6) for i in range(4)]
    host = Request(9, [7, 8], SamplingParams(temperature=0, presence_penalty=1.0), 1)
    expected = {request.id: tokens_of(run(loaded.engine(), [request]))[request.id] for request in some}
    found: dict[int, list[int]] = {request.id: [] for request in [*some, host]}
    for request in [host, *some]:
        engine.add(request)
    scheduler, runner = engine.scheduler, engine.runner
    plans = [scheduler.schedule(), scheduler.schedule()]
    pending = [runner.submit(plan) for plan in plans]
    engine.abort(0)  # not yet started
    outputs = scheduler.commit(plans[0], pending[0].sample({}))
    engine.abort(1)  # started
    outputs += scheduler.commit(plans[1], pending[1].sample({}))
    while engine.has_work:
        outputs += engine.step()
    for output in outputs:
        found[output.request_id] += output.tokens
    assert [found[i] for i in (2, 3)] == [expected[i] for i in (2, 3)]
    for i in (0, 1):
        assert found[i] == expected[i][: len(found[i])]


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 0.8, "frequency_penalty": 1.5, "logprobs": 2}])
def test_drafts_are_verified(loaded: Loaded, params: dict[str, Any]) -> None:
    some = requests(6, **params)
    expected = tokens_of(run(loaded.engine(), some))

    def guesses(seq: Sequence) -> list[int]:
        """What will come if nothing is rejected, with mistakes."""
        coming = expected[seq.id][seq.num_output_tokens :][:3]
        return [token if rng.random() < 0.7 else (token + 1) % VOCAB for token in coming]

    for depth in (1, 2, 3):
        rng = random.Random(depth)
        engine = without_host(stream_engine(loaded, speculation=speculating(guesses), depth=depth))
        assert tokens_of(run(engine, some)) == expected
        stats = engine.stats()
        assert 0 < stats.num_accepted_drafts < stats.num_drafts


@one_in(2)
@pytest.mark.parametrize(
    "row", ["gpt2/small", "mixtral/window", "gpt_oss/sinks", "deepseek_v3/groups", "gemma2/capped"]
)
def test_other_families(row: str, tmp_path: Path) -> None:
    """Learned positions, experts, sinks, latent keys, capped scores: padding touches none of it."""
    loaded = Loaded(tmp_path, row)
    some = requests(5, temperature=0)
    engine = without_host(stream_engine(loaded, num_blocks=60))
    assert tokens_of(run(engine, some)) == {r.id: loaded.greedy(r.prompt_tokens, r.max_tokens) for r in some}


BIAS = {token: float(token % 7 - 3) for token in range(VOCAB + 5)}
EXTRAS: list[dict[str, Any]] = [
    {"temperature": 0.9, "repetition_penalty": 1.7},
    {"temperature": 0, "frequency_penalty": 0.8},
    {"temperature": 0, "presence_penalty": -1.5},
    {"temperature": 0.7, "logit_bias": BIAS},
    {"temperature": 2, "min_tokens": 6, "stop_token_ids": tuple(range(60))},
    {"temperature": 1, "top_k": 9, "logprobs": 0},
    {"temperature": 0, "logprobs": 20, "presence_penalty": 0.5, "logit_bias": {5: 100, 6: -100}, "min_tokens": 9},
]


def with_extras(count: int, **more: Any) -> list[Request]:
    """Requests that want all that steps of the device have beside tokens, and plain ones between them."""
    kinds = [*EXTRAS, {"temperature": 0}]
    return [
        Request(r.id, r.prompt_tokens, SamplingParams(**kinds[r.id % 8], **more), r.max_tokens, r.seed, (5, 200))
        for r in requests(count)
    ]


def assert_same(found: dict[int, list[Output]], expected: dict[int, list[Output]]) -> None:
    assert tokens_of(found) == tokens_of(expected)
    for key, outputs in expected.items():
        reports = [[report for output in some for report in output.logprobs or []] for some in (found[key], outputs)]
        for own, wanted in zip(*reports, strict=True):
            assert (own.token_id, own.rank, own.top_ids) == (wanted.token_id, wanted.rank, wanted.top_ids)
            assert own.logprob == pytest.approx(wanted.logprob, abs=1e-5)
            assert own.top_logprobs == pytest.approx(wanted.top_logprobs, abs=1e-5)


def without_host(engine: Engine) -> Engine:
    """An engine in which the host chooses no token."""

    def fail(*args: Any) -> None:
        raise AssertionError("a step asks for more than its arrays")

    runner: Any = engine.runner
    runner.executor._run = fail
    return engine


@pytest.fixture(scope="module")
def plain_extras(loaded: Loaded) -> dict[int, list[Output]]:
    with dispatch.only(REFERENCE):
        return run(loaded.engine(), with_extras(16))


@one_in(3)
@pytest.mark.parametrize("settings", ENGINES, ids=str)
def test_extras_are_those_of_the_plain_runner(
    loaded: Loaded, plain_extras: dict[int, list[Output]], settings: dict[str, Any]
) -> None:
    engine = without_host(stream_engine(loaded, **settings))
    assert_same(run(engine, with_extras(16)), plain_extras)
    if settings.get("num_blocks") == 22:
        assert engine.stats().num_preemptions > 0


@one_in(3)
@pytest.mark.parametrize("params", EXTRAS, ids=str)
def test_each_extra_changes_what_it_is_about(loaded: Loaded, params: dict[str, Any]) -> None:
    """Else the comparisons above would show nothing."""
    plain = {key: value for key, value in params.items() if key in ("temperature", "top_k", "stop_token_ids")}
    for chosen, differs in ((params, False), (plain, set(params) - set(plain) != {"logprobs"})):
        some, others = requests(4, **params), requests(4, **chosen)
        found, wanted = run(without_host(stream_engine(loaded)), some), run(loaded.engine(), others)
        assert (tokens_of(found) != tokens_of(wanted)) == differs


def test_tokens_whose_keys_were_cached_count_too(loaded: Loaded) -> None:
    """The device never computes the cached positions, so it has to be told their tokens."""
    params = SamplingParams(temperature=0, repetition_penalty=2)
    rng = random.Random(4)
    prompt = rng.choices(range(VOCAB), k=40)
    some = [Request(i, [*prompt, i], params, 12) for i in range(4)]
    engine = without_host(stream_engine(loaded))
    found: dict[int, list[Output]] = {}
    for request in some:
        outputs = run(engine, [request])
        assert outputs[request.id][0].num_cached_tokens == (40 if request.id else 0)
        found |= outputs
    assert_same(found, {request.id: run(loaded.engine(), [request])[request.id] for request in some})


def test_a_replayed_request_goes_on_with_the_same_tokens(loaded: Loaded) -> None:
    params = SamplingParams(temperature=1, frequency_penalty=0.5, min_tokens=10, stop_token_ids=tuple(range(50)))
    request = Request(0, [5, 6, 7], params, 20, seed=3)
    whole = tokens_of(run(loaded.engine(), [request]))[0]
    rest = Request(0, [5, 6, 7], params, 20, seed=3, output_tokens=whole[:6])
    assert whole[:6] + tokens_of(run(without_host(stream_engine(loaded)), [rest]))[0] == whole


def test_tokens_replaced_by_the_host_are_sent(loaded: Loaded) -> None:
    """A step is taken back, and its position gets another token in a step that the host computes."""
    runner: Any = stream_engine(loaded).runner
    penalized, other = SamplingParams(temperature=0, repetition_penalty=2), SamplingParams(prompt_logprobs=0)
    seq = Sequence(Request(0, [1, 2, 3], penalized, 9))
    neighbour = Sequence(Request(1, [4, 5], other, 9))
    seq.groups[0].block_table, neighbour.groups[0].block_table = [0, 1, 2], [3, 4]
    seq.status = neighbour.status = Status.RUNNING

    def step(*items: Scheduled) -> int:
        return int(runner.submit(list(items)).sample({})[0].tokens[0])

    first = step(Scheduled(seq, 0, (1, 2, 3), (), True, 0))
    step(Scheduled(seq, 3, (first,), (), True, 0))
    seq.tokens.append(first + 1)
    beside = Scheduled(neighbour, 0, (4, 5), (), True, 0)
    seq.tokens.append(step(Scheduled(seq, 3, (first + 1,), (), True, 0), beside))
    step(Scheduled(seq, 4, (seq.tokens[4],), (), True, 0))
    assert runner.executor._program.state.histories_CL[seq.batch_index, :5].tolist() == seq.tokens


def test_a_step_that_finds_no_memory_is_taken_back(loaded: Loaded) -> None:
    engine = stream_engine(loaded)
    runner: Any = engine.runner
    program = runner.executor._program
    compute, calls = program.compute, []

    def fail_once(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 5:
            raise torch.OutOfMemoryError("no memory")
        return compute(*args)

    program.compute = fail_once
    some = with_extras(8)
    assert_same(run(engine, some), run(loaded.engine(), some))


def test_more_bans_than_the_device_keeps_are_the_hosts(loaded: Loaded) -> None:
    params = SamplingParams(temperature=1, min_tokens=5)
    some = [Request(i, [i, 3], params, 9, seed=i, eos_token_ids=tuple(range(30, 400))) for i in range(3)]
    assert_same(run(stream_engine(loaded), some), run(loaded.engine(), some))


def test_few_sequences_and_many_tokens(loaded: Loaded) -> None:
    """Shapes of few rows have no more sequences than those of many."""
    some = with_extras(5)
    found = run(stream_engine(loaded, max_num_seqs=3, max_num_batched_tokens=600), some)
    assert_same(found, run(loaded.engine(), some))


def test_logits_that_are_no_numbers_end_their_row_alone(loaded: Loaded) -> None:
    engine = stream_engine(loaded)
    some = [Request(i, [10 + i] * 9, SamplingParams(temperature=0), 1) for i in range(4)]
    model: Any = loaded.model
    table = model.embedding.weight.dense_NK
    kept = table[11].clone()
    table[11] = torch.nan
    try:
        outputs = run(engine, some)
    finally:
        table[11] = kept
    assert [output.error for output in outputs[1]] == [NOT_NUMBERS]
    assert all(output.error is None for i in (0, 2, 3) for output in outputs[i])


@pytest.mark.parametrize(("with_adapters", "kind"), [(a, kind) for a in (False, True) for kind in kinds(a)])
@pytest.mark.parametrize("num_seqs", [1, 2, 3, 9, 33, 250, 256])
def test_padding(num_seqs: int, with_adapters: bool, kind: StepKind) -> None:
    shape, has_graph = padded_shape(num_seqs, num_seqs, 1, 256, kind)
    all_shapes = graph_shapes(GraphLimits(256, 2048, with_adapters))
    first = (first_extra_shapes if kind.has_extras else first_shapes)(GraphLimits(256, 2048, with_adapters))
    assert has_graph
    assert num_seqs <= shape.num_seqs == shape.num_rows <= 256
    assert shape in all_shapes
    assert any(known.holds(shape) for known in first)
    for num_rows in (num_seqs + 1, 300, 513, 2048, 2049):
        if num_rows > num_seqs:
            shape, has_graph = padded_shape(num_rows, num_seqs, 2, 256, kind)
            assert shape == StepShape(*shape[:3], *kind)
            assert has_graph == (num_rows <= 2048)
            assert not has_graph or shape in all_shapes
            assert not has_graph or any(known.holds(shape) for known in first)
            assert shape.num_rows >= num_rows
            assert num_seqs <= shape.num_seqs <= 256


@pytest.mark.parametrize("max_num_seqs", [4, 64, 256])
@pytest.mark.parametrize("num_rows", [30, 513, 2000])
def test_steps_of_prompts_and_drafts_have_a_shape_from_the_start(max_num_seqs: int, num_rows: int) -> None:
    first = first_shapes(GraphLimits(max_num_seqs, 2048, max_drafts=3, has_drafter=True))
    kind = StepKind(has_drafter=True, num_proposed=3)
    for num_seqs in (1, 4, 20):
        for num_drafts in (0, 1, 3 * num_seqs):
            if num_seqs <= max_num_seqs and num_seqs + num_drafts < num_rows:
                shape, has_graph = padded_shape(num_rows, num_seqs, 25, max_num_seqs, kind, num_drafts)
                assert has_graph
                assert any(known.holds(shape) for known in first)


def test_adapters_have_a_shape_from_the_start_without_drafts_too() -> None:
    first = first_shapes(GraphLimits(64, 2048, has_adapters=True, max_drafts=3))
    shape, _ = padded_shape(300, 20, 25, 64, StepKind(has_adapters=True))
    assert any(known.holds(shape) for known in first)


def test_kernels_of_the_longest_step_are_compiled_if_it_has_no_graph() -> None:
    assert longest_shapes(GraphLimits(64, 2048, has_adapters=True, has_drafter=True)) == []
    assert longest_shapes(GraphLimits(64, 8192)) == [StepShape(8192, 8, 8192)]
    kinds_of = {shape[3:6] for shape in longest_shapes(GraphLimits(64, 8192, has_adapters=True, has_drafter=True))}
    assert kinds_of == {(False, adapters, drafter) for adapters in (False, True) for drafter in (False, True)}


def test_steps_look_for_adapters_only_where_there_are_any() -> None:
    assert not any(shape.has_adapters for shape in graph_shapes(GraphLimits(8, 64)))
    assert {shape[3:5] for shape in first_shapes(GraphLimits(8, 64, has_adapters=True))} == {
        (False, False),
        (False, True),
    }
    assert {shape[3:5] for shape in first_extra_shapes(GraphLimits(8, 64, has_adapters=True))} == {(True, True)}


def test_steps_with_extras_wait_for_their_kernels(loaded: Loaded) -> None:
    engine = stream_engine(loaded)
    runner: Any = engine.runner
    graphs = runner.encoder.choose_shape.__self__
    graphs._has_extra_kernels.clear()
    plain = [Request(i, [i, 3], SamplingParams(temperature=0), 9) for i in range(3)]
    assert_same(run(engine, plain), run(loaded.engine(), plain))  # the others do not
    some = with_extras(4)
    expected = run(loaded.engine(), some)
    timer, started = threading.Timer(0.2, graphs._has_extra_kernels.set), time.monotonic()
    timer.start()
    assert_same(run(engine, some), expected)
    assert time.monotonic() - started > 0.15
    timer.join()


def test_the_longest_of_a_few_contexts_is_told(loaded: Loaded) -> None:
    engine = stream_engine(loaded)
    runner: Any = engine.runner
    choose, told = runner.encoder.choose_shape, list[int]()

    def note(sizes: PlanSizes, kind: StepKind) -> Any:
        told.append(sizes.longest_context)
        return choose(sizes, kind)

    runner.encoder.choose_shape = note
    run(engine, [Request(i, [3] * length, SamplingParams(temperature=0), 3) for i, length in enumerate((5, 20))])
    assert (told[0], told[-1]) == (20, 22), "the prompts, then all but the last token, which is not computed"
    told.clear()
    run(engine, [Request(i, [3, 4], SamplingParams(temperature=0), 3) for i in range(LONG_SEQS + 1)])
    assert set(told) == {0}


def test_a_step_waits_for_one_capture_of_an_idle_device_and_not_for_all(loaded: Loaded) -> None:
    engine = stream_engine(loaded)
    runner: Any = engine.runner
    send, captured = runner.executor.send, list[StepShape]()

    def capture_slowly(message: Any) -> Any:
        if not message.num_seqs:
            end = time.perf_counter() + 0.05
            while time.perf_counter() < end:  # most of a capture is Python
                pass
            captured.append(message.shape)
        return send(message)

    runner.executor.send = capture_slowly
    graphs, shapes = GraphDispatcher(GraphLimits(8, 32)), graph_shapes(GraphLimits(8, 32))
    captures = threading.Thread(
        target=lambda: [graphs.capture_when_idle(runner, shape) for shape in shapes], daemon=True
    )
    captures.start()
    while len(captured) < 2 and captures.is_alive():
        time.sleep(0.001)
    seq = Sequence(requests(1, temperature=0)[0])
    seq.status, seq.groups[0].block_table = Status.RUNNING, list(range(20))
    of_plan, before = runner.encoder.batch.of_plan, list[int]()

    def note(plan: Plan) -> Any:
        before.append(len(captured))  # once the step is under way, however late this thread is
        return of_plan(plan)

    runner.encoder.batch.of_plan = note
    started = time.monotonic()
    pending = runner.submit([Scheduled(seq, 0, tuple(seq.tokens), (), True, seq.epoch)])
    assert 2 <= len(captured) <= before[0] + 2, f"it waited for {time.monotonic() - started:.2f} s"
    time.sleep(0.1)
    assert len(captured) <= before[0] + 2, "captures went on although a step was under way"
    pending.sample({})
    captures.join(timeout=30)
    assert captured == shapes


def test_steps_are_brought_to_graphs_that_are_there_or_to_kernels_that_are() -> None:
    graphs: Any = GraphDispatcher(GraphLimits(64, 512))
    first, few, extra = (
        first_shapes(GraphLimits(64, 512)),
        next_shapes(GraphLimits(64, 512)),
        first_extra_shapes(GraphLimits(64, 512)),
    )
    small, mixed = StepShape(4, 4, 1), StepShape(48, 8, 48)
    small_extra = small._replace(has_extras=True)

    def fit(shape: StepShape, compiled: tuple[StepShape, ...] = ()) -> StepShape:
        graphs._captured, graphs._nearest, graphs._compiled = set(first), {}, list(compiled)
        found, has_graph = graphs.fit(shape)
        assert (found in graphs) is has_graph, "what a step runs through is captured by then"
        return found  # type: ignore[no-any-return]

    assert fit(small) == StepShape(64, 64, 1)
    assert fit(mixed) == StepShape(512, 64, 512)
    assert fit(small_extra) == small_extra
    compiled = *extra, *few
    assert fit(small, compiled) == StepShape(16, 16, 1), "one with a kernel for few sequences may be captured"
    assert fit(StepShape(1, 1, 1), compiled) == StepShape(1, 1, 1)
    assert fit(StepShape(32, 32, 1), compiled) == StepShape(64, 64, 1)
    assert fit(small_extra, compiled) == StepShape(64, 64, 1, has_extras=True)
    assert fit(mixed._replace(has_extras=True), compiled) == extra[0]
    graphs._has_all_kernels = True
    assert fit(small, compiled) == small
    graphs._capture_seconds = 0.1
    assert fit(small, compiled) == StepShape(64, 64, 1), "its steps have lost no time yet"
    assert graphs.fit(small_extra._replace(has_adapters=True))[1] is False, "nothing holds it: it runs without a graph"
    graphs._last_capture -= 0.1 / MOST_OF_STEPS
    assert graphs.fit(small_extra._replace(has_adapters=True))[1] is True


def test_a_graph_of_nearly_the_size_will_do_until_the_device_is_idle() -> None:
    """Then the graphs that steps have asked for come first, the newest of them before the others."""
    graphs: Any = GraphDispatcher(GraphLimits(64, 512))
    graphs._captured, graphs._has_all_kernels = {StepShape(20, 20, 1), StepShape(512, 64, 512)}, True
    assert graphs.fit(StepShape(16, 16, 1)) == (StepShape(20, 20, 1), True)
    assert graphs.fit(StepShape(448, 64, 448)) == (StepShape(512, 64, 512), True)
    assert graphs.fit(StepShape(8, 8, 1)) == (StepShape(8, 8, 1), True), "twice the rows are too many"
    fills = StepShape(20, 20, 1, has_drafter=True)
    graphs._captured = graphs._captured | {fills._replace(num_proposed=32)}
    assert graphs.fit(fills) == (fills, True), "drafts that nobody asked for take long to make"
    four, one = verification_shape(1, 4, 64), verification_shape(1, 1, 64)
    graphs._captured = graphs._captured | {four}
    assert graphs.fit(one) == (four, True), "few rows take as long as one more"
    captured: list[StepShape] = []
    runner: Any = SimpleNamespace(
        threads=ThreadGroup(),
        send_when_idle=lambda make, seconds: make() is None,
        encoder=SimpleNamespace(encode_padding=lambda shape: captured.append(shape)),
    )
    graphs.capture_when_idle(runner, StepShape(1, 1, 1))
    assert captured == [one, StepShape(448, 64, 448), StepShape(16, 16, 1), StepShape(1, 1, 1)]


CAPTURE_SECONDS, STEP_SECONDS = 1 / 8, 1 / 128
"""Sums of these have no rounding."""
STEPS_OF_A_CAPTURE = 16
SECONDS_BETWEEN_CAPTURES = CAPTURE_SECONDS / MOST_OF_STEPS


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What ``GraphDispatcher`` takes for the time."""
    clock = Clock()
    monkeypatch.setattr(graph_dispatcher, "time", SimpleNamespace(monotonic=clock, perf_counter=clock))
    return clock


class SlowCaptures:
    """A runner to which kernels take no time, and captures do, which none does in the background.

    A step takes time by its rows, ``STEP_SECONDS`` with the most.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.threads = SimpleNamespace(start=start_thread, is_ending=True)
        self.captured = set[StepShape]()

    def send(self, message: Any) -> Any:
        return SimpleNamespace(wait=lambda: None)

    def capture(self, shape: StepShape) -> Any:
        return SimpleNamespace(wait=partial(self._wait, shape))

    def _wait(self, shape: StepShape) -> None:
        is_decode = shape.max_query_len == 1
        own = STEP_SECONDS * (shape.num_rows / 256 if is_decode else shape.num_rows / 2048)
        self.clock.now += own if shape in self.captured else CAPTURE_SECONDS
        self.captured.add(shape)


def warmed_up(clock: Clock, **options: Any) -> GraphDispatcher:
    """Everything is compiled, and the first graphs were captured so long ago that a step may wait for another."""
    graphs, runner = GraphDispatcher(GraphLimits(256, 2048, **options)), SlowCaptures(clock)
    graphs.warm_up(cast(StepRunner, runner))
    wait_until_prepared()
    clock.now += SECONDS_BETWEEN_CAPTURES
    return graphs


def test_a_full_warm_up_compiles_and_captures_everything_before_it_ends(clock: Clock) -> None:
    graphs: Any = GraphDispatcher(GraphLimits(256, 2048))
    runner, compiled, threads = SlowCaptures(clock), set[StepShape](), set[str]()
    runner.send = lambda message: compiled.update(message.shapes) or SimpleNamespace(wait=lambda: None)  # type: ignore[method-assign]
    graphs._start_thread = lambda work, *args: threads.add(work.__name__)
    graphs.warm_up(cast(StepRunner, runner), is_full=True)
    every = set(graph_shapes(GraphLimits(256, 2048)))
    assert runner.captured >= every
    assert compiled >= every
    assert not threads, "nothing is left to be done between steps"
    for shape in every:
        assert graphs.fit(shape) == (shape, True)


def steps_until_captured(graphs: GraphDispatcher, clock: Clock, shape: StepShape, pause: float = 0.0) -> int:
    """Steps of a shape that are padded to a larger one, before one has its own; with pauses between them."""
    for num_steps in range(1000):
        found, has_graph = graphs.fit(shape)
        assert has_graph
        if found == shape:
            return num_steps
        clock.now += STEP_SECONDS + pause
    raise AssertionError("it was never captured")


def test_shapes_of_one_step_each_are_never_captured_in_its_way(clock: Clock) -> None:
    graphs: Any = warmed_up(clock)
    before = set(graphs._captured)
    for shape in graph_shapes(GraphLimits(256, 2048)):
        if not shape.has_extras:
            assert graphs.fit(shape)[0] in before
            clock.now += 5.0  # whatever the time between them
    assert graphs._captured == before


def test_a_shape_is_captured_when_padding_has_lost_the_time_of_a_capture(clock: Clock) -> None:
    graphs = warmed_up(clock)
    most = padded_shape(96, 96, 1, 256)[0]  # padded to 128
    assert steps_until_captured(graphs, clock, most) == 4 * STEPS_OF_A_CAPTURE
    assert steps_until_captured(graphs, clock, most) == 0
    clock.now += SECONDS_BETWEEN_CAPTURES
    fewer = padded_shape(40, 40, 1, 256)[0]  # padded to 64
    assert steps_until_captured(graphs, clock, fewer) == math.ceil(STEPS_OF_A_CAPTURE / (3 / 8))
    other = padded_shape(48, 48, 1, 256)[0]
    num_steps = steps_until_captured(graphs, clock, other)
    assert num_steps == SECONDS_BETWEEN_CAPTURES / STEP_SECONDS, "its steps have lost enough before, and wait no longer"


@pytest.mark.parametrize("seed", range(8))
def test_captures_delay_steps_by_a_tenth_of_the_time_at_most(seed: int, clock: Clock) -> None:
    """Whatever shapes the steps have, and whether or not a captured graph holds them."""
    graphs: Any = GraphDispatcher(GraphLimits(256, 2048))
    graphs.warm_up(cast(StepRunner, SlowCaptures(clock)))
    wait_until_prepared()
    rng, shapes = random.Random(seed), graph_shapes(GraphLimits(256, 2048))
    last, num_captures = graphs._last_capture, 0
    few = rng.sample(shapes, 6)
    for _ in range(5000):
        shape, before = rng.choice(few if rng.random() < 0.9 else shapes), set(graphs._captured)
        found, has_graph = graphs.fit(shape)
        assert found.holds(shape)
        assert has_graph == (found in graphs)
        if found in graphs and found not in before:
            assert MOST_OF_STEPS * (clock.now - last) >= CAPTURE_SECONDS
            last, num_captures = clock.now, num_captures + 1
            clock.now += CAPTURE_SECONDS
        clock.now += STEP_SECONDS * rng.random()
    assert num_captures > 1, "but they do not wait for ever"


def test_an_idle_device_captures_only_after_a_pause_of_which_a_capture_is_a_tenth() -> None:
    asked: list[float] = []
    graphs: Any = GraphDispatcher(GraphLimits(256, 2048))
    graphs._capture_seconds = CAPTURE_SECONDS
    runner: Any = SimpleNamespace(
        threads=ThreadGroup(),
        send_when_idle=lambda make, seconds: asked.append(seconds) or make() is None,
        encoder=SimpleNamespace(encode_padding=lambda shape: None),
    )
    graphs.capture_when_idle(runner, StepShape(256, 256, 1))
    assert asked == [SECONDS_BETWEEN_CAPTURES]


def test_padding_that_takes_no_time_is_no_loss(clock: Clock) -> None:
    """One token takes as long as a few: the weights are read."""
    graphs: Any = warmed_up(clock)
    graphs._seconds |= {shape: STEP_SECONDS for shape in graphs._seconds if shape.num_rows <= 64}
    few = padded_shape(40, 40, 1, 256)[0]
    for _ in range(1000):
        assert graphs.fit(few) == (StepShape(64, 64, 1), True)
        clock.now += STEP_SECONDS


def test_other_steps_and_pauses_are_no_losses_of_a_shape(clock: Clock) -> None:
    graphs, half, large = warmed_up(clock), padded_shape(96, 96, 1, 256)[0], first_shapes(GraphLimits(256, 2048))[0]
    graphs.fit(half)
    clock.now += STEP_SECONDS
    for _ in range(100):
        assert graphs.fit(large) == (large, True)
        clock.now += STEP_SECONDS
    assert steps_until_captured(graphs, clock, half) == 4 * STEPS_OF_A_CAPTURE - 1
    other = padded_shape(48, 48, 1, 256)[0]
    assert steps_until_captured(graphs, clock, other, pause=60.0) == 4, "each pause counts as one capture at most"


def test_unwanted_drafts_count_as_half_of_a_step(clock: Clock) -> None:
    graphs: Any = warmed_up(clock, max_drafts=3, has_drafter=True)
    drafting = padded_shape(256, 256, 1, 256, StepKind(has_drafter=True, num_proposed=3))[0]
    assert drafting in graphs
    filling = drafting._replace(num_proposed=0)
    assert steps_until_captured(graphs, clock, filling) == 2 * STEPS_OF_A_CAPTURE


def test_few_sequences_with_a_long_context_have_graphs_of_their_own(clock: Clock) -> None:
    graphs = warmed_up(clock, longest_context=100_000)

    def choose(num_seqs: int, longest_context: int) -> StepShape:
        sizes = PlanSizes(num_seqs, num_seqs, 1, longest_context=longest_context)
        shape, has_graph = graphs.choose(sizes, PLAIN)
        assert has_graph
        return shape

    short = StepShape(1, 1, 1)
    long = short._replace(has_long_context=True)
    assert choose(1, LONG_CONTEXT - 1) == choose(1, LONG_CONTEXT) == short, "at first it is computed like a short one"
    assert steps_until_captured(graphs, clock, long) == STEPS_OF_A_CAPTURE / LONG_CONTEXT_LOST
    assert choose(1, LONG_CONTEXT) == long
    assert choose(1, LONG_CONTEXT - 1) == short
    assert not choose(LONG_SEQS + 1, LONG_CONTEXT).has_long_context
    everything = graph_shapes(GraphLimits(256, 2048, longest_context=100_000))
    assert {shape.num_seqs for shape in everything if shape.has_long_context} == {1, 2, 4}
    assert not any(
        shape.has_long_context for shape in graph_shapes(GraphLimits(256, 2048, longest_context=LONG_CONTEXT - 1))
    )


def test_short_contexts_have_graphs_of_their_own_where_positions_are_chosen_of_longer_ones(clock: Clock) -> None:
    graphs = warmed_up(clock, dense_context=100)
    wide, dense = PlanSizes(256, 256, 1), PlanSizes(256, 256, 1, most_context=100)
    assert graphs.choose(dense, PLAIN)[0] == graphs.choose(wide, PLAIN)[0]._replace(most_context=100)
    few = StepShape(200, 200, 1)
    assert few._replace(most_context=100) in graph_shapes(GraphLimits(200, 2048, dense_context=100))
    assert not StepShape(256, 256, 1, most_context=100).holds(few)
    assert StepShape(256, 256, 1).holds(few._replace(most_context=100)), "chosen of a short context are all positions"
    every = graph_shapes(GraphLimits(256, 2048, dense_context=100))
    assert {shape.most_context for shape in every} == {0, 100}
    assert len(every) == 2 * len(graph_shapes(GraphLimits(256, 2048)))


def test_the_encoder_tells_whether_all_contexts_are_short(loaded: Loaded) -> None:
    engine = stream_engine(loaded)
    encoder, told = cast(Any, engine.runner).encoder, list[int]()
    choose, encoder.dense_context = encoder.choose_shape, 7

    def note(sizes: PlanSizes, kind: StepKind) -> Any:
        told.append(sizes.most_context)
        return choose(sizes, kind)

    encoder.choose_shape = note
    requests = [Request(i, [3] * 5, SamplingParams(temperature=0), 6) for i in range(LONG_SEQS + 1)]
    run(engine, requests)
    assert told == [7, 7, 7, 0, 0, 0], "contexts of 5, 6, 7 and then more"


def test_until_all_is_compiled_padding_counts_for_what_is(clock: Clock) -> None:
    """Steps of several sizes lack the same graph."""
    graphs: Any = warmed_up(clock)
    graphs._captured, graphs._seconds = set(first_shapes(GraphLimits(256, 2048))), {}
    graphs._nearest, graphs._has_all_kernels = {}, False
    small = [padded_shape(size, size, 1, 256)[0] for size in (2, 4, 8, 12)]
    compiled = StepShape(16, 16, 1)
    found = []
    for num_steps in range(100):
        found.append(graphs.fit(small[num_steps % 4])[0])
        clock.now += STEP_SECONDS
    num_padded = math.ceil(STEPS_OF_A_CAPTURE / (15 / 16))
    assert found == [StepShape(256, 256, 1)] * num_padded + [compiled] * (100 - num_padded)


def test_steps_with_extras_go_on_when_there_are_shapes_to_bring_them_to() -> None:
    graphs: Any = GraphDispatcher(GraphLimits(8, 32))
    graphs._has_extra_kernels.clear()
    told: list[tuple[list[StepShape], bool]] = []

    def send(message: Any) -> Any:
        return SimpleNamespace(wait=lambda: told.append((message.shapes, graphs._has_extra_kernels.is_set())))

    runner: Any = SimpleNamespace(send=send)
    assert graphs.compile_the_rest(runner) == graph_shapes(GraphLimits(8, 32))
    assert told == [
        (first_extra_shapes(GraphLimits(8, 32)), False),
        (next_shapes(GraphLimits(8, 32)), True),
        (graph_shapes(GraphLimits(8, 32)), True),
    ]
    assert graphs._compiled == [*first_extra_shapes(GraphLimits(8, 32)), *next_shapes(GraphLimits(8, 32))]


def test_only_plain_steps_have_graphs_captured(loaded: Loaded) -> None:
    """A graph that a step does not run through must not be taken for captured."""
    engine = stream_engine(loaded)
    graphs: Any = GraphDispatcher(GraphLimits(8, 32))
    graphs._has_all_kernels = True
    runner: Any = engine.runner
    runner.encoder.choose_shape = graphs.choose
    sent: list[Any] = []
    send = runner.executor.send
    runner.executor.send = lambda message: sent.append(message) or send(message)
    run(engine, [Request(0, [1, 2, 3], SamplingParams(temperature=0, allowed_token_ids=(5, 6)), 4)])
    assert sent
    assert not any(message.uses_graph for message in sent)
    assert not graphs._captured
    run(engine, [Request(1, [1, 2, 3], SamplingParams(temperature=0), 4)])
    assert graphs._captured == {message.shape for message in sent if message.uses_graph} != set()


@pytest.mark.parametrize(("max_num_seqs", "max_num_rows"), [(256, 8192), (64, 512), (3, 100), (1, 16)])
def test_graphs_that_are_there_from_the_start_have_less_than_twice_the_rows(
    max_num_seqs: int, max_num_rows: int
) -> None:
    early = early_shapes(GraphLimits(max_num_seqs, max_num_rows))
    every = graph_shapes(GraphLimits(max_num_seqs, max_num_rows))
    assert set(early) <= set(every)
    for shape in every:
        is_usual = shape.max_query_len == 1 or (shape.num_rows >= 64 and shape.num_seqs <= MANY_SEQS[0])
        if is_usual and not shape.has_extras:
            assert any(known.holds(shape) and known.num_rows < 2 * shape.num_rows for known in early), shape


def test_early_graphs_will_do_for_prompts_beside_some_decodes() -> None:
    """So no step of the first minute waits for another to be captured."""
    early = early_shapes(GraphLimits(256, 8192))
    for num_rows in range(161, 1025):
        shape = padded_shape(num_rows, 16, num_rows - 15, 256)[0]
        assert any(known.holds(shape) and graph_dispatcher._is_nearly(known, shape) for known in early), shape


class _CountingLayer:
    """A layer whose kernels depend on its weight's type."""

    def __init__(self, dtype: torch.dtype, window: int) -> None:
        self.weight = torch.ones(4, dtype=dtype)
        self.window = window
        self.around = self  # what refers to itself is no obstacle

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        ran.append((self.weight.dtype, self.window))
        return x_TD


ran: list[tuple[torch.dtype, int]] = []


def test_a_layer_of_each_kind_and_the_last_launch_all_kernels() -> None:
    ran.clear()
    float32, bfloat16 = torch.float32, torch.bfloat16
    kinds = [(float32, 0), (float32, 8), (float32, 0), (bfloat16, 0), (float32, 8), (float32, 0)]
    model: Any = SimpleNamespace(layers=[_CountingLayer(*kind) for kind in kinds])
    caches = [LayerCache(torch.empty(0), torch.empty(0), group=0) for _ in kinds]
    for layer in with_distinct_layers(model, caches).layers:  # type: ignore[attr-defined]
        layer(torch.empty(2, 3))
    assert ran == [(float32, 0), (float32, 8), (bfloat16, 0), (float32, 0)]
    ran.clear()
    other = [*caches[:2], caches[2]._replace(group=1), *caches[3:]]  # whose tables are others
    for layer in with_distinct_layers(model, other).layers:  # type: ignore[attr-defined]
        layer(torch.empty(2, 3))
    assert ran == [(float32, 0), (float32, 8), (float32, 0), (bfloat16, 0), (float32, 0)]
    other_model: Any = object()
    assert with_distinct_layers(other_model, []) is other_model


class _Widening(_CountingLayer):
    """Gives rows that are some columns wider, or half as wide."""

    def __init__(self, added: int) -> None:
        super().__init__(torch.float32, added)

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        ran.append((torch.float32, x_TD.shape[1]))
        return x_TD.new_zeros(len(x_TD), x_TD.shape[1] + self.window) if self.window else x_TD[:, : x_TD.shape[1] // 2]


class _OfType(_CountingLayer):
    """Gives rows of the type of its weight."""

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        return super().__call__(x_TD).to(self.weight.dtype)


def test_layers_that_are_left_out_give_rows_of_the_same_type() -> None:
    ran.clear()
    float32, bfloat16 = torch.float32, torch.bfloat16
    model: Any = SimpleNamespace(layers=[_OfType(dtype, 0) for dtype in (float32, bfloat16) * 3])
    caches = [LayerCache(torch.empty(0), torch.empty(0), group=0) for _ in model.layers]
    x_TD = torch.zeros(3, 4, dtype=bfloat16)
    layers = with_distinct_layers(model, caches).layers  # type: ignore[attr-defined]
    for layer, expected in zip(layers, (float32, bfloat16) * 3, strict=True):
        x_TD = layer(x_TD)
        assert x_TD.dtype == expected
    assert ran == [(float32, 0), (bfloat16, 0), (bfloat16, 0)]


@pytest.mark.parametrize(
    ("added", "widths"), [((4, 0, 4, 0, 4), [4, 8, 4]), ((2, 2, 2, 2), [4, 6, 8, 10])], ids=["and back", "ever wider"]
)
def test_layers_that_are_left_out_give_rows_as_wide(added: tuple[int, ...], widths: list[int]) -> None:
    model: Any = SimpleNamespace(layers=[_Widening(each) for each in added])
    caches = [LayerCache(torch.empty(0), torch.empty(0), group=0) for _ in added]
    layers = with_distinct_layers(model, caches).layers  # type: ignore[attr-defined]
    for _ in range(2):  # each pass anew
        ran.clear()
        x_TD = torch.zeros(3, 4)
        for layer in layers:
            x_TD = layer(x_TD)
        assert [width for _, width in ran] == widths
        assert x_TD.shape[1] == (8 if 0 in added else 12)
