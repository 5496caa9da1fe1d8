"""Threads that share an ``LLM``, and engines of several threads in one process, give what each gives alone."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from tests.llm.tiny import SETTINGS

pytestmark = pytest.mark.usefixtures("all_cores")

PROMPTS = [[3, 5, number, 7] for number in range(1, 9)]
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
REPEATS = 6


def generated(llm: LLM, prompt: list[int]) -> list[int]:
    return llm.generate([prompt], PARAMS)[0].outputs[0].token_ids


def streamed(llm: LLM, prompt: list[int]) -> list[int]:
    return [token for piece in llm.stream(prompt, PARAMS) for token in piece.token_ids]


@pytest.fixture
def llm(tiny_checkpoint: Path) -> Iterator[LLM]:
    with LLM(tiny_checkpoint, **SETTINGS) as made:
        yield made


def test_threads_share_one(llm: LLM) -> None:
    """More of them than sequences that fit, so that they wait and finish one another's requests."""
    expected = {tuple(prompt): generated(llm, prompt) for prompt in PROMPTS}
    calls = [(way, prompt) for _ in range(REPEATS) for prompt in PROMPTS for way in (generated, streamed)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda call: call[0](llm, call[1]), calls))
    assert found == [expected[tuple(prompt)] for _, prompt in calls]
    assert not llm.engine.has_work


def test_each_thread_has_its_own(llm: LLM, tiny_checkpoint: Path) -> None:
    """Recordings of steps are of a thread: batches of many sizes make many."""
    expected = [generated(llm, prompt) for prompt in PROMPTS]

    def use(own: LLM) -> list[bool]:
        sizes = [number % len(PROMPTS) + 1 for number in range(4 * REPEATS)]
        outputs = [[each.outputs[0].token_ids for each in own.generate(PROMPTS[:size], PARAMS)] for size in sizes]
        return [found == expected[:size] for found, size in zip(outputs, sizes, strict=True)]

    with LLM(tiny_checkpoint, **SETTINGS) as other, ThreadPoolExecutor(2) as pool:
        assert all(all(right) for right in pool.map(use, [llm, other]))
