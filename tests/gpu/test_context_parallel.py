"""Ranks that divide each context (decode context parallel), on one GPU that they share or on several.

They give the tokens of one rank.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, RequestOutput, SamplingParams
from tests.gpu.checkpoints import NEEDS_FOUR, NUM_RANKS, write_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

VOCAB = 1000
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
}
LATENT: dict[str, Any] = {
    **SHAPE,
    "num_key_value_heads": 8,
    "q_lora_rank": None,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "one KV head": ("qwen3", {**SHAPE, "head_dim": 64}),
    "two KV heads": ("qwen3", {**SHAPE, "head_dim": 64, "num_key_value_heads": 2}),
    "latents": ("deepseek_v2", LATENT),
}
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 8,
    "kv_cache_memory": 0.05,
    "max_num_batched_tokens": 256,
    "device": "cuda",
    "dtype": "float32",
}
LOOKUP = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "adaptive": False}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: write_checkpoint(folder / name, kind, **values) for name, (kind, values) in MODELS.items()}


def generate(folder: Path, size: int, num_parts: int, max_tokens: int = 100, **settings: Any) -> list[RequestOutput]:
    """Prompts of one token, of a few, and longer than a step; then longer ones that begin in the same way."""
    rng = random.Random(1)
    prompts = [rng.choices(range(VOCAB), k=length) for length in (1, 2, 3, 40, 300, 700)]
    kinds: list[dict[str, Any]] = [{"temperature": 0, "logprobs": 2}, {"temperature": 0.9, "top_p": 0.9, "top_k": 50}]
    params = [SamplingParams(**kinds[i % 2], seed=i, max_tokens=max_tokens, ignore_eos=True) for i in range(6)]
    parts = {"tensor_parallel_size": size, "decode_context_parallel_size": num_parts}
    with LLM(str(folder), **{**SETTINGS, **parts, **settings}) as llm:
        assert llm.info.tensor_parallel_size == size
        first = llm.generate(prompts, params)
        longer = llm.generate([prompt + prompts[3] for prompt in prompts], params)
        assert sum(result.num_cached_tokens for result in longer) > 500
        llm.engine.check()
    return [*first, *longer]


def check_same(expected: list[RequestOutput], found: list[RequestOutput]) -> None:
    for one, other in zip(
        (result.outputs[0] for result in expected), (result.outputs[0] for result in found), strict=True
    ):
        assert list(other.token_ids) == list(one.token_ids)
        if one.logprobs:
            assert math.isclose(other.cumulative_logprob or 0, one.cumulative_logprob or 0, abs_tol=1e-2)


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize(
    ("model", "size", "num_parts"),
    [
        ("one KV head", 2, 2),
        ("latents", 2, 2),
        pytest.param("two KV heads", 4, 2, marks=NEEDS_FOUR),
        pytest.param("latents", 4, 4, marks=NEEDS_FOUR),
    ],
)
def test_parts_give_the_tokens_of_one_rank(
    checkpoints: dict[str, Path], model: str, size: int, num_parts: int, enforce_eager: bool
) -> None:
    """In every step the ranks compare their results, and would end if they were not equal."""
    expected = generate(checkpoints[model], 1, 1, enforce_eager=enforce_eager)
    check_same(expected, generate(checkpoints[model], size, num_parts, enforce_eager=enforce_eager))


@pytest.mark.parametrize("model", ["one KV head", "latents"])
@pytest.mark.parametrize("size", NUM_RANKS)
def test_drafts_give_the_tokens_without_them(checkpoints: dict[str, Path], model: str, size: int) -> None:
    expected = generate(checkpoints[model], 1, 1)
    check_same(expected, generate(checkpoints[model], size, size, speculative_config=json.dumps(LOOKUP)))


@pytest.mark.parametrize("model", ["one KV head", "latents"])
def test_bfloat16_ranks_agree_and_repeat(checkpoints: dict[str, Path], model: str) -> None:
    """Chunks of prompts depend on times that were measured, so that results repeat with batch invariance only."""
    settings: dict[str, Any] = {"dtype": "bfloat16", "batch_invariant": True}
    first, second = (generate(checkpoints[model], 2, 2, **settings) for _ in range(2))
    check_same(first, second)


@pytest.mark.parametrize("model", ["one KV head", "latents"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_bfloat16_is_as_likely_as_on_one_rank(checkpoints: dict[str, Path], model: str, kv_cache_dtype: str) -> None:
    """The first token of greedy answers, before rounding can lead to another text."""
    settings: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_dtype": kv_cache_dtype, "max_tokens": 1}
    one, two = (generate(checkpoints[model], count, count, **settings) for count in (1, 2))
    for expected, found in zip(one[::2], two[::2], strict=True):
        assert abs((expected.outputs[0].cumulative_logprob or 0) - (found.outputs[0].cumulative_logprob or 0)) < 0.3


def test_a_model_without_copies_of_its_kv_heads_is_refused(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(Exception, match="decode_context_parallel_size: 2 must divide the 1 of 2 ranks"):
        generate(checkpoints["two KV heads"], 2, 2)
