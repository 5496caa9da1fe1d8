"""The engine of this process with its unfinished requests."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Iterator, Sequence

from octavo.engine.engine import Engine
from octavo.errors import Unavailable
from octavo.llm.continuations import Continuation, Job
from octavo.llm.interrupts import interrupts_held_back
from octavo.llm.prompts import READ, Checked, Text
from octavo.sampling_params import choice_key
from octavo.text.tokenizer import Tokenizer
from octavo.types import Request, Task


class LiveRequests:
    """Makes requests of prompts, and runs the engine over them; ``seed`` is for requests without one."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None, seed: int) -> None:
        self._engine: Engine | None = engine
        self._tokenizer = tokenizer
        self._live: dict[int, Continuation] = {}
        """Unfinished continuations, by request id."""
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
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
        self._live.clear()

    def make(self, job_id: str, prompt: Checked, priority: int = 0) -> Job:
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
                priority=priority,
                arrival=time.monotonic(),
            )
            for index in range(params.n)
        ]
        continuations = [Continuation(index, request, self._tokenizer) for index, request in enumerate(requests)]
        return Job(job_id, prompt.text, continuations)

    def make_reading(self, text: Text, task: Task) -> Job:
        """A text to embed or score, not yet submitted."""
        number, arrival = next(self._ids), time.monotonic()
        request = Request(number, text.tokens, READ, 0, arrival=arrival, task=task, second_start=text.second_start)
        return Job("", None, [Continuation(0, request, self._tokenizer)])

    def submit(self, job: Job) -> None:
        """Give the engine the continuations of ``job``, or none of them. Raises ``RequestError``."""
        try:
            for continuation in job.continuations:
                self.engine.add(continuation.request)
                self._live[continuation.request.id] = continuation
        except BaseException:
            self.abort(job)
            raise

    def abort(self, job: Job) -> None:
        """End the unfinished continuations of ``job``, without further output."""
        for continuation in job.continuations:
            if self._live.pop(continuation.request.id, None) is not None:
                self.engine.abort(continuation.request.id)

    @contextlib.contextmanager
    def submitted(self, jobs: Sequence[Job]) -> Iterator[None]:
        """Submit ``jobs`` to the engine; abort those that are unfinished at the end of the block."""
        try:
            for job in jobs:
                self.submit(job)
            yield
        finally:
            for job in jobs:
                self.abort(job)

    def step(self) -> list[Continuation]:
        """Run one engine step; return the continuations that it advanced, of which some may have finished."""
        engine, advanced = self.engine, []
        assert engine.has_work, "the engine lost requests"
        with interrupts_held_back():
            outputs = engine.step()
            now = time.monotonic()
            for output in outputs:
                continuation = self._live.get(output.request_id)
                if continuation is None:
                    continue
                continuation.take(output, now)
                advanced.append(continuation)
                if continuation.finish_reason is not None:
                    del self._live[output.request_id]
                if continuation.finish_reason != output.finish_reason:
                    engine.abort(output.request_id)  # a stop string ended it; the engine sees tokens only
        return advanced
