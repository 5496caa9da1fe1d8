"""What is read from a config.json, and what is refused by name."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from octavo.errors import CheckpointError
from octavo.layers.rotary import DefaultRope, LinearRope, Llama3Rope
from octavo.models.config import ModelConfig, token_ids

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def read(**changes: Any) -> ModelConfig:
    return ModelConfig.from_dict({**BASE, **changes})


def test_defaults_are_those_of_llama() -> None:
    config = read()
    assert (config.num_kv_heads, config.head_dim, config.norm_eps) == (4, 8, 1e-6)
    assert config.rope == DefaultRope(10_000.0)
    assert (config.tie_word_embeddings, config.attention_bias, config.mlp_bias) == (False, False, False)
    assert config.eos_token_ids == ()


def test_the_config_of_a_real_checkpoint_is_understood_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    values = {
        **BASE,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": [2, 7],
        "hidden_act": "silu",
        "initializer_range": 0.04,
        "is_llama_config": True,
        "model_type": "llama",
        "num_key_value_heads": 2,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.42.3",
        "use_cache": True,
    }
    with caplog.at_level(logging.WARNING):
        config = ModelConfig.from_dict(values)
    assert not caplog.records
    assert (config.rope.theta, config.eos_token_ids, config.num_kv_heads) == (100000.0, (2, 7), 2)
    assert config.tie_word_embeddings


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": 5e5}, DefaultRope(5e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, DefaultRope(5e5)),
        ({"rope_theta": 5e5, "rope_parameters": {"partial_rotary_factor": 1.0}}, DefaultRope(5e5)),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4}}, LinearRope(5e5, 4.0)),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, Llama3Rope(5e5, 8.0, 1.0, 4.0, 64)),
        ({"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}, Llama3Rope(5e5, 8.0, 1.0, 4.0, 64)),
    ],
)
def test_rotary_settings_old_and_new(changes: dict[str, Any], expected: DefaultRope) -> None:
    assert read(**changes).rope == expected


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"sliding_window": 64}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_type"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0, "mscale": 2.0}}, "mscale"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "high_freq_factor"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"residual_multiplier": 0.2}, "residual_multiplier"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_attention_heads": 5}, "hidden_size"),
        ({"head_dim": 7}, "head_dim"),
        ({"vocab_size": None}, "vocab_size"),
        ({"vocab_size": "100"}, "vocab_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"num_hidden_layers": 2**40}, "num_hidden_layers"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_changes_the_arithmetic_or_is_wrong_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        read(**changes)


def test_a_window_as_long_as_the_context_is_none() -> None:
    assert read(sliding_window=128) == read(sliding_window=64, use_sliding_window=False) == read()


def test_unknown_keys_are_named_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    read(frobnication=3)
    assert "frobnication" in caplog.text


def test_token_ids() -> None:
    assert token_ids({}, "x") == ()
    assert token_ids({"x": 0}, "x") == (0,)
    assert token_ids({"x": [3, 1]}, "x") == (3, 1)
