"""Videos, from frames to logits, next to transformers; caching and chunks with frames."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from octavo import LLM, SamplingParams
from octavo.engine.sequence_images import rope_shifts
from octavo.errors import InvalidParameter
from octavo.images.processors import PreparedClip, PreparedImage
from octavo.types import ImageInput
from tests.models.test_vision import GREEDY, SCORED, SETTINGS, TOLERANCE, WITH_STATE, words
from tests.models.vision import FAMILIES, IMAGE, as_png, make, picture, without_torchvision
from tests.tiers import nightly, one_in

VIDEO = 249
"""Id of the library's placeholder of a video, where it has one."""
SIZES = {
    "qwen2_vl": (84, 56),
    "qwen2_5_vl": (84, 56),
    "qwen3_vl": (96, 64),
    "qwen3_5": (96, 64),
    "glm4v": (84, 56),
    "kimi_k25": (84, 56),
}
"""Width and height of frames that are not resized; 56 x 56 for the other families."""
VIDEO_SIZE = {"shortest_edge": 28 * 28 * 4, "longest_edge": 32 * 32 * 120}
RATE = 4.0
"""Frames of a second. The library lets text behind a video of Qwen2.5-VL begin as if all its frames were at one time,
so none is later than its largest side here (see ``test_rotary_positions_of_a_video``)."""
NEXT_TO_EACH_OTHER = ("qwen2_vl", "qwen2_5_vl", "llava_onevision")
"""Families without text between frames."""
TEMPLATE = (
    "{% for m in messages %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endfor %}"
)
"""Without a place for videos, as SmolVLM's is."""
COMMON = ("qwen2_5_vl", "qwen3_vl", "llava_onevision", "smolvlm")
OTHERS = ("gemma4", "gemma4_causal", "kimi_k25", "qwen2_vl", "qwen3_5", "glm4v", "internvl")
every_family = pytest.mark.parametrize("family", [*COMMON, *map(nightly, OTHERS)], indirect=True)
Made = tuple[str, Path, PreTrainedModel]


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp(request.param)
    model = make(folder, request.param)
    size = VIDEO_SIZE if request.param in SIZES else {"height": 56, "width": 56, "longest_edge": 56}
    (folder / "video_preprocessor_config.json").write_text(json.dumps({"size": size, "max_soft_tokens": 12}))
    model.config.video_token_id = IMAGE if request.param == "glm4v" else VIDEO
    model.config.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return request.param, folder, model


@pytest.fixture(scope="module")
def llm(family: Made) -> Iterator[LLM]:
    with LLM(family[1], **SETTINGS) as llm:
        yield llm


def pictures(name: str, count: int, seed: int = 0) -> list[Any]:
    return [picture(*SIZES.get(name, (56, 56)), seed + number) for number in range(count)]


def prepared(llm: LLM, frames: list[Any], rate: float = RATE) -> PreparedClip:
    assert llm._images is not None
    return llm._images.prepare_video([as_png(frame) for frame in frames], rate, "here")


def prompt_of(name: str, video: PreparedClip, behind: int = 6) -> dict[str, Any]:
    """Text, the video and text; the words between frames are any."""
    between = [] if name in NEXT_TO_EACH_OTHER else [11]
    tokens = [*words(5), *[IMAGE, *between] * len(video.images), *words(behind, 1)]
    return {"prompt_token_ids": tokens, "images": video.images}


