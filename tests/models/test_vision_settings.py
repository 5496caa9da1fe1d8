"""Images with what changes the decoder: ranks, adapters, quantised weights, drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForImageTextToText, PreTrainedModel

from octavo import LLM, SamplingParams
from octavo.errors import CheckpointError
from tests.models import vision
from tests.models.test_vision import GREEDY, PROMPTS, SETTINGS, TOLERANCE, as_inputs, worst_difference
from tests.ops.cpu_cases import needs_float_kernels
from tests.quant import writers
from tests.tiers import nightly_after

pytestmark = needs_float_kernels
PROMPT_LOOKUP = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "adaptive": False}
FAMILIES = nightly_after(1, ["qwen3_5", "qwen3_vl", "gemma4", "glm4v_moe", "llava_onevision"])


def check(name: str, folder: Path, model: PreTrainedModel, adapter: str | None = None, **settings: Any) -> None:
    with LLM(folder, **SETTINGS, **settings) as llm:
        outputs = llm.generate(as_inputs(PROMPTS), GREEDY, **({"adapter": adapter} if adapter else {}))
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            assert worst_difference(name, model, prompt, output) < TOLERANCE
        llm.engine.check()


@pytest.mark.slow
@pytest.mark.parametrize("name", nightly_after(1, ["qwen3_vl", "qwen3_5", "gemma4", "glm4v_moe", "llava_onevision"]))
def test_each_rank_has_the_tower(name: str, tmp_path: Path) -> None:
    model = vision.make(tmp_path, name)
    check(name, tmp_path, model, device="cpu", tensor_parallel_size=2)


@pytest.mark.parametrize("name", FAMILIES)
def test_drafts_after_images(name: str, tmp_path: Path) -> None:
    """Of prompt lookup, which finds the placeholders, too; some drafts are right, some wrong."""
    model = vision.make(tmp_path, name)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=3)
    with LLM(tmp_path, **SETTINGS, speculative_config=json.dumps(PROMPT_LOOKUP)) as llm:
        for prompt, output in zip(PROMPTS, llm.generate(as_inputs(PROMPTS), params), strict=True):
            assert worst_difference(name, model, prompt, output) < TOLERANCE
        assert 0 < llm.engine.stats().num_accepted_drafts < llm.engine.stats().num_drafts
        llm.engine.check()


def make_adapter(base: Path, folder: Path, maps: str) -> PreTrainedModel:
    """Write a random adapter of the maps whose names match; returns the model with it."""
    torch.manual_seed(3)
    model = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=maps))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    adapted.save_pretrained(folder)
    merged: PreTrainedModel = adapted.merge_and_unload().eval()
    return merged


@pytest.mark.parametrize("name", FAMILIES)
def test_adapters_of_the_text_part(name: str, tmp_path: Path) -> None:
    base, folder = tmp_path / "base", tmp_path / "adapter"
    vision.make(base, name)
    adapted = make_adapter(base, folder, r".*language_model.*\.(q_proj|v_proj)")
    check(name, base, adapted, "a", enable_lora=True, lora_modules=f"a={folder}")


def test_adapters_of_the_tower_are_refused(tmp_path: Path) -> None:
    base, folder = tmp_path / "base", tmp_path / "adapter"
    vision.make(base, "qwen3_vl")
    make_adapter(base, folder, r".*visual\.blocks\.0\.attn\.qkv")
    with pytest.raises(CheckpointError, match="visual"):
        LLM(base, **SETTINGS, enable_lora=True, lora_modules=f"a={folder}")


@pytest.mark.parametrize("name", FAMILIES)
def test_quantised_text_and_a_dense_tower(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, folder, dense = tmp_path / "base", tmp_path / "quantised", tmp_path / "dense"
    vision.make(base, name)
    monkeypatch.setattr(writers, "KEPT", writers.re.compile(f"{writers.KEPT.pattern}|visual|vision|projector|experts"))
    matrices = writers.quantise(base, folder, writers.gptq(4, 16))
    assert matrices
    writers.replace_matrices(base, dense, matrices)
    model = AutoModelForImageTextToText.from_pretrained(dense, dtype=torch.float32, attn_implementation="eager").eval()
    check(name, folder, model)
