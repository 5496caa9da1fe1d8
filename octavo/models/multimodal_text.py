"""The language model of a vision-language or audio checkpoint: its part of the configuration and of the weights.

Text-only requests need nothing else; the other parts are not loaded. Rotary positions of text in three dimensions
(m-rope) are three times the same, which is plain rotary embedding.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from octavo.config import parse_hf_overrides
from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.model_config import architecture
from octavo.quant.checkpoint_tensors import Renamed, TensorSource

GEMMA3 = {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131_072}
GEMMA = {"num_attention_heads": 8, "num_key_value_heads": 1, "max_position_embeddings": 8192}
GEMMA2 = {**GEMMA, "num_key_value_heads": 4}
GLM = {"rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0}
LLAMA = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
MISTRAL = {**LLAMA, "intermediate_size": 14_336, "num_key_value_heads": 8, "max_position_embeddings": 131_072}
QWEN2 = {
    **LLAMA,
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
}
PADDLE = {
    "vocab_size": 103_424,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
}
TEXT_MODELS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "cohere2": ("Cohere2ForCausalLM", {}),
    "cohere_compass_text": ("CohereCompassForCausalLM", {}),
    "deepseek": ("DeepseekForCausalLM", {}),
    "deepseek_ocr2_text": ("DeepseekForCausalLM", {}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", {}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {}),
    "dots3_note": ("Dots3NoteForCausalLM", {}),
    "dots3_note_text": ("Dots3NoteForCausalLM", {}),
    "exaone4": ("Exaone4ForCausalLM", {}),
    "gemma": ("GemmaForCausalLM", GEMMA),
    "gemma2": ("Gemma2ForCausalLM", GEMMA2),
    "gemma3_text": ("Gemma3ForCausalLM", GEMMA3),
    "gemma3n_text": ("Gemma3nForCausalLM", {}),
    "glm4v_text": ("Glm4ForCausalLM", GLM),
    "gemma4_text": ("Gemma4ForCausalLM", {}),
    "gemma4_unified_text": ("Gemma4UnifiedForCausalLM", {}),
    "glm4v_moe_text": ("Glm4MoeForCausalLM", {"partial_rotary_factor": 1.0}),
    "glm5_next_text": ("Glm5NextForCausalLM", {}),
    "glm_ocr_text": ("Glm4ForCausalLM", GLM),
    "granite": ("GraniteForCausalLM", {}),
    "granite4_vision_text": ("GraniteForCausalLM", {}),
    "gpt_oss": ("GptOssForCausalLM", {}),
    "hyperclovax": ("HyperCLOVAXForCausalLM", {}),
    "internlm2": ("InternLM2ForCausalLM", {}),
    "kimi_k2": ("DeepseekV3ForCausalLM", {}),
    "inkling2_text": ("Inkling2ForCausalLM", {}),
    "inkling_text": ("InklingForCausalLM", {}),
    "lfm2": ("Lfm2ForCausalLM", {}),
    "lfm2_moe": ("Lfm2MoeForCausalLM", {}),
    "lfm3": ("Lfm3ForCausalLM", {}),
    "lightonocr_text": ("Qwen3ForCausalLM", {}),
    "llama4_text": ("Llama4ForCausalLM", {}),
    "llama": ("LlamaForCausalLM", LLAMA),
    "minimax_m3_vl_text": ("MiniMaxM3VLForCausalLM", {}),
    "ministral3": ("Ministral3ForCausalLM", {}),
    "mistral": ("MistralForCausalLM", MISTRAL),
    "mistral4": ("Mistral4ForCausalLM", {}),
    "paddleocr_vl": ("LlamaForCausalLM", PADDLE),
    "paddleocr_vl_text": ("LlamaForCausalLM", PADDLE),
    "phi3": ("Phi3ForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", QWEN2),
    "qwen2_5_omni_text": ("Qwen2ForCausalLM", {}),
    "qwen2_5_vl": ("Qwen2ForCausalLM", {}),
    "qwen2_5_vl_text": ("Qwen2ForCausalLM", {}),
    "qwen2_vl": ("Qwen2ForCausalLM", {}),
    "qwen2_vl_text": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {}),
    "qwen3_omni_moe_text": ("Qwen3MoeForCausalLM", {"norm_topk_prob": True}),
    "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", {}),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", {}),
    "qwen3_vl_moe_text": ("Qwen3MoeForCausalLM", {"norm_topk_prob": True}),
    "qwen3_vl_text": ("Qwen3ForCausalLM", {"rms_norm_eps": 1e-6}),
    "qwen4_exp_text": ("Qwen4ExpForCausalLM", {}),
    "step3p5": ("Step3p5ForCausalLM", {}),
}
"""``model_type`` of a text part to its architecture, and defaults that published configurations omit."""
NEEDLESS: dict[str, Mapping[str, Any]] = {
    "qwen3_omni_moe_text": {"use_qk_norm": True, "shared_expert_intermediate_size": 0},
}
"""By ``model_type`` of a text part, values of keys that say what its architecture does anyway."""
TEXT_PARTS: dict[str, str] = {
    "DeepseekOCR2ForCausalLM": "deepseek",
    "DeepseekOCRForCausalLM": "deepseek",
    "DeepseekOcr2ForConditionalGeneration": "deepseek_ocr2_text",
    "DeepseekVLV2ForCausalLM": "deepseek_v2",
    "DeepseekVLForConditionalGeneration": "llama",
    "AyaVisionForConditionalGeneration": "cohere2",
    "AudioFlamingo3ForConditionalGeneration": "qwen2",
    "Cohere2VisionForConditionalGeneration": "cohere2",
    "CohereCompassForConditionalGeneration": "cohere_compass_text",
    "Dots3NoteForConditionalGeneration": "dots3_note_text",
    "Exaone4_5_ForConditionalGeneration": "exaone4",
    "FastVlmForConditionalGeneration": "qwen2",
    "GlmAsrForConditionalGeneration": "llama",
    "Glm4vMoeForConditionalGeneration": "glm4v_moe_text",
    "Glm5NextForConditionalGeneration": "glm5_next_text",
    "GlmOcrForConditionalGeneration": "glm_ocr_text",
    "GotOcr2ForConditionalGeneration": "qwen2",
    "Granite4VisionForConditionalGeneration": "granite4_vision_text",
    "HyperCLOVAXVisionV2ForConditionalGeneration": "hyperclovax",
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "Gemma3nForConditionalGeneration": "gemma3n_text",
    "Gemma4ForConditionalGeneration": "gemma4_text",
    "Gemma4UnifiedForConditionalGeneration": "gemma4_unified_text",
    "Glm46VForConditionalGeneration": "glm4v_text",
    "Glm4vForConditionalGeneration": "glm4v_text",
    "Idefics2ForConditionalGeneration": "mistral",
    "Idefics3ForConditionalGeneration": "llama",
    "Inkling2ForConditionalGeneration": "inkling2_text",
    "InklingForConditionalGeneration": "inkling_text",
    "InternVLChatModel": "qwen2",
    "InternVLForConditionalGeneration": "qwen2",
    "JanusForConditionalGeneration": "llama",
    "KimiK25ForConditionalGeneration": "kimi_k2",
    "KimiVLForConditionalGeneration": "deepseek_v3",
    "Kimi_K25ForConditionalGeneration": "deepseek_v3",
    "Lfm2VlForConditionalGeneration": "lfm2",
    "Lfm3VlForConditionalGeneration": "lfm3",
    "LightOnOCRForConditionalGeneration": "qwen3",
    "LightOnOcrForConditionalGeneration": "qwen3",
    "Llama4ForConditionalGeneration": "llama4_text",
    "LlavaForConditionalGeneration": "llama",
    "LlavaNextForConditionalGeneration": "llama",
    "LlavaNextVideoForConditionalGeneration": "llama",
    "LlavaOnevisionForConditionalGeneration": "qwen2",
    "MiniCPMV4_6ForConditionalGeneration": "qwen3_5_text",
    "MiniCPMV4_7ForConditionalGeneration": "qwen3_5_text",
    "MiniCPMOcrForConditionalGeneration": "qwen3_5_text",
    "MiniMaxM3SparseForConditionalGeneration": "minimax_m3_vl_text",
    "Mistral3ForConditionalGeneration": "mistral",
    "MusicFlamingoForConditionalGeneration": "qwen2",
    "Ovis2ForConditionalGeneration": "qwen2",
    "PaddleOCRVLForConditionalGeneration": "paddleocr_vl_text",
    "PaliGemmaForConditionalGeneration": "gemma",
    "PerceptionLMForConditionalGeneration": "llama",
    "QianfanOCRForConditionalGeneration": "qwen3",
    "Qwen2AudioForConditionalGeneration": "qwen2",
    "Qwen2VLForConditionalGeneration": "qwen2_vl_text",
    "Qwen2_5OmniForConditionalGeneration": "qwen2_5_omni_text",
    "Qwen2_5OmniModel": "qwen2_5_omni_text",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl_text",
    "Qwen3_5ForConditionalGeneration": "qwen3_5_text",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe_text",
    "Qwen3ASRForConditionalGeneration": "qwen3",
    "Qwen3OmniMoeForConditionalGeneration": "qwen3_omni_moe_text",
    "Qwen3VLForConditionalGeneration": "qwen3_vl_text",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe_text",
    "Qwen4ExpForConditionalGeneration": "qwen4_exp_text",
    "SmolVLMForConditionalGeneration": "llama",
    "Step3p7ForConditionalGeneration": "step3p5",
    "VideoLlama3ForConditionalGeneration": "qwen2",
    "VideoLlavaForConditionalGeneration": "llama",
    "VipLlavaForConditionalGeneration": "llama",
    "VoxtralForConditionalGeneration": "llama",
}
"""Architecture of a checkpoint to the ``model_type`` of its text part, if the configuration does not say it."""
PREFIXES = {
    "language.model.": "model.",
    "language.lm_head.": "lm_head.",
    "language_model.model.encoder.": "model.",  # as transformers saves QianfanOCR
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "thinker.model.": "model.",
    "thinker.lm_head.": "lm_head.",
}
"""Prefixes of the text part's weights, and the corresponding prefixes in a text-only checkpoint."""
LEFT_OUT = re.compile(
    r"((model|thinker)\.)?(aligner|audio_adapter|audio_encoder|vision|vision_tower|vision_model|vision_encoder|vision_project(ion|or)|visual|visual_embeddings_table|connector|"
    r"multi_modal_projector|mm_projector|projector|mlp_AR|mlp1|patch_merge_mlp|merger|image_newline|image_tower|video_tower|audio_tower|embed_vision|"
    r"layerwise_projectors|spatial_projectors|vqmodel|generation_(embeddings|aligner|head)|"
    r"embed_audio|vision_embedder|vit_large_projector|view_sep[ea]rator|sam_model|qwen2_model|talker|code2wav|token2wav)\b"
)
"""Names of the other parts."""
OF_HEADS = re.compile(r"(lm_head|score|classifier)\.")
HEADLESS = re.compile(r"(embed_tokens|layers|norm)\.")
"""Beginnings of names in a checkpoint of a model without a head; elsewhere ``model.`` precedes them."""
OUTER = ("eos_token_id", "quantization_config", "tie_word_embeddings")
"""Keys of the text part that may stand outside of it."""