def expected_logprobs(
    name: str, model: PreTrainedModel, tokens: list[int], frames: list[Any], rate: float = RATE
) -> torch.Tensor:
    """What the library computes for an expanded prompt in which ``IMAGE`` stands for all parts of a video."""
    processor = FAMILIES[name].processor()
    ids = torch.tensor([tokens])
    if name.startswith("gemma4"):
        found = processor(frames, return_tensors="pt")
        given = {"pixel_values_videos": found["pixel_values"], "video_position_ids": found["image_position_ids"]}
        given |= {"num_frames_per_video": torch.tensor([len(frames)]), "mm_token_type_ids": 2 * (ids == IMAGE).int()}
        return _logprobs(model, torch.where(ids == IMAGE, VIDEO, ids), given)
    mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in (processor.image_mean, processor.image_std))
    pixels = [torch.from_numpy(np.array(frame)).permute(2, 0, 1).float() / 255 for frame in frames]
    stacked = torch.stack([(frame - mean) / deviation for frame in pixels])[None]
    given: dict[str, Any] = {}
    if name == "kimi_k25":
        patchify = without_torchvision(name, "video_processing").Kimi_K25VideoProcessor.patchify
        chunks = [patchify(None, stacked[:, start : start + 4], 14) for start in range(0, len(frames), 4)]
        inner: Any = model.model
        rows = list[torch.Tensor]()
        for patches, *grid in chunks:  # as the library cannot compute groups of different lengths at once
            with torch.inference_mode():
                found = inner.vision_tower(patches[0], grid_thw=torch.tensor([grid]))
                rows.append(inner.mm_projector(found.pooler_output).squeeze(1))
        given["mm_encoder_outputs"] = {"video": SimpleNamespace(pooler_output=rows)}
    elif name in SIZES:
        side = 16 if name.startswith("qwen3") else 14
        patches, *grid = Qwen3VLVideoProcessor().patchify(stacked, side, 2, 2)
        given = {"pixel_values_videos": patches[0], "video_grid_thw": torch.tensor([grid])}
        given["mm_token_type_ids"] = 2 * (ids == IMAGE).int()
        if name == "qwen2_5_vl":
            given["second_per_grid_ts"] = [2 / rate]
    elif name == "llava_onevision":
        given = {"pixel_values_videos": stacked}
    elif name == "smolvlm":
        given = {"pixel_values": stacked, "pixel_attention_mask": torch.ones(1, len(frames), 56, 56).long()}
    else:
        given = {"pixel_values": stacked[0]}
    if ("pixel_values_videos" in given and name != "glm4v") or name == "kimi_k25":
        ids = torch.where(ids == IMAGE, VIDEO, ids)
    return _logprobs(model, ids, given)


def _logprobs(model: PreTrainedModel, ids: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=ids, **given).logits[0]
    return logits.float().log_softmax(dim=-1)


def worst_difference(made: Made, output: Any, frames: list[Any], rate: float = RATE) -> float:
    assert output.outputs[0].error is None
    answer = output.outputs[0]
    tokens = [*output.prompt_token_ids, *answer.token_ids]
    expected = expected_logprobs(made[0], made[2], tokens, frames, rate)
    found = [entry or {} for entry in (output.prompt_logprobs or [])[1:]] + (answer.logprobs or [])
    start = 0 if output.prompt_logprobs else len(output.prompt_token_ids) - 1
    return max(
        abs(logprob.logprob - expected[start + place, token].item())
        for place, entry in enumerate(found)
        for token, logprob in entry.items()
    )


@one_in(3)
@every_family
def test_logits_are_those_of_transformers(family: Made, llm: LLM) -> None:
    """An odd number of frames, an even one, and text; batched."""
    videos = [pictures(family[0], 3), pictures(family[0], 6 if family[0] == "kimi_k25" else 4, 10)]
    prompts: list[Any] = [prompt_of(family[0], prepared(llm, frames)) for frames in videos]
    outputs = llm.generate([*prompts, words(30)], SCORED)
    for frames, output in zip(videos, outputs, strict=False):
        assert worst_difference(family, output, frames) < TOLERANCE
    other = pictures(family[0], len(videos[1]), 20)
    assert worst_difference(family, outputs[1], other) > 10 * TOLERANCE
    llm.engine.check()


@one_in(3)
@every_family
def test_frames_are_cached_and_cut_by_chunks(family: Made, llm: LLM) -> None:
    """A video that goes on where another one ended differs from its last frame on; chunks end within frames."""
    name, folder, _ = family
    first = pictures(name, 4, 30)
    second = [*first[:2], *pictures(name, 2, 40)]
    for frames in (first, second, first):
        (output,) = llm.generate([prompt_of(name, prepared(llm, frames), 30)], GREEDY)
        assert worst_difference(family, output, frames) < TOLERANCE
    assert output.num_cached_tokens >= 8 or name in WITH_STATE
    with LLM(folder, **SETTINGS, max_num_batched_tokens=6, max_num_seqs=4) as other:
        (output,) = other.generate([prompt_of(name, prepared(other, first))], SCORED)
        assert worst_difference(family, output, first) < TOLERANCE
        other.engine.check()


