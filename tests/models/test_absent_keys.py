"""Keys that a ``config.json`` leaves out have the defaults of transformers, which differ between families."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from octavo.errors import CheckpointError
from octavo.models.registry import read_config

ARCHITECTURES = {
    "gpt_oss": "GptOssForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "mistral": "MistralForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "llama": "LlamaForCausalLM",
}


def config_of(kind: str, **changes: Any) -> dict[str, Any]:
    """A published model's keys as they are written, with the rotary ones of older versions of the library."""
    values = AutoConfig.for_model(kind).to_dict() | {"architectures": [ARCHITECTURES[kind]], "rope_parameters": None}
    return {key: value for key, value in (values | changes).items() if value is not ...}


@pytest.mark.parametrize(
    ("kind", "written"),
    [
        ("gpt_oss", {"rope_theta": 150_000.0}),
        ("mixtral", {"rope_theta": 1_000_000.0}),
        ("mistral", {"rope_theta": 10_000.0}),
        ("mistral", {"sliding_window": 4096}),
        ("mixtral", {"sliding_window": None}),
        ("deepseek_v3", {"n_group": 8, "topk_group": 4}),
        ("deepseek_v3", {"topk_group": 4}),
    ],
)
def test_an_absent_key_is_as_its_default_written(kind: str, written: dict[str, Any]) -> None:
    absent = read_config(config_of(kind, **dict.fromkeys(written, ...)))
    assert absent == read_config(config_of(kind, **written))


def test_a_window_of_null_is_none() -> None:
    assert set(read_config(config_of("mistral", sliding_window=None)).windows) == {0}


def test_the_default_scaling_of_gpt_oss_is_that_of_a_configuration_without_any() -> None:
    plain = {"rope_parameters": {"rope_theta": 10_000.0}}
    assert read_config(config_of("gpt_oss", **plain)) != read_config(config_of("gpt_oss", rope_theta=10_000.0))
    given = [read_config(config_of(kind, **plain)).rotary_embeddings for kind in ("gpt_oss", "llama")]
    assert given[0] == given[1]


def test_attention_to_later_tokens_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match="is_causal"):
        read_config(config_of("llama", is_causal=False))
