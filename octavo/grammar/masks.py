"""The engine's side of structured output: compiles grammars while steps run, and masks while the forward pass runs."""

from __future__ import annotations

import contextlib
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
"""Most bytes of text of the grammars that are cached for further requests."""
NICENESS = 10
EAGER_SECONDS = 5.0
"""For so long after a start for which requests with grammars waited, grammars are compiled at the priority of steps."""
TOO_SLOW = "computing what the grammar allows takes too long"


@dataclass(eq=False, slots=True)
class MatcherProgress:
    """Matcher state of one sequence. It only advances: sampled tokens are never rolled back."""

    matcher: LLMatcher
    num_tokens: int = 0
    has_ended: bool = False
    """Whether an end token has completed the text; with ``ignore_eos`` generation continues."""
    seconds: float = 0.0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """The masks that one item of a plan needs."""

    sequence_id: int
    progress: MatcherProgress
    tokens: Sequence[int | None]
    """Tokens since the last mask."""
    drafts: tuple[int, ...]


class PendingMasks(Mapping[int, list[Mask]]):
    """Masks that are being computed; access waits for them."""

    def __init__(self, future: Future[dict[int, list[Mask]]]) -> None:
        self._future = future

    def __getitem__(self, sequence_id: int) -> list[Mask]:
        return self._future.result()[sequence_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._future.result())

    def __len__(self) -> int:
        return len(self._future.result())


def _allow_all(masks: list[Mask]) -> None:
    """Allow every token: text after the end of the grammar is unconstrained."""
    for mask in masks:
        mask[:] = 0xFF


def _give_way() -> None:
    """Lower this thread's priority below the steps', on Linux, where threads have their own."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)


class MatcherMasks:
    """The ``Grammars`` of an engine, over llguidance. ``load`` reads the vocabulary on first use.

    One thread compiles and another computes masks, so that neither waits for the other; llguidance releases the
    interpreter lock in both.
    """

    def __init__(self, load: Callable[[], Vocabulary]) -> None:
        self._load = load
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="grammars", initializer=_give_way)
        self._eagerly_compiling = ThreadPoolExecutor(1, thread_name_prefix="first grammars")
        self._eager_until = 0.0
        self._masking = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._loading = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._eos_ids: frozenset[int] = frozenset()
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._keeping = threading.Lock()
        self._last: Future[dict[int, list[Mask]]] | None = None

    # ---- the vocabulary

    def start_loading(self) -> None:
        """Load the vocabulary in a thread, instead of with the first grammar."""
        threading.Thread(target=self.finish_loading, name="vocabulary of grammars", daemon=True).start()

    def finish_loading(self) -> None:
        """Load the vocabulary, or wait until it is loaded. An error is left for the first grammar."""
        with contextlib.suppress(Exception):
            self._loaded()
        self._eager_until = time.monotonic() + EAGER_SECONDS

    def _loaded(self) -> LLTokenizer:
        with self._loading:
            if self._tokenizer is None:
                vocabulary = self._load()
                self._eos_ids = frozenset(vocabulary.eos_ids)
                self._tokenizer = make_tokenizer(vocabulary)
            return self._tokenizer

    # ---- before a request is scheduled

    def prepare(self, request: Request) -> Future[MatcherProgress]:
        """Start compiling the grammar of ``request``. The future may raise ``GrammarError``."""
        assert request.params.grammar is not None
        is_eager = time.monotonic() < self._eager_until
        threads = self._eagerly_compiling if is_eager else self._compiling
        return threads.submit(self._compile, request.params.grammar)

    def _compile(self, text: str) -> MatcherProgress:
        with self._keeping:
            matcher = self._kept.get(text)
        if matcher is None:
            matcher = compile_matcher(normalised(text), self._loaded())
        with self._keeping:
            self._kept[text] = matcher
            self._kept.move_to_end(text)
            while len(self._kept) > 1 and sum(map(len, self._kept)) > MAX_KEPT_BYTES:
                self._kept.popitem(last=False)
            return MatcherProgress(matcher.deep_copy())

    # ---- in a step

    def masks(self, plan: Plan) -> Masks:
        """The masks of the sequences in ``plan`` that have a grammar, computed in the background."""
        bound = [item for item in plan if item.samples and item.seq.grammar is not None and not item.is_stale]
        if not bound:
            return {}
        if self._last is not None:
            self._last.result()  # after a failed step they may still be in progress
        tasks = []
        for item in bound:
            seq, progress = item.seq, item.seq.grammar
            end = item.settled_start + len(item.tokens)
            tokens = seq.tokens[seq.num_prompt_tokens + progress.num_tokens : end]
            progress.num_tokens += len(tokens)
            tasks.append(Task(seq.id, progress, tokens, item.known_drafts))
        self._last = self._masking.submit(self._compute, tasks)
        return PendingMasks(self._last)

    def _compute(self, tasks: list[Task]) -> dict[int, list[Mask]]:
        return {task.sequence_id: self._compute_one(task) for task in tasks}

    def _compute_one(self, task: Task) -> list[Mask]:
        """A mask for the next token and for the one after each draft that is allowed."""
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
                mask[:] = 0  # an empty mask makes the sampler fail this sequence alone
        return masks

    def _match(self, task: Task, masks: list[Mask]) -> None:
        assert self._tokenizer is not None
        matcher, num_known = task.progress.matcher, self._tokenizer.vocab_size
        matcher.consume_tokens(list(task.tokens))  # type: ignore[arg-type]
        fill_mask(matcher, masks[0])
        num_taken = 0
        for draft, mask in zip(task.drafts, masks[1:], strict=True):
            if draft in self._eos_ids:
                _allow_all(masks[1 + num_taken :])
                break
            if draft >= num_known or not matcher.try_consume_tokens([draft]):
                break  # a model may have logits for more tokens than its tokenizer has
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
