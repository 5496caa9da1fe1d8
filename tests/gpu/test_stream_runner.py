"""The CUDA runner: graphs give what single launches give, and batch-invariant tokens do not depend on the batch."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM, SamplingParams
from octavo.runtime.executors.graphs import Graphs
from octavo.steps.graph_shapes import LONG_CONTEXT, StepShape
from octavo_bench.offline import wait_until_prepared
from tests.gpu.checkpoints import write_checkpoint
from tests.models.families import VOCAB_SIZE, make_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

VOCAB = 1000


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Qwen3: normalised heads, grouped queries, heads of 64."""
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "initializer_range": 0.1,
    }
    return write_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", **shape)


def prompts(count: int, longest: int, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(VOCAB), k=rng.randint(1, longest)) for _ in range(count)]


def generate(folder: Path, some: list[list[int]], params: Any, **settings: Any) -> list[list[int]]:
    with LLM(str(folder), device="cuda", **settings) as llm:
        return [list(result.outputs[0].token_ids) for result in llm.generate(some, params)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_200_greedy_steps_of_graphs_are_those_of_single_launches(checkpoint: Path, dtype: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    settings: dict[str, Any] = {"dtype": dtype, "max_num_seqs": 8, "num_kv_blocks": 200}
    some = prompts(5, 300)
    graphs = generate(checkpoint, some, params, **settings)
    assert graphs == generate(checkpoint, some, params, enforce_eager=True, **settings)
    assert graphs == generate(checkpoint, some, params, **settings)


def test_tokens_after_a_long_context_are_those_of_other_kernels(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 16384}))
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    settings: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 400}
    rng = random.Random(3)
    some = [rng.choices(range(VOCAB), k=length) for length in (LONG_CONTEXT - 20, 9000, 30)]
    expected = generate(tmp_path, some, params, batch_invariant=True, **settings)
    with LLM(str(tmp_path), device="cuda", **settings) as llm:
        wait_until_prepared()
        graphs: Any = llm.engine.runner
        assert any(shape.has_long_context for shape in graphs.encoder.choose_shape.__self__._captured)
        found = [list(result.outputs[0].token_ids) for result in llm.generate(some, params)]
    assert found == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batch_invariant_tokens_are_those_of_each_request_alone(checkpoint: Path, dtype: str) -> None:
    """64 mixed requests with shared beginnings, a pool too small for all of them, prompts in chunks."""
    rng = random.Random(2)
    beginning = rng.choices(range(VOCAB), k=150)
    some = [beginning[: rng.choice([0, 64, 150])] + prompt for prompt in prompts(64, 200)]
    params = [
        SamplingParams(temperature=rng.choice([0.0, 0.8]), top_p=0.95, seed=i, max_tokens=40, ignore_eos=True)
        for i in range(64)
    ]
    settings: dict[str, Any] = {"dtype": dtype, "batch_invariant": True, "block_size": 64}
    together = generate(
        checkpoint, some, params, max_num_seqs=32, num_kv_blocks=60, max_num_batched_tokens=96, **settings
    )
    with LLM(str(checkpoint), device="cuda", num_kv_blocks=60, enable_prefix_caching=False, **settings) as llm:
        for prompt, own, found in zip(some, params, together, strict=True):
            assert list(llm.generate([prompt], own)[0].outputs[0].token_ids) == found


def test_what_only_the_host_samples_may_be_in_any_step(checkpoint: Path) -> None:
    some = prompts(12, 100)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "presence_penalty": 0.5, "logprobs": 2},
        {"temperature": 0.9, "top_k": 30, "repetition_penalty": 1.2},
        {"temperature": 0, "prompt_logprobs": 1},
        {"temperature": 0.9, "allowed_token_ids": tuple(range(0, VOCAB, 7))},
    ]
    params = [SamplingParams(seed=i, max_tokens=30, ignore_eos=True, **kinds[i % 5]) for i in range(12)]
    settings: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 100}
    found = generate(checkpoint, some, params, **settings)
    with LLM(str(checkpoint), device="cpu", **settings) as llm:
        expected = [list(result.outputs[0].token_ids) for result in llm.generate(some, params)]
    assert found == expected


