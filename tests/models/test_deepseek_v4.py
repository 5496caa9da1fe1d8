"""DeepSeek-V4: names and keys of published checkpoints, drafts that are taken back, and what is cached."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM, SamplingParams
from octavo.errors import CheckpointError
from octavo.models.layer_cache import kv_groups
from octavo.models.registry import read_config
from octavo.ops.linear.grouped_linear import E2M1
from tests.models.adapter_files import make_adapter
from tests.models.families import make_checkpoint
from tests.tiers import nightly_after

ROW = "deepseek_v4/three_kinds"
SETTINGS: dict[str, Any] = {"device": "cpu", "block_size": 8, "num_kv_blocks": 100, "max_model_len": 128}
PROMPTS = [[(7 * i + 3 * j) % 11 + 1 for j in range(length)] for i, length in enumerate((30, 5, 61))]
PUBLISHED: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_hidden_layers": 5,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-6,
    "compress_ratios": [0, 128, 4, 128, 4, 0],
    "compress_rope_theta": 160000,
    "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
    "num_hash_layers": 3,
}
"""The keys of older names, with sizes of DeepSeek-V4-Flash."""


def said(folder: Path, **settings: Any) -> list[tuple[int, ...]]:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with LLM(folder, dtype="float32", **SETTINGS, **settings) as llm:
        found = [tuple(result.outputs[0].token_ids) for result in llm.generate(PROMPTS, params)]
        llm.engine.check()
    return found


def published_name(name: str) -> str:
    """That of a published checkpoint for what the library writes."""
    name = name.removeprefix("model.")
    for own, other in {
        "embed_tokens.": "embed.",
        "hc_head.hc_": "hc_head_",
        ".attn.norm.": ".attn.kv_norm.",
    }.items():
        name = name.replace(own, other)
    return name


def test_names_of_published_checkpoints(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, ROW)
    expected = said(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {published_name(name): tensor for name, tensor in tensors.items()}
    assert {"embed.weight", "head.weight", "norm.weight", "hc_head_fn", "layers.0.attn.kv_norm.weight"} < set(renamed)
    renamed["mtp.0.hc_head_fn"] = torch.zeros(4, 128)
    save_file(renamed, tmp_path / "model.safetensors")
    assert said(tmp_path) == expected


def test_published_types(tmp_path: Path) -> None:
    """FP8 blocks, and experts of 4 bits, each with powers of two as scales; others as they are."""
    whole, packed = tmp_path / "whole", tmp_path / "packed"
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "initializer_range": 0.05}
    make_checkpoint(whole, ROW, **sizes)
    make_checkpoint(packed, ROW, **sizes)
    dense = load_file(whole / "model.safetensors")
    stored = {published_name(name): tensor for name, tensor in dense.items()}
    for name in list(dense):
        own, module = published_name(name), published_name(name).removesuffix(".weight")
        if ".experts." in name:
            codes, exponents = torch.randint(16, dense[name].shape), torch.randint(120, 124, (len(dense[name]), 1))
            groups = exponents.repeat(1, dense[name].shape[1] // 32).to(torch.uint8)
            dense[name] = torch.tensor(E2M1)[codes] * 2.0 ** (exponents - 127)
            stored[own] = (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8).view(torch.int8)
            stored[f"{module}.scale"] = groups.view(torch.float8_e8m0fnu)
        elif (
            name.endswith((".wq_a.weight", ".wq_b.weight", ".wkv.weight", ".wo_a.weight", ".wo_b.weight", ".w1.weight"))
            and ".compressor." not in name
        ):
            stored[own] = (dense[name] * 64).to(torch.float8_e4m3fn)
            stored[f"{module}.scale"] = torch.full((1, 1), 121, dtype=torch.uint8).view(torch.float8_e8m0fnu)
            dense[name] = stored[own].float() / 64
    save_file(dense, whole / "model.safetensors")
    save_file(stored, packed / "model.safetensors")
    config = json.loads((packed / "config.json").read_text())
    config |= {"expert_dtype": "fp4", "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (packed / "config.json").write_text(json.dumps(config))
    assert said(packed) == said(whole)


def test_drafts_are_taken_back(tmp_path: Path) -> None:
    """Entries of rejected tokens are overwritten before a row sees them."""
    make_checkpoint(tmp_path, ROW)
    drafts = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1}
    assert said(tmp_path, speculative_config=drafts) == said(tmp_path)


@pytest.mark.parametrize("settings", nightly_after(1, ({}, {"kv_offload_memory": 0.01})))
def test_texts_that_are_given_up_and_found_again(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Over blocks in which groups end anywhere, in steps of a few tokens; with all layers in one group, too."""
    make_checkpoint(tmp_path, ROW)
    chance = random.Random(3)
    stems = [chance.choices(range(1, 97), k=length) for length in (37, 64)]
    prompts = [
        chance.choice(stems)[: chance.randrange(5, 64)] + chance.choices(range(1, 97), k=chance.randrange(1, 30))
        for _ in range(7)
    ]
    params = [SamplingParams(temperature=0, max_tokens=chance.randrange(10, 20), ignore_eos=True) for _ in prompts]
    base: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 128}
    with LLM(tmp_path, **base, num_kv_blocks=100, enable_prefix_caching=False) as llm:
        alone = [
            llm.generate([prompt], own)[0].outputs[0].token_ids for prompt, own in zip(prompts, params, strict=True)
        ]
    small = {"block_size": 7, "num_kv_blocks": 20, "max_num_batched_tokens": 13, "max_num_seqs": 6}
    with LLM(tmp_path, **base, **small, **settings) as llm:
        for _ in range(2):
            results = llm.generate(prompts, params)
            llm.engine.check()
            assert [result.outputs[0].token_ids for result in results] == alone
        assert sum(result.num_cached_tokens for result in results) > 50
        assert llm.engine.stats().num_preemptions > 0


