"""Tiny random checkpoints of models that read audio, and what transformers computes with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForMultimodalLM,
    PreTrainedModel,
    Qwen2_5OmniThinkerConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen3ASRFeatureExtractor,
    Qwen3OmniMoeThinkerConfig,
    Qwen3OmniMoeThinkerForConditionalGeneration,
    WhisperFeatureExtractor,
)

from tests.models.vision_base import IMAGE, QWEN_SIZE, ROPE, TEXT, tokenizer
from tests.models.vision_qwen import QWEN3_PROCESSOR, QWEN3_VISION, QWEN_VISION, as_omni

AUDIO = 251
"""Id of the placeholder."""
RATE = 16_000
VOXTRAL_ROWS = 100
BINS = 80
TOWER = {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "num_mel_bins": BINS,
    "max_source_positions": 150,
}
CHUNKED = {**TOWER, "output_dim": 64, "max_source_positions": 1500}
Sound = npt.NDArray[np.float64]


class AudioFamily(NamedTuple):
    """How a family's checkpoints and their audio are made."""

    config: dict[str, Any]
    extractor: Any
    asked: dict[str, Any]
    """How the family's processor calls it."""
    text: str
    """The placeholder in the vocabulary."""
    whole: str = ""
    """The class of the published checkpoint of which the model is a part."""


def whisper_extractor(seconds: int) -> Any:
    return WhisperFeatureExtractor(feature_size=BINS, chunk_length=seconds)


