"""Keys that a ``config.json`` leaves out, where families differ: they have the values of the family's class in
transformers. A key that is null is not absent."""

from __future__ import annotations

from typing import Any

KV_HEADS = {
    2: "Ernie4_5 Gemma3n Glm Glm4 Qwen3Next Qwen3_5Moe Qwen4Exp Starcoder2 Zaya",
    4: "Ernie4_5_Moe Flint Gemma2 Gemma3 Gemma4 Gemma4Unified GraniteSWA Kolibri1 Lfm3 Mellum MiMoV2Flash MiniMaxM3VL "
    "Qwen3Moe Qwen3_5 SmolLM3 VaultGemma",
    5: "BitNet",
    8: "Bamba Cwm FalconH1 GptOss HYV3 Inkling Inkling2 Jamba Laguna Lfm2 Llama4 MiniMax MiniMaxM2 Ministral "
    "Ministral3 Mistral Mixtral NemotronH Phimoe SeedOss SolarOpen Step3p5",
}
"""``num_key_value_heads``, and the families, of which the other ones have as many as query heads."""
OTHERS: dict[str, dict[str, Any]] = {
    "FalconH1": {"mamba_d_ssm": 1024},
    "GPTJ": {"n_positions": 2048},
    "Gemma4Unified": {"sliding_window": 1024},
    "Glm4MoeLite": {"rms_norm_eps": 1e-5},
    "GraniteMoeHybrid": {"intermediate_size": 11_008},
    "GraniteMoeSWA": {"rms_norm_eps": 1e-6, "tie_word_embeddings": False},
    "Inkling": {"swa_num_attention_heads": 64, "swa_num_key_value_heads": 16, "swa_head_dim": 128},
    "Inkling2": {"swa_num_attention_heads": 48, "swa_num_key_value_heads": 8, "swa_head_dim": 128},
    "Lfm2": {"rope_theta": 1e6},
    "Lfm2Moe": {"rope_theta": 1e6},
    "Llama4": {"intermediate_size_mlp": 16_384},
    "LongcatFlash": {"rms_norm_eps": 1e-5, "rope_theta": 1e7, "routed_scaling_factor": 6.0, "zero_expert_num": 256},
    "MiMoV2Flash": {"moe_intermediate_size": 2048},
    "MiniMax": {"rope_theta": 1e6},
    "Qwen3": {"head_dim": 128},
    "SolarOpen": {"moe_intermediate_size": 1280},
}
"""By family, other keys and their values."""


def absent_keys(architecture: str) -> dict[str, Any]:
    """The keys that may be absent for this architecture, with their values."""
    family = architecture.partition("For")[0].removesuffix("Model")
    found = dict(OTHERS.get(family, {}))
    for count, names in KV_HEADS.items():
        if family in names.split():
            found["num_key_value_heads"] = count
    return found
