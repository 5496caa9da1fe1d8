"""Vision-language models, from pixels to logits, next to transformers; caching, chunks and preemption with images."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from octavo import LLM, RequestOutput, SamplingParams
from octavo.build import build_executor
from octavo.engine.runner.step_runner import StepRunner
from octavo.engine.sequence_images import rope_shifts
from octavo.errors import CheckpointError, InvalidParameter, RunnerError
from octavo.images.preparer import placed
from octavo.runtime.executors.stream_executor import StreamExecutor
from octavo.steps.messages import Message, Reply, Step
from octavo.types import ImageInput, Request
from tests.models.vision import FAMILIES, IMAGE, PREFIX, as_png, expected_logprobs, make, picture, written_config
from tests.tiers import nightly, nightly_after, one_in

SETTINGS: dict[str, Any] = {"dtype": "float32", "block_size": 8, "num_kv_blocks": 120}
SCORED = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=3, logprobs=3)
GREEDY = SamplingParams(temperature=0, max_tokens=4, logprobs=3)
ONE, TALL, SMALL = picture(100, 70, 1), picture(64, 150, 2), picture(33, 44, 3)
TOLERANCE = 1e-3
WITH_STATE = ("qwen3_5", "lfm2_vl", "minicpmv4_6")
"""Families that reuse a prefix of 64 tokens or a multiple, as they have recurrent states."""
ROOM = {
    "minicpmv4_6": (7, 48),
    "deepseek_ocr": (16, 96),
    "granite_vision": (22, 128),
    "llava_next": (22, 128),
    "llava_onevision": (18, 128),
}
"""Blocks, and tokens of a sequence, with room for two prompts of an image but not for the answers."""
Prompt = tuple[list[int], list[Image.Image]]


def words(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 240, (count,), generator=generator).tolist()


PROMPTS: list[Prompt] = [
    ([*words(5), IMAGE, *words(9)], [ONE]),
    ([IMAGE, *words(3), IMAGE, 7, IMAGE, *words(2)], [ONE, TALL, SMALL]),
    (words(40), []),
    ([*words(3), IMAGE], [TALL]),
]


COMMON = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "mistral3", "gemma3", "gemma4")
"""Families with which everything is tested each time; with the others, what differs from family to family."""
OTHERS = [name for name in FAMILIES if name != PREFIX]
every_family = pytest.mark.parametrize("family", OTHERS, indirect=True)
common_families = pytest.mark.parametrize(
    "family", [*COMMON, *(nightly(name) for name in OTHERS if name not in COMMON)], indirect=True
)
one_family = pytest.mark.parametrize("family", nightly_after(1, OTHERS), indirect=True)


@pytest.fixture(scope="module")
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, make(folder, request.param)


@pytest.fixture(scope="module")
def llm(family: tuple[str, Path, PreTrainedModel]) -> Iterator[LLM]:
    with LLM(family[1], **SETTINGS) as llm:
        yield llm


def as_inputs(prompts: Sequence[Prompt]) -> list[Any]:
    return [{"prompt_token_ids": tokens, "images": images} if images else tokens for tokens, images in prompts]


def worst_difference(name: str, model: PreTrainedModel, prompt: Prompt, output: RequestOutput) -> float:
    """The largest difference of a log-probability, of the prompt and of what was sampled after it."""
    found = [entry or {} for entry in (output.prompt_logprobs or [])[1:]]
    completion = output.outputs[0]
    assert completion.error is None
    found += completion.logprobs or []
    expected = expected_logprobs(name, model, *prompt, completion.token_ids)
    start = 0 if output.prompt_logprobs else len(output.prompt_token_ids or []) - 1
    return max(
        abs(logprob.logprob - expected[start + place, token].item())
        for place, entry in enumerate(found)
        for token, logprob in entry.items()
    )


@every_family
def test_logits_are_those_of_transformers(family: tuple[str, Path, PreTrainedModel], llm: LLM) -> None:
    """One image and three of different sizes, first, last and nearly adjacent, batched with text; then decoding."""
    name, _, model = family
    for prompt, output in zip(PROMPTS, llm.generate(as_inputs(PROMPTS), SCORED), strict=True):
        assert worst_difference(name, model, prompt, output) < TOLERANCE
    llm.engine.check()


@common_families
def test_an_image_makes_a_difference(family: tuple[str, Path, PreTrainedModel], llm: LLM) -> None:
    """Random weights could hide that pixels or places are ignored."""
    name, _, model = family
    tokens = [*words(5), IMAGE, *words(9)]
    (output,) = llm.generate(as_inputs([(tokens, [TALL])]), SCORED)
    turned = TALL.transpose(Image.Transpose.ROTATE_180)
    assert worst_difference(name, model, (tokens, [turned]), output) > 10 * TOLERANCE


@pytest.mark.parametrize("family", ["qwen3_vl", nightly("gemma3"), nightly("gemma4")], indirect=True)
def test_steps_of_gpus(family: tuple[str, Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded as for graphs, in which any row may be an image's, and started before the one before has ended."""
    name, _, model = family
    steps: list[Step] = []

    class Noting(StreamExecutor):
        def send(self, message: Message) -> Reply[Any]:
            steps.extend([message] if isinstance(message, Step) and message.num_seqs else [])
            return super().send(message)

    def on_stream(*args: Any, forward: Any, logits: Any, vocabulary: Any, link: None, **parts: Any) -> StreamExecutor:
        return Noting(*args, **parts)

    monkeypatch.setattr(build_executor, "HostExecutor", on_stream)
    unscored = SamplingParams(temperature=0, max_tokens=3, logprobs=3)
    with LLM(family[1], **SETTINGS, max_num_batched_tokens=48, max_num_seqs=8) as llm:
        for params in (SCORED, unscored):
            for prompt, output in zip(PROMPTS, llm.generate(as_inputs(PROMPTS), params), strict=True):
                assert worst_difference(name, model, prompt, output) < TOLERANCE
        llm.engine.check()
    of_images = [step for step in steps if step.shape.has_images]
    assert any(step.spans or (step.uses_graph and step.is_plain) for step in of_images)
    assert not any(step.spans and (step.uses_graph or step.is_plain) for step in of_images)