PADDED = {"padding": "max_length", "return_attention_mask": True}
UNPADDED = {"padding": True, "truncation": False, "return_attention_mask": True}
AROUND = {
    "audio_start_token_id": 241,
    "audio_end_token_id": 242,
    "vision_start_token_id": 243,
    "vision_end_token_id": 244,
}
OMNI3 = {
    "text_config": {
        **TEXT,
        "rope_parameters": {**ROPE, "mrope_interleaved": True},
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "vision_config": {**QWEN3_VISION, "depth": 3, "deepstack_visual_indexes": [0, 2]},
    "audio_config": {**CHUNKED, "downsample_hidden_size": 8, "n_window_infer": 200},
    "image_token_id": IMAGE,
    "audio_token_id": AUDIO,
    **AROUND,
}
OMNI25 = {
    "text_config": {**TEXT, "rope_parameters": ROPE},
    "vision_config": {**QWEN_VISION, "depth": 3, "fullatt_block_indexes": [1], "window_size": 56},
    "audio_config": {**CHUNKED, "n_window": 50},
    "image_token_index": IMAGE,
    "audio_token_index": AUDIO,
    **AROUND,
}
AUDIO_FAMILIES = {
    "qwen2_audio": AudioFamily(
        {"text_config": {"model_type": "qwen2", **TEXT}, "audio_config": TOWER, "audio_token_index": AUDIO},
        whisper_extractor(3),
        PADDED,
        "<|AUDIO|>",
    ),
    "voxtral": AudioFamily(
        {
            "text_config": {"model_type": "llama", **TEXT},
            "audio_config": {**TOWER, "encoder_ffn_dim": 128, "max_source_positions": VOXTRAL_ROWS},
            "audio_token_id": AUDIO,
        },
        whisper_extractor(3),
        {"padding": True, "truncation": False, "pad_to_multiple_of": 2 * VOXTRAL_ROWS * 160},
        "[AUDIO]",
    ),
    "qwen3_asr": AudioFamily(
        {
            "text_config": {"model_type": "qwen3", **TEXT, "tie_word_embeddings": False},
            "audio_config": {**CHUNKED, "downsample_hidden_size": 8, "n_window_infer": 200},
            "audio_token_id": AUDIO,
            "tie_word_embeddings": False,
        },
        Qwen3ASRFeatureExtractor(feature_size=BINS),
        {"padding": True, "return_attention_mask": True},
        "<|audio_pad|>",
    ),
    "omni3": AudioFamily(
        OMNI3, whisper_extractor(30), UNPADDED, "<|audio_pad|>", "Qwen3OmniMoeForConditionalGeneration"
    ),
    "omni25": AudioFamily(OMNI25, whisper_extractor(6), PADDED, "<|AUDIO|>", "Qwen2_5OmniForConditionalGeneration"),
}


def make_audio(folder: Path, name: str) -> PreTrainedModel:
    """Save a random checkpoint with the configuration of its extractor."""
    torch.manual_seed(3)
    family = AUDIO_FAMILIES[name]
    model: Any
    if name == "omni3":
        config = Qwen3OmniMoeThinkerConfig(**family.config)
        model = Qwen3OmniMoeThinkerForConditionalGeneration._from_config(config, attn_implementation="eager")
    elif name == "omni25":
        config = Qwen2_5OmniThinkerConfig(**family.config)
        model = Qwen2_5OmniThinkerForConditionalGeneration._from_config(config, attn_implementation="eager")
    else:
        config = AutoConfig.for_model(name, **family.config)
        model = AutoModelForMultimodalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            if weight_name.endswith("embed_positions.weight") or not weight.any():
                weight.normal_(std=0.3)
            elif "norm" in weight_name and weight_name.endswith("weight"):
                weight.add_(torch.randn_like(weight) * 0.2)
            elif weight.dim() > 1:
                weight.mul_(20 if "conv" in weight_name else 4)
    model.eval().save_pretrained(folder)
    both = (
        {**image_processor(name).to_dict(), **family.extractor.to_dict()}
        if family.whole
        else family.extractor.to_dict()
    )
    (folder / "preprocessor_config.json").write_text(json.dumps(both))
    if family.whole:
        as_omni(folder, family.whole)
    tokenizer({family.text: AUDIO}).save(str(folder / "tokenizer.json"))
    loaded: PreTrainedModel = model
    return loaded


def image_processor(name: str) -> Any:
    return QWEN3_PROCESSOR() if name == "omni3" else Qwen2VLImageProcessorPil(size=QWEN_SIZE)


def sound(seconds: float, seed: int) -> Sound:
    """Chords that change, over noise, in steps of 24 bits."""
    rng, count = np.random.default_rng(seed), int(seconds * RATE)
    time = np.arange(count) / RATE
    pitches = rng.uniform(80, 4000, (4, 1)) * (1 + 0.3 * np.sin(2 * np.pi * rng.uniform(0.2, 3, (4, 1)) * time))
    waves = np.sin(2 * np.pi * np.cumsum(pitches, axis=1) / RATE) * rng.uniform(0.02, 0.2, (4, 1))
    mixed = waves.sum(0) + rng.normal(0, 0.01, count)
    return np.round(mixed.clip(-1, 1 - 2**-23) * 2**23) / 2**23


def packed(sound: Sound) -> bytes:
    """Its samples of 24 bits."""
    return (sound * 2**23).astype("<i4").view(np.uint8).reshape(-1, 4)[:, :3].tobytes()


def expected_logprobs(
    name: str, model: PreTrainedModel, prompt: list[int], sounds: Sequence[Sound], answer: Sequence[int] = ()
) -> torch.Tensor:
    """Log-probabilities of the next token at each position of the expanded prompt and the answer. Each sound is
    extracted alone, as batches would have other lengths."""
    family = AUDIO_FAMILIES[name]
    made: Any = model
    rows = list[torch.Tensor]()
    with torch.inference_mode():
        for each in sounds:
            found = family.extractor(each, sampling_rate=RATE, return_tensors="pt", **family.asked)
            features, mask = found["input_features"], found.get("attention_mask")
            if name == "voxtral":
                windows = features.reshape(BINS, -1, 2 * VOXTRAL_ROWS).transpose(0, 1)
                rows.append(made.get_audio_features(windows).pooler_output)
            elif name == "qwen2_audio":
                rows.append(_of_qwen2_audio(made.model, features, int(mask.sum())))
            elif name == "qwen3_asr":
                rows.append(made.get_audio_features(features, mask).pooler_output)
            else:
                rows.append(made.get_audio_features(features, mask).last_hidden_state)
        tokens, places, waiting = list[int](), list[int](), iter(rows)
        for token in prompt:
            count = len(next(waiting)) if token == AUDIO else 1
            places += range(len(tokens), len(tokens) + count) if token == AUDIO else []
            tokens += [token] * count
        ids = torch.tensor([[*tokens, *answer]])
        embeds = made.get_input_embeddings()(ids).clone()
        if rows:
            embeds[0, places] = torch.cat(rows).to(embeds.dtype)
        positions = torch.arange(ids.shape[1])
        kinds = {"position_ids": positions.expand(3, 1, -1)} if family.whole else {}
        logits: torch.Tensor = model(inputs_embeds=embeds, **kinds).logits[0]
    return logits.float().log_softmax(dim=-1)


def with_image(
    name: str, model: Any, prompt: list[int], sound: Sound, image: Image.Image, answer: Sequence[int]
) -> torch.Tensor:
    """Of a prompt with one image and any number of times the same audio, by the library's own forward and positions."""
    family, sounds = AUDIO_FAMILIES[name], [sound] * prompt.count(AUDIO)
    heard = family.extractor(sounds, sampling_rate=RATE, return_tensors="pt", **family.asked)
    seen = image_processor(name)([image], return_tensors="pt")
    with torch.inference_mode():
        rows = model.get_audio_features(heard["input_features"], heard["attention_mask"]).last_hidden_state
        counts = {AUDIO: len(rows) // len(sounds), IMAGE: int(seen["image_grid_thw"].prod()) // 4}
        ids = torch.tensor([[*(each for token in prompt for each in [token] * counts.get(token, 1)), *answer]])
        logits: torch.Tensor = model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            input_features=heard["input_features"],
            feature_attention_mask=heard["attention_mask"],
            pixel_values=seen["pixel_values"],
            image_grid_thw=seen["image_grid_thw"],
        ).logits[0]
    return logits.float().log_softmax(dim=-1)


def _of_qwen2_audio(model: Any, features: torch.Tensor, num_frames: int) -> torch.Tensor:
    """As its forward has it, which takes no embeddings beside audio."""
    rows, count = (num_frames - 1) // 2 + 1, ((num_frames - 1) // 2 + 1 - 2) // 2 + 1
    mask = torch.where(torch.arange(features.shape[-1] // 2) < rows, 0.0, -torch.inf)[None, None, None]
    states = model.audio_tower(features, attention_mask=mask.expand(1, 1, mask.shape[-1], -1)).last_hidden_state
    found: torch.Tensor = model.multi_modal_projector(states)[0, :count]
    return found
