"""Which values of a generation config reach requests, and which are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import CheckpointError, ConfigError
from octavo.weights.default_model import SMOLLM2_135M
from octavo.weights.generation_config import chosen_config, sampling_defaults

WRITTEN: dict[str, Any] = {
    "bos_token_id": 1,
    "do_sample": True,
    "eos_token_id": [2, 3],
    "max_new_tokens": 512,
    "min_p": None,
    "repetition_penalty": 1.05,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "transformers_version": "5.0.0",
}


def test_the_models_own_values_are_taken_and_vllm_means_none() -> None:
    assert sampling_defaults("auto", WRITTEN) == {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "repetition_penalty": 1.05,
        "max_tokens": 512,
    }
    assert sampling_defaults("vllm", WRITTEN) == {}
    assert sampling_defaults("auto", {}) == {}
    for setting in ("auto", "vllm"):
        assert chosen_config(setting, WRITTEN, Path("SmolLM2-135M-Instruct.Q4_1.gguf")) == WRITTEN


def test_what_the_authors_of_the_default_model_publish_fills_in() -> None:
    path = Path("/models") / SMOLLM2_135M.file_name
    config = chosen_config("auto", {"eos_token_id": 2}, path)
    assert config == {"eos_token_id": 2, "temperature": 0.2, "top_p": 0.9}
    assert sampling_defaults("vllm", config) == {}
    assert chosen_config("auto", {"eos_token_id": 2}, Path("other.gguf")) == {"eos_token_id": 2}


def test_all_tokens_are_asked_for_as_minus_one_too() -> None:
    assert sampling_defaults("auto", {"top_k": -1}) == {"top_k": 0}


def test_a_folder_with_another_one(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0}))
    config = chosen_config(str(tmp_path), WRITTEN, Path(SMOLLM2_135M.file_name))
    assert sampling_defaults(str(tmp_path), config) == {"temperature": 0}


def test_a_folder_without_one_is_refused(tmp_path: Path) -> None:
    for setting in (str(tmp_path), str(tmp_path / "missing"), "Auto"):
        with pytest.raises(ConfigError, match=r"generation_config: .* is neither auto, vllm nor a folder with gen"):
            chosen_config(setting, WRITTEN, Path("model"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_k", 2.5),
        ("min_p", True),
        ("repetition_penalty", 0),
        ("max_new_tokens", [1]),
    ],
)
def test_values_that_no_request_may_have_are_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=rf"generation config: {key}: .* Serve with --generation-config vllm"):
        sampling_defaults("auto", {key: value})
    assert sampling_defaults("vllm", {key: value}) == {}
