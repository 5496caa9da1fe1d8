"""The runner that stays one step ahead: what it gives is what the plain runner gives, step for step.

It runs here on the CPU with the reference operations, without graphs but with all of its padding.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from octavo.cache.kv_cache import KVCache
from octavo.engine.engine import Engine
from octavo.engine.scheduler import Scheduler
from octavo.ops import dispatch
from octavo.ops.dispatch import REFERENCE
from octavo.runtime.graphs import graph_shapes, padded_shape
from octavo.runtime.kv_storage import KVStorage
from octavo.runtime.sampler import NOT_NUMBERS
from octavo.runtime.step_program import StepLimits
from octavo.runtime.stream_runner import StreamRunner
from octavo.sampling_params import SamplingParams
from octavo.types import Request
from tests.runtime.test_model_runner import CPU, MIXED, VOCAB, Loaded, requests, run, tokens_of


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
    proposer: Any = None,
) -> Engine:
    storage = KVStorage(loaded.config, num_blocks, block_size, torch.float32, CPU)
    storage.pool.fill_(torch.nan)
    limits = StepLimits(max_num_seqs, max_num_batched_tokens, max_blocks=120 // block_size)
    runner = StreamRunner(loaded.model, storage, VOCAB, limits)
    cache = KVCache(num_blocks, block_size)
    scheduler = Scheduler(cache, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    return Engine(scheduler, runner, depth=depth, proposer=proposer)


ENGINES: list[dict[str, Any]] = [
    {},
    {"depth": 1},
    {"depth": 3},
    {"block_size": 1, "num_blocks": 300},
    {"block_size": 16, "max_num_batched_tokens": 9},
    {"num_blocks": 22},
    {"max_num_seqs": 3},
]


@pytest.mark.parametrize("settings", ENGINES, ids=str)
def test_greedy_tokens_are_those_of_transformers(loaded: Loaded, settings: dict[str, Any]) -> None:
    some = requests(10, temperature=0)
    found = tokens_of(run(stream_engine(loaded, **settings), some))
    assert found == {r.id: loaded.greedy(r.prompt_tokens, r.max_tokens) for r in some}


@pytest.mark.parametrize("settings", ENGINES, ids=str)
def test_rows_of_the_device_and_of_the_host_together(loaded: Loaded, settings: dict[str, Any]) -> None:
    """Some requests ask for what only the host does: the steps behind wait for it, and nobody's tokens change."""
    some = [
        Request(r.id, r.prompt_tokens, SamplingParams(**MIXED[r.id % 5]), r.max_tokens, r.seed) for r in requests(15)
    ]
    expected = [tokens_of(run(loaded.engine(), [request]))[request.id] for request in some]
    found = tokens_of(run(stream_engine(loaded, **settings), some))
    assert [found[request.id] for request in some] == expected


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


def test_drafts_are_verified(loaded: Loaded) -> None:
    class Guess:
        def propose(self, plan: Any) -> None:
            for item in plan:
                if item.samples and not item.is_stale and None not in item.seq.tokens:
                    item.seq.draft_tokens = [item.seq.tokens[-1], 3]

    some = requests(6, temperature=0)
    found = tokens_of(run(stream_engine(loaded, proposer=Guess()), some))
    assert found == {r.id: loaded.greedy(r.prompt_tokens, r.max_tokens) for r in some}


def test_logits_that_are_no_numbers_end_their_row_alone(loaded: Loaded) -> None:
    engine = stream_engine(loaded)
    some = [Request(i, [10 + i] * 9, SamplingParams(temperature=0), 1) for i in range(4)]
    model: Any = loaded.model
    table = model.embedding.table_VD
    kept = table[11].clone()
    table[11] = torch.nan
    try:
        outputs = run(engine, some)
    finally:
        table[11] = kept
    assert [output.error for output in outputs[1]] == [NOT_NUMBERS]
    assert all(output.error is None for i in (0, 2, 3) for output in outputs[i])


@pytest.mark.parametrize("num_seqs", [1, 2, 3, 9, 33, 250, 256])
def test_padding(num_seqs: int) -> None:
    shape, has_graph = padded_shape(num_seqs, num_seqs, 1, 256)
    assert has_graph
    assert num_seqs <= shape.num_seqs == shape.num_rows <= 256
    for num_rows in (num_seqs + 1, 300, 513, 2048, 2049):
        if num_rows > num_seqs:
            shape, has_graph = padded_shape(num_rows, num_seqs, 2, 256)
            assert has_graph == (num_rows <= 2048)
            assert not has_graph or shape in graph_shapes(256, 2048)
            assert shape.num_rows >= num_rows
            assert num_seqs <= shape.num_seqs <= 256
