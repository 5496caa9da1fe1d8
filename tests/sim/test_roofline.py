"""The roofline counts what a real model has: checked against transformers' own parameters, and by hand."""

from __future__ import annotations

import pytest

from octavo.errors import ConfigError
from octavo.sim.roofline import Work, decode_work, prefill_work, shape_of
from octavo.sim.shapes import SHAPES


@pytest.mark.parametrize("name", ["qwen3-0.6b", "llama-3.2-1b", "qwen3-8b", "llama-3.1-8b", "gpt2"])
def test_matrix_weights_are_the_matrices_of_the_model(name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**SHAPES[name])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    matrices = sum(weight.numel() for key, weight in model.named_parameters() if weight.ndim == 2)
    looked_up = 0 if config.tie_word_embeddings else model.get_input_embeddings().weight.numel()
    positions = model.transformer.wpe.weight.numel() if name == "gpt2" else 0
    assert shape_of(SHAPES[name]).matrix_weights == matrices - looked_up - positions


def test_a_decode_step() -> None:
    shape = shape_of(SHAPES["llama-3.1-8b"])
    assert shape.kv_values_per_token == 2 * 32 * 8 * 128
    work = decode_work(shape, batch=64, context=1000, weight_bytes=2, kv_bytes=1)
    assert work.bytes == 2 * shape.matrix_weights + 64 * 1000 * 2 * 32 * 8 * 128
    assert work.flops == 64 * (2 * shape.matrix_weights + 4 * 32 * 4096 * 1000)


def test_one_token_of_prompt_is_one_step_of_decoding() -> None:
    shape = shape_of(SHAPES["qwen3-8b"])
    assert prefill_work(shape, 1) == decode_work(shape, 1, 1)
    assert prefill_work(shape, 3).flops < 3 * decode_work(shape, 1, 3).flops


def test_the_slower_of_moving_and_computing_counts() -> None:
    assert Work(bytes=4 * 10**9, flops=10**9).floor_ms(bandwidth_tb_s=4, peak_tflop_s=100) == pytest.approx(1)
    assert Work(bytes=1, flops=2 * 10**11).floor_ms(bandwidth_tb_s=4, peak_tflop_s=100) == pytest.approx(2)


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="mixture of experts"):
        shape_of({**SHAPES["qwen3-8b"], "num_experts": 8})
    with pytest.raises(ConfigError, match="no intermediate_size"):
        shape_of({"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1})
