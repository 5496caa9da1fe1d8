"""Speculative decoding on a CUDA device: graphs, a step ahead, and the same tokens as without drafts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.ops.sampling.sampling import SampleParams
from octavo.runtime.drafting.optional_acceptance import distribution
from tests.gpu.checkpoints import write_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

NGRAM: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "adaptive": False}
SETTINGS: dict[str, Any] = {
    "block_size": 16,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "device": "cuda",
    "dtype": "float32",
}
PROMPTS = [[(7 * i + 3 * j) % 16 for j in range(length)] for i, length in enumerate([1, 5, 16, 17, 64, 150, 40, 9, 3])]
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0, "frequency_penalty": 0.4, "logprobs": 2},
    {"temperature": 1.0, "top_k": 5, "min_tokens": 8, "stop_token_ids": [3]},
    {"temperature": 0, "allowed_token_ids": list(range(40))},
    {"temperature": 0, "allowed_token_ids": [7]},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama."""
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


def generate(folder: Path, **settings: Any) -> tuple[list[Any], Any]:
    params = [
        SamplingParams(**PARAMS[i % len(PARAMS)], seed=i, max_tokens=60, ignore_eos=True) for i in range(len(PROMPTS))
    ]
    with LLM(str(folder), **{**SETTINGS, "num_kv_blocks": 200, **settings}) as llm:
        found = [list(result.outputs[0].token_ids) for result in llm.generate(PROMPTS, params)]
        llm.engine.check()
        return found, llm.engine


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_kv_blocks": 26},
        {"async_scheduling": False},
        {"enforce_eager": True},
        {"speculative_config": {**NGRAM, "adaptive": True}},
        {"speculative_config": {**NGRAM, "num_speculative_tokens": 1}},
    ],
    ids=["graphs", "preempting", "one step", "eager", "adaptive", "one draft"],
)
def test_tokens_are_those_without_drafts(checkpoint: Path, settings: dict[str, Any]) -> None:
    want, _ = generate(checkpoint, batch_invariant=True)
    found, engine = generate(checkpoint, **{"batch_invariant": True, "speculative_config": NGRAM, **settings})
    assert found == want
    stats = engine.stats()
    assert stats.num_accepted_drafts <= stats.num_drafts
    if "speculative_config" not in settings:
        assert stats.num_accepted_drafts > 0
    assert engine.depth == (1 if settings.get("async_scheduling") is False else 2)


def test_steps_of_decodes_and_drafts_have_graphs(checkpoint: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    with LLM(str(checkpoint), **SETTINGS, num_kv_blocks=200, speculative_config=NGRAM) as llm:
        llm.generate([PROMPTS[4]] * 4, params)
        executor: Any = llm.engine.runner.executor  # type: ignore[attr-defined]
        shapes = list(executor._graphs._graphs)
        assert any(shape.is_verification for shape in shapes)
        assert llm.engine.stats().num_accepted_drafts > 0


def test_rows_computed_one_by_one_agree(checkpoint: Path) -> None:
    """Without ``batch_invariant``, greedy tokens in float32 hardly ever differ."""
    found, _ = generate(checkpoint, speculative_config=NGRAM)
    want, _ = generate(checkpoint)
    same = sum(a == b for one, other in zip(found, want, strict=True) for a, b in zip(one, other, strict=True))
    assert same >= 0.9 * sum(map(len, want))


def test_rejection_sampling_keeps_the_distribution() -> None:
    count, target = 131_072, torch.tensor([0.1, 0.6, 0.3])
    given = SampleParams(
        torch.ones(count), torch.zeros(count), torch.zeros(count).int(), torch.ones(count),
        torch.arange(count) * 77_777, torch.full((count,), 5).int(),
    )  # fmt: skip
    given = SampleParams(*(column.cuda() for column in given))
    drafts = torch.full((count,), 2).cuda()
    logits = target.log().repeat(count, 1).cuda()
    parts = [slice(start, start + (1 << 14)) for start in range(0, count, 1 << 14)]  # a grid has at most 65,535 rows
    tokens = torch.cat(
        [distribution(logits[part], SampleParams(*(column[part] for column in given)), drafts[part]) for part in parts]
    )
    shares = torch.bincount(tokens.long(), minlength=3).cpu() / count
    assert ((shares - target).abs() <= 4 * (target * (1 - target) / count).sqrt()).all()


def test_synthetic_acceptance_is_as_long_as_asked(checkpoint: Path) -> None:
    settings = {**NGRAM, "num_speculative_tokens": 3, "acceptance": "synthetic", "synthetic_acceptance_length": 2.6}
    params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    with LLM(str(checkpoint), **SETTINGS, num_kv_blocks=400, speculative_config=settings) as llm:
        started = time.perf_counter()
        llm.generate([PROMPTS[4]] * 8, params)
        stats = llm.engine.stats()
        print(f"{time.perf_counter() - started:.2f} s, {stats}")
    assert 1.3 < 1 + stats.num_accepted_drafts / stats.num_speculations < 3.2
