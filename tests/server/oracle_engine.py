"""An engine process with the real deciding half and the oracle as its runner, for tests of replay."""

from __future__ import annotations

import time

from octavo.cache.kv_cache import KVCache
from octavo.cache.kv_events import KVEvents
from octavo.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.engine.scheduler import Scheduler
from octavo.types import EngineInfo, Plan
from tests.oracle import VOCAB_SIZE, OracleRunner, PendingStep
from tests.server.fake_engine import make_info

BLOCK_SIZE = 4
NUM_BLOCKS = 100
STEP_SECONDS = 0.002


class SlowOracleRunner(OracleRunner):
    def submit(self, plan: Plan) -> PendingStep:
        time.sleep(STEP_SECONDS)
        return super().submit(plan)


def build(config: EngineConfig) -> tuple[Engine, EngineInfo]:
    cache = KVCache(NUM_BLOCKS, BLOCK_SIZE, events=KVEvents() if config.cache.enable_kv_events else None)
    scheduler = Scheduler(cache, max_num_seqs=8, max_num_batched_tokens=32)
    info = make_info(
        max_model_len=NUM_BLOCKS * BLOCK_SIZE,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(),
        block_size=BLOCK_SIZE,
        num_kv_blocks=NUM_BLOCKS,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        architecture="oracle",
    )
    return Engine(scheduler, SlowOracleRunner(BLOCK_SIZE), depth=config.model.seed), info
