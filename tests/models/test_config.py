"""What is read from a config.json, and what is refused by name."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest

from octavo.errors import CheckpointError
from octavo.layers.rotary import DefaultRope, FactorsRope, LinearRope, Llama3Rope, SwitchedRope
from octavo.models.parts import DecoderConfig, MLPPart
from octavo.models.phimoe import PhimoeConfig
from octavo.models.registry import read_config
from octavo.steps.limits import NEVER, RopeSets
from octavo.weights.generation_config import token_ids
from tests.models.families import ROWS, make_config

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
LONG_FROM_1 = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 4}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def read(**changes: Any) -> DecoderConfig:
    config = read_config({**BASE, **changes})
    assert isinstance(config, DecoderConfig)
    return config


def test_defaults_are_those_of_llama() -> None:
    config = read()
    assert (config.num_kv_heads, config.head_dim, config.norm_eps) == (4, 8, 1e-6)
    assert config.ropes[0][0] == DefaultRope(10_000.0)
    attention, mlp = config.layers[0].attention, config.layers[0].mlp
    assert isinstance(mlp, MLPPart)
    assert (config.tie_word_embeddings, attention.has_bias, attention.has_output_bias, mlp.has_bias) == (False,) * 4
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
        config = read_config(values)
    assert not caplog.records
    assert (config.ropes[0][0].theta, config.eos_token_ids, config.num_kv_heads) == (100000.0, (2, 7), 2)
    assert config.tie_word_embeddings


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": 5e5}, DefaultRope(5e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, DefaultRope(5e5)),
        ({"rope_theta": 5e5, "rope_parameters": {"partial_rotary_factor": 1.0}}, DefaultRope(5e5)),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4}}, LinearRope(5e5, 4.0)),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, Llama3Rope(5e5, 8.0, 1.0, 4.0, 64)),
        ({"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "finetuned": True}}, Llama3Rope(5e5, 8.0, 1.0, 4.0, 64)),
        ({"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}, Llama3Rope(5e5, 8.0, 1.0, 4.0, 64)),
    ],
)
def test_rotary_settings_old_and_new(changes: dict[str, Any], expected: DefaultRope) -> None:
    assert read(**changes).ropes[0][0] == expected


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"sliding_window": 64}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 4.0}}, "rope_type is 'spiral'; it must be one of default"),
        ({"rope_scaling": {"rope_type": ["linear"]}}, "rope_type"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "alpha": 1.0}}, "alpha"),
        ({"rope_scaling": {"type": "dynamic"}}, "factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 1e305}}, "factor"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "short_factor"),
        ({"rope_scaling": LONG_FROM_1, "original_max_position_embeddings": 1}, "original_max_position_embeddings"),
        ({"rope_scaling": {"rope_type": "factors", "factors": [1.0, 1.0, 0.0, 1.0]}}, "factors"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0, "mscale": 2.0}}, "mscale"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "high_freq_factor"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_parameters": {"partial_rotary_factor": 0.4}}, "partial_rotary_factor"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; it must be 1"),
        ({"partial_rotary_factor": 1e308}, "partial_rotary_factor is 1e\\+308"),
        ({"quantization_config": {"quant_method": "quip"}}, "quantization_config"),
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


@pytest.mark.parametrize(
    "name", ["Gemma3ForCausalLM", "Gemma4ForCausalLM", "Olmo3ForCausalLM", "ModernBertForMaskedLM"]
)
@pytest.mark.parametrize("given", ["x", {"full_attention": "x"}, {"sliding_attention": [1], "full_attention": {}}])
def test_rotary_settings_of_each_kind_of_layers_are_objects(name: str, given: Any) -> None:
    with pytest.raises(CheckpointError, match=r"rope_parameters[a-z_.]* is"):
        read(architectures=[name], rope_parameters=given)


def test_a_window_as_long_as_the_context_is_none() -> None:
    mistral = {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 4}
    assert read(**mistral, sliding_window=128) == read(**mistral)
    assert read(**mistral, sliding_window=64).windows == (64, 64)
    shorter = read_config({**BASE, **mistral, "sliding_window": 64}, max_len=64)
    assert isinstance(shorter, DecoderConfig)
    assert shorter.windows == (0, 0)


def test_longrope_has_two_lists_of_factors_where_contexts_are_longer_than_the_original() -> None:
    scaling = {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    values = {**BASE, "rope_scaling": scaling, "original_max_position_embeddings": 64}
    scale = (1 + math.log(2) / math.log(64)) ** 0.5
    short, long = (FactorsRope(10_000.0, (factor,) * 4, scale) for factor in (1.0, 2.0))
    for max_len, expected in ((64, short), (65, SwitchedRope(10_000.0, 64, short, long))):
        config = read_config(values, max_len)
        assert isinstance(config, DecoderConfig)
        assert config.ropes[0][0] == expected
        assert config.rope_sets == (None if max_len == 64 else RopeSets(64))


def test_phi3_calls_two_lists_of_factors_yarn_too() -> None:
    scaling = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    phi = {**BASE, "architectures": ["Phi3ForCausalLM"], "original_max_position_embeddings": 64}
    yarn, longrope = (read_config({**phi, "rope_scaling": {**scaling, "type": kind}}) for kind in ("yarn", "longrope"))
    assert yarn == longrope


def test_each_list_of_factors_can_have_a_scale_of_its_own() -> None:
    scaling = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "long_mscale": 1.4}
    moe = {"architectures": ["PhimoeForCausalLM"], "num_local_experts": 4, "original_max_position_embeddings": 64}
    moe["num_key_value_heads"] = 4
    config = read_config({**BASE, **moe, "rope_scaling": {**scaling, "short_mscale": 1.2}})
    [rope] = config.rotary_embeddings
    assert isinstance(rope, SwitchedRope)
    assert rope.attention_factors == [1.2, 1.4]


def test_dynamic_scaling_makes_contexts_longer() -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    for max_len, longest in ((None, 256), (128, 128)):
        config = read_config({**BASE, "rope_scaling": scaling}, max_len)
        assert config.max_position_embeddings == 256
        assert config.rope_sets == (RopeSets(128, 8) if longest > 128 else None)


@pytest.mark.parametrize(
    ("sets", "num_prompt", "num_tokens", "expected"),
    [
        (RopeSets(64), 10, 64, (0, 64)),
        (RopeSets(64), 10, 65, (1, NEVER)),
        (RopeSets(64), 65, 65, (1, NEVER)),
        (RopeSets(64, 4), 10, 64, (0, 64)),
        (RopeSets(64, 4), 10, 65, (4, 68)),
        (RopeSets(64, 4), 10, 68, (4, 68)),
        (RopeSets(64, 4), 10, 69, (8, 72)),
        (RopeSets(64, 4), 75, 75, (11, 79)),
        (RopeSets(64, 4), 75, 79, (11, 79)),
        (RopeSets(64, 4), 75, 80, (15, 83)),
    ],
)
def test_which_rotary_frequencies_a_text_has(
    sets: RopeSets, num_prompt: int, num_tokens: int, expected: tuple[int, int]
) -> None:
    assert sets.of(num_prompt, num_tokens) == expected


def test_the_older_keys_of_qwen_say_which_layers_have_windows() -> None:
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "max_window_layers": 1}
    assert read(**qwen, use_sliding_window=False).windows == (0, 0)
    assert read(**qwen, use_sliding_window=True).windows == (0, 8)
    with pytest.raises(CheckpointError, match="sliding_window"):
        read(architectures=["LlamaForCausalLM"], layer_types=["full_attention", "sliding_attention"])


def test_kinds_of_layers_that_are_no_words_are_refused() -> None:
    with pytest.raises(CheckpointError, match="layer_types"):
        read(architectures=["Gemma2ForCausalLM"], layer_types=["full_attention", ["full_attention"]])


def test_unknown_keys_are_named_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    read(frobnication=3)
    assert "frobnication" in caplog.text


def test_token_ids() -> None:
    assert token_ids({}, "x") == ()
    assert token_ids({"x": 0}, "x") == (0,)
    assert token_ids({"x": [3, 1]}, "x") == (3, 1)


def test_no_family_computes_angles_that_no_layer_uses() -> None:
    for row in ROWS:
        config = read_config(make_config(row).to_dict())
        assert isinstance(config, DecoderConfig)
        used = {part.attention.rope for part in config.layers if not part.is_recurrent} - {None}
        assert used == set(range(len(config.ropes))), row


@pytest.mark.parametrize(
    "row",
    [
        *("qwen3_next/experts", "qwen3_5/dense", "qwen4_exp_text/plain", "olmo_hybrid/rotated", "kimi_linear/experts"),
        *("glm5_next_text/all_blocks", "bailing_hybrid/bounded", "bamba/one_of_two", "granitemoehybrid/experts"),
        *("jamba/dense", "minimax/lightning", "gemma4/own_embeddings", "gemma4/experts", "gemma3n/streams"),
    ],
)
def test_activations_that_other_layers_than_feed_forward_ones_would_have_too(row: str) -> None:
    values = make_config(row).to_dict()
    key = next(key for key in ("hidden_act", "hidden_activation") if key in values)
    read_config(values)
    with pytest.raises(CheckpointError, match=f"{key} is 'gelu'"):
        read_config({**values, key: "gelu"})


def test_the_bound_of_phimoe_is_that_of_its_configuration() -> None:
    mixture = {"architectures": ["PhimoeForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
    mixture["num_key_value_heads"] = 4
    config = read(**mixture, router_jitter_noise=0.25)
    assert isinstance(config, PhimoeConfig)
    assert config.jitter == 0.25
    with pytest.raises(CheckpointError, match="num_experts_per_tok is 3; it must be 2"):
        read(**mixture | {"num_experts_per_tok": 3})


def test_only_heads_that_nothing_rotates_may_be_of_odd_size() -> None:
    sizes = {"hidden_size": 35, "num_attention_heads": 5}
    with pytest.raises(CheckpointError, match="head_dim is 7; it must be an even number"):
        read(**sizes)
    assert read(architectures=["BloomForCausalLM"], **sizes).head_dim == 7


def test_pooling_that_classifiers_of_compass_do_not_have() -> None:
    values = {"architectures": ["CohereCompassTextForSequenceClassification"], "pooling": "mean", "num_labels": 2}
    with pytest.raises(CheckpointError, match="pooling is 'mean'; it must be 'eos'"):
        read(**values)
    assert read(**values | {"architectures": ["CohereCompassForCausalLM"]}).num_layers
