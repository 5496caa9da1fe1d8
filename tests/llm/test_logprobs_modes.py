"""What log-probabilities are of, and how many there may be; and that a scoring pass gives those of sampling."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.errors import InvalidParameter
from octavo.ops.sampling.sampling import BANNED, SampleParams, least_kept, processed_logits
from tests.llm.test_weight_updates import SETTINGS
from tests.llm.tiny import write_checkpoint
from tests.models.families import make_checkpoint
from tests.ops.cpu_cases import needs_float_kernels
from tests.runtime.thread_ranks import ranks_as_threads
from tests.tiers import nightly, one_in

V = 264
PROMPT = [5, 9, 3, 60, 2, 7, 9, 1, 8]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_checkpoint(tmp_path_factory.mktemp("model") / "a")
    make_checkpoint(folder, "llama/gqa", vocab_size=V)
    return folder


def distributions(folder: Path, mode: str, params: SamplingParams, **settings: Any) -> torch.Tensor:
    """What is reported of all tokens at each position of an answer: [tokens, V]."""
    with LLM(str(folder), logprobs_mode=mode, max_logprobs=-1, **{**SETTINGS, **settings}) as llm:
        (output,) = llm.generate([PROMPT], params)
    rows = output.outputs[0].logprobs or []
    return torch.tensor([[row[token].logprob for token in range(V)] for row in rows])


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=[needs_float_kernels, pytest.mark.nightly])])
def test_modes(folder: Path, size: int) -> None:
    """All follow from the raw logits by the documented steps."""
    settings = {"tensor_parallel_size": size}
    values = {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "logit_bias": {7: 2.0}, "seed": 5}
    params = SamplingParams(max_tokens=4, logprobs=V, ignore_eos=True, **values)
    raw = distributions(folder, "raw_logits", params, **settings)
    own = distributions(folder, "raw_logprobs", params, **settings)
    torch.testing.assert_close(own, raw.log_softmax(1))
    biased = raw.clone()
    biased[:, 7] += 2.0
    expected = biased / 0.7
    for row in expected:
        row[row < least_kept(row, 0.01, 40, 0.9)] = -math.inf
    assert 1 < expected.isfinite().sum(1).min() <= expected.isfinite().sum(1).max() <= 40
    processed = distributions(folder, "processed_logits", params, **settings)
    torch.testing.assert_close(processed, expected.clamp(min=-9999.0))
    found = distributions(folder, "processed_logprobs", params, **settings)
    torch.testing.assert_close(found, expected.log_softmax(1).clamp(min=-9999.0))


def test_processed_logits_are_those_from_which_tokens_are_drawn() -> None:
    torch.manual_seed(0)
    logits_RV = torch.randn(6, 50) * 3
    logits_RV[2, 4] = BANNED
    columns: list[list[float]] = [[0.7, 0.0, 1.0, 1.3, 0.5, 1.0], [0.0, 0.2, 0.0, 0.05, 0.0, 0.0]]
    columns += [[0, 3, 5, 0, 50, 7], [1.0, 0.5, 1.0, 0.8, 0.3, 0.01]]
    types = [torch.float32, torch.float32, torch.int32, torch.float32]
    own = [torch.tensor(column, dtype=dtype) for column, dtype in zip(columns, types, strict=True)]
    zeros = torch.zeros(6, dtype=torch.int64)
    found_RV = processed_logits(logits_RV, SampleParams(*own, zeros, zeros.int()))
    for row, logits_V, *values in zip(found_RV, logits_RV, *columns, strict=True):
        temperature, min_p, top_k, top_p = values
        if temperature == 0.0:
            assert torch.equal(row, logits_V)
            continue
        scores_V = (logits_V / temperature).masked_fill(logits_V == BANNED, -math.inf)
        cut = least_kept(scores_V, float(min_p), int(top_k), top_p)
        assert torch.equal(row, scores_V.masked_fill((scores_V < cut) | (scores_V == -math.inf), BANNED))


def test_no_more_than_the_setting_allows(folder: Path) -> None:
    with LLM(str(folder), **SETTINGS) as llm:
        for name in ("logprobs", "prompt_logprobs"):
            with pytest.raises(InvalidParameter, match=rf"'{name}' must be a whole number from 0 to 20 \("):
                llm.generate([PROMPT], SamplingParams(**{name: 21}))


DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False}


def test_log_probabilities_of_named_tokens(folder: Path) -> None:
    """Those of the whole distribution, best first, beside requests that want others or none."""
    ids = (200, 3, 77)
    asked = [
        SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, **more)
        for more in ({"logprob_token_ids": ids}, {"logprobs": 2}, {}, {"logprobs": V})
    ]
    with LLM(str(folder), max_logprobs=-1, **SETTINGS) as llm:
        named, best, none, whole = (output.outputs[0] for output in llm.generate([PROMPT] * 4, asked))
        with pytest.raises(InvalidParameter, match="'logprob_token_ids' has 264, which is not a token id"):
            llm.generate([PROMPT], SamplingParams(logprob_token_ids=(V,)))
    assert named.token_ids == best.token_ids == none.token_ids == whole.token_ids
    assert none.logprobs is None
    for token, row, best_row, all_row in zip(
        named.token_ids, named.logprobs or [], best.logprobs or [], whole.logprobs or [], strict=True
    ):
        assert set(row) == {*ids, token}
        assert {key: value.logprob for key, value in row.items()} == {key: all_row[key].logprob for key in row}
        assert len(best_row) == 2
        assert best_row[token].logprob == row[token].logprob
    with pytest.raises(InvalidParameter, match="at most 128 token ids"):
        SamplingParams(logprob_token_ids=tuple(range(129)))


SCORED: list[Any] = [
    ("llama/gqa", {}),
    nightly("llama/gqa", {"enforce_eager": True}),
    ("llama/gqa", {"logprobs_mode": "processed_logprobs"}),
    ("llama/gqa", {"quantization": "int4", "quantize_lm_head": True}),
    nightly("llama/gqa", {"quantization": "int8"}),
    ("llama/gqa", {"quantization": "fp8"}),
    nightly("llama/gqa", {"dtype": "bfloat16"}),
    ("llama/gqa", {"tensor_parallel_size": 2}),
    ("llama/gqa", {"speculative_config": DRAFTS}),
    ("qwen3_5/dense", {}),
    ("mixtral/window", {}),
]


@needs_float_kernels
@one_in(4)
@pytest.mark.parametrize(("row", "settings"), SCORED, ids=str)
def test_a_scoring_pass_gives_the_bits_of_sampling(
    row: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampled together and behind cached prefixes; scored alone, together and in other chunks: no bit differs."""
    ranks_as_threads(monkeypatch)
    write_checkpoint(tmp_path)
    make_checkpoint(tmp_path, row, vocab_size=V)
    prompts = [PROMPT, [*PROMPT, 4], [9, 9, 2] * 12, [1]]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=30, ignore_eos=True, logprobs=0)
    scoring = SamplingParams(temperature=0.8, max_tokens=1, prompt_logprobs=0)
    settings = {**SETTINGS, "max_model_len": 128, **settings}

    def scored(llm: LLM, sequences: list[list[int]]) -> list[list[float]]:
        found = [output.prompt_logprobs or [] for output in llm.generate(sequences, scoring)]
        return [
            [row[token].logprob for row, token in zip(rows, tokens, strict=True) if row is not None]
            for rows, tokens in zip(found, sequences, strict=True)
        ]

    with LLM(str(tmp_path), **settings) as llm:
        outputs = [result.outputs[0] for result in llm.generate(prompts, params)]
        sequences = [[*prompt, *output.token_ids] for prompt, output in zip(prompts, outputs, strict=True)]
        together = scored(llm, sequences)
        assert [scored(llm, [sequence])[0] for sequence in sequences] == together
        assert [result.outputs[0].logprobs for result in llm.generate(prompts, params)] == [  # behind cached prefixes
            output.logprobs for output in outputs
        ]
    for prompt, output, row in zip(prompts, outputs, together, strict=True):
        sampled = [top[token].logprob for token, top in zip(output.token_ids, output.logprobs or [], strict=True)]
        assert row[len(prompt) - 1 :] == sampled
    with LLM(str(tmp_path), **{**settings, "max_num_batched_tokens": 16, "enable_prefix_caching": False}) as llm:
        assert scored(llm, sequences) == together
