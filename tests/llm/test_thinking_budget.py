"""A model whose reasoning is ended after so many tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams, StructuredOutputsParams
from octavo.errors import InvalidParameter
from octavo.types import Output, Request, ThinkingBudget


@pytest.mark.parametrize("drafts", [None, {"method": "ngram", "num_speculative_tokens": 3}])
def test_a_text_goes_on_behind_what_is_forced(tiny_checkpoint: Path, drafts: Any) -> None:
    settings: dict[str, Any] = {"max_model_len": 128, "num_kv_blocks": 64, "load_format": "dummy"}
    if drafts is not None:
        settings["speculative_config"] = drafts
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [[3, 4, 5] * 6, [5, 6, 7, 8] * 4]
    with LLM(tiny_checkpoint, **settings) as llm:
        engine, plain, bound = llm.engine, dict[int, list[int]](), dict[int, list[int]]()
        for found, budget in ((plain, None), (bound, ThinkingBudget(10, ((3,),), ((1, 2),), is_inside=True))):
            for number, prompt in enumerate(prompts, 900 + len(found)):
                engine.add(Request(number, prompt, params, 24, thinking=budget))
                found[number] = []
            while engine.has_work:
                outputs: list[Output] = engine.step()
                for output in outputs:
                    found[output.request_id] += output.tokens
                engine.check()
    for number in plain:
        assert bound[number][:10] == plain[number][:10]
        assert bound[number][10:12] == [1, 2]
        assert len(bound[number]) == 24


def test_a_model_without_marks_of_reasoning_has_no_budget(tiny_checkpoint: Path) -> None:
    with (
        LLM(tiny_checkpoint, max_model_len=64, load_format="dummy") as llm,
        pytest.raises(InvalidParameter, match="marks reasoning"),
    ):
        llm.generate([[3, 4]], SamplingParams(thinking_token_budget=3))


def test_a_structure_of_all_of_the_output_leaves_no_reasoning() -> None:
    with pytest.raises(InvalidParameter, match="bind all of the output"):
        SamplingParams(thinking_token_budget=3, structured_outputs=StructuredOutputsParams(regex="a"))
