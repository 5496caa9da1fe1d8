"""Models that read audio, from samples to logits, next to transformers; caching, chunks and preemption with audio."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.audio_utils import mel_filter_bank
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniAudioEncoderConfig
from transformers.models.qwen2_audio.configuration_qwen2_audio import Qwen2AudioEncoderConfig
from transformers.models.qwen3_asr.configuration_qwen3_asr import Qwen3ASREncoderConfig
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeAudioEncoderConfig
from transformers.models.voxtral.configuration_voxtral import VoxtralEncoderConfig

from octavo import LLM, RequestOutput, SamplingParams
from octavo.build.build_vision import audio_bytes
from octavo.images.families import read_processor
from octavo.models.audio.encoder import _filters
from octavo.models.vision.tower import Pixels
from octavo.models.vision.towers import load_tower, read_vision
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.weights.checkpoint import open_checkpoint
from tests.models.audio_families import (
    AROUND,
    AUDIO,
    AUDIO_FAMILIES,
    RATE,
    Sound,
    expected_logprobs,
    make_audio,
    packed,
    sound,
    with_image,
)
from tests.models.vision import as_png, picture
from tests.models.vision_base import IMAGE
from tests.models.vision_qwen import as_omni

SETTINGS: dict[str, Any] = {"dtype": "float32", "block_size": 8, "num_kv_blocks": 160}
SCORED = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=3, logprobs=3)
UNSCORED = SamplingParams(temperature=0, max_tokens=3, logprobs=3)
TOLERANCE = 2e-3
ALONE = {"qwen2_audio": "Qwen2Audio", "voxtral": "Voxtral", "qwen3_asr": "Qwen3ASR"}
CONFIGS: dict[str, Any] = {
    "qwen2_audio": Qwen2AudioEncoderConfig,
    "voxtral": VoxtralEncoderConfig,
    "qwen3_asr": Qwen3ASREncoderConfig,
    "omni3": Qwen3OmniMoeAudioEncoderConfig,
    "omni25": Qwen2_5OmniAudioEncoderConfig,
}
PICTURE = picture(100, 70, 1)
SHORT, MIDDLE, LONG = sound(0.73, 1), sound(2.0, 2), sound(2.9, 3)
Prompt = tuple[list[int], list[Sound]]
Made = tuple[str, Path, PreTrainedModel]


def words(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 240, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS: list[Prompt] = [
    ([*words(5), AUDIO, *words(9)], [MIDDLE]),
    ([AUDIO, *words(3), AUDIO, 7, *words(2)], [LONG, SHORT]),
    (words(40), []),
    ([*words(3), AUDIO, 5], [SHORT]),
]


@pytest.fixture(scope="module", params=AUDIO_FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, make_audio(folder, request.param)


@pytest.fixture(scope="module")
def llm(family: Made) -> Iterator[LLM]:
    with LLM(family[1], **SETTINGS) as llm:
        yield llm


def as_input(llm: LLM, prompt: Prompt) -> Any:
    assert llm._images is not None
    tokens, sounds = prompt
    clips = [llm._images.processor.audio_of(packed(each)) for each in sounds]
    images = [image for clip in clips for image in clip.images]
    return {"prompt_token_ids": tokens, "images": images} if images else tokens


def worst_difference(name: str, model: PreTrainedModel, prompt: Prompt, output: RequestOutput) -> float:
    return difference_from(expected_logprobs(name, model, *prompt, output.outputs[0].token_ids), output)


def difference_from(expected: torch.Tensor, output: RequestOutput) -> float:
    """The largest difference of a log-probability, of the prompt and of what was sampled after it."""
    completion = output.outputs[0]
    assert completion.error is None
    found = [entry or {} for entry in (output.prompt_logprobs or [])[1:]] + (completion.logprobs or [])
    start = 0 if output.prompt_logprobs else len(output.prompt_token_ids or []) - 1
    return max(
        abs(logprob.logprob - expected[start + place, token].item())
        for place, entry in enumerate(found)
        for token, logprob in entry.items()
    )


def test_logits_are_those_of_transformers(family: Made, llm: LLM) -> None:
    name, _, model = family
    for prompt, output in zip(PROMPTS, llm.generate([as_input(llm, each) for each in PROMPTS], SCORED), strict=True):
        assert worst_difference(name, model, prompt, output) < TOLERANCE
    llm.engine.check()


def test_audio_makes_a_difference(family: Made, llm: LLM) -> None:
    name, _, model = family
    tokens = [*words(5), AUDIO, *words(9)]
    (output,) = llm.generate([as_input(llm, (tokens, [MIDDLE]))], SCORED)
    assert worst_difference(name, model, (tokens, [np.ascontiguousarray(MIDDLE[::-1])]), output) > 10 * TOLERANCE


@pytest.mark.parametrize("family", ["qwen2_audio", "omni3"], indirect=True)
def test_a_prompt_in_chunks_and_again_from_the_cache(family: Made, llm: LLM) -> None:
    """Chunks end within audio; what two prompts begin with, audio and text, is computed once."""
    name, folder, model = family
    begin = [*words(5), AUDIO, *words(9)]
    prompts: list[Prompt] = [([*begin, AUDIO, 7], [LONG, other]) for other in (SHORT, MIDDLE)]
    with LLM(folder, **SETTINGS, max_num_batched_tokens=16, max_num_seqs=2) as small:
        outputs = [small.generate([as_input(small, prompt)], UNSCORED)[0] for prompt in prompts]
        small.engine.check()
    for prompt, output in zip(prompts, outputs, strict=True):
        assert worst_difference(name, model, prompt, output) < TOLERANCE
    assert (outputs[1].num_cached_tokens or 0) > len(begin)


def test_the_first_files_of_qwen3_asr(tmp_path: Path) -> None:
    """They are those of the whole of Qwen3-Omni: the projector is a part of the tower."""
    make_audio(tmp_path, "qwen3_asr")
    outputs = list[RequestOutput]()
    for is_first in (False, True):
        if is_first:
            as_omni(tmp_path, "Qwen3ASRForConditionalGeneration")
            stored = load_file(tmp_path / "model.safetensors")
            projector = re.compile(r"thinker\.model\.multi_modal_projector\.linear_")
            named = {projector.sub("thinker.audio_tower.proj", name): tensor for name, tensor in stored.items()}
            assert named.keys() != stored.keys()
            own = {name.replace("thinker.model.audio_tower.", "thinker.audio_tower."): named[name] for name in named}
            save_file(own, tmp_path / "model.safetensors")
        with LLM(tmp_path, **SETTINGS) as llm:
            outputs += llm.generate([as_input(llm, PROMPTS[0])], SCORED)
    assert outputs[0].prompt_logprobs == outputs[1].prompt_logprobs
    assert outputs[0].outputs[0].logprobs == outputs[1].outputs[0].logprobs


@pytest.mark.parametrize("family", ["omni3", "omni25"], indirect=True)
def test_images_and_audio_in_one_prompt(family: Made, llm: LLM) -> None:
    """Also positions of an image behind audio, as the library computes them."""
    name, _, model = family
    assert llm._images is not None
    heard, seen = [AROUND["audio_start_token_id"], AUDIO], [AROUND["vision_start_token_id"], IMAGE]
    tokens = [*words(4), *heard, 242, *words(3), *seen, 244, *words(2), *heard, 242, 9]
    audio, image = llm._images.processor.audio_of(packed(SHORT)), llm._images.prepare(as_png(PICTURE), "auto", "it")
    prompt = {"prompt_token_ids": tokens, "images": [audio.images[0], image, audio.images[0]]}
    (output,) = llm.generate([prompt], SCORED)
    expected = with_image(name, model, tokens, SHORT, PICTURE, output.outputs[0].token_ids)
    assert difference_from(expected, output) < TOLERANCE


@pytest.mark.parametrize("name", AUDIO_FAMILIES)
def test_keys_that_are_left_out_are_those_of_the_class(name: str) -> None:
    """Of a tower whose configuration says nothing."""
    architecture = AUDIO_FAMILIES[name].whole or f"{ALONE[name]}ForConditionalGeneration"
    values = {"architectures": [architecture], "audio_config": {"model_type": ""}, "text_config": {"hidden_size": 3584}}
    found: Any = read_vision(values)
    expected = CONFIGS[name]().to_dict()
    for ours, theirs in {
        "num_bins": ("num_mel_bins",),
        "width": ("d_model", "hidden_size"),
        "depth": ("encoder_layers", "num_hidden_layers"),
        "num_heads": ("encoder_attention_heads", "num_attention_heads"),
        "ffn_size": ("encoder_ffn_dim", "intermediate_size"),
    }.items():
        assert getattr(found, ours) == next(expected[key] for key in theirs if key in expected)
    if "n_window" in expected:
        assert found.chunk == 2 * expected["n_window"]
    if "n_window_infer" in expected:
        assert found.chunks_together == expected["n_window_infer"] // found.chunk
        assert found.num_channels == expected["downsample_hidden_size"]


def test_what_a_gpu_measures_at_its_start(family: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest audio that a request may have, in the type of GPUs; what is allocated counts from before it is."""
    _, folder, _ = family
    checkpoint, form = open_checkpoint(folder), WeightFormat(torch.bfloat16, torch.device("cpu"))
    config, processor = read_vision(checkpoint.config), read_processor(folder)
    assert config is not None
    assert processor is not None
    audio, lengths = processor.limited(100).audio, list[int]()
    assert audio is not None
    tower = load_tower(checkpoint.config, config, checkpoint, form).tower

    def watched(sound: Pixels) -> torch.Tensor:
        lengths.append(sound.pixels.numel() // 3)
        made = tower(sound)
        assert len(made) == audio.count(lengths[0]) <= 100
        return made

    for name in ("reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 5)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 12)
    assert audio_bytes(watched, audio, form) == 7
    assert lengths == [int(audio.most_seconds * RATE)]


@pytest.mark.parametrize("num_bins", [80, 128])
def test_filters(num_bins: int) -> None:
    expected = mel_filter_bank(201, num_bins, 0.0, 8000.0, RATE, norm="slaney", mel_scale="slaney")
    assert np.abs(_filters(num_bins, torch.device("cpu")).numpy() - expected).max() < 1e-6
