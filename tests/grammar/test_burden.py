"""Trying a grammar out is no burden to the process that serves streams, however large the vocabulary."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from octavo.grammar import forms
from octavo.grammar.masks import MatcherMasks
from octavo.grammar.trial_queue import TrialQueue
from octavo.grammar.vocabulary import PackedVocabulary, Vocabulary, pack_tokens
from octavo.sampling_params import SamplingParams
from octavo.types import Request
from tests.grammar.walks import VOCABULARY
from tests.timing import undisturbed

NUM_TOKENS = 150_000
MAX_ASKING_SECONDS = 0.015
"""Of the processor, in the asking thread: the child's start and one answer. Encoding the tokens anew takes 36 ms and
more on an idle machine, and most of that time the interpreter's lock is held."""


def niceness(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[16])


@pytest.mark.timing
def test_starting_the_child_costs_little_whatever_the_vocabulary() -> None:
    tokens = [bytes([i % 256]) if i < 256 else b"%x" % i for i in range(NUM_TOKENS)]
    vocabulary = PackedVocabulary(pack_tokens(tokens), [NUM_TOKENS - 1], [NUM_TOKENS - 1])

    def seconds() -> float:
        asking = TrialQueue(lambda: vocabulary)
        try:
            before = time.thread_time()
            verdict = asking._ask(forms.grammar_text(forms.choice(["yes", "no"])))
            used = time.thread_time() - before
            assert verdict.form is not None, verdict.reason
            return used
        finally:
            asking.close()

    assert undisturbed(seconds, MAX_ASKING_SECONDS) < MAX_ASKING_SECONDS


@pytest.mark.skipif(not Path("/proc").exists(), reason="reads a process's niceness from /proc")
def test_the_child_gives_way_to_the_engine() -> None:
    async def check() -> None:
        vocabulary = PackedVocabulary(pack_tokens(VOCABULARY.tokens), VOCABULARY.special_ids, VOCABULARY.eos_ids)
        asking = TrialQueue(lambda: vocabulary)
        try:
            await asking.try_grammar(forms.grammar_text(forms.choice(["yes", "no"])))
            assert asking.process_id is not None
            assert niceness(asking.process_id) == min(19, os.nice(0) + 10)
        finally:
            asking.close()

    asyncio.run(check())


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads have priorities of their own on Linux")
def test_compiling_in_the_engine_gives_way_to_its_steps() -> None:
    found: dict[str, Any] = {}

    def load() -> Vocabulary:
        found["thread"] = threading.current_thread().name
        found["niceness"] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        return VOCABULARY

    masks = MatcherMasks(load)
    params = SamplingParams(grammar=forms.grammar_text(forms.choice(["yes", "no"])))
    masks.prepare(Request(1, [1], params, max_tokens=4)).result(60)
    assert found["thread"].startswith("grammars")
    assert found["niceness"] == min(19, os.nice(0) + 10)
