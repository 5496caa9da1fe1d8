"""A few requests over a model without weights, one line for each step."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.cache.kv_cache import KVCache
from octavo.config import SchedulerSettings
from octavo.engine.engine import Engine
from octavo.engine.scheduler import Scheduler
from octavo.sampling_params import SamplingParams
from octavo.types import Request
from octavo_fleet.backends.toy_models import WORDS, FakeRunner, NextByFormula, NextByHash

PROMPTS = {
    "alpha": ([10, 11, 12, 13, 14, 15], 4),
    "bravo": ([21, 22, 23], 5),
    "charlie": ([31, 32, 33, 34], 3),
    "delta": ([41, 42], 4),
}
"""Name to prompt and number of output tokens."""
TEXTS = ["explain continuous batching to a newcomer", "why pages", "who goes first", "what are prefixes good for"]
COLUMNS = (("step", 4), ("computes", 30), ("gives", 46), ("waiting", 14), ("held/idle/free blocks", 21))


@dataclass(frozen=True)
class DemoSizes:
    """How large the engine is, and how it decides."""

    max_num_seqs: int = 3
    prefill_budget: int = 6
    num_kv_blocks: int = 10
    block_size: int = 4
    scheduling_policy: str = "fcfs"


class Demo:
    """An engine with four requests. With ``speaks`` its tokens are words, otherwise numbers."""

    def __init__(self, sizes: DemoSizes, speaks: bool = False) -> None:
        self.names = list(PROMPTS)
        self.speaks = speaks
        runner = FakeRunner(NextByHash(dict(enumerate(TEXTS))) if speaks else NextByFormula())
        scheduler = Scheduler(
            KVCache(sizes.num_kv_blocks, sizes.block_size),
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.prefill_budget + sizes.max_num_seqs,
            settings=SchedulerSettings(scheduling_policy=sizes.scheduling_policy),
        )
        self.engine = Engine(scheduler, runner)
        self.tokens: dict[int, list[int]] = {}
        self.num_steps = 0
        for number, (prompt, max_tokens) in enumerate(PROMPTS.values()):
            self.tokens[number] = []
            self.engine.add(Request(number, prompt, SamplingParams(max_tokens=max_tokens), max_tokens))

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

    def head(self) -> str:
        """The names of the columns."""
        return _line([name for name, _ in COLUMNS]) + "\n" + "-+-".join("-" * width for _, width in COLUMNS)

    def step(self) -> str:
        """Run a step; returns its line."""
        outputs = self.engine.step()
        self.num_steps += 1
        computed = [f"{self.names[item.seq.id]}:{len(item.tokens)}" for item in self.engine.last_plan]
        given = []
        for output in outputs:
            self.tokens[output.request_id] += output.tokens
            given.append(
                f"{self.names[output.request_id]}->{self._show(output.tokens)}{'.' * bool(output.finish_reason)}"
            )
        stats = self.engine.stats()
        waiting = [name for number, name in enumerate(self.names) if number in self.engine.scheduler.waiting]
        num_free = stats.num_blocks - stats.num_used_blocks - stats.num_cached_blocks
        blocks = f"{stats.num_used_blocks}/{stats.num_cached_blocks}/{num_free}"
        return _line([str(self.num_steps), *(", ".join(part) or "-" for part in (computed, given, waiting)), blocks])

    def results(self) -> str:
        """What each request got."""
        stats = self.engine.stats()
        lines = [f"{name}: {self._show(self.tokens[number])}" for number, name in enumerate(self.names)]
        counts = f"{stats.num_prompt_tokens} prompt tokens, {stats.num_output_tokens} output tokens"
        return "\n".join([*lines, "", f"{self.num_steps} steps, {counts}, {stats.num_preemptions} preemptions"])

    def _show(self, tokens: list[int]) -> str:
        return " ".join(WORDS[token] if self.speaks else str(token) for token in tokens)


def _line(parts: list[str]) -> str:
    return " | ".join(part.ljust(width) for part, (_, width) in zip(parts, COLUMNS, strict=True)).rstrip()
