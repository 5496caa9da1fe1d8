"""The processes of a tensor-parallel engine killed and stopped at random moments: no stream changes, nothing is left.

``OCTAVO_RANK_KILLS=50`` makes it a long run, of about ten seconds a kill on two free cores.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from octavo.build.build_engine import build_engine
from octavo.config import ServeConfig
from octavo.errors import ConfigError
from octavo.sampling_params import SamplingParams
from octavo.types import Request
from octavo_server.engines.async_engine import AsyncEngine
from tests.llm.tiny import write_checkpoint
from tests.ops.cpu_cases import needs_float_kernels
from tests.server.child_engine import Recorder, until
from tests.tiers import nightly_after

NUM_KILLS = int(os.environ.get("OCTAVO_RANK_KILLS", "2"))
NUM_STREAMS = 8
MAX_TOKENS = 40
SECONDS = 180.0
ATTACKS = [
    *((1, signal.SIGKILL), (0, signal.SIGSTOP), (0, signal.SIGKILL)),
    *((1, signal.SIGSTOP), (1, signal.SIGKILL)),
]
"""Ranks, of which 0 is the engine process, and what happens to them."""

MIXTURE = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 1,
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200 + 60 * NUM_KILLS), needs_float_kernels]


def make_config(folder: Path, size: int = 2, **settings: Any) -> ServeConfig:
    """A tiny random model on ranks; one that hangs is found out in a few seconds."""
    sizes = {"num_kv_blocks": 400, "block_size": 16, "max_num_batched_tokens": 64, "engine_timeout": 8.0}
    model = {"model": str(folder), "load_format": "dummy", "device": "cpu", "tensor_parallel_size": size}
    return ServeConfig.from_flat({**sizes, **model, **settings})


def rewrite(folder: Path, changes: dict[str, Any]) -> None:
    """Change keys of the configuration."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@asynccontextmanager
async def running(config: ServeConfig) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(config)
    await engine.start()
    try:
        yield engine
    finally:
        pids = processes(engine)
        await engine.stop(5)
        assert await are_gone(pids)


def processes(engine: AsyncEngine) -> list[int]:
    """The engine process and its ranks, in their order."""
    assert engine.pid is not None
    try:
        children = psutil.Process(engine.pid).children()
    except psutil.NoSuchProcess:
        return [engine.pid]
    return [engine.pid, *sorted(child.pid for child in children if "octavo.rank_process" in child.cmdline())]


