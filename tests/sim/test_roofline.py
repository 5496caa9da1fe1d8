"""The roofline counts what a real model has: checked against transformers' own parameters, and by hand."""

from __future__ import annotations

import random

import pytest

from octavo.errors import ConfigError
from octavo_fleet.sim.costs.roofline import decode_work, prefill_work, shape_of
from octavo_fleet.sim.shapes import SHAPES
from tests.tiers import one_in

DENSE = [
    *("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-32b", "llama-3.1-70b"),
    *("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "gemma-3-1b", "gpt2"),
]
MIXTURES = ["qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b", "deepseek-v2-lite"]
RECURRENT = ["qwen3.5-9b", "qwen3.5-35b-a3b", "qwen3-next-80b-a3b", "nemotron-h-8b"]
RANKED = {**SHAPES["deepseek-v2-lite"], "q_lora_rank": 96, "v_head_dim": 80, "num_attention_heads": 4}
"""Latent attention whose queries are projected in two steps."""


@one_in(3)
@pytest.mark.parametrize("name", [*DENSE, *MIXTURES, *RECURRENT, "ranked"])
def test_matrix_weights_are_the_matrices_of_the_model(name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = RANKED if name == "ranked" else SHAPES[name]
    config = AutoConfig.for_model(**shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    matrices = sum(weight.numel() for key, weight in model.named_parameters() if weight.ndim >= 2 and "bias" not in key)
    looked_up = 0 if config.tie_word_embeddings else model.get_input_embeddings().weight.numel()
    positions = model.transformer.wpe.weight.numel() if name == "gpt2" else 0
    assert shape_of(shape).matrix_weights == matrices - looked_up - positions


def test_a_decode_step() -> None:
    shape = shape_of(SHAPES["llama-3.1-8b"])
    assert shape.kv_values_per_token == 2 * 32 * 8 * 128
    work = decode_work(shape, batch=64, context=1000, weight_bytes=2, kv_bytes=1)
    assert work.bytes == 2 * shape.matrix_weights + 64 * 1000 * 2 * 32 * 8 * 128
    assert work.flops == 64 * (2 * shape.matrix_weights + 4 * 32 * 4096 * 1000)


def test_a_decode_step_of_latent_attention() -> None:
    """A position is one vector of 512 + 64 numbers in each layer, for all of 16 heads, of which 512 are the value."""
    shape = shape_of(SHAPES["deepseek-v2-lite"])
    assert shape.kv_values_per_token == 27 * 576
    work = decode_work(shape, batch=16, context=512, weight_bytes=2, kv_bytes=1)
    assert work.bytes == round(2 * shape.weights_read(16)) + 16 * 512 * 27 * 576
    assert work.flops == 16 * (2 * shape.active_weights + 27 * 16 * 2 * (576 + 512) * 512)
    behind = 16 * 128 * (512 + 2048) + 2048 * (64 + 3 * (6 + 2) * 1408) + 2048 * 102_400
    assert shape.last_weights_read(1) == pytest.approx(behind)


def test_a_decode_step_of_recurrent_layers() -> None:
    """It reads and writes the states of all sequences, of float32, and inputs of convolutions of 16 bits."""
    shape = shape_of(SHAPES["qwen3.5-9b"])
    assert shape.kv_values_per_token == 8 * 2 * 4 * 256
    assert shape.state_bytes == 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    work = decode_work(shape, batch=64, context=1000)
    assert work.bytes == 2 * shape.matrix_weights + 64 * (1000 * 2 * shape.kv_values_per_token + 2 * shape.state_bytes)
    more = decode_work(shape, batch=64, context=1001).flops - work.flops
    assert more == 64 * 4 * 8 * 16 * 256


def test_a_step_of_a_mixture_reads_the_experts_of_its_tokens() -> None:
    shape = shape_of(SHAPES["qwen3-30b-a3b"])
    expert = 48 * 3 * 2048 * 768
    outside = shape.matrix_weights - 128 * expert
    assert shape.active_weights == outside + 8 * expert
    assert decode_work(shape, 1, 0).bytes == 2 * shape.active_weights
    assert decode_work(shape, 16, 0).flops == 32 * shape.active_weights
    random.seed(0)
    seen = [len({e for _ in range(16) for e in random.sample(range(128), 8)}) for _ in range(1000)]
    read = (decode_work(shape, 16, 0).bytes / 2 - outside) / expert
    assert read == pytest.approx(sum(seen) / 1000, rel=0.01)
    assert decode_work(shape, 10_000, 0).bytes == 2 * shape.matrix_weights


def test_the_text_part_of_a_model_with_images_counts() -> None:
    text = {**SHAPES["qwen3-30b-a3b"], "model_type": "qwen3_vl_moe_text"}
    del text["intermediate_size"]  # no layer is without experts
    whole = {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe", "text_config": text}
    assert shape_of(whole)._replace(ffn=6144) == shape_of(SHAPES["qwen3-30b-a3b"])._replace(ffn=6144)


def test_layers_without_experts_and_shared_ones() -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    places = {"mlp_only_layers": [1], "decoder_sparse_step": 2, "shared_expert_intermediate_size": 48}
    dense = SHAPES["qwen3-0.6b"]
    assert shape_of({**dense, **sizes, **places}).mixture == (13, 4, 2, 32, 48, 1)  # every second of 28 but one
    assert shape_of({**dense, **sizes, **places, "mlp_only_layers": [0]}).mixture == (14, 4, 2, 32, 48, 1)


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-30b-a3b", "deepseek-v2-lite", "nemotron-h-8b"])
def test_one_token_of_prompt_is_one_step_of_decoding(name: str) -> None:
    shape = shape_of(SHAPES[name])
    assert prefill_work(shape, 1) == decode_work(shape, 1, 1)
    assert prefill_work(shape, 3).flops < 3 * decode_work(shape, 1, 3).flops


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="no v_head_dim"):
        shape_of({key: value for key, value in SHAPES["deepseek-v2-lite"].items() if key != "v_head_dim"})
    with pytest.raises(ConfigError, match="kinds conv of lfm2 are not counted"):
        shape_of({**SHAPES["qwen3-8b"], "model_type": "lfm2", "layer_types": ["conv"] * 36})
    with pytest.raises(ConfigError, match="no intermediate_size"):
        shape_of({"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1})