@pytest.mark.parametrize("family", ["qwen2_5_vl"], indirect=True)
def test_the_rate_of_frames_counts(family: Made, llm: LLM) -> None:
    """Equal frames at other times have other positions, also if they were seen before."""
    frames = pictures(family[0], 6, 50)
    for rate in (16.0, 8.0):
        (output,) = llm.generate([prompt_of(family[0], prepared(llm, frames, rate))], SCORED)
        assert worst_difference(family, output, frames, rate) < TOLERANCE


def test_rotary_positions_of_a_video() -> None:
    """Three groups of 1 x 2 embeddings, two positions apart; what follows is behind the last one's time."""
    groups = [ImageInput(1 + 2 * i, 2, IMAGE, b"", (1, 1, 1), b"", (), (1, 2), 2 * i if i else None) for i in range(3)]
    shifts, delta = rope_shifts(groups, 9, 3)
    positions = shifts + range(9)
    assert positions.tolist() == [
        [0, 1, 1, 3, 3, 5, 5, 6, 7],
        [0, 1, 1, 1, 1, 1, 1, 6, 7],
        [0, 1, 2, 1, 2, 1, 2, 6, 7],
    ]
    assert delta == -1


@pytest.mark.parametrize("family", ["smolvlm"], indirect=True)
def test_videos_in_text_and_in_messages(family: Made, llm: LLM) -> None:
    """An array of frames and a list of them, each with what the family's prompts say of a video."""
    frames = pictures(family[0], 3, 60)
    array = np.stack([np.array(frame) for frame in frames])
    image, last = pictures(family[0], 2, 70)
    inputs: list[dict[str, Any]] = [
        {"prompt": "<video>", "videos": [(array, {"fps": RATE})]},
        {"prompt": "<image><video><image>", "multi_modal_data": {"image": [image, last], "video": frames}},
    ]
    alone, among = llm.generate(inputs, SCORED)
    assert worst_difference(family, alone, frames) < TOLERANCE
    assert (among.prompt_token_ids or []).count(IMAGE) == 2 * 5 * 4 + 3 * 4  # images have tiles, frames are whole
    assert among.outputs[0].error is None
    content = [{"type": "video", "video": frames, "fps": RATE}, {"type": "text", "text": "<video>"}]
    (answer,) = llm.chat([{"role": "user", "content": content}], GREEDY)
    assert (answer.prompt_token_ids or [])[:24] == (alone.prompt_token_ids or [])[:24]  # and then the client's text
    assert (answer.prompt_token_ids or []).count(IMAGE) == 3 * 4
    for wrong, message in (
        ({"prompt": "<video><video>", "videos": [array]}, "has places for 2 videos, and there are 1"),
        ({"prompt_token_ids": [IMAGE], "videos": [array]}, "it must be text"),
        ({"prompt": "<video>", "videos": array[0]}, r"must be an array of uint8 \[frames, rows, columns, 3\]"),
        ({"prompt": "<video>", "videos": [(array, {"fps": -1})]}, "'fps' must be"),
    ):
        with pytest.raises(InvalidParameter, match=message):
            llm.generate([wrong], GREEDY)


@pytest.mark.parametrize("family", ["qwen3_vl"], indirect=True)
def test_videos_are_prepared_once(family: Made, llm: LLM) -> None:
    """Parts of a video are images to the engine: equal ones share their embeddings."""
    still = [pictures(family[0], 1)[0]] * 4
    video = prepared(llm, still)
    assert [image.shape for image in video.images] == [(2, 64, 96)] * 2
    assert isinstance(video.images[0], PreparedImage)
    assert llm._images is not None
    digests = {llm._images.processor.placed(image, 0).digest for image in video.images}
    assert len(digests) == 1
    params = SamplingParams(temperature=0, max_tokens=2)
    assert llm.generate([prompt_of(family[0], video)], params)[0].outputs[0].error is None
