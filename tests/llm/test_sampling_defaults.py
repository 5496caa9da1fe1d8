"""``LLM`` samples by the model's generation config if the caller gives no parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from tests.llm.tiny import SETTINGS, write_checkpoint


def load(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, **SETTINGS, **settings)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path)
    written = {"temperature": 0.0, "max_new_tokens": 5, "top_k": 7, "eos_token_id": [9, 256]}
    (tmp_path / "generation_config.json").write_text(json.dumps(written))
    return tmp_path


def test_the_models_own_are_the_default(folder: Path) -> None:
    with load(folder) as llm:
        assert llm.info.eos_token_ids == (9, 256)
        default = llm.get_default_sampling_params()
        assert default == SamplingParams(temperature=0, max_tokens=5, top_k=7)
        expected = llm.generate("Hello", default)[0].outputs[0].token_ids
        assert [llm.generate("Hello")[0].outputs[0].token_ids for _ in range(3)] == [expected] * 3
        assert [token for piece in llm.stream("Hello") for token in piece.token_ids] == list(expected)
        # Parameters that are given are not mixed with those of the model.
        llm.generate("Hello", SamplingParams(max_tokens=3, ignore_eos=True))


def test_neutral_on_request(folder: Path) -> None:
    with load(folder, generation_config="vllm") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
        assert llm.info.eos_token_ids == (9, 256)


def test_those_of_another_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "generation_config.json").write_text(json.dumps({"top_p": 0.5, "eos_token_id": 11}))
    with load(folder, generation_config=str(other)) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(top_p=0.5)
        assert llm.info.eos_token_ids == (11,)
