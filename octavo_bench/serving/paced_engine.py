"""An engine process whose device is a clock: every step takes the same time, whatever is in it.

Run as ``python -m octavo_bench.serving.paced_engine STEP_MS FD`` in place of the real engine process, to see what the
front process costs when there is nothing else to see.
"""

from __future__ import annotations

import sys
import time

from octavo.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.types import EngineInfo, Masks, Plan, Sampled
from octavo_bench.overhead import MAX_NUM_BATCHED_TOKENS, InstantStep, build_instant_engine
from octavo_fleet.backends.modelless import make_info
from octavo_server.engines.engine_process import main

MAX_MODEL_LEN = 4096
MAX_NUM_SEQS = 1024


class PacedRunner:
    """Answers each step when its time is over. Steps follow one another without a pause, as on a device that gets
    the next one in time."""

    def __init__(self, step_seconds: float) -> None:
        self.step_seconds = step_seconds
        self._due = 0.0

    def submit(self, plan: Plan) -> PacedStep:
        now, self._due = time.monotonic(), self._due + self.step_seconds
        if self._due < now:  # it idled
            self._due = now + self.step_seconds
        return PacedStep(plan, self._due)


class PacedStep(InstantStep):
    """A step that is done at a given time."""

    def __init__(self, plan: Plan, due: float) -> None:
        super().__init__(plan)
        self.due = due

    def sample(self, masks: Masks) -> list[Sampled]:
        wait = self.due - time.monotonic()
        if wait > 0:  # even a sleep of no time takes some
            time.sleep(wait)
        return super().sample(masks)


def build(config: EngineConfig, step_seconds: float) -> tuple[Engine, EngineInfo]:
    """The real engine around a paced runner; ``config`` is of no interest to it."""
    engine = build_instant_engine(MAX_NUM_SEQS, MAX_MODEL_LEN, PacedRunner(step_seconds))
    cache = engine.scheduler.cache
    return engine, make_info(
        "none",
        vocab_size=32000,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        block_size=cache.block_size,
        num_kv_blocks=cache.num_blocks,
    )


if __name__ == "__main__":
    seconds = float(sys.argv[1]) / 1e3
    main(build=lambda config: build(config, seconds))
