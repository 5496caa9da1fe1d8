"""Keys and values of 8 and 4 bits through the real engine: the same bits in any chunks and batch, and after any way
back of a block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.build.device_settings import resolve_kv_dtype
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.models.layer_cache import LayerCacheSpec
from octavo.ops.attention.cached_rows import INT4
from octavo.quant.stored.stored_weight import WeightFormat
from tests.models.families import make_checkpoint
from tests.models.test_architectures import random_tokens
from tests.ops.cpu_cases import needs_float_kernels
from tests.tiers import nightly_after, one_in

pytestmark = needs_float_kernels
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "block_size": 16, "max_model_len": 128}
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1)
SHARED = random_tokens(60)
PROMPTS = [SHARED + random_tokens(20, 1), random_tokens(3, 2), SHARED[:45] + random_tokens(9, 3), random_tokens(25, 4)]
PROMPTS += [random_tokens(9, seed) for seed in (5, 6)]
CASES = [
    ("llama/gqa", "int8"),
    ("gemma2/capped", "int4"),
    ("qwen3_5/dense", "int4"),
    ("deepseek_v2/lite", "int8"),
    ("llama/gqa", "int4"),
    ("gemma2/capped", "int8"),
    ("deepseek_v2/lite", "int4"),
]
"""Full attention, windows, latents, and recurrent states beside keys."""


def told(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[list[Any]]:
    """Tokens and log-probabilities of the answers."""
    found = [list(result.outputs[0].logprobs or ()) for result in llm.generate(prompts, GREEDY)]
    llm.engine.check()
    return found


@one_in(2)
@pytest.mark.parametrize(("row", "kind"), nightly_after(4, CASES))
def test_bits_are_those_of_a_request_alone(tmp_path: Path, row: str, kind: str) -> None:
    make_checkpoint(tmp_path, row)
    settings = {**SETTINGS, "kv_cache_dtype": kind}
    with LLM(tmp_path, **settings, num_kv_blocks=60, enable_prefix_caching=False) as llm:
        alone = [told(llm, [prompt])[0] for prompt in PROMPTS]
        assert told(llm) == alone
    # Chunks, parts of blocks that are copied, hits, and fewer blocks than the answers need.
    with LLM(tmp_path, **settings, num_kv_blocks=15, max_num_batched_tokens=64, kv_offload_memory=0.01) as llm:
        for _ in range(2):
            assert told(llm) == alone
        stats = llm.engine.stats()
        assert min(stats.num_preemptions, stats.prefix_hits, stats.num_offload_restored) > 0


def test_memory_is_that_of_the_rows(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama/gqa", head_dim=64)
    sizes = []
    for kind in ("float32", "int8", "int4"):
        with LLM(tmp_path, **SETTINGS, num_kv_blocks=20, kv_cache_dtype=kind) as llm:
            sizes.append(llm.info.memory["kv_cache"])
    assert [size * 256 / sizes[0] for size in sizes] == [256, 64 + 4, 32 + 2 * 4]


def test_names_and_what_is_refused() -> None:
    given = EngineConfig.from_flat({"kv_cache_dtype": "int8_per_token_head"})
    assert given.cache.kv_cache_dtype == "int8"
    on_gpu, on_cpu = (WeightFormat(torch.bfloat16, torch.device(device)) for device in ("cuda", "cpu"))
    narrow, latent = LayerCacheSpec(2, 24), LayerCacheSpec(1, 576, kind="latent")
    assert resolve_kv_dtype("int8", on_gpu, [narrow]) == torch.int8
    assert resolve_kv_dtype("int4", on_gpu, [LayerCacheSpec(2, 80), LayerCacheSpec(kind="state")]) == INT4
    assert resolve_kv_dtype("int4", on_cpu, [narrow, latent]) == INT4
    with pytest.raises(ConfigError, match="kv_cache_dtype: int4 on a GPU needs a head_dim that 16 divides, not 24"):
        resolve_kv_dtype("int4", on_gpu, [narrow])
    with pytest.raises(ConfigError, match="kv_cache_dtype: int8 is for keys and values on a GPU, not for latents"):
        resolve_kv_dtype("int8", on_gpu, [narrow, latent])
    entries = LayerCacheSpec(1, 64, kind="latent", beside=0, rate=4)
    for name in ("int8", "int4", "fp8"):
        with pytest.raises(ConfigError, match=f"kv_cache_dtype: {name} is not for the compressed entries"):
            resolve_kv_dtype(name, on_cpu, [latent, entries])
