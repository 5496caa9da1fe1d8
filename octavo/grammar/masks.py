"""The engine's side of structured output: it compiles beside the steps, and computes masks beside the forward pass."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from llguidance import LLMatcher, LLTokenizer

from octavo.grammar.matchers import (
    FREE_SECONDS,
    SECONDS_PER_TOKEN,
    Mask,
    compile_matcher,
    fill_mask,
    first_line,
    make_tokenizer,
    new_mask,
    normalised,
)
from octavo.grammar.vocabulary import Vocabulary
from octavo.types import Masks, Plan, Request

logger = logging.getLogger(__name__)

MAX_KEPT_BYTES = 1 << 20
"""Grammars are kept for further requests while their texts are no longer than this together."""
NICENESS = 10
TOO_SLOW = "computing what the grammar allows takes too long"


@dataclass(eq=False, slots=True)
class Progress:
    """How far one sequence's text is matched. It only grows: tokens, once sampled, are never taken back."""

    matcher: LLMatcher
    num_tokens: int = 0
    has_ended: bool = False
    """The text is complete, and a token has said so; a client may have asked that it go on all the same."""
    seconds: float = 0.0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """The masks that one item of a plan needs."""

    sequence_id: int
    progress: Progress
    tokens: Sequence[int | None]
    """Those that came since the last mask."""
    drafts: tuple[int, ...]


class ComingMasks(Mapping[int, list[Mask]]):
    """Masks that are being computed; whoever looks into them waits."""

    def __init__(self, future: Future[dict[int, list[Mask]]]) -> None:
        self._future = future

    def __getitem__(self, sequence_id: int) -> list[Mask]:
        return self._future.result()[sequence_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._future.result())

    def __len__(self) -> int:
        return len(self._future.result())


def _allow_all(masks: list[Mask]) -> None:
    """Bind nothing: what is written after the end of a text is no part of it."""
    for mask in masks:
        mask[:] = 0xFF


def _give_way() -> None:
    """Leave the cores to the steps: on Linux, where threads have priorities of their own."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)


class MatcherMasks:
    """The ``Grammars`` of an engine, over llguidance. ``load`` reads the vocabulary when it is first needed.

    Two threads do the work, one the compiling and one the masks, so that neither waits for the other; llguidance
    lets go of the interpreter lock in both.
    """

    def __init__(self, load: Callable[[], Vocabulary]) -> None:
        self._load = load
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="grammars", initializer=_give_way)
        self._masking = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._tokenizer: LLTokenizer | None = None
        self._eos_ids: frozenset[int] = frozenset()
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._last: Future[dict[int, list[Mask]]] | None = None

    # ---- before a request is scheduled

    def prepare(self, request: Request) -> Future[Progress]:
        """Start to compile what ``request`` is bound to. The future may come to hold a ``GrammarError``."""
        assert request.params.grammar is not None
        return self._compiling.submit(self._compile, request.params.grammar)

    def _compile(self, text: str) -> Progress:
        matcher = self._kept.get(text)
        if matcher is None:
            if self._tokenizer is None:
                vocabulary = self._load()
                self._tokenizer, self._eos_ids = make_tokenizer(vocabulary), frozenset(vocabulary.eos_ids)
            matcher = self._kept[text] = compile_matcher(normalised(text), self._tokenizer)
        self._kept.move_to_end(text)
        while len(self._kept) > 1 and sum(map(len, self._kept)) > MAX_KEPT_BYTES:
            self._kept.popitem(last=False)
        return Progress(matcher.deep_copy())

    # ---- in a step

    def masks(self, plan: Plan) -> Masks:
        """The masks of the sequences in ``plan`` that have a grammar; they are computed while the caller goes on."""
        bound = [item for item in plan if item.samples and item.seq.grammar is not None and not item.is_stale]
        if not bound:
            return {}
        if self._last is not None:
            self._last.result()  # nobody may have looked into them, if the step failed
        tasks = []
        for item in bound:
            seq, progress = item.seq, item.seq.grammar
            end = item.start + len(item.tokens)
            tokens = seq.tokens[seq.num_prompt_tokens + progress.num_tokens : end]
            progress.num_tokens += len(tokens)
            tasks.append(Task(seq.id, progress, tokens, item.drafts))
        self._last = self._masking.submit(self._compute, tasks)
        return ComingMasks(self._last)

    def _compute(self, tasks: list[Task]) -> dict[int, list[Mask]]:
        return {task.sequence_id: self._compute_one(task) for task in tasks}

    def _compute_one(self, task: Task) -> list[Mask]:
        """A mask for the next token and, behind each draft that is allowed, for the one after it."""
        assert self._tokenizer is not None
        progress = task.progress
        masks = [new_mask(self._tokenizer) for _ in range(1 + len(task.drafts))]
        progress.has_ended = progress.has_ended or not self._eos_ids.isdisjoint(task.tokens)
        if progress.has_ended:
            _allow_all(masks)
        elif progress.error is None:
            started = time.thread_time()
            self._match(task, masks)
            progress.seconds += time.thread_time() - started
            self._check(task)
        if progress.error is not None:
            for mask in masks:
                mask[:] = 0  # with nothing allowed, the sampler ends this sequence and no other
        return masks

    def _match(self, task: Task, masks: list[Mask]) -> None:
        matcher = task.progress.matcher
        matcher.consume_tokens(list(task.tokens))  # type: ignore[arg-type]
        fill_mask(matcher, masks[0])
        num_taken = 0
        for draft, mask in zip(task.drafts, masks[1:], strict=True):
            if draft in self._eos_ids:
                _allow_all(masks[1 + num_taken :])
                break
            if not matcher.try_consume_tokens([draft]):
                break
            num_taken += 1
            fill_mask(matcher, mask)
        matcher.rollback(num_taken)

    def _check(self, task: Task) -> None:
        progress = task.progress
        if progress.matcher.is_error():
            progress.error = first_line(progress.matcher.get_error())
        elif progress.seconds > FREE_SECONDS + SECONDS_PER_TOKEN * progress.num_tokens:
            progress.error = TOO_SLOW
        if progress.error is not None:
            logger.warning("request %d: its grammar failed: %s", task.sequence_id, progress.error)
