"""The failure of one prompt does not affect others, and Ctrl-C leaves the engine usable."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from octavo import LLM, RunnerError, SamplingParams
from octavo.engine.protocols import Runner, SubmittedStep
from octavo.llm.live_requests import interrupts_held_back
from octavo.types import Masks, Plan, Sampled

PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


class Watched:
    """A runner that runs a check before each step is waited for."""

    def __init__(self, runner: Runner, check: Callable[[Plan], None]) -> None:
        self.runner = runner
        self.check = check

    def submit(self, plan: Plan) -> SubmittedStep:
        return WatchedStep(self.runner.submit(plan), plan, self.check)


class WatchedStep:
    """A step of ``Watched``."""

    def __init__(self, pending: SubmittedStep, plan: Plan, check: Callable[[Plan], None]) -> None:
        self.pending, self.plan, self.check = pending, plan, check

    @property
    def is_started(self) -> bool:
        return self.pending.is_started

    def sample(self, masks: Masks) -> list[Sampled]:
        self.check(self.plan)
        return self.pending.sample(masks)


@pytest.fixture(autouse=True)
def _ctrl_c_interrupts() -> Iterator[None]:
    """As in a terminal: a process that a script starts in the background has its SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def watch(llm: LLM) -> Iterator[Callable[[Callable[[Plan], None]], None]]:
    """Set a check on the model's runner for one test."""
    runner = llm.engine.runner

    def start(check: Callable[[Plan], None]) -> None:
        llm.engine.runner = Watched(runner, check)

    yield start
    llm.engine.runner = runner


def test_one_failure_does_not_lose_the_other_results(llm: LLM, watch: Callable[[Callable[[Plan], None]], None]) -> None:
    prompts = ["fine", "bad", "also fine"]
    expected = llm.generate(prompts, PARAMS)
    bad = llm.get_tokenizer().encode("bad")

    def check(plan: Plan) -> None:
        if any(item.seq.request.prompt_tokens == bad and item.seq.num_output_tokens > 3 for item in plan):
            raise RunnerError("the device is on fire")

    watch(check)
    results = llm.generate(prompts, PARAMS)
    assert [result.outputs[0].finish_reason for result in results] == ["length", "error", "length"]
    assert "on fire" in (results[1].outputs[0].error or "")
    begun = results[1].outputs[0].token_ids
    assert 0 < len(begun) < 10
    assert begun == expected[1].outputs[0].token_ids[: len(begun)]
    for place in (0, 2):
        assert results[place].outputs == expected[place].outputs


def test_ctrl_c_ends_the_call_between_two_steps_and_leaves_nothing_behind(
    llm: LLM, watch: Callable[[Callable[[Plan], None]], None]
) -> None:
    expected = llm.generate(["a", "b"], PARAMS)
    steps = 0

    def check(plan: Plan) -> None:
        nonlocal steps
        steps += 1
        if steps == 3:
            signal.raise_signal(signal.SIGINT)

    watch(check)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], PARAMS)
    assert steps == 3
    assert llm.engine.stats().num_running == 0
    llm.engine.check()
    assert [r.outputs for r in llm.generate(["a", "b"], PARAMS)] == [r.outputs for r in expected]


def test_an_interrupt_waits_for_the_end_of_the_block() -> None:
    order = []
    with contextlib.suppress(KeyboardInterrupt):
        with interrupts_held_back():
            signal.raise_signal(signal.SIGINT)
            order.append("in the block")
        order.append("not reached")
    assert order == ["in the block"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_does_not_wait() -> None:
    order = []
    with contextlib.suppress(KeyboardInterrupt), interrupts_held_back():
        signal.raise_signal(signal.SIGINT)
        order.append("after the first")
        signal.raise_signal(signal.SIGINT)
        order.append("not reached")
    assert order == ["after the first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_run_as_usual() -> None:
    ran = []

    def work() -> None:
        with interrupts_held_back():
            ran.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ran == [True]
