"""Keys that a ``config.json`` leaves out have the defaults of transformers, which differ between families."""

from __future__ import annotations

import contextlib
import copy
import json
from typing import Any

import pytest
from transformers import AutoConfig

from octavo.errors import CheckpointError
from octavo.models.registry import read_config
from tests.models.families import FIRST_ROWS, make_config
from tests.tiers import one_in

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


EMULATED = ("bailing_moe_v2", "minicpm")
"""Families that the library has under another name, with other defaults."""
NOT_OF_THE_MODEL = {"architectures", "model_type", "eos_token_id", "q_lora_rank", "kv_lora_rank", "unpadded_vocab_size"}
"""Ends are the tokenizer's, and files in which a rank is absent have none."""


@one_in(7)
@pytest.mark.parametrize("row", FIRST_ROWS)
def test_each_absent_key_has_the_value_of_the_family(row: str) -> None:
    """Or it is refused by name, as sizes are."""
    config = make_config(row)
    if config.model_type in EMULATED:
        pytest.skip("the library has no defaults of this family")
    written = json.loads(json.dumps(config.to_dict()))
    for key in written.keys() - NOT_OF_THE_MODEL:
        less = {name: value for name, value in written.items() if name != key}
        try:
            completed = type(config).from_dict(copy.deepcopy(less)).to_dict()
            expected = read_config(completed | {"architectures": written["architectures"]})
        except Exception:
            continue  # the library needs the key, or its default is not for models of this size
        with contextlib.suppress(CheckpointError):
            assert read_config(less) == expected, key
