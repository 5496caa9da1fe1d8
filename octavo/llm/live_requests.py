"""The engine of this process with its unfinished requests."""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from types import FrameType

from octavo.engine.engine import Engine
from octavo.errors import Unavailable
from octavo.llm.adapters import BASE, Adapter
from octavo.llm.continuations import Continuation, GenerationJob
from octavo.llm.outputs import CompletionOutput
from octavo.llm.prompts import READ, Checked, TokenizedText
from octavo.sampling_params import choice_key
from octavo.text.tokenizer import Tokenizer
from octavo.types import MemoryPart, Request, Task


class Unfinished:
    """How many continuations of a call are unfinished."""

    count = 0


class LiveRequests:
    """Makes requests of prompts, and runs the engine over them; ``seed`` is for requests without one.

    Several threads may use it: whichever runs a step advances the requests of all.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None, seed: int) -> None:
        self._engine: Engine | None = engine
        self._tokenizer = tokenizer
        self._live: dict[int, tuple[Continuation, Unfinished]] = {}
        """Unfinished continuations, and the calls that they belong to, by request id."""
        self._lock = threading.RLock()
        """Held for every use of the engine and of ``_live``."""
        self._ids = itertools.count()
        self._seeds = random.Random(seed)

    @property
    def engine(self) -> Engine:
        """The engine; raises ``Unavailable`` after ``close``."""
        if self._engine is None:
            raise Unavailable("This engine is closed.")
        return self._engine

    def close(self) -> None:
        """Free the memory and drop unfinished requests. May be called twice."""
        with self._lock:
            engine, self._engine = self._engine, None
            if engine is not None:
                engine.close()
            self._live.clear()

    def make(self, job_id: str, prompt: Checked, priority: int = 0, adapter: Adapter = BASE) -> GenerationJob:
        """The ``n`` continuations of a prompt, not yet submitted."""
        params = prompt.params
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
        requests = [
            Request(
                id=next(self._ids),
                prompt_tokens=prompt.tokens,
                params=params,
                max_tokens=prompt.max_tokens,
                seed=choice_key(seed, index),
                eos_token_ids=prompt.eos_token_ids,
                banned_sequences=prompt.banned_sequences,
                thinking=prompt.thinking,
                priority=priority,
                arrival=time.monotonic(),
                adapter=adapter.name,
                cache_salt=adapter.cache_salt,
                images=list(prompt.images),
            )
            for index in range(params.n)
        ]
        reading = self.engine.scheduler.routes
        routes = None if reading is None else reading.info
        continuations = [
            Continuation(index, request, self._tokenizer, routes) for index, request in enumerate(requests)
        ]
        return GenerationJob(job_id, prompt.text, continuations)

    def make_reading(self, text: TokenizedText, task: Task) -> GenerationJob:
        """A text to embed or score, not yet submitted."""
        number, arrival = next(self._ids), time.monotonic()
        request = Request(number, text.tokens, READ, 0, arrival=arrival, task=task, second_start=text.second_start)
        return GenerationJob("", None, [Continuation(0, request, self._tokenizer)])

    def submit(self, job: GenerationJob, unfinished: Unfinished) -> None:
        """Give the engine the continuations of ``job``, or none of them. Raises ``RequestError``."""
        with self._lock:
            try:
                for continuation in job.continuations:
                    self.engine.add(continuation.request)
                    self._live[continuation.request.id] = continuation, unfinished
                    unfinished.count += 1
            except BaseException:
                self.abort(job)
                raise

    def abort(self, job: GenerationJob) -> None:
        """End the unfinished continuations of ``job``, without further output."""
        with self._lock:
            for continuation in job.continuations:
                if self._live.pop(continuation.request.id, None) is not None:
                    self.engine.abort(continuation.request.id)

    @contextlib.contextmanager
    def submitted(self, jobs: Sequence[GenerationJob]) -> Iterator[Unfinished]:
        """Submit ``jobs`` to the engine; abort those that are unfinished at the end of the block."""
        unfinished = Unfinished()
        try:
            for job in jobs:
                self.submit(job, unfinished)
            yield unfinished
        finally:
            for job in jobs:
                self.abort(job)

    def step(self, unfinished: Unfinished | None = None) -> list[Continuation]:
        """Run one engine step; return the continuations that it advanced, of which some may have finished.

        Does nothing if all of a call have been finished by steps of other threads.
        """
        with self._lock:
            return self._step() if unfinished is None or unfinished.count else []

    def load_weights(self, folder: str, files: Sequence[str]) -> None:
        """See ``Engine.load_weights``; the requests of all threads end first."""
        with self._lock:
            while self.engine.has_work:
                self._step()
            self.engine.load_weights(folder, files)

    def sleep(self) -> None:
        """See ``Engine.sleep``; the requests of all threads end first."""
        with self._lock:
            while self.engine.has_work:
                self._step()
            self.engine.sleep()

    def wake(self, parts: Collection[MemoryPart]) -> None:
        """See ``Engine.wake``."""
        with self._lock:
            self.engine.wake(parts)

    def next_piece(self, continuation: Continuation) -> CompletionOutput | None:
        """What is new of a continuation, while no thread adds to it."""
        with self._lock:
            return continuation.next_piece()

    def _step(self) -> list[Continuation]:
        engine, advanced = self.engine, []
        assert engine.has_work, "the engine lost requests"
        with interrupts_held_back():
            outputs = engine.step()
            now = time.monotonic()
            for output in outputs:
                if output.request_id not in self._live:
                    continue
                continuation, unfinished = self._live[output.request_id]
                continuation.take(output, now)
                advanced.append(continuation)
                if continuation.finish_reason is not None:
                    del self._live[output.request_id]
                    unfinished.count -= 1
                if continuation.finish_reason != output.finish_reason:
                    engine.abort(output.request_id)  # a stop string ended it; the engine sees tokens only
        return advanced


@contextlib.contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Within this block SIGINT is recorded; it is raised at the end of the block.

    An exception in the middle of a step would leave the engine's state inconsistent. A second Ctrl-C is not
    deferred, so a step that hangs can be interrupted. Only the main thread receives signals; in others this has no
    effect.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    is_noted = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal is_noted
        is_noted = True
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if is_noted:
            signal.raise_signal(signal.SIGINT)