@every_family
@one_in(5)
def test_chunks_may_end_within_an_image(family: tuple[str, Path, PreTrainedModel]) -> None:
    name, folder, model = family
    with LLM(folder, **SETTINGS, max_num_batched_tokens=6, max_num_seqs=4) as llm:
        for prompt, output in zip(PROMPTS, llm.generate(as_inputs(PROMPTS), SCORED), strict=True):
            assert worst_difference(name, model, prompt, output) < TOLERANCE
        llm.engine.check()


@one_in(5)
@common_families
@pytest.mark.parametrize("num_shared", [4, 10, 14, 60], ids=["before", "at its start", "inside", "behind"])
def test_prefixes_are_cached_with_images(num_shared: int, family: tuple[str, Path, PreTrainedModel], llm: LLM) -> None:
    """The second prompt shares its first tokens, image included, with the first one."""
    name, _, model = family
    start = words(12, seed=num_shared)
    first: Prompt = ([*start, IMAGE, *words(40, seed=1)], [ONE])
    length = len(llm.generate(as_inputs([first]), GREEDY)[0].prompt_token_ids or [])
    behind = max(0, min(40, num_shared - (length - 40)))
    second: Prompt = first
    if num_shared < 12:
        second = ([*start[:num_shared], *words(20, seed=2), IMAGE, *words(5)], [ONE])
    elif behind:
        second = ([*start, IMAGE, *words(40, seed=1)[:behind], *words(9, seed=3)], [ONE])
    (output,) = llm.generate(as_inputs([second]), GREEDY)
    assert worst_difference(name, model, second, output) < TOLERANCE
    if second is first:
        assert output.num_cached_tokens >= 8 or name in WITH_STATE


