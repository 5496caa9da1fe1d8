"""``config.json`` of several families of models, and ``generation_config.json``."""

from __future__ import annotations

import contextlib
import json

from octavo.errors import CheckpointError, ConfigError
from octavo.models.registry import read_config
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.generation_config import chosen_config, sampling_defaults
from tests.fuzz.target import JSONTarget, Target, as_json

FAMILIES = (
    *("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM", "MixtralForCausalLM"),
    *("Phi3ForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM", "GPT2LMHeadModel", "Qwen3MoeForCausalLM"),
)
SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 400,
    "eos_token_id": 2,
}
MORE = {
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False},
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 32,
}
GENERATION = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2], "do_sample": True}


def make() -> Target:
    return ModelConfig()


class ModelConfig(JSONTarget):
    def __init__(self) -> None:
        super().__init__()
        self.seeds = [as_json({"config": {**SHAPE, "architectures": [name]}, "generation": {}}) for name in FAMILIES]
        self.seeds += [as_json({"config": {**SHAPE, **MORE}, "generation": GENERATION})]

    def read(self, data: bytes) -> None:
        try:
            files = json.loads(data)
        except (ValueError, RecursionError):
            (self.folder / "config.json").write_bytes(data)
        else:
            parts = files if isinstance(files, dict) else {"config": files}
            (self.folder / "config.json").write_bytes(as_json(parts.get("config")))
            (self.folder / "generation_config.json").write_bytes(as_json(parts.get("generation")))
        with contextlib.suppress(CheckpointError, ConfigError):
            read_config(open_checkpoint(self.folder, "dummy").config, 4096)
        with contextlib.suppress(CheckpointError, ConfigError):
            sampling_defaults("auto", chosen_config("auto", {}, self.folder))
