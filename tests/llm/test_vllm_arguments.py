"""Names that scripts for vLLM use: they mean here what they mean there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import (
    LLM,
    CheckpointError,
    InvalidParameter,
    LoRARequest,
    RunnerError,
    SamplingParams,
    StructuredOutputsParams,
)
from tests.llm.test_adapters import GREEDY, PROMPT, SETTINGS, Made
from tests.llm.tiny import write_checkpoint


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = write_checkpoint(tmp_path_factory.mktemp("model"))
    with LLM(folder, load_format="dummy", num_kv_blocks=64, scheduling_policy="priority", max_num_seqs=1) as made:
        yield made


def test_an_adapter_is_loaded_when_it_is_first_named(tmp_path: Path) -> None:
    made = Made(tmp_path)
    settings = {**made.settings, "lora_modules": None, "max_loras": 1}
    first = LoRARequest("first", 1, str(tmp_path / "first"))
    with LLM(**settings) as llm:
        for _ in range(2):
            [result] = llm.generate([PROMPT], GREEDY, lora_request=first, use_tqdm=False)
            made.check("first", list(result.outputs[0].token_ids))
        with pytest.raises(InvalidParameter, match="loaded with other content"):
            llm.generate([PROMPT], GREEDY, lora_request=first._replace(lora_path=str(tmp_path / "second")))
        with pytest.raises(CheckpointError, match="max_loras"):
            llm.generate([PROMPT], GREEDY, lora_request=LoRARequest("second", 2, str(tmp_path / "second")))
    with LLM(made.settings["model"], **SETTINGS) as llm, pytest.raises(CheckpointError, match="enable_lora"):
        llm.generate([PROMPT], GREEDY, lora_request=first)


def test_priorities_order_prompts(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    first, second = llm.generate([[1, 2], [3, 4]], params, priority=[5, -5])
    assert first.metrics is not None
    assert second.metrics is not None
    assert second.metrics.first_token_ts < first.metrics.first_token_ts
    for wrong in ([1], [1, "2"], [1, True]):
        with pytest.raises(InvalidParameter, match="a list of 2 whole numbers"):
            llm.generate([[1, 2], [3, 4]], params, priority=wrong)


@pytest.mark.parametrize(
    ("given", "form"),
    [
        ({"regex": "a[bc]{3}"}, r"a[bc]{3}"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'root ::= "x" [0-9]'}, r"x\d"),
    ],
)
def test_structured_outputs(llm: LLM, given: dict[str, Any], form: str) -> None:
    params = SamplingParams(max_tokens=60, seed=1, structured_outputs=StructuredOutputsParams(**given))
    [result] = llm.generate("some", params)
    assert re.fullmatch(form, result.outputs[0].text)


@pytest.mark.parametrize("as_text", [True, False])
def test_structured_outputs_of_a_schema(llm: LLM, as_text: bool) -> None:
    schema: Any = {"enum": [{"a": 1}, {"a": 2}]}
    outputs = StructuredOutputsParams(json=json.dumps(schema) if as_text else schema)
    [result] = llm.generate("some", SamplingParams(max_tokens=60, seed=1, structured_outputs=outputs))
    assert json.loads(result.outputs[0].text) in schema["enum"]


@pytest.mark.parametrize("given", [{}, {"regex": "a", "choice": ["b"]}, {"json": "{"}, {"json": 5}, {"choice": []}])
def test_structured_outputs_that_make_no_grammar(llm: LLM, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter, match="structured_outputs"):
        llm.generate("some", SamplingParams(structured_outputs=StructuredOutputsParams(**given)))


def test_tokens_without_texts_and_prompts_cut_at_their_start(llm: LLM) -> None:
    plain = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    bare = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, detokenize=False, truncate_prompt_tokens=3)
    expected, found = llm.generate([[7, 8, 9], [5, 6, 7, 8, 9]], [plain, bare])
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    assert found.prompt_token_ids == [7, 8, 9]
    assert (bool(expected.outputs[0].text), found.outputs[0].text) == (True, "")
    assert bare.clone() == bare
    for wrong in ({"detokenize": False, "stop": ["a"]}, {"truncate_prompt_tokens": 0}):
        with pytest.raises(InvalidParameter):
            SamplingParams(**wrong)  # type: ignore[arg-type]


def test_other_names(llm: LLM) -> None:
    assert llm.llm_engine is llm.engine
    with pytest.raises(TypeError, match=r"LLM\.generate.* unexpected keyword argument 'use_progres'"):
        llm.generate("some", use_progres=True)  # type: ignore[call-arg]
    with pytest.raises(RunnerError, match="cannot free its memory"):
        llm.sleep(level=1)
