"""The deciding half over models without weights: known tokens, known figures, and what it costs."""

from __future__ import annotations

import statistics

import pytest
import torch

from octavo.cli import main
from octavo.config import POLICY_NAMES
from octavo.types import Sequence
from octavo_bench.demo import PROMPTS, Demo, DemoSizes
from octavo_bench.overhead import step_milliseconds
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


@pytest.mark.timing
def test_the_time_of_a_step_does_not_grow_with_the_requests() -> None:
    def typical(num_seen: int) -> float:
        return statistics.median(step_milliseconds(32, 16, 200, num_seen=num_seen))

    twice = 2 * min(typical(500) for _ in range(4))
    assert undisturbed(lambda: typical(4000), twice) < twice


@one_in(3)
@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_step_of_256_with_10_000_waiting_takes_less_than_a_millisecond(policy: str) -> None:
    """It takes about 0.4 ms, and more than twice that on a core whose other half is at work."""

    def milliseconds() -> float:
        return min(step_milliseconds(256, 16, 60, policy, num_waiting=10_000))

    assert undisturbed(milliseconds, 1.0) < 1.0
