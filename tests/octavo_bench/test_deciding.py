"""The deciding half over models without weights: known tokens, known figures, and what it costs."""

from __future__ import annotations

import pytest
import torch

from octavo.cli import main
from octavo.config import POLICY_NAMES
from octavo.types import Sequence
from octavo_bench.demo import PROMPTS, Demo, DemoSizes
from octavo_bench.overhead import measure_waiting
from octavo_bench.synthetic import SyntheticWork, external_fragmentation, run
from octavo_fleet.backends.toy_models import WORDS, NextByFormula, highest_wave
from tests.engine.making import make_request
from tests.tiers import one_in
from tests.timing import undisturbed

KNOWN = {
    "alpha": [2762, 9122, 19667, 2537],
    "bravo": [23687, 25712, 9182, 29677, 28297],
    "charlie": [15727, 31857, 18052],
    "delta": [16997, 16317, 30062, 28932],
}
"""What github.com/ad-github1/LLM-INFERENCE-ENGINE prints for the same prompts."""


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("num_blocks", [3, 4, 10])
def test_the_demonstration_gives_the_known_tokens(policy: str, num_blocks: int) -> None:
    demo = Demo(DemoSizes(num_kv_blocks=num_blocks, scheduling_policy=policy))
    while demo.has_work:
        demo.step()
        assert demo.num_steps < 100
    assert {name: demo.tokens[number] for number, name in enumerate(PROMPTS)} == KNOWN


def test_the_demonstration_as_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo"]) == 0
    out = capsys.readouterr().out
    assert "1    | alpha:6, bravo:3" in out
    assert "alpha: 2762 9122 19667 2537" in out
    assert main(["demo", "--words", "--num-kv-blocks", "4"]) == 0
    assert "1 preemptions" in capsys.readouterr().out


def test_the_end_of_text_by_formula() -> None:
    seq = Sequence(make_request(0, prompt=[5] * 40))
    following = NextByFormula(eos_token_id=2)
    assert [n for n in range(1, 41) if following(seq, n) == 2] == [17, 34]


def test_the_words_are_those_of_the_original_arithmetic() -> None:
    """The original takes sines of float32 tensors; the highest wave is the same for each of its 997 frequencies."""
    n = torch.arange(1, len(WORDS) + 1, dtype=torch.float32)
    for step in (*range(8), 100, 511):
        for frequency in range(1, 998):
            assert highest_wave(frequency, step) == int(torch.argmax(torch.sin(n * frequency) + torch.cos(n + step)))


def test_the_golden_run() -> None:
    """Tokens and steps are the other's to the last. Its prompts may not use what decoding leaves of the budget, so
    that 451 steps hold 13,907 of its items and 13,906 of ours; and it takes blocks in another order."""
    figures = run(SyntheticWork(), external=True)
    assert figures["completed_requests"] == 1000
    assert figures["total_generated_tokens"] == 13_904
    assert figures["total_prefill_tokens"] == 50_467
    assert figures["step_count"] == 451
    assert figures["max_batch_size_seen"] == 32
    assert figures["avg_batch_size"] == pytest.approx(30.836, abs=0.005)
    assert figures["peak_memory_utilization"] == pytest.approx(0.0332, abs=0.0002)
    assert figures["avg_internal_fragmentation_ratio"] == pytest.approx(0.11463, abs=0.0005)
    assert figures["peak_internal_fragmentation_ratio"] <= 0.21
    assert figures["peak_external_fragmentation_ratio"] <= 0.507


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_tokens_do_not_depend_on_the_policy(policy: str) -> None:
    """Nor on preemption: the smaller cache has room for a few sequences only."""
    reference = run(SyntheticWork(requests=60))
    small = run(SyntheticWork(requests=60, policy=policy, cache_blocks=14))
    assert small["completed_requests"] == 60
    assert small["total_generated_tokens"] == reference["total_generated_tokens"]


def test_external_fragmentation() -> None:
    assert external_fragmentation([]) == 0
    assert external_fragmentation([3, 1, 2]) == 0
    assert external_fragmentation([1, 2, 5, 9]) == 0.5


@pytest.mark.timing
def test_the_time_of_a_step_does_not_grow_with_the_requests() -> None:
    def typical(requests: int) -> float:
        return float(run(SyntheticWork(requests=requests))["p50_step_duration_ms"])

    twice = 2 * min(typical(500) for _ in range(4))
    assert undisturbed(lambda: typical(4000), twice) < twice


@one_in(3)
@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_step_of_256_with_10_000_waiting_takes_less_than_a_millisecond(policy: str) -> None:
    """It takes about 0.4 ms, and more than twice that on a core whose other half is at work."""

    def milliseconds() -> float:
        row = measure_waiting(policy, 256, 10_000, 0, steps=60)
        assert row["running"] == 256
        assert row["waiting"] >= 9_000
        return float(row["step_ms"]["min"])

    assert undisturbed(milliseconds, 1.0) < 1.0
