"""The memory budget, and the automatic limits that follow from it."""

from __future__ import annotations

import ctypes
import json
import math
import platform
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.build.build_engine import build_engine
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.models.layer_cache import KVGroup, rank_cache
from octavo.models.registry import ARCHITECTURES, read_config
from octavo.ops.attention.choose_keys import MOST_SCORES
from octavo.ops.collective import SINGLE_RANK, ContextRanks
from octavo.runtime import memory_budget
from octavo.runtime.kv_storage import KVStorage
from octavo.runtime.memory_budget import GIB, Limits, MemoryBudget, plan_memory
from octavo.sampling_params import SamplingParams
from octavo.types import Request
from octavo_bench.sanity import tiny_config
from tests.tiers import nightly

KEYS = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
}
MODEL = read_config(KEYS)
STREAMS = [
    f"{name}ForCausalLM"
    for name in ("DeepseekV4", "Gemma3n", "Glm5Next", "HYV4", "Inkling2", "Llama", "Qwen4Exp", "Zaya")
]
"""Families of which a token is more than one vector between layers, and others."""
PER_TOKEN = 30 * 2 * 3 * 64 * 4


def settled(free: int = 16 * GIB, device: str = "cpu", **settings: Any) -> tuple[Limits, MemoryBudget]:
    config = EngineConfig.from_flat(settings)
    return plan_memory(config, MODEL, torch.float32, torch.float32, device, weights={"float32": 500}, free=free)


