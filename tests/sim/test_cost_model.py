"""What a step costs: counted against a plain loop, by hand at both ends of the roofline, and learned from times."""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from octavo.config import CacheSettings
from octavo.engine.timing.step_model import StepWork, work_of
from octavo.errors import ConfigError
from octavo.types import Scheduled, Sequence
from octavo_fleet.sim.client_metrics import Sketch
from octavo_fleet.sim.costs.cost_model import Roofline, pools_of
from octavo_fleet.sim.costs.devices import LAYER_SECONDS, find_device
from octavo_fleet.sim.costs.fitted import fit, read_log
from octavo_fleet.sim.costs.roofline import decode_work, prefill_work, shape_of
from octavo_fleet.sim.jobs import Job
from octavo_fleet.sim.shapes import SHAPES

SHAPE = shape_of(SHAPES["llama-3.1-8b"])
H200 = find_device("h200")


def item(start: int, count: int, samples: bool, drafts: int = 0) -> Scheduled:
    seq = Sequence(Job(0.0, ((1, start + count + 8),), 4, 2).request(1, 1.0, [1] * (start + count + 8)))
    return Scheduled(seq, start, (1,) * count, (1,) * drafts, samples, 0)


def test_work_is_what_a_plain_loop_counts() -> None:
    rng = random.Random(0)
    for _ in range(200):
        plan = []
        for _ in range(rng.randrange(1, 9)):
            count, samples = rng.choice([(1, True), (1, False), (rng.randrange(1, 40), rng.random() < 0.5)])
            plan.append(item(rng.randrange(60), count, samples, rng.randrange(4) if samples else 0))
        sizes = [(one.start, len(one.tokens) + len(one.drafts)) for one in plan]
        want = StepWork(
            sum(size for _, size in sizes),
            sum(1 + len(one.drafts) for one in plan if one.samples or len(one.tokens) + len(one.drafts) == 1),
            sum(start + size for start, size in sizes),
            sum(start + i + 1 for start, size in sizes for i in range(size)),
            sequences=len(plan),
            has_prompt=int(any(len(one.tokens) > 1 for one in plan)),
            drafted_rows=sum(size for _, size in sizes),
            num_verified=sum(len(one.drafts) for one in plan),
        )
        assert work_of(plan) == want
        plain = [msgspec.structs.replace(one, drafts=()) for one in plan]
        assert work_of(plan, has_drafts=False) == work_of(plain)._replace(drafted_rows=0)


def test_roofline_is_that_of_the_bench_with_the_devices_figures() -> None:
    cost = Roofline(SHAPE, H200)
    overhead = SHAPE.layers * LAYER_SECONDS
    least = decode_work(SHAPE, 1, 1000).bytes / H200.bandwidth
    assert cost.seconds(StepWork(1, 1, 1000, 1000)) == pytest.approx(least + overhead, rel=1e-3)
    prompt = prefill_work(SHAPE, 8192).flops / H200.arithmetic
    pairs = 8192 * 8193 // 2
    assert cost.seconds(StepWork(8192, 1, 8192, pairs)) == pytest.approx(prompt + overhead, rel=0.01)


def test_more_devices_are_faster_but_not_in_proportion() -> None:
    one, two = Roofline(SHAPE, H200), Roofline(SHAPE, H200, 2)
    work = StepWork(64, 64, 64_000, 64_000)
    assert one.seconds(work) / 2 < two.seconds(work) < one.seconds(work)
    with pytest.raises(ConfigError, match="tensor_parallel"):
        Roofline(SHAPE, H200, 3)


def test_blocks_fill_what_the_weights_leave() -> None:
    count, states = pools_of(SHAPE, H200, 1, CacheSettings(), (64, 256), 2)
    used = count * 64 * 131_072 + 8.03e9 * 2
    assert states is None
    assert 0.99 < used / (H200.memory * 0.9) <= 1.0
    with pytest.raises(ConfigError, match="device: the weights take 16 GB"):
        pools_of(SHAPE, find_device("l4"), 1, CacheSettings(gpu_memory_utilization=0.5), (64, 256), 2)