def test_adapters(tmp_path: Path) -> None:
    base, folder = tmp_path / "base", tmp_path / "adapter"
    make_checkpoint(base, ROW)
    maps = ["q_a_proj", "q_b_proj", "o_b_proj", "self_attn.kv_proj"]
    merged = make_adapter(base, folder, 0, target_modules=maps, exclude_modules=r".*compressor.*")
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with LLM(base, dtype="float32", enable_lora=True, lora_modules=f"own={folder}", **SETTINGS) as llm:
        [result] = llm.generate([PROMPTS[2]], params, adapter="own")
    told = [next(iter(row.values())).logprob for row in (result.prompt_logprobs or [])[1:] if row]
    with torch.inference_mode():
        logits = merged(torch.tensor([PROMPTS[2]]), use_cache=False).logits[0].log_softmax(dim=-1)
    expected = logits[:-1].gather(1, torch.tensor(PROMPTS[2][1:]).unsqueeze(1))[:, 0]
    torch.testing.assert_close(torch.tensor(told), expected, atol=1e-4, rtol=0)


def test_keys_of_older_names() -> None:
    config: Any = read_config(PUBLISHED)
    window, sparse, heavy = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
    assert config.kinds == (window, heavy, sparse, heavy, sparse)
    assert config.fixed == (True, True, True, False, False)
    assert [width for _, width in config.ropes] == [64, 64]
    assert config.ropes[1][0].attention_factor == 1.0
    groups = kv_groups(config.cache, max_window=4096)
    assert [group.window for group in groups] == [0, 128, 8]
    numbers = [group.bytes_per_block(config.cache, torch.bfloat16, 128) // 2 for group in groups]
    assert numbers == [2 * 512 + 2 * 32 * 640, 128 * (5 * 512 + 2 * 1024), 128 * 2 * 4 * 640]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compress_ratios": [0, 128, 5, 128, 4]}, "compress_ratios .* each one of 0, 4 and 128"),
        ({"o_groups": 7}, "o_groups is 7; it must be a divisor of num_attention_heads, 64"),
        ({"index_head_dim": 62}, "index_head_dim is 62; it must be at least as many numbers as are rotated, 64"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim is 63; it must be an even number"),
        ({"scoring_func": "relu"}, "scoring_func is 'relu'; it must be one of sqrtsoftplus, sigmoid, softmax"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is .dynamic.; it must be one of default"),
    ],
)
def test_wrong_keys(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config({**PUBLISHED, **changes})


def test_experts_of_a_token_that_there_are_not(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, ROW)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.ffn.gate.tid2eid"][3, 1] = 6
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.gate\.tid2eid has numbers that are not below 6"):
        said(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["n_routed_experts"] == 6
