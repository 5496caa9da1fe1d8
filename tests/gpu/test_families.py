"""Every architecture on a CUDA device next to transformers on the CPU: batches, chunks, prefix hits, graphs of state.

Skipped where there is no such device. Half a minute with `-n 8`, where a GPU has room for as many processes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from octavo import LLM, SamplingParams
from tests.models import vision
from tests.models.families import EVERY_ROW, ROWS
from tests.models.test_architectures import LENGTHS, PROMPTS, Made, check_logprobs
from tests.models.test_vision import PROMPTS as WITH_IMAGES
from tests.models.test_vision import SCORED, as_inputs, worst_difference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

NEW_TOKENS = 24
SETTINGS: dict[str, Any] = {"device": "cuda", "dtype": "float32", "max_num_seqs": 4, "kv_cache_memory": 0.05}
WITH_STATE = [row for row in ROWS if ROWS[row][0] in {"qwen3_next", "mamba2", "lfm2", "nemotron_h", "granitemoehybrid"}]


@pytest.fixture(scope="module", params=EVERY_ROW)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("model"), request.param)


def check_next_to_transformers(made: Made, **settings: Any) -> None:
    """Greedy tokens and log-probabilities, of mixed lengths, and of longer prompts that begin in the same way."""
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=3)
    with LLM(made.folder, **{**SETTINGS, "max_num_batched_tokens": 48, **settings}) as llm:
        first = llm.generate(PROMPTS, params)
        longer = [
            prompt + list(result.outputs[0].token_ids)[:20] for prompt, result in zip(PROMPTS, first, strict=True)
        ]
        again = llm.generate(longer, params)
        assert sum(result.num_cached_tokens for result in again) > sum(LENGTHS) // 2
        llm.engine.check()
    for prompt, result in zip([*PROMPTS, *longer], [*first, *again], strict=True):
        output = result.outputs[0]
        expected = made.logprobs([*prompt, *output.token_ids])[len(prompt) - 1 : -1]
        assert len(output.token_ids) == NEW_TOKENS
        check_logprobs(output.logprobs or [], expected)
        chosen = expected[range(NEW_TOKENS), list(output.token_ids)]
        assert (chosen >= expected.amax(dim=-1) - 1e-3).all(), "a token that is not the likeliest"


def test_logprobs_are_those_of_transformers(made: Made) -> None:
    check_next_to_transformers(made, enforce_eager=True)


@pytest.mark.parametrize("row", WITH_STATE)
@pytest.mark.parametrize("settings", [{}, {"batch_invariant": True}], ids=str)
def test_graphs_of_models_with_state(row: str, settings: dict[str, Any], tmp_path: Path) -> None:
    check_next_to_transformers(Made(tmp_path, row), **settings)


@pytest.mark.parametrize("settings", [{"enforce_eager": True}, {}], ids=str)
@pytest.mark.parametrize("name", list(vision.FAMILIES))
def test_images(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Twice: the second time, images and prefixes come from the caches."""
    model: PreTrainedModel = vision.make(tmp_path, name)
    sizes = {"device": "cuda", "dtype": "float32", "block_size": 16, "num_kv_blocks": 120}
    with LLM(tmp_path, **sizes, **settings) as llm:
        for _ in range(2):
            for prompt, output in zip(WITH_IMAGES, llm.generate(as_inputs(WITH_IMAGES), SCORED), strict=True):
                assert worst_difference(name, model, prompt, output) < 2e-3
        llm.engine.check()
