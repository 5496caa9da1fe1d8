"""Small random adapters made by PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

LLAMA_MAPS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make_adapter(
    base: Path, folder: Path, seed: int, model_class: Any = AutoModelForCausalLM, **values: Any
) -> PreTrainedModel:
    """Write a random adapter for the model in ``base``; return the model with it merged in by PEFT."""
    torch.manual_seed(seed)
    model = model_class.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": LLAMA_MAPS, **values})
    adapted = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    adapted.save_pretrained(folder)
    merged: PreTrainedModel = adapted.merge_and_unload().eval()
    return merged
