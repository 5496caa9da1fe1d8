"""Every architecture on a CUDA device next to the CPU: batches, chunks, prefix hits, graphs of models with state.

Skipped where there is no such device. About a minute with `-n 8`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from octavo import LLM, RequestOutput, SamplingParams
from octavo.models.vision.tower_parts import attend
from tests.models import vision
from tests.models.families import EVERY_ROW, ROWS, make_checkpoint
from tests.models.test_architectures import LENGTHS, PROMPTS
from tests.models.test_vision import OTHERS, SCORED, as_inputs, worst_difference
from tests.models.test_vision import PROMPTS as WITH_IMAGES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=3)
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "kv_cache_memory": 0.05,
}
OF_GPU = {"device": "cuda", "gpu_memory_utilization": 1.0}
"""Several processes have the device at the same time."""
TOLERANCE = 1e-3
STATE_TYPES = {
    "qwen3_next",
    "qwen3_5_text",
    "mamba2",
    "falcon_mamba",
    "lfm2",
    "nemotron_h",
    "granitemoehybrid",
    "falcon_h1",
    "jamba",
    "zamba2",
    "bailing_hybrid",
    "zaya",
    "qwen4_exp_text",
    "inkling_text",
    "inkling2_text",
}
WITH_STATE = [row for row in ROWS if ROWS[row][0] in STATE_TYPES]


def generate(folder: Path, **settings: Any) -> list[RequestOutput]:
    """Prompts of mixed lengths, and longer ones that begin in the same way."""
    with LLM(folder, **{**SETTINGS, **settings}) as llm:
        first = llm.generate(PROMPTS, GREEDY)
        longer = [prompt + PROMPTS[3] for prompt in PROMPTS]
        again = llm.generate(longer, GREEDY)
        assert sum(result.num_cached_tokens for result in again) > sum(LENGTHS) // 2
        llm.engine.check()
    return [*first, *again]


def check_next_to_cpu(folder: Path, **settings: Any) -> None:
    check_alike(generate(folder, device="cpu"), generate(folder, **OF_GPU, **settings))


def check_alike(ones: list[RequestOutput], others: list[RequestOutput], tolerance: float = TOLERANCE) -> None:
    """Log-probabilities, up to the first token that is another because two are nearly as likely."""
    for expected, found in zip(ones, others, strict=True):
        one, other = expected.outputs[0], found.outputs[0]
        for place, (token, entries) in enumerate(zip(one.token_ids, one.logprobs or [], strict=True)):
            told = (other.logprobs or [])[place]
            for known in entries.keys() & told.keys():
                assert abs(entries[known].logprob - told[known].logprob) < tolerance
            if other.token_ids[place] != token:
                assert entries[token].logprob - entries[other.token_ids[place]].logprob < tolerance
                break


@pytest.mark.parametrize("row", EVERY_ROW)
def test_logprobs_are_those_of_the_cpu(row: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, row)
    check_next_to_cpu(tmp_path, enforce_eager=True)


@pytest.mark.parametrize("row", WITH_STATE)
@pytest.mark.parametrize("settings", [{}, {"batch_invariant": True}], ids=str)
def test_graphs_of_models_with_state(row: str, settings: dict[str, Any], tmp_path: Path) -> None:
    make_checkpoint(tmp_path, row)
    check_next_to_cpu(tmp_path, **settings)


@pytest.mark.parametrize("settings", [{"enforce_eager": True}, {}], ids=str)
@pytest.mark.parametrize("name", OTHERS)
def test_images(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Twice: the second time, images and prefixes come from the caches."""
    model: PreTrainedModel = vision.make(tmp_path, name)
    sizes: dict[str, Any] = {**OF_GPU, "dtype": "float32", "block_size": 16, "num_kv_blocks": 120}
    with LLM(tmp_path, **sizes, **settings) as llm:
        for _ in range(2):
            for prompt, output in zip(WITH_IMAGES, llm.generate(as_inputs(WITH_IMAGES), SCORED), strict=True):
                assert worst_difference(name, model, prompt, output) < 2 * TOLERANCE
        llm.engine.check()


def test_attention_of_towers_stores_no_scores() -> None:
    """Those of an image of 1024 x 1024 pixels would take 512 MiB, and most of the time."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(4096, 16, 72, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = attend(q, k, v)
    assert torch.cuda.max_memory_allocated() - before < 8 * q.nbytes
    scores = torch.einsum("nah,mah->anm", q[:50].double(), k.double()) * 72**-0.5
    expected = torch.einsum("anm,mah->nah", scores.softmax(-1), v.double()).flatten(1)
    assert (found[:50].double() - expected).norm() < 1e-2 * expected.norm()
