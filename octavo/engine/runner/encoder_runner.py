"""The runner for encoder models: sends the texts of a plan to the executor as one message."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from octavo.engine.runner.step_encoder import NOT_NUMBERS
from octavo.steps.messages import NO_ADAPTER, Encode, EncoderText, Executor
from octavo.types import Masks, Plan, Sampled, Scheduled, Task


@dataclass(frozen=True, slots=True)
class PendingTexts:
    """A plan that is computed when ``sample`` is called."""

    runner: EncoderRunner
    plan: Plan

    @property
    def is_started(self) -> bool:
        return False

    def sample(self, masks: Masks) -> list[Sampled]:
        """Compute the plan; items that are stale by now give an empty ``Sampled``. Raises ``RunnerError``."""
        return self.runner.compute(self.plan)


class EncoderRunner:
    """Sends texts to an executor whose model supports these ``tasks``; ``adapters`` are the numbers of those loaded."""

    def __init__(self, executor: Executor, tasks: tuple[Task, ...], adapters: Mapping[str, int]) -> None:
        self._executor = executor
        self._tasks = tasks
        self._adapters = adapters

    def submit(self, plan: Plan) -> PendingTexts:
        """Accept a plan, in which every text is complete; earlier plans may still be pending."""
        return PendingTexts(self, plan)

    def warm_up(self) -> None:
        """Compute a dummy text, so that no request waits for kernel compilation."""
        self._executor.send(Encode([EncoderText([0, 0], task=self._tasks[0])])).wait()

    def compute(self, plan: Plan) -> list[Sampled]:
        """The results of a plan."""
        live = [item for item in plan if not item.is_stale]
        assert all(item.start == 0 and item.samples for item in live), "an encoder got a part of a text"
        requests = [item.seq.request for item in live if item.seq.request.task in self._tasks]
        texts = [
            EncoderText(
                *(request.prompt_tokens, request.second_start, request.task),
                self._adapters.get(request.adapter, NO_ADAPTER),
            )
            for request in requests
        ]
        values = iter(self._executor.send(Encode(texts)).wait() if texts else [])
        return [Sampled([]) if item.is_stale else self._sampled(item, values) for item in plan]

    def _sampled(self, item: Scheduled, values: Iterator[bytes | None]) -> Sampled:
        task = item.seq.request.task
        if task not in self._tasks:
            return Sampled([], error=f"this model can {' and '.join(self._tasks)}; it cannot {task}")
        value = next(values)
        return Sampled([], values=value, error=NOT_NUMBERS if value is None else None)