def test_recurrent_states_take_memory_and_time() -> None:
    shape = shape_of(SHAPES["qwen3.5-9b"])
    count, states = pools_of(shape, H200, 1, CacheSettings(), (64, 256), 2)
    assert states is not None
    assert (states.num_held, states.every) == (256, 1572)
    rest = H200.memory * 0.9 - 2 * (shape.matrix_weights + 4096 * 248_320) - 256 * shape.state_bytes
    of_snapshots = (states.num_slots - 256) * shape.state_bytes
    assert 0.99 < 2 * of_snapshots / rest <= 1.0
    assert 0.99 < 2 * count * 64 * 32_768 / rest <= 1.01
    _, few = pools_of(shape, H200, 1, CacheSettings(num_state_snapshots=3), (64, 8), 2)
    assert few == (11, 8, 1572, 64, False, False)
    with pytest.raises(ConfigError, match=r"states of 256 sequences take \d\d GB"):
        pools_of(shape, find_device("l4"), 1, CacheSettings(), (64, 256), 2)
    cost, work = Roofline(shape, H200), StepWork(64, 64, 64_000, 64_000)
    moved = decode_work(shape, 64, 1000).bytes / H200.bandwidth
    assert cost.seconds(work) == pytest.approx(moved + shape.layers * LAYER_SECONDS, rel=1e-3)