def test_defaults_on_a_cpu_take_one_gib_for_the_cache() -> None:
    limits, budget = settled()
    assert limits == Limits(8192, 32, (KVGroup(tuple(range(30)), 0),), (GIB // (32 * PER_TOKEN),), 64, 256)
    assert budget.kv_cache == limits.num_kv_blocks * 32 * PER_TOKEN <= GIB
    assert budget.weights == 500


def test_the_cache_takes_its_share_when_little_is_free_but_always_one_context() -> None:
    _, budget = settled(free=2 * GIB)
    assert 0.4 * GIB < budget.kv_cache < GIB
    small, _ = settled(free=GIB * 8 // 10)
    assert small.num_kv_blocks * 32 == 8192


def test_a_gpu_gives_all_that_is_left() -> None:
    limits, budget = settled(free=8 * GIB, device="cuda")
    total = budget.kv_cache + budget.activations + budget.logits
    assert 8 * GIB - 64 * PER_TOKEN < total <= 8 * GIB
    assert (limits.block_size, limits.max_num_seqs, limits.max_num_batched_tokens) == (64, 256, 4096)


def test_ranks_that_divide_contexts_hold_as_many_times_the_tokens_in_the_same_memory() -> None:
    model = read_config({**KEYS, "num_key_value_heads": 1})
    kinds, limits = (torch.float32, torch.float32, "cpu", {"float32": 500}, 16 * GIB, 3), []
    for num_parts in (1, 3):
        values = {"tensor_parallel_size": 3, "decode_context_parallel_size": num_parts, "kv_cache_memory": 0.25}
        limit, budget = plan_memory(EngineConfig.from_flat(values), model, *kinds)
        context = None if num_parts == 1 else ContextRanks(SINGLE_RANK, num_parts)
        sizes = limit.groups, limit.num_blocks, limit.block_size
        storage = KVStorage(model.cache, *sizes, torch.float32, torch.device("cpu"), context=context)
        assert sum(part.nbytes for part in storage.tensors) == budget.kv_cache
        limits.append(limit)
    one, three = limits
    assert (three.num_blocks, three.block_size) == (one.num_blocks, 3 * one.block_size)


def test_ranks_with_sequences_of_their_own_hold_as_many_times_the_tokens_in_the_same_memory() -> None:
    """Where there is one KV head, which all ranks would hold; with more, each rank holds all of them."""
    kinds = torch.float32, torch.float32, "cpu", {"float32": 500}, 16 * GIB, 3
    for kv_heads, times in ((1, 3), (3, 1)):
        model, limits = read_config({**KEYS, "num_attention_heads": 3, "num_key_value_heads": kv_heads}), []
        for dp_attention in (False, True):
            values = {"tensor_parallel_size": 3, "enable_dp_attention": dp_attention, "kv_cache_memory": 0.25}
            limit, budget = plan_memory(EngineConfig.from_flat(values), model, *kinds)
            specs = rank_cache(model.cache, 3 // limit.num_dp_ranks)
            sizes = limit.groups, limit.num_blocks, limit.block_size
            storage = KVStorage(specs, *sizes, torch.float32, torch.device("cpu"))
            assert sum(part.nbytes for part in storage.tensors) == budget.kv_cache
            limits.append(limit)
        assert abs(limits[1].num_cached_tokens - times * limits[0].num_cached_tokens) < 3 * limits[0].block_size


@pytest.mark.parametrize(("free", "num_tokens"), [(16, 8192), (8, 4096), (4, 2048), (1, 2048)])
def test_steps_have_as_many_tokens_as_take_a_small_share_of_a_gpu(free: int, num_tokens: int) -> None:
    assert settled(free=free * GIB, device="cuda")[0].max_num_batched_tokens == num_tokens
    given, _ = settled(free=free * GIB, device="cuda", max_num_batched_tokens=6000)
    assert given.max_num_batched_tokens == 6000


def test_steps_are_not_long_where_windows_would_have_to_hold_their_tokens() -> None:
    kinds = ["sliding_attention", "full_attention"] * 15
    windows = {"layer_types": kinds, "sliding_window": 128, "use_sliding_window": True}
    model = read_config({**KEYS, "architectures": ["Qwen3ForCausalLM"], "head_dim": 64, **windows})
    sizes = {"bfloat16": 500}, 64 * GIB
    limits, _ = plan_memory(EngineConfig.from_flat({}), model, torch.bfloat16, torch.bfloat16, "cuda", *sizes)
    assert limits.max_num_batched_tokens == 2048
    assert len(limits.groups) == 2


def test_a_gpu_keeps_room_to_expand_the_keys_of_prompts_from_latents() -> None:
    """For the heads of each rank, up to a limit; nothing for heads that no kernel expands."""
    keys = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "first_k_dense_replace": 2,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "max_position_embeddings": 163840,
    }

    def activations(num_ranks: int = 1, device: str = "cuda", max_model_len: int = 8192, **changed: int) -> int:
        config, model = EngineConfig.from_flat({"max_model_len": max_model_len}), read_config({**keys, **changed})
        dtype = torch.bfloat16
        sizes = {"bfloat16": 500}, 16 * GIB, num_ranks
        return plan_memory(config, model, dtype, dtype, device, *sizes)[1].activations

    plain = activations(v_head_dim=64)
    assert 8192 * (16 * 256 + 64) * 2 <= activations() - plain < 8192 * (16 * 256 + 64) * 2 + 2**21
    assert (
        8192 * (8 * 256 + 64) * 2 <= activations(2) - activations(2, v_head_dim=64) < 8192 * (8 * 256 + 64) * 2 + 2**21
    )
    assert 1 * GIB < activations(max_model_len=163840) - activations(max_model_len=163840, v_head_dim=64) < 1.1 * GIB
    assert activations(device="cpu") == activations(device="cpu", v_head_dim=64)


@pytest.mark.parametrize("max_model_len", [2048, 8192])
def test_the_keys_of_indexers_and_their_scores_take_memory(max_model_len: int) -> None:
    """Scores only where a row does not attend to all positions, and on GPUs."""
    model = read_config(tiny_config("DeepseekV32ForCausalLM") | {"max_position_embeddings": 8192})
    config, dtype = EngineConfig.from_flat({"max_model_len": max_model_len}), torch.bfloat16
    sizes = {"bfloat16": 500}, 64 * GIB
    limits, budget = plan_memory(config, model, dtype, dtype, "cuda", *sizes)
    latents = sum(spec.head_dim for spec in model.cache)
    assert budget.kv_cache == limits.num_blocks[0] * limits.block_size * 2 * (latents + model.num_layers * 128)
    others = read_config(tiny_config("DeepseekV3ForCausalLM") | {"max_position_embeddings": 8192})
    more = budget.activations - plan_memory(config, others, dtype, dtype, "cuda", *sizes)[1].activations
    choice = limits.max_num_batched_tokens * 2048
    assert abs(more - (0 if max_model_len == 2048 else 4 * (MOST_SCORES + choice))) < 2**20


@pytest.mark.parametrize("name", STREAMS + [nightly(name) for name in ARCHITECTURES if name not in STREAMS])
def test_what_a_token_takes_between_layers_is_planned(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(name)))
    sizes = {"model": str(tmp_path), "load_format": "dummy", "device": "cpu", "dtype": "bfloat16"}
    engine, _ = build_engine(EngineConfig.from_flat({**sizes, "max_model_len": 256, "num_kv_blocks": 32}))
    runner: Any = engine.runner
    model, widths = runner.executor._program.model, set[float]()

    def noted(part: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: Any) -> Tensor:
            x_TX = part(*args)
            widths.add(x_TX.nbytes / len(x_TX) / 2)
            return x_TX

        return run

    model.embedded, model.layers = noted(model.embedded), [noted(layer) for layer in model.layers]
    engine.add(Request(1, [5, 6, 7, 8], SamplingParams(max_tokens=1), 1))
    while engine.has_work:
        engine.step()
    engine.close()
    assert max(widths) == read_config(tiny_config(name)).stream_size


def test_what_blocks_of_each_head_are_worth_takes_memory() -> None:
    kernel = pytest.importorskip("octavo_kernels.triton.attention.choose_head_blocks")
    config = read_config(tiny_config("MiniMaxM3VLForCausalLM"))
    assert config.expanded_bytes(config.dense_context, 4096, 2, 1) == 0
    assert config.expanded_bytes(1 << 20, 4096, 2, 1) == 16 * kernel.MAX_SCRATCH


@pytest.mark.parametrize("name", ["Glm5NextForCausalLM", "Qwen4ExpForCausalLM"])
def test_ranks_of_blocks_that_indexers_choose_among_take_memory(name: str) -> None:
    """Of so many rows as are ranked at once, or of one; none where a row attends to all positions."""
    config: Any = read_config(tiny_config(name))
    size, most = config.index.block, config.index.most
    assert config.expanded_bytes((most + 1) * size - 1, 4096, 2, 1) == 0
    for longest in (1 << 20, 1 << 31):
        choice = 4 * (most + 1) * size if name.startswith("Glm") else 8 * most
        ranks = 8 * max(MOST_SCORES, longest // size)
        assert config.expanded_bytes(longest, 4096, 2, 1) == ranks + 4096 * choice


@pytest.mark.parametrize(("num_tokens", "num_rows"), [(512, 512), (4096, 1024)])
def test_a_cpu_keeps_room_for_what_experts_give(num_tokens: int, num_rows: int) -> None:
    """In float32, for as many rows as are computed at once."""
    experts = {"num_experts": 8, "moe_intermediate_size": 64, "mlp_only_layers": [0], "head_dim": 64}
    settings = EngineConfig.from_flat({"max_num_batched_tokens": num_tokens})
    found = []
    for num_chosen in (1, 4):
        model = read_config(
            KEYS | experts | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts_per_tok": num_chosen}
        )
        planned = plan_memory(settings, model, torch.float32, torch.float32, "cpu", {"float32": 500}, 16 * GIB)
        found.append(planned[1].activations)
    assert found[1] - found[0] == 3 * num_rows * 576 * 4


def test_what_is_given_is_kept() -> None:
    limits, _ = settled(max_model_len=100, block_size=7, num_kv_blocks=20, max_num_seqs=3, max_num_batched_tokens=11)
    assert limits == Limits(100, 7, (KVGroup(tuple(range(30)), 0),), (20,), 3, 11)


def test_batch_limits_follow_each_other() -> None:
    assert settled(max_num_batched_tokens=10)[0].max_num_seqs == 10
    assert settled(max_num_seqs=1000)[0].max_num_batched_tokens == 1000


def test_a_pool_that_is_given_bounds_the_context_that_is_not() -> None:
    assert settled(num_kv_blocks=10)[0].max_model_len == 320
    limits, budget = settled(kv_cache_memory=0.25)
    assert limits.max_model_len == limits.num_kv_blocks * 32
    assert 0 <= 0.25 * GIB - budget.kv_cache < 32 * PER_TOKEN


@pytest.mark.parametrize(
    ("settings", "free", "words"),
    [
        ({"max_model_len": 8193}, 16 * GIB, ["max_model_len", "8193", "8192"]),
        ({"max_model_len": 321, "num_kv_blocks": 10}, 16 * GIB, ["max_model_len to 320", "num_kv_blocks"]),
        ({"kv_cache_memory": 0.002}, 16 * GIB, []),
        ({"kv_cache_memory": 20}, 16 * GIB, ["kv_cache_memory", "20.00 GiB"]),
        ({"max_model_len": 8192}, GIB // 2, ["max_model_len", "would fit"]),
        ({}, GIB // 100, ["weights, activations and logits take", "GiB more than there is"]),
    ],
)
def test_what_does_not_fit_names_the_setting_to_change(settings: dict[str, Any], free: int, words: list[str]) -> None:
    if not words:
        assert settled(free=free, **settings)[0].num_kv_blocks == 1
        return
    with pytest.raises(ConfigError) as raised:
        settled(free=free, **settings)
    assert all(word in str(raised.value) for word in words), raised.value


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_free_memory_bounds_the_context_that_is_not_given(device: str, caplog: pytest.LogCaptureFixture) -> None:
    def used(limits: Limits, budget: MemoryBudget) -> int:
        return budget.kv_cache + budget.activations + budget.logits

    free = GIB * 4 // 10 if device == "cuda" else GIB // 2
    limits, budget = settled(free=free, device=device)
    assert 1000 < limits.max_model_len < 8192
    assert limits.num_kv_blocks * limits.block_size == limits.max_model_len
    assert used(limits, budget) <= free < used(limits, budget) + limits.block_size * PER_TOKEN
    assert f"max_model_len is {limits.max_model_len}, not the model's 8192" in caplog.text


def test_a_smaller_batch_makes_room_for_a_context(caplog: pytest.LogCaptureFixture) -> None:
    """Only by limits that are not given, and no further than the context needs that was asked for."""
    free = GIB * 6 // 10
    limits, _ = settled(free=free, device="cuda")
    assert (limits.max_model_len, limits.max_num_seqs, limits.max_num_batched_tokens) == (8192, 128, 1024)
    assert "at most 128 sequences and 1024 tokens" in caplog.text
    limits, _ = settled(free=free, device="cuda", max_model_len=2048)
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (256, 2048)
    limits, _ = settled(free=free, device="cuda", max_num_seqs=256)
    assert limits.max_num_seqs == 256 == limits.max_num_batched_tokens
    assert limits.max_model_len < 8192
    with pytest.raises(ConfigError, match="lower max_model_len"):
        settled(free=free, device="cuda", max_model_len=8192, max_num_seqs=256)


@pytest.mark.parametrize("size", [1, 8, 24, 48])
def test_a_block_that_tiles_of_a_gpu_do_not_divide_is_refused(size: int) -> None:
    """With blocks of 48 a tile of 32 keys would read the block that lies behind."""
    with pytest.raises(ConfigError, match=f"^block_size: .* power of two of at least 16 .* not {size}$"):
        settled(device="cuda", block_size=size)
    assert settled(block_size=size)[0].block_size == size
    assert settled(device="cuda", block_size=16)[0].block_size == 16


def test_a_cache_smaller_than_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory: one block takes"):
        settled(kv_cache_memory=0.001, block_size=64)


def test_the_storage_takes_what_the_budget_says() -> None:
    limits, budget = settled(num_kv_blocks=5, block_size=16)
    storage = KVStorage(
        MODEL.cache, limits.groups, limits.num_blocks, limits.block_size, torch.float32, torch.device("cpu")
    )
    per_token = sum(spec.bytes_per_block(torch.float32, 1) for spec in MODEL.cache)
    assert storage.pools[0][0].nbytes == budget.kv_cache == 5 * 16 * per_token
    assert [layer.keys.shape for layer in storage.layers] == [(5, 3, 16, 64)] * 30
    assert storage.layers[0].keys.data_ptr() != storage.layers[0].values.data_ptr()


def test_the_table_adds_up() -> None:
    table = MemoryBudget(1 << 20, 2 << 20, 3 << 20, 4 << 20).table().splitlines()
    assert [line.split()[-2] for line in table] == ["1.0", "2.0", "3.0", "4.0", "10.0"]


def test_free_memory_heeds_the_control_group(tmp_path: Path) -> None:
    assert 0 < memory_budget.free_memory(torch.device("cpu"), 0.9) < math.inf
    assert memory_budget._cgroup_available(tmp_path) is None
    (tmp_path / "memory.current").write_text("300\n")
    (tmp_path / "memory.max").write_text("1000\n")
    assert memory_budget._cgroup_available(tmp_path) == 700
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_budget._cgroup_available(tmp_path) is None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_memory_of_a_cache_that_is_given_bounds_states_without_keys(device: str) -> None:
    sizes = {"num_heads": 8, "head_dim": 64, "state_size": 64, "hidden_size": 256, "num_hidden_layers": 4}
    keys = {"architectures": ["Mamba2ForCausalLM"], "vocab_size": 1000, **sizes}
    config = EngineConfig.from_flat({"kv_cache_memory": 0.25, "max_num_seqs": 4, "max_model_len": 4096})
    model = read_config(keys)
    limits, budget = plan_memory(config, model, torch.float32, torch.float32, device, {"float32": 500}, 16 * GIB)
    assert 0.2 * GIB < budget.states < 0.3 * GIB
    assert limits.states is not None


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's settings")
def test_pages_that_were_freed_are_used_again() -> None:
    memory_budget.keep_freed(128 << 20)
    library, size = ctypes.CDLL(None), 40 << 20
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    library.free.argtypes = (ctypes.c_void_p,)
    faults = []
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        place = library.malloc(size)
        ctypes.memset(place, 1, size)
        library.free(place)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    assert min(faults) < size // resource.getpagesize() // 4
