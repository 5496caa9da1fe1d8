"""A model that sleeps frees the GPU and keeps its weights in host memory; awake again, it gives the same tokens."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.config import ServeConfig
from octavo.types import Request
from octavo_server.engines.async_engine import AsyncEngine
from tests.gpu.checkpoints import write_checkpoint
from tests.server.child_engine import Recorder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

GIB = 1 << 30
PROMPTS = [[(7 * i + 3 * j) % 128 for j in range(length)] for i, length in enumerate([1, 5, 16, 17, 64, 150])]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def free_bytes() -> int:
    """Without waiting for the device: another thread may be capturing a graph, which that would end."""
    return torch.cuda.mem_get_info()[0]


def tokens_of(llm: LLM) -> list[list[int]]:
    return [list(result.outputs[0].token_ids) for result in llm.generate(PROMPTS, GREEDY)]


def sleep_and_wake(llm: LLM) -> dict[str, float]:
    """Seconds and GiB of one sleep; the time of a waking includes an answer of one token."""
    awake, started = free_bytes(), time.perf_counter()
    llm.engine.sleep()
    asleep, reserved, slept = free_bytes(), torch.cuda.memory_reserved(), time.perf_counter()
    llm.wake_up(tags=["weights"])
    without_cache = free_bytes()
    llm.wake_up()
    woken = time.perf_counter()
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=1))
    answered = time.perf_counter()
    return {
        "fall_asleep_s": round(slept - started, 3),
        "wake_s": round(woken - slept, 3),
        "wake_and_answer_s": round(answered - slept, 3),
        "freed_gib": round((asleep - awake) / GIB, 3),
        "freed_with_weights_gib": round((without_cache - awake) / GIB, 3),
        "reserved_asleep_gib": round(reserved / GIB, 3),
    }


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"enforce_eager": True},
        {"batch_invariant": True, "quantization": "int4", "dtype": "bfloat16"},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
        {"kv_offload_memory": 0.1},
    ],
    ids=str,
)
def test_tokens_are_the_same_after_a_sleep(tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = write_checkpoint(tmp_path, "llama")
    own: dict[str, Any] = {"dtype": "float32", "block_size": 16, "num_kv_blocks": 64, "max_num_seqs": 8, **settings}
    with LLM(str(folder), device="cuda", **own) as llm:
        expected = tokens_of(llm)
        for _ in range(3):
            sleep_and_wake(llm)
            assert tokens_of(llm) == expected
            llm.engine.check()


def test_an_8b_model_frees_its_memory_and_wakes_within_two_seconds(tmp_path: Path) -> None:
    """With random weights; the first sleep also allocates the host memory."""
    if torch.cuda.get_device_properties(0).total_memory < 30 * GIB:
        pytest.skip("needs 30 GiB")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    with LLM(str(tmp_path), device="cuda", load_format="dummy", kv_cache_memory=4.0, max_num_seqs=16) as llm:
        expected = tokens_of(llm)
        figures = []
        for _ in range(3):
            figures.append(sleep_and_wake(llm))
            assert tokens_of(llm) == expected
    print("\n" + "\n".join(map(json.dumps, figures)))
    assert min(each["freed_gib"] for each in figures) > 14.9 + 4
    assert all(3.9 < each["freed_with_weights_gib"] < 5 for each in figures), "the cache"
    assert max(each["wake_s"] for each in figures) < 2


def test_a_server_keeps_the_process_of_a_model_that_sleeps(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llama")
    settings: dict[str, Any] = {"model": str(folder), "device": "cuda", "kv_cache_memory": 2.0, "block_size": 16}
    settings |= {"max_num_seqs": 8, "batch_invariant": True}

    async def answer(engine: AsyncEngine) -> list[int]:
        recorder = Recorder()
        engine.add(Request(engine.next_id(), [1, 2, 3, 4], GREEDY, 24), recorder)
        await recorder.done.wait()
        assert recorder.error is None
        return recorder.tokens

    async def main() -> None:
        engine = AsyncEngine(ServeConfig.from_flat(settings))
        await engine.start()
        try:
            pid, expected = engine.pid, await answer(engine)
            for _ in range(2):
                awake = free_bytes()
                await engine.sleep(1)
                assert free_bytes() - awake > 1.9 * GIB
                assert await answer(engine) == expected
                assert engine.pid == pid
            await engine.sleep(2)
            assert not os.path.exists(f"/proc/{pid}")
            assert await answer(engine) == expected
        finally:
            await engine.stop(0)

    asyncio.run(main())