def shared_memory() -> set[str]:
    """What has a name there, but for the semaphores that other processes of this machine make with multiprocessing."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


async def are_gone(pids: list[int]) -> bool:
    async with asyncio.timeout(10):
        while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
            await asyncio.sleep(0.02)
    return True


def send(engine: AsyncEngine, number: int, max_tokens: int = MAX_TOKENS) -> Recorder:
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.95}, {"frequency_penalty": 0.5}]
    params = SamplingParams(**kinds[number % 3], seed=number, ignore_eos=True)
    prompt = random.Random(number).choices(range(256), k=20)
    recorder = Recorder()
    engine.add(Request(engine.next_id(), prompt, params, max_tokens, number), recorder)
    return recorder


async def finish(recorders: list[Recorder], seconds: float = SECONDS) -> list[list[int]]:
    async with asyncio.timeout(seconds):
        for recorder in recorders:
            await recorder.done.wait()
            assert recorder.error is None, recorder.error
    return [recorder.tokens for recorder in recorders]


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (2, {}),
        *nightly_after(
            0,
            (
                (2, {"enable_expert_parallel": True}),
                (3, {"enable_expert_parallel": True}),
                (2, {"decode_context_parallel_size": 2}),
                (3, {"decode_context_parallel_size": 3, "enable_expert_parallel": True}),
                (2, {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}),
                (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
                (2, {"enable_dp_attention": True, "enable_expert_parallel": True}),
                (3, {"enable_dp_attention": True, "enable_expert_parallel": True}),
            ),
        ),
    ],
)
def test_ranks_that_are_killed_or_stopped_lose_and_change_nothing(
    size: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    rng = random.Random(7)
    write_checkpoint(tmp_path)
    heads = {"num_attention_heads": 2 * size, "hidden_size": 16 * size}
    rewrite(tmp_path, {**heads, **(MIXTURE if "enable_expert_parallel" in settings else {})})
    config = make_config(tmp_path, size, **settings)
    before = shared_memory()
    seen: set[int] = set()
    recoveries: list[float] = []

    async def main() -> None:
        async with running(config) as engine:
            expected = await finish([send(engine, number) for number in range(NUM_STREAMS)])
            assert all(len(tokens) == MAX_TOKENS for tokens in expected)
            began = time.monotonic()
            assert await finish([send(engine, number) for number in range(NUM_STREAMS)]) == expected
            undisturbed = time.monotonic() - began
            for kill in range(NUM_KILLS):
                await until(lambda: engine.is_ready, SECONDS)
                recorders = [send(engine, number) for number in range(NUM_STREAMS)]
                await asyncio.sleep(rng.uniform(0, 0.8 * undisturbed))
                seen.update(pids := processes(engine))
                assert len(pids) == size
                rank, how = ATTACKS[kill % len(ATTACKS)]
                began = time.monotonic()
                os.kill(pids[rank], how)
                assert await finish(recorders) == expected
                recoveries.append(time.monotonic() - began)
                print(f"{kill}: rank {rank}, {how.name}: {recoveries[-1]:.1f} s")
                assert how == signal.SIGSTOP or await are_gone(pids)  # one that stops when all have ended is not missed
            assert engine.metrics.poison_requests == 0
            assert engine.num_restarts >= NUM_KILLS - 1  # a signal may come when all streams have just ended
            assert await are_gone(sorted(seen.difference(processes(engine))))

    asyncio.run(main())
    assert shared_memory() <= before
    print(f"{NUM_KILLS} kills: median {sorted(recoveries)[NUM_KILLS // 2]:.1f} s, longest {max(recoveries):.1f} s")


@pytest.mark.nightly
@pytest.mark.parametrize("moments", [[0.0], [0.0, 1.5]])
def test_a_rank_that_is_killed_while_idle_or_while_it_starts_is_started_again(
    tmp_path: Path, moments: list[float]
) -> None:
    """Killed while it starts: so many seconds after it is there."""

    async def main() -> None:
        async with running(make_config(write_checkpoint(tmp_path))) as engine:
            expected = await finish([send(engine, 1)])
            idle = processes(engine)
            os.kill(idle[1], signal.SIGKILL)
            await until(lambda: engine.pid != idle[0] and engine.is_ready, SECONDS)
            assert await are_gone(idle)
            for seconds in moments:
                first = processes(engine)
                recorder = send(engine, 1)
                os.kill(first[1], signal.SIGKILL)
                await until(lambda pid=first[0]: engine.pid != pid and len(processes(engine)) == 2, SECONDS)
                await asyncio.sleep(seconds)
                second = processes(engine)
                os.kill(second[-1], signal.SIGKILL)
                assert await finish([recorder]) == expected
                assert await are_gone([*first, *second])

    asyncio.run(main())


def test_ranks_end_with_a_front_process_that_is_killed(tmp_path: Path) -> None:
    settings = ["--load-format", "dummy", "--device", "cpu", "--tensor-parallel-size", "2", "--port", "0"]
    folder = str(write_checkpoint(tmp_path))
    front = psutil.Popen([sys.executable, "-m", "octavo", "serve", folder, *settings], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + SECONDS
        while len(children := front.children(recursive=True)) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(random.Random(3).uniform(0, 3))
        children = front.children(recursive=True)
    finally:
        front.kill()
        front.wait()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({}, 3, "tensor_parallel_size: 3 does not divide the model's 2 attention heads"),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48},
            3,
            "must divide the model's 2 KV heads",
        ),
        (
            {"intermediate_size": 63},
            2,
            "tensor_parallel_size: 2 does not divide the width of the feed-forward layer, 63",
        ),
        ({**MIXTURE, "num_local_experts": 1, "num_experts_per_tok": 1}, 2, "1 experts cannot be divided among 2 ranks"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused(
    changes: dict[str, Any], size: int, message: str, tmp_path: Path
) -> None:
    rewrite(write_checkpoint(tmp_path), changes)
    settings = {"enable_expert_parallel": True} if "num_local_experts" in changes else {}
    with pytest.raises(ConfigError, match=message):
        build_engine(make_config(tmp_path, size, **settings))


EIGHT_HEADS = {"num_attention_heads": 8, "hidden_size": 64}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 32}
DRAFTER = {"method": "draft_model", "model": "other", "num_speculative_tokens": 2}
INDEXED = {"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "moe_intermediate_size": 32}
INDEXED |= {"q_lora_rank": 16, "kv_lora_rank": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
INDEXED |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
FALCON = {"architectures": ["FalconForCausalLM"], "model_type": "falcon", "alibi": True, "multi_query": True}


@pytest.mark.parametrize(
    ("changes", "size", "settings", "message"),
    [
        ({}, 2, {"decode_context_parallel_size": 4}, "4 must divide tensor_parallel_size, which is 2"),
        ({}, 1, {"decode_context_parallel_size": 2}, "2 must divide tensor_parallel_size, which is 1"),
        (
            {"num_key_value_heads": 2},
            2,
            {"decode_context_parallel_size": 2},
            "decode_context_parallel_size: 2 must divide the 1 of 2 ranks that hold the same of the model's 2 KV heads",
        ),
        (
            {**EIGHT_HEADS, "num_key_value_heads": 2},
            4,
            {"decode_context_parallel_size": 4},
            "4 must divide the 2 of 4 ranks",
        ),
        (MISTRAL, 2, {"decode_context_parallel_size": 2}, "2 needs full attention"),
        (FALCON, 2, {"decode_context_parallel_size": 2}, "2 does not go with the model's ALiBi slopes"),
        (INDEXED, 2, {"decode_context_parallel_size": 2}, "2 does not go with attention to what an indexer chooses"),
        (
            {},
            2,
            {"decode_context_parallel_size": 2, "enable_return_routed_experts": True},
            "decode_context_parallel_size and enable_return_routed_experts",
        ),
        (
            {},
            2,
            {"decode_context_parallel_size": 2, "speculative_config": json.dumps(DRAFTER)},
            '"draft_model" needs decode_context_parallel_size 1',
        ),
    ],
)
def test_contexts_that_cannot_be_divided_are_refused(
    changes: dict[str, Any], size: int, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    rewrite(write_checkpoint(tmp_path), changes)
    with pytest.raises(ConfigError, match=message):
        build_engine(make_config(tmp_path, size, **settings))
