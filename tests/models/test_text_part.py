"""The language model of a checkpoint that also sees pictures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, PreTrainedModel

from octavo import LLM, SamplingParams
from octavo.errors import CheckpointError
from octavo.models.registry import read_config
from tests.models.families import GEMMA, SHAPE
from tests.models.test_architectures import SETTINGS, random_tokens

VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}


def make(folder: Path) -> PreTrainedModel:
    torch.manual_seed(3)
    text = {**SHAPE, **GEMMA, "num_hidden_layers": 3, "sliding_window_pattern": 2}
    config = Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4)
    model: PreTrainedModel = Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.add_(torch.randn_like(weight) * 0.3)
    model.eval().save_pretrained(folder)
    return model


def check(folder: Path, model: PreTrainedModel) -> None:
    prompt = random_tokens(60)
    with LLM(folder, dtype="float32", **SETTINGS) as llm:
        result = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=5))[0]
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0].log_softmax(dim=-1)
    for i, found in enumerate((result.prompt_logprobs or [])[1:]):
        for token, logprob in (found or {}).items():
            assert logprob.logprob == pytest.approx(expected[i, token].item(), abs=1e-4)


@pytest.mark.parametrize("prefix", ["as saved", "language_model.model.", "model.language_model."])
def test_text_is_computed_as_by_the_whole_model(prefix: str, tmp_path: Path) -> None:
    model = make(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    if prefix != "as saved":
        other = {
            name: prefix + name.split("language_model.")[1].removeprefix("model.")
            for name in tensors
            if "language_model." in name
        }
        assert len(other) > 30
        tensors = {other.get(name, name): tensor for name, tensor in tensors.items()}
        save_file(tensors, tmp_path / "model.safetensors")
    check(tmp_path, model)


def test_what_published_configurations_leave_out() -> None:
    values = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
    }
    config = read_config(values)
    assert (config.architecture, config.vocab_size, config.num_heads) == ("Gemma3ForCausalLM", 262_208, 8)
    assert (config.num_kv_heads, config.head_dim, config.eos_token_ids) == (4, 256, (1, 106))
    with pytest.raises(CheckpointError, match="text_config"):
        read_config({"architectures": ["Gemma3ForConditionalGeneration"]})


def test_quantised_weights_of_the_whole_are_not_passed_over() -> None:
    values = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "quantization_config": {"quant_method": "quip"},
        "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
    }
    with pytest.raises(CheckpointError, match=r"quantization_config\.quant_method is 'quip'"):
        read_config(values)