def overridden_config(values: Mapping[str, Any], hf_overrides: str | None) -> dict[str, Any]:
    """The configuration of the text part, with the members of the setting in place of its own."""
    return {**text_config(values), **parse_hf_overrides(hf_overrides)}


def text_config(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of the text part; for a text-only model, the configuration itself.

    Either part of a ``config.json`` may have the ``quantization_config``. Older configurations have no part for the
    text, but its keys among their own. Raises ``CheckpointError``.
    """
    whole = architecture(ConfigKeys(values))
    if whole not in TEXT_PARTS:
        return values
    inner = next((values[name] for name in ("text_config", "llm_config", "language_config") if name in values), None)
    if inner is None and "hidden_size" in values:
        inner = {
            key: value for key, value in values.items() if not key.startswith(("audio_", "vision_", "image_", "video_"))
        }
    if not isinstance(inner, Mapping):
        raise wrong("text_config", inner, "an object")
    kind = inner.get("model_type") or TEXT_PARTS[whole]
    if kind not in TEXT_MODELS:
        raise wrong("text_config.model_type", kind, f"one of {', '.join(TEXT_MODELS)}")
    if kind == "deepseek_v2" and inner.get("topk_method") == "noaux_tc":  # the largest DeepSeek-VL2
        kind = "deepseek_v3"
    if kind == "deepseek_v2" and inner.get("use_mla") is False:  # the smallest one, and DeepSeek-OCR
        kind = "deepseek"
    name, defaults = TEXT_MODELS[kind]
    outer = {key: values[key] for key in OUTER if key in values}
    given = {key: value for key, value in {**outer, **inner}.items() if value is not None}
    if isinstance(outer.get("tie_word_embeddings"), bool):  # takes precedence, as in transformers
        given["tie_word_embeddings"] = outer["tie_word_embeddings"]
    if kind in ("gemma", "gemma2"):  # PaliGemma's: which prompts do, that have an image, the tower says
        given.pop("use_bidirectional_attention", None)
    for key, value in NEEDLESS.get(kind, {}).items():
        if given.get(key) == value:
            del given[key]
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(given.get(key), Mapping):
            given[key] = plain_rope(given[key])
    unscaled = {"logit_scale": 1.0} if kind == "cohere2" else {}  # as the wrappers' classes leave it out
    return {**defaults, **given, **_glm_heads(kind, given), **unscaled, "architectures": [name]}


def _glm_heads(kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of GLM's vision-language models that differ from the text model's: their head size has another default, and
    GLM-OCR never has biases."""
    size, count = given.get("hidden_size"), given.get("num_attention_heads")
    if not kind.startswith("glm") or not isinstance(size, int) or not isinstance(count, int) or count < 1:
        return {}
    own = {"head_dim": given.get("head_dim") or size // count}
    return {**own, "attention_bias": False} if kind == "glm_ocr_text" else own


def plain_rope(given: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary keys, also by kind of layer, without those that divide a head among the three dimensions of a position."""
    of_images = {"mrope_section", "mrope_interleaved"}
    if given.get("interleaved") == given.get("mrope_interleaved"):  # Qwen3-Omni says it twice
        of_images.add("interleaved")
    plain = {
        key: plain_rope(value) if isinstance(value, Mapping) else value
        for key, value in given.items()
        if key not in of_images
    }
    return {key: "default" if value == "mrope" else value for key, value in plain.items()}


class TextPart(Renamed):
    """The weights of the text part under the names of a text-only model; unchanged for most text-only models.

    Some have the names of a model without a head, which lack the prefix ``model.``; here they have it.
    """

    def __init__(self, source: TensorSource, root: str | None = None) -> None:
        """``root``: what precedes the names of a model with a head; those of a model without any lack it."""
        stored = {own_name(name): name for name in source.names() if not LEFT_OUT.match(name)}
        self._is_renamed = any(own != name for own, name in stored.items())
        if root is not None and not any(name.startswith(root) for name in stored):
            stored = {name if OF_HEADS.match(name) else root + name: stored[name] for name in stored}
        self._is_headless = any(map(HEADLESS.match, stored)) and not any(own.startswith("model.") for own in stored)
        if self._is_headless:
            stored = {f"model.{own}" if HEADLESS.match(own) else own: name for own, name in stored.items()}
        super().__init__(source, stored)

    def aliases(self, module: str) -> tuple[str, ...]:
        """Other names of a module: those of checkpoints like this one, none for most text-only models.

        All prefixes are tried, as a configuration may have the names of the model that was quantised, which differ from
        those that the library stores.
        """
        if self._is_headless:
            return (module.removeprefix("model."),)
        if not self._is_renamed:
            return ()
        stored = ((prefix, own) for prefix, own in PREFIXES.items() if f"{module}.".startswith(own))
        return tuple((prefix + f"{module}.".removeprefix(own)).removesuffix(".") for prefix, own in stored)


def own_name(name: str) -> str:
    """The name of a weight or a map in a text-only model."""
    for prefix, own in PREFIXES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name