def random_steps(count: int, seed: int) -> tuple[list[StepWork], list[float]]:
    rng = np.random.default_rng(seed)
    works, seconds = [], []
    for _ in range(count):
        tokens = int(rng.choice([1, 2, 4, 8, 30, 64, 200, 256]))
        rows = min(tokens, int(rng.integers(0, 33)))
        context = tokens + int(rng.integers(0, 4000))
        work = StepWork(tokens, rows, context, context * max(1, tokens // 4))
        works.append(work)
        true = 2e-3 + 1e-4 * min(tokens, 16) + 4e-5 * max(0, tokens - 16) + 3e-5 * rows + 2e-7 * context
        seconds.append(true * float(rng.lognormal(0, 0.02)) * (20.0 if rng.random() < 0.01 else 1.0))
    return works, seconds


def test_a_fit_learns_bends_and_is_not_led_astray_by_pauses() -> None:
    fitted = fit(*random_steps(2000, 1))
    works, _ = random_steps(500, 2)
    for work in works:
        true = 2e-3 + 1e-4 * min(work.tokens, 16) + 4e-5 * max(0, work.tokens - 16) + 3e-5 * work.rows
        assert fitted.expected(work) == pytest.approx(true + 2e-7 * work.context, rel=0.06)
    assert fitted.error < 0.03
    drawn = [fitted.seconds(works[0]) for _ in range(2000)]
    assert np.median(drawn) == pytest.approx(fitted.expected(works[0]), rel=0.02)
    assert max(drawn) > 5 * fitted.expected(works[0]), "what was seen of pauses is lost"


def test_steps_with_prompts_may_take_longer_from_their_first_token_on() -> None:
    rng = random.Random(3)
    works = []
    for _ in range(400):
        rows = rng.choice([1, 2, 4, 8, 16])
        tokens = rows + rng.choice([0, 0, rng.randrange(1, 40)])
        works.append(StepWork(tokens, rows, 50 * rows, 50 * rows))
    fitted = fit(works, [0.002 + 1e-5 * work.tokens + 0.001 * (work.tokens > work.rows) for work in works])
    assert fitted.expected(StepWork(4, 4, 200, 200)) == pytest.approx(0.00204, rel=0.02)
    assert fitted.expected(StepWork(6, 4, 200, 200)) == pytest.approx(0.00306, rel=0.02)


def test_steps_that_sample_nothing_are_not_guessed_at() -> None:
    """Where all steps that were seen sample something, nobody knows what the head takes; others cost as much."""
    works = [StepWork(tokens, 1, tokens, tokens) for tokens in (1, 4, 16, 64, 200) for _ in range(40)]
    fitted = fit(works, [0.004 + 4e-5 * work.tokens for work in works])
    assert fitted.expected(StepWork(200, 0, 200, 200)) == pytest.approx(0.012, rel=0.02)
    more = [StepWork(tokens, 0, tokens, tokens) for tokens in (64, 200) for _ in range(20)]
    fitted = fit(works + more, [0.004 + 4e-5 * work.tokens - 0.001 * (work.rows == 0) for work in works + more])
    assert fitted.expected(StepWork(200, 0, 200, 200)) == pytest.approx(0.011, rel=0.02)
    assert fitted.expected(StepWork(100, 0, 100, 100)) == pytest.approx(0.007, rel=0.02)


def uneven_steps(seed: int) -> tuple[list[StepWork], list[float]]:
    """Steps of 2 ms, one in 500 of which takes thirty times as long, and even ones of 40 ms."""
    rng = np.random.default_rng(seed)
    works = [StepWork(1, 1, 100, 100), StepWork(256, 1, 256, 32_896)] * 2000
    seconds = [
        0.002 * (30 if rng.random() < 1 / 500 else float(rng.lognormal(0, 0.05))) if work.tokens == 1 else 0.04
        for work in works
    ]
    return works, seconds


def test_pauses_are_drawn_as_often_as_they_were_seen_and_for_steps_of_the_same_length() -> None:
    works, seconds = uneven_steps(7)
    fitted = fit(works, seconds)
    for work in works[:2]:
        own = [taken for other, taken in zip(works, seconds, strict=True) if other == work]
        drawn = [fitted.seconds(work) for _ in range(20_000)]
        assert np.mean(drawn) == pytest.approx(np.mean(own), rel=0.03)
        assert np.quantile(drawn, 0.99) == pytest.approx(np.quantile(own, 0.99), rel=0.05)


def test_the_same_form_on_a_slower_machine() -> None:
    fitted = fit(*random_steps(2000, 1))
    works, seconds = random_steps(500, 2)
    slower = fitted.as_of(works, [1.5 * taken for taken in seconds])
    drawn = [slower.seconds(works[0]) for _ in range(2000)]
    assert np.median(drawn) == pytest.approx(1.5 * fitted.expected(works[0]), rel=0.05)


def test_logs_are_read_and_bad_ones_are_named(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    works, seconds = random_steps(60, 3)
    lines = [{**work._asdict(), "seconds": taken} for work, taken in zip(works, seconds, strict=True)]
    path.write_text("\n".join(map(json.dumps, lines)))
    got_works, got_seconds = read_log(path)
    assert got_works == works
    assert got_seconds == pytest.approx(seconds)
    for line in lines:
        del line["idle"], line["rested"]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert read_log(path)[0] == works, "it may be left out"
    path.write_text('{"tokens": 1}\n')
    with pytest.raises(ConfigError, match="line 1"):
        read_log(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_log(tmp_path / "none")
    with pytest.raises(ConfigError, match="too few"):
        fit(works[:10], seconds[:10])


def test_percentiles_are_within_a_percent() -> None:
    rng = np.random.default_rng(5)
    values = rng.lognormal(-3, 2, 20_000)
    sketch = Sketch()
    for value in values:
        sketch.add(float(value))
    sketch.add(0.0, 3)
    for percent in (1, 50, 90, 99, 99.9):
        exact = np.percentile([0, 0, 0, *values], percent, method="lower")
        assert sketch.percentile(percent) == pytest.approx(exact, rel=0.0051)
    assert sketch.count == 20_003
    assert sketch.summary()["max"] == values.max()
