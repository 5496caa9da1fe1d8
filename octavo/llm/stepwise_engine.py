"""``Engine``: the engine of this process step by step, for programs with a loop of their own."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.config import DEFAULT_MODEL
from octavo.errors import InvalidParameter
from octavo.llm.adapters import adapters_of, chosen
from octavo.llm.continuations import GenerationJob
from octavo.llm.engine_metrics import EngineMetrics, Recorder
from octavo.llm.live_requests import LiveRequests, Unfinished
from octavo.llm.loading import build, settle
from octavo.llm.outputs import CompletionOutput, RequestOutput
from octavo.llm.prompts import Prompt, check_all, check_grammars
from octavo.sampling_params import MAX_TOKEN_ID, SamplingParams
from octavo.types import EngineStats


@dataclass(frozen=True, slots=True)
class Computed:
    """What a step computed of one continuation."""

    request_id: str
    index: int
    """Which of the request's ``n`` continuations."""
    start: int
    """Position of the first token computed."""
    num_tokens: int
    num_drafts: int
    """Draft tokens verified behind them."""
    is_prompt: bool
    """Whether ``start`` is a position of the prompt (prefill), or of the output (decode)."""


@dataclass(frozen=True)
class StepResult:
    """What a step did."""

    step: int
    """Number of steps so far, with this one."""
    computed: list[Computed]
    """One entry for each sequence in the batch."""
    outputs: list[tuple[str, CompletionOutput]]
    """New text and tokens, by request id: pieces that concatenate, as from ``LLM.stream``."""
    finished: list[RequestOutput]
    """Requests that ended with this step, complete."""
    stats: EngineStats
    """Gauges and counters after this step."""


class Engine:
    """A model with its engine, in this process, run step by step.

    Requests may be added between any two steps; each step advances all that are running. ``model`` and ``settings``
    are those of ``LLM``; with ``backend="toy"`` the scheduler and the KV cache run over a decoder without weights.
    Raises ``ConfigError`` or ``CheckpointError``. One thread at a time may use it. Close it, or use it in a ``with``
    statement, to free the memory.
    """

    def __init__(self, model: str | Path = DEFAULT_MODEL, **settings: Any) -> None:
        self.config, self.tokenizer = settle(model, settings)
        self._adapters = adapters_of(self.config.model)
        engine, self.info = build(self.config)
        self._requests = LiveRequests(engine, self.tokenizer, self.config.model.seed)
        self._ids = itertools.count()
        self._jobs: dict[str, GenerationJob] = {}
        """Unfinished requests."""
        self._owners: dict[int, GenerationJob] = {}
        """The same, by the engine's request id of each continuation."""
        self._recorder = Recorder()
        self.completed: dict[str, RequestOutput] = {}
        """Ended requests by id, aborted and failed ones included. Remove what you have read: nothing else does."""

    def add(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        adapter: str | None = None,
    ) -> str:
        """Submit a prompt, as text or token ids; returns its request id, which is drawn unless given.

        ``priority`` counts under the priority policy; smaller goes first. ``adapter`` is as for ``LLM.generate``.
        Raises a ``RequestError`` for a prompt or parameters that could never be served, and for an id that is in use.
        """
        if request_id is not None and not isinstance(request_id, str):
            raise InvalidParameter("request_id", f"'request_id' must be text, not {type(request_id).__name__}.")
        if type(priority) is not int or abs(priority) > MAX_TOKEN_ID:
            allowed = f"a whole number from -{MAX_TOKEN_ID} to {MAX_TOKEN_ID}"
            raise InvalidParameter("priority", f"'priority' must be {allowed}.")
        if request_id is None:
            request_id = next(name for name in map(str, self._ids) if not self._knows(name))
        elif self._knows(request_id):
            raise InvalidParameter("request_id", f"The request id {request_id!r} is in use.")
        params = sampling_params
        if params is None:
            params = SamplingParams(**self.info.sampling_defaults)  # type: ignore[arg-type]
        (checked,) = check_all([prompt], params, self.tokenizer, self.info)
        check_grammars([checked], self._requests.engine.grammars)
        job = self._requests.make(request_id, checked, priority, chosen(adapter, self._adapters))
        self._requests.submit(job, Unfinished())
        self._recorder.note_submitted()
        self._jobs[request_id] = job
        self._owners.update((continuation.request.id, job) for continuation in job.continuations)
        return request_id

    def abort(self, request_id: str) -> None:
        """End a request, with the ``finish_reason`` ``"abort"``; does nothing if no unfinished request has this id."""
        if (job := self._jobs.get(request_id)) is not None:
            self._requests.abort(job)
            for continuation in job.continuations:
                continuation.finish_reason = continuation.finish_reason or "abort"
            self._end(job)

    @property
    def has_work(self) -> bool:
        """Whether requests are unfinished."""
        return bool(self._jobs)

    def step(self) -> StepResult:
        """Run one step: schedule, compute, commit. Without work it does nothing."""
        engine = self._requests.engine
        advanced = self._requests.step() if engine.has_work else []
        computed = self._computed() if engine.last_plan else []
        jobs = [self._owners[continuation.request.id] for continuation in advanced]
        pieces = [(job.id, part.next_piece()) for job, part in zip(jobs, advanced, strict=True)]
        outputs = [(request_id, piece) for request_id, piece in pieces if piece is not None]
        finished = [self._end(job) for job in {job.id: job for job in jobs if job.is_finished}.values()]
        stats = engine.stats()
        if computed:
            self._recorder.note_step(stats, self.info.block_size, len(computed))
        return StepResult(stats.num_steps, computed, outputs, finished, stats)

    def run(self, max_steps: int | None = None) -> list[RequestOutput]:
        """Run steps until nothing is unfinished; returns the requests that ended, in the order in which they ended.

        Raises ``TimeoutError`` if work is left after ``max_steps``.
        """
        finished: list[RequestOutput] = []
        num_steps = 0
        while self.has_work:
            if num_steps == max_steps:
                raise TimeoutError(f"{len(self._jobs)} requests are unfinished after {max_steps} steps.")
            finished += self.step().finished
            num_steps += 1
        return finished

    def request(self, request_id: str) -> RequestOutput:
        """A request with its output so far; raises ``KeyError`` if no request has this id."""
        return self._jobs[request_id].result() if request_id in self._jobs else self.completed[request_id]

    def stats(self) -> EngineStats:
        """Gauges and counters as of now; O(1)."""
        return self._requests.engine.stats()

    def metrics(self) -> EngineMetrics:
        """Totals since the start, with percentiles of the latest requests and steps."""
        return self._recorder.metrics(self.stats())

    def close(self) -> None:
        """Free the memory and drop unfinished requests. May be called twice."""
        self._requests.close()
        self._jobs.clear()
        self._owners.clear()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _knows(self, request_id: str) -> bool:
        return request_id in self._jobs or request_id in self.completed

    def _computed(self) -> list[Computed]:
        return [
            Computed(
                job.id,
                item.seq.id - job.continuations[0].request.id,
                item.start,
                len(item.tokens),
                len(item.drafts),
                item.start < item.seq.num_prompt_tokens,
            )
            for item in self._requests.engine.last_plan
            if (job := self._owners.get(item.seq.id)) is not None
        ]

    def _end(self, job: GenerationJob) -> RequestOutput:
        """Move a finished job to ``completed``."""
        del self._jobs[job.id]
        for continuation in job.continuations:
            del self._owners[continuation.request.id]
        result = self.completed[job.id] = job.result()
        self._recorder.note_ended([output.finish_reason for output in result.outputs], result.metrics)
        return result
