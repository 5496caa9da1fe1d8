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
from octavo.images.families import PROCESSORS
from octavo.images.pixel_scaling import TOKENS, VIDEO
from octavo.models.vision.towers import read_vision
from tests.models import vision
from tests.models.test_vision import GREEDY, PROMPTS, SETTINGS, TOLERANCE, as_inputs, worst_difference
from tests.ops.cpu_cases import needs_float_kernels
from tests.quant import writers
from tests.runtime.thread_ranks import ranks_as_threads
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


QWEN = {"hidden_size": 64, "out_hidden_size": 64, "intermediate_size": 64, "depth": 2, "num_heads": 2}
SECTIONS = {"hidden_size": 64, "rope_parameters": {"mrope_section": [4, 2, 2]}}
WRONG: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("DeepseekOCRForCausalLM", {"width": "x"}, {}, "width is 'x'; it must be an object"),
    ("DeepseekOCRForCausalLM", {"width": {"sam": 3}}, {}, "sam is 3; it must be an object"),
    ("DeepseekOCRForCausalLM", {"width": {"sam_b": {"downsample_channels": []}}}, {}, "downsample_channels"),
    ("DeepseekOCRForCausalLM", {"width": {"sam_b": {"downsample_channels": 5}}}, {}, "downsample_channels is 5"),
    ("DeepseekOCRForCausalLM", {"width": {"sam_b": {"global_attn_indexes": 5}}}, {}, "global_attn_indexes is 5"),
    ("DeepseekOCRForCausalLM", {"width": {"sam_b": {"mlp_ratio": 1e308}}}, {}, "mlp_ratio"),
    ("DeepseekOCR2ForCausalLM", {"width": {"other": {"rope_parameters": 5}}}, {}, "rope_parameters is 5"),
    ("DeepseekOCR2ForCausalLM", {"width": {"other": {"rope_theta": "x"}}}, {}, "rope_theta is 'x'"),
    ("Gemma4ForConditionalGeneration", {"rope_parameters": [1]}, {}, r"rope_parameters is \[1\]"),
    ("InternVLForConditionalGeneration", {}, {"downsample_ratio": 1e308}, "downsample_ratio is 1e"),
    ("KimiVLForConditionalGeneration", {"merge_kernel_size": ["x", "x"]}, {}, "merge_kernel_size"),
    ("Llama4ForConditionalGeneration", {"rope_parameters": "x"}, {}, "rope_parameters is 'x'"),
    ("LlavaForConditionalGeneration", {"layer_norm_eps": 10**400}, {}, "layer_norm_eps"),
    ("LlavaForConditionalGeneration", {"model_type": "pixtral", "rope_parameters": "x"}, {}, "rope_parameters is 'x'"),
    ("MiniCPMV4_6ForConditionalGeneration", {}, {"merge_kernel_size": 2}, "merge_kernel_size is 2"),
    ("Qwen2_5_VLForConditionalGeneration", {**QWEN, "fullatt_block_indexes": 7}, {}, "fullatt_block_indexes is 7"),
    ("Qwen3VLForConditionalGeneration", {**QWEN, "deepstack_visual_indexes": ["8"]}, {}, "deepstack_visual_indexes"),
    ("Qwen3VLForConditionalGeneration", QWEN, {"text_config": {"rope_scaling": 4}}, "rope_scaling is 4"),
]


@pytest.mark.parametrize(("name", "inner", "outer", "message"), WRONG)
def test_wrong_keys_of_a_tower_are_refused_by_name(
    name: str, inner: dict[str, Any], outer: dict[str, Any], message: str
) -> None:
    values = {"architectures": [name], "text_config": SECTIONS, "vision_config": {"some": "key", **inner}, **outer}
    with pytest.raises(CheckpointError, match=message):
        read_vision(values)


def test_a_part_for_vision_is_an_object() -> None:
    with pytest.raises(CheckpointError, match="vision_config is 'x'; it must be an object"):
        read_vision({"architectures": ["LlavaForConditionalGeneration"], "text_config": {}, "vision_config": "x"})


@pytest.mark.parametrize("name", nightly_after(1, ["qwen3_vl", "qwen3_5", "gemma4", "glm4v_moe", "llava_onevision"]))
def test_each_rank_has_the_tower(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_as_threads(monkeypatch)
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


def test_glmga_has_no_videos_and_patches_of_its_own_size_alone() -> None:
    config: dict[str, Any] = {"architectures": ["Glm46VForConditionalGeneration"], "model_type": "glmga"}
    config |= {"vision_config": {}, VIDEO: {}, TOKENS: {}}
    make = PROCESSORS["Glm46VForConditionalGeneration"]
    found = make(config, {"patch_expand_factor": 1})
    assert found is not None
    assert found.video is None
    with pytest.raises(CheckpointError, match="patch_expand_factor is 2; it must be 1"):
        make(config, {"patch_expand_factor": 2})


def test_kinds_of_layers_of_compass_with_other_axes_are_refused() -> None:
    kinds = {
        name: {"mrope_section": [count, 2, 2]} for name, count in (("full_attention", 4), ("sliding_attention", 5))
    }
    config = {"architectures": ["CohereCompassForConditionalGeneration"], "text_config": {"rope_parameters": kinds}}
    config["vision_config"] = {"depth": 1}
    with pytest.raises(CheckpointError, match="the same for all kinds of layers"):
        read_vision(config)
