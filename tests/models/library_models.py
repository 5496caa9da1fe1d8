"""Models that transformers has under another name, or not among those that make text, put together of what it has."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeModel,
    Glm5NextPreTrainedModel,
    Glm5NextTextConfig,
    Glm5NextTextModel,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteModel,
    Mistral4Config,
    Mistral4ForCausalLM,
    Step3p7PreTrainedModel,
    Step3p7TextConfig,
    Step3p7TextModel,
    core_model_loading,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming
from transformers.modeling_outputs import CausalLMOutput

Split = getattr(core_model_loading, "Split", None)
"""Not in transformers 5.17: there, Ling's joined projections cannot be compared."""


class Step3p5Model(Step3p7TextModel):
    """The text part of Step 3.7, which is Step 3.5."""


class Step3p5ForCausalLM(Step3p7PreTrainedModel):
    """Step 3.5, which the library has within the whole of Step 3.7 alone."""

    config_class = Step3p7TextConfig

    def __init__(self, config: Step3p7TextConfig) -> None:
        super().__init__(config)
        self.model = Step3p5Model(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> CausalLMOutput:
        hidden = self.model(input_ids, use_cache=use_cache).last_hidden_state
        return CausalLMOutput(logits=self.lm_head(hidden))


class Glm5NextForCausalLM(Glm5NextPreTrainedModel):
    """The text part of GLM-5.3-Flash with a head: the library has it within the whole alone."""

    config_class = Glm5NextTextConfig

    def __init__(self, config: Glm5NextTextConfig) -> None:
        super().__init__(config)
        self.model = Glm5NextTextModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> CausalLMOutput:
        hidden = self.model(input_ids, use_cache=use_cache).last_hidden_state
        return CausalLMOutput(logits=self.lm_head(hidden))


class BailingMoeV2Config(Glm4MoeConfig):
    """Ling 2, whose code the library does not have: it computes what GLM-4.5 does, by other names."""

    model_type = "bailing_moe_v2"
    attribute_map: ClassVar[dict[str, str]] = {
        "num_local_experts": "num_experts",
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "attention_bias": "use_qkv_bias",
    }
    score_function: str = "sigmoid"
    moe_router_enable_expert_bias: bool = True


class BailingMoeV2Model(Glm4MoeModel):
    config_class = BailingMoeV2Config


class BailingMoeV2ForCausalLM(Glm4MoeForCausalLM):
    config_class = BailingMoeV2Config


class MiniCPMConfig(GraniteConfig):
    """MiniCPM computes what Granite does, whose factors it has by other keys."""

    model_type = "minicpm"

    def to_dict(self) -> dict[str, Any]:
        found = super().to_dict()
        width, count = self.hidden_size, self.num_hidden_layers
        of_granite = ("embedding_multiplier", "residual_multiplier", "logits_scaling", "attention_multiplier")
        embedding, residual, logits, _ = (found.pop(key) for key in of_granite)
        return found | {
            "scale_emb": embedding,
            "scale_depth": residual * count**0.5,
            "dim_model_base": width / logits,
        }


class MiniCPMModel(GraniteModel):
    config_class = MiniCPMConfig


class MiniCPMForCausalLM(GraniteForCausalLM):
    config_class = MiniCPMConfig


LING = {
    "mlp.gate.expert_bias": "mlp.gate.e_score_correction_bias",
    "model.word_embeddings.": "model.embed_tokens.",
    ".attention.dense.": ".self_attn.o_proj.",
    ".attention.query_layernorm.": ".self_attn.q_norm.",
    ".attention.key_layernorm.": ".self_attn.k_norm.",
}
"""Names of Ling's checkpoints, and the library's."""


def register() -> None:
    """Tell the library of them, and of the names in their checkpoints."""
    AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
    AutoModelForCausalLM.register(Glm5NextTextConfig, Glm5NextForCausalLM, exist_ok=True)
    AutoModelForCausalLM.register(Step3p7TextConfig, Step3p5ForCausalLM, exist_ok=True)
    AutoModel.register(Step3p7TextConfig, Step3p5Model, exist_ok=True)
    AutoConfig.register("minicpm", MiniCPMConfig, exist_ok=True)
    AutoModelForCausalLM.register(MiniCPMConfig, MiniCPMForCausalLM, exist_ok=True)
    AutoModel.register(MiniCPMConfig, MiniCPMModel, exist_ok=True)
    AutoConfig.register("bailing_moe_v2", BailingMoeV2Config, exist_ok=True)
    AutoModelForCausalLM.register(BailingMoeV2Config, BailingMoeV2ForCausalLM, exist_ok=True)
    AutoModel.register(BailingMoeV2Config, BailingMoeV2Model, exist_ok=True)
    of_step = [
        conversion
        for conversion in get_checkpoint_conversion_mapping("step3p7")
        if any("moe" in name or "share_expert" in name for name in conversion.source_patterns)
    ]
    register_checkpoint_conversion_mapping("step3p5", of_step, overwrite=True)
    if Split is None:
        return
    of_ling = [WeightRenaming(re.escape(name), own) for name, own in LING.items()]
    for end in ("weight", "bias"):
        names = [f"self_attn.{part}_proj.{end}" for part in "qkv"]
        of_ling.append(WeightConverter(f"attention.query_key_value.{end}", names, [Split(0)]))
    of_ling += get_checkpoint_conversion_mapping("glm4_moe")
    register_checkpoint_conversion_mapping("bailing_moe_v2", of_ling, overwrite=True)