@common_families
def test_images_that_differ_in_a_pixel_share_nothing(llm: LLM, family: tuple[str, Path, PreTrainedModel]) -> None:
    tokens = [*words(7, seed=9), IMAGE, *words(30, seed=9)]
    other = ONE.resize((112, 112))
    changed = other.copy()
    changed.putpixel((50, 50), (1, 2, 3))
    results = [llm.generate(as_inputs([(tokens, [image])]), GREEDY)[0] for image in (other, changed, other)]
    assert results[1].num_cached_tokens < 8
    name, _, model = family
    assert results[2].num_cached_tokens >= 24 or len(results[2].prompt_token_ids or []) < 32 or name in WITH_STATE
    for image, result in zip((other, changed, other), results, strict=True):
        assert worst_difference(name, model, (tokens, [image]), result) < TOLERANCE


@pytest.mark.parametrize("family", ["qwen3_5"], indirect=True)
@pytest.mark.parametrize("num_before", [5, 52], ids=["behind an image", "inside an image"])
def test_snapshots_of_states_are_found_by_images(
    num_before: int, family: tuple[str, Path, PreTrainedModel], llm: LLM
) -> None:
    """The only snapshot is the one at 64 tokens: the same image leads to it, another one of the same size does not."""
    name, _, model = family
    tokens = [*words(num_before, seed=20), IMAGE, *words(100 - num_before, seed=21)]
    first, other = picture(128, 128, 20), picture(128, 128, 21)
    for image, num_cached in ((first, 0), (other, 0), (first, 64), (other, 64)):
        prompt = (tokens[:80] if num_cached else tokens, [image])
        (output,) = llm.generate(as_inputs([prompt]), GREEDY)
        assert output.num_cached_tokens == num_cached
        assert worst_difference(name, model, prompt, output) < TOLERANCE


@pytest.mark.parametrize("family", ["qwen3_5"], indirect=True)
def test_turns_that_add_an_image_begin_at_snapshots_within_images(
    family: tuple[str, Path, PreTrainedModel], llm: LLM
) -> None:
    """Steps end at 64 and 128 tokens, within an image each: what is left of it has the embeddings of its own places."""
    name, _, model = family
    images, tokens = [picture(128, 128, seed) for seed in (30, 31, 32)], words(56, seed=30)
    for turn, num_cached in enumerate((0, 64, 128)):
        prompt = ([*tokens, IMAGE, *words(5, seed=turn)], images[: turn + 1])
        (output,) = llm.generate(as_inputs([prompt]), GREEDY)
        assert output.num_cached_tokens == num_cached
        assert worst_difference(name, model, prompt, output) < TOLERANCE
        tokens = [*prompt[0], *output.outputs[0].token_ids, *words(39, seed=turn)]


@one_in(5)
@common_families
def test_preempted_sequences_and_several_continuations(family: tuple[str, Path, PreTrainedModel]) -> None:
    name, folder, model = family
    room = ROOM.get(name, (14, 96))
    settings = {**SETTINGS, "num_kv_blocks": room[0], "max_model_len": room[1], "enable_prefix_caching": False}
    prompts = [([*words(4, seed=i), IMAGE, *words(6)], [picture(80 + i, 60, i)]) for i in range(4)]
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=2, ignore_eos=True)
    with LLM(folder, **settings, max_num_seqs=4) as llm:
        outputs = llm.generate(as_inputs(prompts), params)
        assert llm.engine.stats().num_preemptions > 0
        for prompt, output in zip(prompts, outputs, strict=True):
            assert worst_difference(name, model, prompt, output) < TOLERANCE
        (both,) = llm.generate(as_inputs(prompts[:1]), SamplingParams(temperature=1, seed=1, n=2, max_tokens=3))
        assert len(both.outputs) == 2
        llm.engine.check()


