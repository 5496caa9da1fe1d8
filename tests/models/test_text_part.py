"""The language model of a checkpoint that also sees pictures."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, PreTrainedModel

from octavo import LLM, SamplingParams
from octavo.build.device_settings import quant_method, weight_format
from octavo.config import ModelSettings
from octavo.errors import CheckpointError, ConfigError
from octavo.layers.rotary import DefaultRope
from octavo.models.config_checks import check_sizes
from octavo.models.multimodal_text import TEXT_MODELS, TEXT_PARTS
from octavo.models.parts import DecoderConfig
from octavo.models.registry import ARCHITECTURES, read_config
from octavo.weights.safetensors import SafetensorsCheckpoint
from octavo_bench.architectures import tiny_config, tiny_model
from tests.models.families import GEMMA, SHAPE, make_checkpoint
from tests.models.test_architectures import SETTINGS, random_tokens
from tests.models.test_quantised import logprobs
from tests.quant.writers import Writer, auto_round, compressed, gptq, quantise, replace_matrices
from tests.tiers import nightly_after, one_in

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


WRAPPERS = {
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Mistral3ForConditionalGeneration": "mistral3",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen2VLForConditionalGeneration": "qwen2_vl",
    "Glm4vForConditionalGeneration": "glm4v",
    "AyaVisionForConditionalGeneration": "aya_vision",
    "Cohere2VisionForConditionalGeneration": "cohere2_vision",
    "Exaone4_5_ForConditionalGeneration": "exaone4_5",
    "Glm46VForConditionalGeneration": "glm46v",
    "Glm4vMoeForConditionalGeneration": "glm4v_moe",
    "GlmOcrForConditionalGeneration": "glm_ocr",
    "GotOcr2ForConditionalGeneration": "got_ocr2",
    "Idefics2ForConditionalGeneration": "idefics2",
    "Idefics3ForConditionalGeneration": "idefics3",
    "InternVLForConditionalGeneration": "internvl",
    "LightOnOcrForConditionalGeneration": "lighton_ocr",
    "LlavaForConditionalGeneration": "llava",
    "LlavaNextForConditionalGeneration": "llava_next",
    "LlavaNextVideoForConditionalGeneration": "llava_next_video",
    "LlavaOnevisionForConditionalGeneration": "llava_onevision",
    "Ovis2ForConditionalGeneration": "ovis2",
    "QianfanOCRForConditionalGeneration": "qianfan_ocr",
    "Qwen2AudioForConditionalGeneration": "qwen2_audio",
    "SmolVLMForConditionalGeneration": "smolvlm",
    "VideoLlavaForConditionalGeneration": "video_llava",
    "VipLlavaForConditionalGeneration": "vipllava",
    "VoxtralForConditionalGeneration": "voxtral",
    "AudioFlamingo3ForConditionalGeneration": "audioflamingo3",
    "CohereCompassForConditionalGeneration": "cohere_compass",
    "DeepseekVLForConditionalGeneration": "deepseek_vl",
    "Glm5NextForConditionalGeneration": "glm5_next",
    "GlmAsrForConditionalGeneration": "glmasr",
    "HyperCLOVAXVisionV2ForConditionalGeneration": "hyperclovax_vision_v2",
    "Lfm3VlForConditionalGeneration": "lfm3_vl",
    "MiniCPMOcrForConditionalGeneration": "minicpm_ocr",
    "MiniCPMV4_7ForConditionalGeneration": "minicpmv4_7",
    "MiniMaxM3SparseForConditionalGeneration": "minimax_m3_vl",
    "MusicFlamingoForConditionalGeneration": "musicflamingo",
    "Qwen3ASRForConditionalGeneration": "qwen3_asr",
    "Step3p7ForConditionalGeneration": "step3p7",
    "VideoLlama3ForConditionalGeneration": "video_llama_3",
}
"""Classes with a part for text, and their ``model_type``."""
WITHOUT_DEFAULTS: dict[str, dict[str, Any]] = {
    "step3p7": {"sliding_window": 24},
    "minimax_m3_vl": {
        "layer_types": ["full_attention", *["minimax_m3_sparse"] * 3],
        "mlp_layer_types": ["dense", *["sparse"] * 3],
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 8,
        "index_topk_blocks": 3,
        "dense_intermediate_size": 48,
    },
    "cohere_compass": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 2, 2]}}
    },
}
"""Keys of the part for text for which the library has no usable defaults."""


@pytest.mark.parametrize(("name", "kind"), nightly_after(3, WRAPPERS.items()))
def test_text_of_every_wrapper(name: str, kind: str, tmp_path: Path) -> None:
    model = tiny_model(tiny_config(kind, **WITHOUT_DEFAULTS.get(kind, {})), getattr(transformers, name))
    model.save_pretrained(tmp_path)
    check(tmp_path, model)


def test_the_text_of_dots_3_with_its_keys_among_the_others(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "dots3_note_text/windows")
    tensors = load_file(tmp_path / "model.safetensors")
    parts = ("audio_encoder.x", "audio_adapter.x", "vision_encoder.x", "model.mtp.embed_tokens.weight")
    tensors |= dict.fromkeys(parts, torch.zeros(1))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    values = json.loads((tmp_path / "config.json").read_text())
    values |= {"architectures": ["Dots3NoteForConditionalGeneration"], "model_type": "dots3_note"}
    (tmp_path / "config.json").write_text(json.dumps({**values, "audio_config": {}, "vision_config": {}}))
    check(tmp_path, model)


GRANITE = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2}
TEXT = {**SHAPE, "num_hidden_layers": 2, "pad_token_id": 0}
OF_IMAGES: dict[str, dict[str, Any]] = {
    "granite4_vision": {
        "text_config": {**TEXT, **GRANITE},
        "vision_config": {**VISION, "model_type": "clip_vision_model", "hidden_size": 64, "image_size": 16},
        "qformer_config": {
            **{key: VISION[key] for key in ("intermediate_size", "num_hidden_layers", "num_attention_heads")},
            "model_type": "blip_2_qformer",
            "hidden_size": 64,
            "encoder_hidden_size": 64,
            "vocab_size": 8,
        },
        "image_grid_pinpoints": [[16, 16]],
        "image_token_index": 7,
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[0, 0]],
    },
    "janus": {
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {**VISION, "projection_dim": SHAPE["hidden_size"]},
        "vq_config": {
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "latent_channels": 8,
            "num_res_blocks": 1,
            "num_embeddings": 16,
            "projection_dim": 32,
            "image_token_embed_dim": 32,
        },
        "image_token_id": 7,
    },
}
"""Configurations of wrappers whose other parts the library gives no small sizes."""


@pytest.mark.parametrize("kind", nightly_after(1, OF_IMAGES))
def test_text_where_other_parts_need_their_sizes(kind: str, tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model(kind, **OF_IMAGES[kind])
    model_class = transformers.AutoModelForImageTextToText._model_mapping[type(config)]
    model = tiny_model(config, model_class)
    model.save_pretrained(tmp_path)
    check(tmp_path, model)


@pytest.mark.parametrize(
    ("name", "row"),
    [("FastVlmForConditionalGeneration", "qwen2/biases"), ("PerceptionLMForConditionalGeneration", "llama/gqa")],
)
def test_text_beside_a_tower_of_timm(name: str, row: str, tmp_path: Path) -> None:
    """The library makes these classes with the package timm alone; their text models are those of others."""
    model = make_checkpoint(tmp_path, row)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {re.sub("^model\\.", "model.language_model.", key): tensor for key, tensor in tensors.items()}
    others = {"model.vision_tower.timm_model.stem.weight", "model.multi_modal_projector.linear_1.weight"}
    save_file({**renamed, **{key: torch.ones(3) for key in others}}, tmp_path / "model.safetensors")
    path = tmp_path / "config.json"
    inner = json.loads(path.read_text())
    tied = inner.pop("tie_word_embeddings")
    path.write_text(json.dumps({"architectures": [name], "tie_word_embeddings": tied, "text_config": inner}))
    check(tmp_path, model)


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_keys_of_the_text_part_among_the_others(kind: str) -> None:
    """Older configurations have no ``text_config``."""
    name = next(name for name, other in WRAPPERS.items() if other == kind)
    values = {**tiny_config(kind).get_text_config().to_dict(), "architectures": [name], "vision_start_token_id": 7}
    values |= {
        "rope_parameters": None,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]},
        "model_type": kind,
    }
    values |= {"rope_theta": 500.0, "vision_config": {"depth": 2}, "layer_types": None}
    config = read_config(values)
    assert isinstance(config, DecoderConfig)
    assert (config.architecture, config.ropes[0][0]) == ("Qwen2ForCausalLM", DefaultRope(500.0))


def test_wrappers_name_models_that_are_served() -> None:
    assert set(TEXT_PARTS.values()) <= set(TEXT_MODELS)
    assert {name for name, _ in TEXT_MODELS.values()} <= set(ARCHITECTURES)
    values = {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": "mamba"}}
    with pytest.raises(CheckpointError, match=r"text_config\.model_type is 'mamba'; it must be one of .*llama"):
        read_config(values)


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
    inner = {"hidden_size": 2304, "intermediate_size": 9216, "model_type": "gemma2", "num_hidden_layers": 26}
    inner |= {"vocab_size": 257_216, "num_image_tokens": 256}
    second = read_config({"architectures": ["PaliGemmaForConditionalGeneration"], "text_config": inner})
    assert (second.num_heads, second.num_kv_heads, second.head_dim) == (8, 4, 256)
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


@pytest.mark.parametrize("row", ["qwen3/wide_heads", "llama/one_kv_head_tied", "deepseek_v2/lite"])
def test_names_of_a_model_without_a_head(row: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, row)
    drop_prefix(tmp_path)
    check(tmp_path, model)


def drop_prefix(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")


def test_heads_of_a_model_without_a_head_are_checked_before_loading(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3/wide_heads")
    drop_prefix(tmp_path)
    source = SafetensorsCheckpoint(tmp_path)
    check_sizes(read_config(source.config), source)
    with pytest.raises(CheckpointError, match="head_dim is 1000"):
        check_sizes(read_config({**source.config, "head_dim": 1000}), source)


@pytest.mark.parametrize("is_inner", [True, False])
def test_settings_know_how_either_part_is_quantised(is_inner: bool) -> None:
    inner: dict[str, Any] = {"hidden_size": 64}
    config: dict[str, Any] = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": inner}
    (inner if is_inner else config)["quantization_config"] = {"quant_method": "gptq"}
    found: Any = SimpleNamespace(config=config, has_blocks=False)
    assert quant_method(found) == "gptq"
    form = weight_format(ModelSettings(quantization="gptq"), torch.device("cpu"), found)
    assert form.is_quantised
    assert form.quantization is None
    with pytest.raises(ConfigError, match=r"int4 is for unquantised .* quantised already \(gptq\)"):
        weight_format(ModelSettings(quantization="int4"), torch.device("cpu"), found)


PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MODULES = [
    f"layers.{layer}.{part}" for layer in range(3) for part in (*PARTS, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
]


def int4(targets: Callable[[str], list[str]]) -> Callable[[str], Writer]:
    """compressed-tensors whose group has the targets that this function gives for a prefix."""

    def make(prefix: str) -> Writer:
        writer = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=16)
        writer.config["config_groups"]["group_0"]["targets"] = targets(prefix)
        return writer

    return make


def with_rules(writer: Writer, **rules: Any) -> Writer:
    """4 bits by rules alone."""
    return Writer({**writer.config, "bits": 8, **rules}, writer.write)


RULES: dict[str, Callable[[str], Writer]] = {
    "targets by pattern": int4(lambda prefix: [f"re:{re.escape(prefix)}layers.*_proj"]),
    "targets by name": int4(lambda prefix: [prefix + module for module in MODULES]),
    "targets of the text part": int4(lambda _: [r"re:model\.layers.*_proj"]),
    "dynamic": lambda prefix: with_rules(gptq(4, 16), dynamic={rf"+:{re.escape(prefix)}layers\..*": {"bits": 4}}),
    "extra_config": lambda prefix: with_rules(
        auto_round(4, 16), extra_config={prefix + module: {"bits": 4} for module in MODULES}
    ),
}


@one_in(5)
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
@pytest.mark.parametrize("stored", ["language_model.model.", "model.language_model."])
def test_rules_may_have_the_names_of_the_whole_model(tmp_path: Path, rules: str, prefix: str, stored: str) -> None:
    """They have those of the model that was quantised, which the library may store under other names."""
    source, folder, plain = (tmp_path / name for name in ("source", "quantised", "plain"))
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    make_checkpoint(source, "gemma3/two_ropes", initializer_range=0.1, **sizes)
    matrices = quantise(source, folder, RULES[rules](prefix))
    assert len(matrices) == len(MODULES)
    replace_matrices(source, plain, matrices)
    for path in (folder, plain):
        tensors = load_file(path / "model.safetensors")
        renamed = {re.sub("^model\\.", stored, name): tensor for name, tensor in tensors.items()}
        save_file(renamed, path / "model.safetensors")
        text = json.loads((path / "config.json").read_text())
        outer = {"quantization_config": text.pop("quantization_config", None), "text_config": text}
        outer["architectures"] = ["Gemma3ForConditionalGeneration"]
        (path / "config.json").write_text(json.dumps(outer))
    check_same(folder, plain)


def check_same(folder: Path, plain: Path) -> None:
    (found, answer), (expected, same) = (logprobs(path, dtype="float32") for path in (folder, plain))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0, equal_nan=True)
    assert answer == same


@one_in(3)
@pytest.mark.parametrize("rules", [rules for rules in RULES if rules != "targets of the text part"])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_rules_for_a_model_without_a_head_may_have_its_names(tmp_path: Path, rules: str, prefix: str) -> None:
    source, folder, plain = (tmp_path / name for name in ("source", "quantised", "plain"))
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    make_checkpoint(source, "qwen3/wide_heads", initializer_range=0.1, **sizes)
    replace_matrices(source, plain, quantise(source, folder, RULES[rules](prefix)))
    drop_prefix(folder)
    check_same(folder, plain)
