"""The processes of an engine's ranks killed and stopped at random moments: no stream changes, nothing is left."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from octavo.build.build_engine import build_engine
from octavo.errors import ConfigError
from tests.llm.tiny import write_checkpoint
from tests.ops.cpu_cases import needs_float_kernels
from tests.server.child_engine import until
from tests.server.rank_attacks import (
    SECONDS,
    are_gone,
    descendants,
    finish,
    make_config,
    other_ranks,
    processes,
    ranks,
    running,
    send,
)

ROOT = Path(__file__).parents[2]
EXPERTS, CONTEXTS, SEQUENCES = "enable_expert_parallel", "decode_context_parallel_size", "enable_dp_attention"
MIXTURE = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 1,
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), needs_float_kernels]


def rewrite(folder: Path, changes: dict[str, Any]) -> None:
    """Change keys of the configuration."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


Case = tuple[str, dict[str, Any], list[tuple[int, str]]]


def case(folder: Path, size: int, attacks: list[tuple[int, str]], **settings: Any) -> Case:
    """A case of ``rank_attacks``, with a model that so many ranks divide."""
    home = folder / "-".join([str(size), *settings])
    write_checkpoint(home)
    heads = {"num_attention_heads": 2 * size, "hidden_size": 16 * size, "intermediate_size": 96}
    rewrite(home, {**heads, **(MIXTURE if EXPERTS in settings else {})})
    return str(home), {"size": size, **settings}, attacks


def run(cases: Sequence[Case]) -> None:
    command = [sys.executable, "-m", "tests.server.rank_attacks", json.dumps(cases)]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_ranks_that_are_killed_or_stopped_lose_and_change_nothing(tmp_path: Path) -> None:
    """Some of the attacks of the test after this one, in one process."""
    tensor = case(tmp_path, 3, [(2, "SIGKILL"), (1, "SIGSTOP")])
    experts = case(tmp_path, 4, [(3, "SIGSTOP")], **{EXPERTS: True})
    contexts = case(tmp_path, 2, [(1, "SIGKILL"), (0, "SIGSTOP")], **{CONTEXTS: 2})
    run([tensor, experts, contexts])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("size", "settings"),
    [
        *((size, {}) for size in (2, 3, 4)),
        *((size, {EXPERTS: True}) for size in (2, 3, 4)),
        *((size, {CONTEXTS: size}) for size in (2, 3, 4)),
        (4, {CONTEXTS: 2, EXPERTS: True}),
        *((size, {SEQUENCES: True, EXPERTS: True}) for size in (2, 3)),
        (2, {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}),
        (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    ],
)
def test_any_rank_may_be_killed_or_stopped(size: int, settings: dict[str, Any], tmp_path: Path) -> None:
    attacks = [(rank, how) for rank in range(size) for how in ("SIGKILL", "SIGSTOP")]
    run([case(tmp_path, size, attacks, **settings)])


@pytest.mark.nightly
@pytest.mark.parametrize("moments", [[0.0], [0.0, 1.5]])
def test_a_rank_that_is_killed_while_idle_or_while_it_starts_is_started_again(
    tmp_path: Path, moments: list[float]
) -> None:
    """Killed while it starts: so many seconds after it is there."""

    async def main() -> None:
        async with running(make_config(write_checkpoint(tmp_path))) as engine:
            expected = await finish([send(engine, 1)])
            first, idle = ranks(engine), processes(engine)
            os.kill(first[1], signal.SIGKILL)
            await until(lambda: engine.pid != first[0] and engine.is_ready, SECONDS)
            assert await are_gone(idle)
            for seconds in moments:
                first, all_of_first = ranks(engine), processes(engine)
                recorder = send(engine, 1)
                os.kill(first[1], signal.SIGKILL)
                await until(lambda pid=first[0]: engine.pid != pid and len(ranks(engine)) == 2, SECONDS)
                await asyncio.sleep(seconds)
                second, all_of_second = ranks(engine), processes(engine)
                os.kill(second[-1], signal.SIGKILL)
                assert await finish([recorder]) == expected
                assert await are_gone([*all_of_first, *all_of_second])

    asyncio.run(main())


def test_ranks_are_told_from_what_else_an_engine_starts() -> None:
    script = """if True:
        import subprocess, sys, time
        for name in ("compiler", "octavo.rank_process", "octavo.rank_process", "compiler"):
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", name])
            print(child.pid, flush=True)
        time.sleep(60)
    """
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        pids = [int(engine.stdout.readline()) for _ in range(4)]
        children = descendants(engine.pid)
        try:
            assert sorted(child.pid for child in children) == sorted(pids)
            assert other_ranks(engine.pid) == pids[1:3]
        finally:
            for process in (engine, *children):
                process.kill()
    assert not other_ranks(engine.pid)


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
    _, alive = psutil.wait_procs(children, timeout=30)
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
