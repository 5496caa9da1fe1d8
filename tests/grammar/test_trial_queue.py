"""Grammars are tried out in a process of their own, whose time and memory are bounded."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar

import pytest

from octavo.errors import QueueFull
from octavo.grammar import forms, tester
from octavo.grammar.trial_queue import MAX_PROCESSES, PAUSE, GrammarRefused, TrialQueue
from octavo.grammar.vocabulary import PackedVocabulary, pack_tokens
from octavo.system.child_process import ChildLost
from octavo.system.child_worker import RENDERED, Answer
from tests.grammar.walks import VOCABULARY

PACKED = PackedVocabulary(pack_tokens(VOCABULARY.tokens), VOCABULARY.special_ids, VOCABULARY.eos_ids)
GOOD = forms.grammar_text(forms.json_schema({"type": "object"}))


def run(
    test: Callable[[TrialQueue], Coroutine[Any, Any, None]],
    max_seconds: float = 2.0,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    async def inside() -> None:
        trials = TrialQueue(lambda: PACKED, max_seconds, clock)
        try:
            await test(trials)
        finally:
            trials.close()

    asyncio.run(inside())


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        either = [{"anyOf": [schema, {"type": kind}]} for kind in ("integer", "boolean")]
        schema = {"allOf": either}
    return schema


def many(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(count)}}


def rules(count: int) -> str:
    start = "start: " + " | ".join(f"r{index}" for index in range(count))
    return "\n".join([start, *(f'r{index}: "a" r{index * 7 % count}?' for index in range(count))])


BOMBS = {
    "repeats of repeats": forms.regex("((a{0,100}){0,100}){0,100}"),
    "big repeats": forms.regex("(.{0,1000}){0,1000}x"),
    "counting": forms.regex("(a|b)*a(a|b){900}"),
    "dots": forms.regex("(.*a.*b.*c.*d.*e.*f.*g){20}"),
    "unclosed": forms.regex("(" * 2000),
    "lookaround": forms.regex("(?=a)b"),
    "long expression": forms.regex("(a|b)" * 10000),
    "nested schemas": forms.json_schema(nested(8)),
    "deep schema": forms.json_schema(nested(6)),
    "many properties": forms.json_schema(many(2000)),
    "long enum": forms.json_schema({"enum": [f"value {index}" for index in range(4000)]}),
    "long strings": forms.json_schema({"type": "string", "minLength": 10**9, "maxLength": 2 * 10**9}),
    "long arrays": forms.json_schema({"type": "array", "minItems": 10**9}),
    "expressions together": forms.json_schema(
        {"allOf": [{"type": "string", "pattern": f"{c}.*{c}.{{1,30}}{c}"} for c in "abcdefghijklm"]}
    ),
    "endless reference": forms.json_schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    "endless rule": forms.grammar("start: start start"),
    "ambiguous rule": forms.grammar('start: a\na: a a a | "x" | ""'),
    "parentheses": forms.grammar("start: " + "(" * 20000 + '"a"' + ")" * 20000),
    "parentheses of GBNF": forms.grammar("root ::= " + "(" * 20000 + '"a"' + ")" * 20000),
    "many rules": forms.grammar(rules(3000)),
}


def test_a_bomb_costs_little_and_leaves_nothing_behind() -> None:
    async def test(trials: TrialQueue) -> None:
        await trials.try_grammar(GOOD)
        for name, part in BOMBS.items():
            started = time.monotonic()
            before = time.process_time()
            with contextlib.suppress(GrammarRefused):
                await trials.try_grammar(forms.grammar_text(part))
            assert time.monotonic() - started < 150, f"{name}: two seconds of processor time, and what other work takes"
            assert time.process_time() - before < 0.5, name
            await trials.try_grammar(forms.grammar_text(forms.choice([name])))

    run(test)


def test_a_grammar_that_hangs_is_cut_off_and_the_next_one_served() -> None:
    hanging = forms.grammar_text(forms.regex("a+"))

    async def test(trials: TrialQueue) -> None:
        await trials.try_grammar(GOOD)
        first = trials.process_id
        assert first is not None
        os.kill(first, 19)  # SIGSTOP: it does not answer any more
        with pytest.raises(GrammarRefused, match=r"more than 0\.5 seconds"):
            await trials.try_grammar(hanging)
        await trials.try_grammar(forms.grammar_text(forms.regex("b+")))
        assert trials.process_id != first
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)

    run(test, max_seconds=0.5)


def test_verdicts_are_kept() -> None:
    async def test(trials: TrialQueue) -> None:
        bad = forms.grammar_text(forms.json_schema({"not": {}}))
        await trials.try_grammar(GOOD)
        with pytest.raises(GrammarRefused, match="uses 'not'"):
            await trials.try_grammar(bad)
        trials.close()
        await trials.try_grammar(GOOD)
        with pytest.raises(GrammarRefused, match="uses 'not'"):
            await trials.try_grammar(bad)
        assert trials.process_id is None, "a process was started for what is known"

    run(test)


def late_answer(text: str, monkeypatch: pytest.MonkeyPatch) -> Answer:
    """What the tester says of a grammar whose compilation takes longer than it may."""
    with monkeypatch.context() as patch:
        patch.setattr(tester, "MAX_COMPILE_SECONDS", -1.0)
        return tester.Tester(VOCABULARY).serve(text)


@pytest.mark.parametrize("is_lost", [False, True])
def test_what_took_too_long_is_tried_again_after_a_pause(is_lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    text = forms.grammar_text(forms.regex("a+"))
    now = 100.0
    first = ChildLost("it used up its memory or processor time") if is_lost else late_answer(text, monkeypatch)
    answers = [first, tester.Tester(VOCABULARY).serve(text)]

    class Child:
        """A worker that takes two seconds for its first question, and is asked two."""

        is_alive = True

        def __init__(self, *settings: object) -> None: ...
        def close(self) -> None: ...

        def ask(self, question: str) -> Answer:
            nonlocal now
            now += 2
            answer = answers.pop(0)
            if isinstance(answer, ChildLost):
                raise answer
            return answer

    monkeypatch.setattr("octavo.grammar.trial_queue.ChildProcess", Child)

    async def test(trials: TrialQueue) -> None:
        nonlocal now
        reason = "processor time" if is_lost else "compiling it takes too long"
        tries = await asyncio.gather(*(trials.try_grammar(text) for _ in range(5)), return_exceptions=True)
        assert all(isinstance(each, GrammarRefused) and reason in str(each) for each in tries)
        now += 2 * PAUSE - 0.1
        with pytest.raises(GrammarRefused, match=reason):
            await trials.try_grammar(text)
        assert len(answers) == 1, "it was tried more than once"
        now += 0.2
        form = await trials.try_grammar(text)
        now += 1e6
        assert await trials.try_grammar(text) == form, "what passed is kept"

    run(test, clock=lambda: now)


def test_a_process_that_does_not_start_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*settings: object) -> None:
        raise ChildLost("its process did not start")

    async def test(trials: TrialQueue) -> None:
        with monkeypatch.context() as patch:
            patch.setattr("octavo.grammar.trial_queue.ChildProcess", fails)
            with pytest.raises(GrammarRefused, match="did not start"):
                await trials.try_grammar(GOOD)
        await trials.try_grammar(GOOD)

    run(test, clock=lambda: 0.0)


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.grammar.trial_queue.MAX_KEPT_BYTES", 500)

    async def test(trials: TrialQueue) -> None:
        for index in range(40):
            await trials.try_grammar(forms.grammar_text(forms.choice([f"choice {index}"])))
        assert sum(map(len, trials._kept)) <= 500

    run(test)


@pytest.mark.parametrize(
    "make",
    [
        lambda: forms.json_schema(nested(14)),
        lambda: forms.regex("a" * 300_000),
        lambda: forms.choice(["a" * 1000] * 300),
        lambda: forms.grammar("start: " + '"a"' * 100_000),
    ],
)
def test_what_is_too_large_is_refused_before_anything_is_made_of_it(make: Callable[[], forms.Part]) -> None:
    with pytest.raises(forms.FormError, match="larger than"):
        make()


def test_a_grammar_that_is_too_large_is_refused_at_once() -> None:
    async def test(trials: TrialQueue) -> None:
        with pytest.raises(GrammarRefused, match=f"larger than {forms.MAX_GRAMMAR_BYTES} bytes"):
            await trials.try_grammar(forms.grammar_text({"regex": "a" * forms.MAX_GRAMMAR_BYTES}))
        assert trials.process_id is None

    run(test)


def test_cancelling_ends_the_work() -> None:
    async def test(trials: TrialQueue) -> None:
        await trials.try_grammar(GOOD)
        first = trials.process_id
        assert first is not None
        os.kill(first, 19)
        task = asyncio.create_task(trials.try_grammar(forms.grammar_text(forms.regex("a+"))))
        await asyncio.sleep(0.05)
        started = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await trials.try_grammar(forms.grammar_text(forms.regex("b+")))
        assert trials.process_id != first
        assert time.monotonic() - started < 15

    run(test, max_seconds=20)


class SlowChild:
    """A worker that is as slow as the test wants, and notes what it compiled."""

    compiled: ClassVar[list[str]] = []
    running: ClassVar[int] = 0
    most: ClassVar[int] = 0
    gate: ClassVar[threading.Semaphore]

    is_alive = True

    def __init__(self, *settings: object) -> None: ...
    def close(self) -> None: ...

    def ask(self, question: str) -> Answer:
        SlowChild.running += 1
        SlowChild.most = max(SlowChild.most, SlowChild.running)
        assert SlowChild.gate.acquire(timeout=30)
        SlowChild.running -= 1
        self.compiled.append(question)
        return RENDERED, question


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> type[SlowChild]:
    SlowChild.compiled, SlowChild.running, SlowChild.most = [], 0, 0
    SlowChild.gate = threading.Semaphore(0)
    monkeypatch.setattr("octavo.grammar.trial_queue.ChildProcess", SlowChild)
    monkeypatch.setattr("octavo.grammar.trial_queue.SLOW_SECONDS", 0.0)
    return SlowChild


async def until_done(slow: type[SlowChild], task: asyncio.Task[Any]) -> None:
    """Let one question after the other be answered, however slow the machine is."""
    while not task.done():
        count = len(slow.compiled)
        slow.gate.release()
        while len(slow.compiled) == count:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.005)


def test_a_tenant_waits_for_few_grammars_of_another(slow: type[SlowChild]) -> None:
    async def test(trials: TrialQueue) -> None:
        flood = [asyncio.create_task(trials.try_grammar(f"flood {index}", "a")) for index in range(50)]
        await asyncio.sleep(0)
        other = asyncio.create_task(trials.try_grammar("other", "b"))
        again = asyncio.create_task(trials.try_grammar("flood 49", "b"))
        await until_done(slow, other)
        assert slow.compiled.index("other") < 2 * MAX_PROCESSES
        await until_done(slow, again)
        assert slow.compiled.index("flood 49") <= 3 * MAX_PROCESSES, "what both wait for is in both queues"
        assert (await trials.try_grammar("other", "c")).form == "other", "what is known waits for nothing"
        slow.gate.release(100)
        await asyncio.gather(*flood)
        assert len(slow.compiled) == 51
        assert slow.most == MAX_PROCESSES

    run(test)


def test_grammars_that_take_little_time_need_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.grammar.trial_queue.SLOW_SECONDS", 30.0)  # little even on a busy machine

    async def test(trials: TrialQueue) -> None:
        await trials.try_grammar(GOOD)
        first = trials.process_id
        await asyncio.gather(*(trials.try_grammar(forms.grammar_text(forms.choice([str(n)]))) for n in range(20)))
        assert [process.id for process in trials._processes] == [first]

    run(test, max_seconds=30.0)


def test_a_second_process_ends_when_there_is_nothing_to_do(slow: type[SlowChild]) -> None:
    async def test(trials: TrialQueue) -> None:
        tasks = [asyncio.create_task(trials.try_grammar(f"{number}")) for number in range(4)]
        while len(trials._processes) < MAX_PROCESSES:
            await asyncio.sleep(0.001)
        slow.gate.release(4)
        await asyncio.gather(*tasks)
        assert len(trials._processes) == 1

    run(test)


def test_a_process_can_be_started_before_the_first_grammar() -> None:
    async def test(trials: TrialQueue) -> None:
        trials.start_process()
        while not trials._idle:
            await asyncio.sleep(0.01)
        first = trials.process_id
        await trials.try_grammar(GOOD)
        assert trials.process_id == first

    run(test)


def test_a_queue_is_bounded_for_each_tenant(slow: type[SlowChild], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.grammar.trial_queue.MAX_WAITING", 3)

    async def test(trials: TrialQueue) -> None:
        flood = [asyncio.create_task(trials.try_grammar(f"flood {index}", "a")) for index in range(3 + MAX_PROCESSES)]
        await asyncio.sleep(0)
        for _ in range(3):
            with pytest.raises(QueueFull) as refused:
                await trials.try_grammar("more", "a")
            assert refused.value.retry_after
        other = asyncio.create_task(trials.try_grammar("more", "b"))
        flood[-1].cancel()
        await asyncio.sleep(0)
        flood[-1] = asyncio.create_task(trials.try_grammar("there is room again", "a"))
        await asyncio.sleep(0)
        slow.gate.release(100)
        await asyncio.gather(other, *flood)
        assert f"flood {2 + MAX_PROCESSES}" not in slow.compiled, "what no request waits for is not compiled"
        assert not trials._jobs
        assert not trials._waiting

    run(test)


def test_many_at_once_are_served_one_after_the_other() -> None:
    async def test(trials: TrialQueue) -> None:
        texts = [forms.grammar_text(forms.choice([str(index % 5)])) for index in range(30)]
        results = await asyncio.gather(*(trials.try_grammar(text) for text in texts))
        assert [each.form for each in results] == texts

    run(test)
