"""A GPU's process of a tensor-parallel engine is killed under 16 streams: they go on with the same tokens, and nothing
of the engine is left, such as what compiled its kernels.

``OCTAVO_RANKS_SHAPE=qwen3-8b`` does it with random weights of that model's shape.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from octavo_bench.dummy_models import write_model
from tests.gpu.checkpoints import NEEDS_FOUR, write_checkpoint
from tests.gpu.test_tensor_parallel import SHAPE
from tests.server.child_engine import until
from tests.server.rank_attacks import are_gone, finish, make_config, processes, ranks, running, send

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

NUM_STREAMS = 16
SECONDS = 120.0
READY_SECONDS = 15.0
"""From the death of a rank until the engine is ready again."""


def make_model(folder: Path) -> Path:
    name = os.environ.get("OCTAVO_RANKS_SHAPE")
    return write_model(name, folder) if name else write_checkpoint(folder, "qwen3", **SHAPE)


@pytest.mark.parametrize(
    ("size", "rank"), [(2, 1), (2, 0), pytest.param(4, 3, marks=NEEDS_FOUR), pytest.param(4, 0, marks=NEEDS_FOUR)]
)
def test_a_killed_rank_changes_no_stream(tmp_path: Path, size: int, rank: int) -> None:
    device = {"device": "cuda", "dtype": "bfloat16", "batch_invariant": True, "max_model_len": 1024}
    sizes = {"max_num_seqs": 16, "engine_timeout": 60.0, "gpu_memory_utilization": 0.4}
    config = make_config(make_model(tmp_path), size, **device, **sizes)

    async def main() -> None:
        began = time.monotonic()
        async with running(config) as engine:
            print(f"ready after {time.monotonic() - began:.1f} s")
            expected = await finish([send(engine, number) for number in range(NUM_STREAMS)], SECONDS)
            recorders = [send(engine, number) for number in range(NUM_STREAMS)]
            await until(lambda: all(recorder.tokens for recorder in recorders), SECONDS)
            assert not any(recorder.done.is_set() for recorder in recorders)
            pids, everything = ranks(engine), processes(engine)
            assert len(pids) == size
            os.kill(pids[rank], signal.SIGKILL)
            killed = time.monotonic()
            await until(lambda: engine.pid != pids[0] and engine.is_ready, SECONDS)
            ready = time.monotonic() - killed
            assert await finish(recorders, SECONDS) == expected
            print(f"rank {rank} killed: ready again after {ready:.1f} s, all done {time.monotonic() - killed:.1f} s")
            assert ready < READY_SECONDS
            assert await are_gone(everything)

    asyncio.run(main())
