"""Rotary frequencies that depend on a text's length, against transformers: longrope and dynamic scaling."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from octavo import LLM, SamplingParams
from tests.models.families import LONG, SHAPE, SHORT, VOCAB_SIZE, rope
from tests.tiers import nightly_after

ORIGINAL = 48
KINDS: dict[str, dict[str, Any]] = {
    "phi3": {
        **rope("longrope", short_factor=SHORT, long_factor=LONG),
        "original_max_position_embeddings": ORIGINAL,
        "max_position_embeddings": 200,
    },
    "llama": {**rope("dynamic", factor=4.0), "max_position_embeddings": ORIGINAL},
}
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_num_batched_tokens": 32,
    "max_num_seqs": 4,
    "kv_cache_memory": 0.01,
    "block_size": 16,
}
LENGTHS = (ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 100, 30, 5)
DRAFTS = '{"method": "ngram", "num_speculative_tokens": 3}'


def prompts() -> list[list[int]]:
    """Of several lengths, and with equal beginnings; the last repeats itself."""
    first = random.Random(0).choices(range(3, VOCAB_SIZE), k=max(LENGTHS))
    return [*(first[:length] for length in LENGTHS), first[:9] * 5]


def made(folder: Path, kind: str) -> PreTrainedModel:
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **{**SHAPE, "sliding_window": None, **KINDS[kind]})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.eval().save_pretrained(folder)
    return model


@torch.inference_mode()
def logprobs(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    model(torch.tensor([[0]]))  # which makes it forget the longest text that it has seen
    found: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)
    return found


@pytest.mark.parametrize("drafts", nightly_after(1, (DRAFTS, "")))
def test_each_token_has_the_factors_of_the_text_before_it(tmp_path: Path, drafts: str) -> None:
    """Alone, together and over the prefix cache: transformers computes the text before each token as one."""
    model = made(tmp_path, "phi3")
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
    with LLM(tmp_path, speculative_config=drafts or None, **SETTINGS) as llm:
        asked = prompts()
        alone = [llm.generate([prompt], params)[0] for prompt in asked]
        together = llm.generate(asked, params)
        assert together[3].num_cached_tokens >= 90
    for prompt, first, again in zip(asked, alone, together, strict=True):
        tokens = list(first.outputs[0].token_ids)
        assert len(tokens) == 24
        assert list(again.outputs[0].token_ids) == tokens
        told = zip(tokens, first.outputs[0].logprobs or [], again.outputs[0].logprobs or [], strict=True)
        for index, (token, *numbers) in enumerate(told):
            expected = logprobs(model, [*prompt, *tokens[:index]])[-1]
            assert token == int(expected.argmax())
            for number in numbers:
                assert number[token].logprob == pytest.approx(expected[token].item(), abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_all_of_a_prompt_has_the_same_frequencies(tmp_path: Path, kind: str) -> None:
    """In chunks, and told once: what is computed again, as the text grows, changes nothing of what was told."""
    model = made(tmp_path, kind)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, prompt_logprobs=0)
    with LLM(tmp_path, **SETTINGS) as llm:
        for prompt in prompts():
            [result] = llm.generate([prompt], params)
            expected = logprobs(model, prompt)
            for index, told in enumerate((result.prompt_logprobs or [])[1:]):
                token = prompt[index + 1]
                assert (told or {})[token].logprob == pytest.approx(expected[index, token].item(), abs=1e-4)


def test_dynamic_scaling_follows_a_text_that_grows(tmp_path: Path) -> None:
    """Behind the original length its base changes with every 16th of that, and for prompts it is exact."""
    model, step = made(tmp_path, "llama"), ORIGINAL // 16
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1)
    short, long = prompts()[4], prompts()[3]
    with LLM(tmp_path, **SETTINGS) as llm:
        for prompt, exact in ((short, range(ORIGINAL - len(short), 40, step)), (long, range(1))):
            for result in (*llm.generate([prompt], params), *llm.generate([prompt], params)):
                tokens, told = list(result.outputs[0].token_ids), result.outputs[0].logprobs or []
                assert len(tokens) == 40
                for index in exact:
                    expected = logprobs(model, [*prompt, *tokens[:index]])[-1]
                    assert told[index][tokens[index]].logprob == pytest.approx(expected[tokens[index]].item(), abs=1e-4)