@common_families
def test_a_request_goes_on_in_another_engine(family: tuple[str, Path, PreTrainedModel], llm: LLM) -> None:
    """As after the death of an engine process: prompt, images and the tokens so far are sent again."""
    tokens, images = PROMPTS[0]
    (whole,) = llm.generate(as_inputs([PROMPTS[0]]), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    expected = whole.outputs[0].token_ids
    assert llm._images is not None
    prepared = [llm._images.prepare(as_png(image), "auto", "") for image in images]
    expanded, inputs = placed(tokens, prepared, llm._images.processor)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    request = Request(7, expanded, params, 8, output_tokens=expected[:3], images=inputs)
    with LLM(family[1], **SETTINGS) as other:
        other.engine.add(request)
        found: list[int] = []
        while other.engine.has_work:
            found += [token for output in other.engine.step() for token in output.tokens]
    assert found == expected[3:]


@pytest.mark.parametrize("family", ["qwen3_5", "gemma3"], indirect=True)
def test_failed_steps_are_computed_again(
    family: tuple[str, Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the images on, where a failed step has lost the state behind them; and without a cut within an image whose
    rows attend to each other, although it is longer than a step."""
    name, folder, model = family
    num_steps, finish = itertools.count(1), StepRunner.finish

    def failing(self: StepRunner, *args: Any) -> Any:
        found = finish(self, *args)
        if next(num_steps) in (1, 20, 40):
            raise RunnerError("by chance")
        return found

    params = SamplingParams(temperature=0, max_tokens=12, prompt_logprobs=3, logprobs=3, ignore_eos=True)
    with LLM(folder, **SETTINGS, max_num_batched_tokens=6, max_num_seqs=2) as llm:
        monkeypatch.setattr(StepRunner, "finish", failing)
        for prompt, output in zip(PROMPTS, llm.generate(as_inputs(PROMPTS), params), strict=True):
            assert worst_difference(name, model, prompt, output) < TOLERANCE
        llm.engine.check()
        assert llm.engine.stats().num_faults >= 2


@pytest.mark.parametrize("family", ["qwen3_5"], indirect=True)
def test_drafts_of_an_mtp_layer_with_images(family: tuple[str, Path, PreTrainedModel], tmp_path: Path) -> None:
    """Answers are those without drafts, whatever the layer proposes behind images, chunks and cached prefixes."""
    name, folder, model = family
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    stored = load_file(folder / "model.safetensors")
    last, size = "model.language_model.layers.3.", 64
    own = {key.replace(last, "mtp.layers.0."): tensor.clone() for key, tensor in stored.items() if last in key}
    own |= {f"mtp.{part}.weight": torch.zeros(size) for part in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    own["mtp.fc.weight"] = torch.cat([torch.zeros(size, size), torch.eye(size)], dim=1)  # drafts from the last state
    save_file(stored | own, tmp_path / "model.safetensors")
    settings = {**SETTINGS, "speculative_config": {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False}}
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=3, ignore_eos=True)
    with LLM(tmp_path, **settings, max_num_batched_tokens=24) as llm:
        for prompts in (PROMPTS, [*PROMPTS[:1], ([*PROMPTS[0][0], 7, IMAGE, 9], [ONE, SMALL])]):
            for prompt, output in zip(prompts, llm.generate(as_inputs(prompts), params), strict=True):
                assert worst_difference(name, model, prompt, output) < TOLERANCE
        stats = llm.engine.stats()
        assert stats.num_drafts > 0
        assert stats.num_accepted_drafts > 0
        llm.engine.check()


@one_family
def test_a_tower_that_fails_ends_its_own_request(llm: LLM) -> None:
    runner: Any = llm.engine.runner
    pool = runner.executor._embeddings
    tower, bad = pool._tower, picture(90, 90, 11)

    def failing(image: Any) -> torch.Tensor:
        if image.pixels.numpy().tobytes() == pixels:
            raise RuntimeError("no memory")
        rows: torch.Tensor = tower(image)
        return rows

    assert llm._images is not None
    pixels = llm._images.prepare(as_png(bad), "auto", "").pixels
    pool._tower = failing
    prompts = [([*words(3, seed=i), IMAGE], [image]) for i, image in enumerate((TALL, bad, SMALL))]
    try:
        outputs = llm.generate(as_inputs(prompts), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    finally:
        pool._tower = tower
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert "the tower for images or audio failed" in str(outputs[1].outputs[0].error)
    llm.engine.check()


@common_families
def test_placeholders_are_never_sampled(llm: LLM) -> None:
    params = SamplingParams(temperature=5.0, max_tokens=60, seed=3, ignore_eos=True)
    (output,) = llm.generate(as_inputs([PROMPTS[0]]), params)
    assert len(output.outputs[0].token_ids) == 60
    (biased,) = llm.generate(
        as_inputs([PROMPTS[0]]), SamplingParams(temperature=0, max_tokens=4, logit_bias={IMAGE: 100.0})
    )
    for completion in (output.outputs[0], biased.outputs[0]):
        assert IMAGE not in completion.token_ids


@one_family
def test_places_and_images_must_be_as_many(llm: LLM) -> None:
    with pytest.raises(InvalidParameter, match="places for 2 images, and there are 1"):
        llm.generate(as_inputs([([IMAGE, 5, IMAGE], [ONE])]), GREEDY)


@common_families
def test_a_model_may_read_text_alone(family: tuple[str, Path, PreTrainedModel]) -> None:
    with LLM(family[1], **SETTINGS, language_model_only=True) as llm:
        assert llm.info.num_image_slots == 0
        with pytest.raises(InvalidParameter, match="reads text only"):
            llm.generate(as_inputs(PROMPTS[:1]), GREEDY)


@one_family
def test_weights_alone_have_the_images_of_another_folder(
    family: tuple[str, Path, PreTrainedModel], llm: LLM, tmp_path: Path
) -> None:
    for path in family[1].glob("*.safetensors*"):
        shutil.copy(path, tmp_path)
    own = {"hf_config_path": str(family[1]), "tokenizer": str(family[1])}
    with LLM(tmp_path, **SETTINGS, **own) as other:
        assert other.info.num_image_slots == llm.info.num_image_slots > 0
        found, expected = (each.generate(as_inputs(PROMPTS[:1]), GREEDY)[0].outputs[0] for each in (other, llm))
        assert found.token_ids == expected.token_ids


@pytest.mark.parametrize("family", [PREFIX], indirect=True)
@pytest.mark.parametrize("most", [6, 512])
def test_a_prompt_attends_to_all_of_itself(most: int, family: tuple[str, Path, PreTrainedModel]) -> None:
    """It is computed in one piece, and found again as a whole: the same image and words before others are not."""
    name, folder, model = family
    start = [*words(3), IMAGE, *words(20, seed=4)]
    prompts: list[Prompt] = [(start, [ONE]), (start, [TALL]), ([*start, *words(9, seed=5)], [ONE]), (start, [ONE])]
    with LLM(folder, **SETTINGS, max_num_batched_tokens=most, max_num_seqs=4) as llm:
        outputs = llm.generate(as_inputs(prompts[:2]), SCORED)
        outputs += [llm.generate(as_inputs([prompt]), GREEDY)[0] for prompt in prompts[2:]]
        for prompt, output in zip(prompts, outputs, strict=True):
            assert worst_difference(name, model, prompt, output) < TOLERANCE
        assert [output.num_cached_tokens for output in outputs] == [0, 0, 0, 38]  # all but the last
        with pytest.raises(InvalidParameter, match="one image of a prompt; there are 2"):
            llm.generate(as_inputs([([IMAGE, 5, IMAGE], [ONE, TALL])]), GREEDY)
        tokens = llm.generate(as_inputs([([2, IMAGE, 2, 5], [ONE])]), GREEDY)[0].prompt_token_ids
        assert tokens == [*[IMAGE] * 16, 2, 5]
        llm.engine.check()


def test_sections_must_be_of_all_pairs(tmp_path: Path) -> None:
    make(tmp_path, "qwen2_5_vl")
    config = written_config(tmp_path)
    config["text_config"]["rope_parameters"]["mrope_section"] = [1, 1, 1]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="mrope_section: is of 3 rotated pairs; heads have 8"):
        LLM(tmp_path, **SETTINGS)


def test_rotary_positions_of_an_image() -> None:
    """Text, an image of 2 x 3 embeddings, text: as in Qwen2-VL's paper."""
    image = ImageInput(2, 6, IMAGE, b"", (1, 1, 1), b"", (), (2, 3))
    shifts, delta = rope_shifts([image], 10, 3)
    positions = shifts + range(10)
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]
    assert delta == -3