def test_an_8_bit_cache_runs_and_stays_close(checkpoint: Path) -> None:
    """Values near those of a 16-bit cache: most first tokens are the same ones."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    some = prompts(32, 100)
    expected = generate(checkpoint, some, params, dtype="bfloat16", num_kv_blocks=200)
    found = generate(checkpoint, some, params, dtype="bfloat16", num_kv_blocks=200, kv_cache_dtype="fp8")
    assert sum(a == b for a, b in zip(found, expected, strict=True)) >= 16


def test_scales_of_an_8_bit_cache_hold_keys_and_values_that_it_could_not(checkpoint: Path, tmp_path: Path) -> None:
    """Keys of thousands and values of ten-thousandths; with drafts of a suffix, every kind of step occurs."""
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    for part, factor in {"k_norm": 2000, "q_norm": 1 / 2000, "v_proj": 1e-4, "o_proj": 1e4}.items():
        for layer in range(4):
            tensors[f"model.layers.{layer}.self_attn.{part}.weight"] *= factor
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    some = [prompt * 3 for prompt in prompts(32, 60)]

    def answers(**settings: Any) -> list[list[int]]:
        save_file(tensors, tmp_path / "model.safetensors")
        return generate(tmp_path, some, params, dtype="bfloat16", num_kv_blocks=400, **settings)

    expected = answers()
    unscaled = answers(kv_cache_dtype="fp8")
    for layer in range(4):
        tensors[f"model.layers.{layer}.self_attn.k_scale"] = torch.full((2, 1, 1), 36.0)
        tensors[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor(4e-6)
    drafts = {"method": "ngram", "num_speculative_tokens": 4}
    kinds: list[dict[str, Any]] = [{}, {"enforce_eager": True}, {"speculative_config": drafts}]
    scaled = [answers(kv_cache_dtype="fp8", **settings) for settings in kinds]
    alike = [count_alike(found, expected) for found in (unscaled, *scaled)]
    assert alike[0] < 8, alike
    assert min(alike[1:]) >= 16, alike


def count_alike(found: list[list[int]], expected: list[list[int]]) -> int:
    """Answers whose first token is the same."""
    return sum(a[0] == b[0] for a, b in zip(found, expected, strict=True))


EXTRAS: list[dict[str, Any]] = [
    {"temperature": 0.9, "repetition_penalty": 1.7},
    {"temperature": 0, "frequency_penalty": 0.8, "presence_penalty": -0.5},
    {"temperature": 0.7, "logit_bias": {token: float(token % 7 - 3) for token in range(300)}},
    {"temperature": 2, "min_tokens": 25, "stop_token_ids": tuple(range(100))},
    {"temperature": 0, "logprobs": 20, "presence_penalty": 0.5, "min_tokens": 9, "stop_token_ids": (3,)},
    {"temperature": 1, "top_k": 9, "logprobs": 0},
    {"temperature": 0},
]


@pytest.mark.parametrize("settings", [{}, {"enforce_eager": True}, {"num_kv_blocks": 12, "block_size": 16}], ids=str)
def test_penalties_biases_bans_and_logprobs_are_those_of_the_cpu(checkpoint: Path, settings: dict[str, Any]) -> None:
    """Twice the same prompts: the second time the device does not compute the positions whose tokens it looks at."""
    some = prompts(14, 100, seed=3) * 2
    params = [
        SamplingParams(seed=i, max_tokens=40, ignore_eos=True, **EXTRAS[i % len(EXTRAS)]) for i in range(len(some))
    ]
    own: dict[str, Any] = {"num_kv_blocks": 200, "max_num_seqs": 8, **settings}
    with LLM(str(checkpoint), device="cuda", dtype="float32", **own) as llm:
        found = [result.outputs[0] for result in llm.generate(some, params)]
    with LLM(str(checkpoint), device="cpu", dtype="float32", num_kv_blocks=200) as llm:
        expected = [result.outputs[0] for result in llm.generate(some, params)]
    for a, b in zip(found, expected, strict=True):
        assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason)
        for x, y in zip(a.logprobs or [], b.logprobs or [], strict=True):
            logprobs = ([entry.logprob for entry in entries.values()] for entries in (x, y))
            assert next(logprobs) == pytest.approx(next(logprobs), abs=1e-3)


FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2/small": {"n_embd": 256, "n_head": 4},
    "qwen3_moe/normalised": {"hidden_size": 256, "head_dim": 64},
    "gpt_oss/sinks": {"hidden_size": 256, "head_dim": 64},
    "mixtral/two_of_five": {"hidden_size": 256},
    "deepseek_v2/lite": {},
    "deepseek_v3/groups": {"kv_lora_rank": 64},
}


@pytest.mark.parametrize("row", FAMILIES)
def test_greedy_tokens_of_other_families_are_those_of_the_cpu(row: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, row, **FAMILIES[row])
    some = [[token % VOCAB_SIZE for token in prompt] for prompt in prompts(9, 200)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    settings: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 100, "max_num_batched_tokens": 300}
    found = generate(tmp_path, some, params, **settings)
    assert found == generate(tmp_path, some, params, enforce_eager=True, **settings)
    with LLM(str(tmp_path), device="cpu", **settings) as llm:
        assert found == [list(result.outputs[0].token_ids) for result in llm.generate(some, params)]


def test_a_graph_gets_memory_that_was_freed_before() -> None:
    size = 300 << 20

    def run(shape: StepShape) -> None:
        torch.empty(size, dtype=torch.uint8, device="cuda").zero_()

    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.empty_cache()
        torch.empty(torch.cuda.mem_get_info()[0] - size - (100 << 20), dtype=torch.uint8, device="cuda")
        Graphs(run, contextlib.nullcontext)(StepShape(1, 1, 1))
