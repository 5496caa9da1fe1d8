"""Models whose rows attend to some positions alone: the same bits however a text is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from tests.models.families import make_checkpoint
from tests.models.test_architectures import PROMPTS, SETTINGS
from tests.ops.cpu_cases import needs_float_kernels
from tests.tiers import nightly

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, prompt_logprobs=2, logprobs=2)


@needs_float_kernels
@pytest.mark.parametrize(
    "row", ["hy_v4/shared", *map(nightly, ("axk2/gated_norms", "deepseek_v32/groups", "glm_moe_dsa/shared"))]
)
def test_a_text_has_the_same_bits_alone_in_a_batch_and_in_any_chunks(row: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, row)

    def answers(prompts: list[list[int]], **more: Any) -> list[Any]:
        with LLM(tmp_path, dtype="float32", **{**SETTINGS, **more}) as llm:
            found = llm.generate(prompts, PARAMS)
            again = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2))
        for first, second in zip(found, again, strict=True):  # the second over what the first has cached
            assert first.outputs[0].logprobs == second.outputs[0].logprobs
        return [(result.prompt_logprobs, result.outputs[0].logprobs) for result in found]

    expected = answers(PROMPTS)
    assert answers(PROMPTS, max_num_batched_tokens=7) == expected
    assert answers(PROMPTS[-1:], max_num_batched_tokens=100, block_size=1) == expected[-1:]
