"""On a CPU a request's log-probabilities are the same alone and among others, to the bit, for every family."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from tests.models.families import FIRST_ROWS, OWN_ROWS, ROWS, TELLING, make_checkpoint
from tests.tiers import nightly, one_in

PROMPTS = [[(7 * i + 3 * j) % 60 + 1 for j in range(length)] for i, length in enumerate((1, 5, 17, 33, 40, 9, 3))]
PARAMS = [SamplingParams(temperature=i % 2, seed=i, max_tokens=12, ignore_eos=True, logprobs=2) for i in range(7)]
FEW = {*TELLING, *(row for row in FIRST_ROWS if row in OWN_ROWS)}


@one_in(7)
@pytest.mark.parametrize("row", [row if row in FEW else nightly(row) for row in ROWS])
def test_log_probabilities_are_those_of_a_request_alone(tmp_path: Path, row: str) -> None:
    make_checkpoint(tmp_path, row)
    check(tmp_path, "float32")


@pytest.mark.parametrize("row", ["qwen4_exp_text/plain", "minimax_m3_vl_text/few_blocks"])
def test_chosen_blocks_are_attended_to_as_all_are(tmp_path: Path, row: str) -> None:
    """In bfloat16, where a query that is rounded has other scores. Alone, short requests see all of their blocks."""
    make_checkpoint(tmp_path, row)
    check(tmp_path, "bfloat16")


def check(folder: Path, dtype: str) -> None:
    settings = {"device": "cpu", "dtype": dtype, "block_size": 8, "num_kv_blocks": 120, "max_model_len": 256}
    with LLM(folder, **settings, enable_prefix_caching=False, max_num_batched_tokens=24) as llm:
        alone = [llm.generate([prompt], params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
        together = llm.generate(PROMPTS, PARAMS)
    for one, other in zip(alone, together, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs
