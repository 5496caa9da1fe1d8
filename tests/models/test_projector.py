"""Towers in GGUF next to the text part, with the logits of transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from octavo import LLM
from octavo.errors import CheckpointError
from octavo.models.vision.tower import Pixels
from octavo.models.vision.towers import load_tower, read_vision
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.gguf.gguf_checkpoint import ProjectorTensors
from octavo.weights.gguf.hub_gguf import choose_projector
from octavo.weights.gguf.projector import KINDS as FILES
from octavo.weights.gguf.projector import open_projector, projector_of
from tests.models import vision
from tests.models.gguf_files import write_gguf, write_projector
from tests.models.test_vision import PROMPTS, SCORED, SETTINGS, TOLERANCE, as_inputs, worst_difference
from tests.tiers import nightly, one_in

Array = npt.NDArray[np.float32]
TEXT = {"gemma3": ("gemma3_text", "gemma3_text"), "qwen2_5_vl": ("qwen2", "qwen2_vl_text")}
TEXT |= {"qwen3_vl": ("qwen3", "qwen3_vl_text"), "qwen3_5": ("qwen3_5_text", "qwen3_5_text")}
TEXT |= {"qwen3_vl_moe": ("qwen3_moe", "qwen3_vl_moe_text")}
TEXT |= {"mistral3": ("mistral", "llama"), "pixtral": ("mistral", "llama"), "smolvlm": ("llama", "llama")}
TEXT |= {"llava": ("llama", "llama"), "llava_next": ("llama", "llama"), "glm4v": ("glm4", "glm4")}
TEXT |= dict.fromkeys(("gemma4", "gemma4_causal"), ("gemma4_text", "gemma4_text"))
TEXT |= {"internvl": ("qwen3", "qwen3"), "internvl_rms": ("qwen2", "qwen2")}
"""The text part's ``model_type`` of a family in transformers, and in ``write_gguf``."""
KINDS = {"gemma3": ("gemma3", "<image_soft_token>"), "qwen2_5_vl": ("qwen2.5vl_merger", "<|image_pad|>")}
KINDS |= dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5"), ("qwen3vl_merger", "<|image_pad|>"))

KINDS |= dict.fromkeys(("mistral3", "pixtral"), ("pixtral", "[IMG]")) | {"smolvlm": ("idefics3", "<image>")}
KINDS |= dict.fromkeys(("gemma4", "gemma4_causal"), ("gemma4v", "<|image|>"))
KINDS |= {"llava": ("mlp", "<image>"), "llava_next": ("mlp", "<unk>"), "glm4v": ("glm4v", "<|image|>")}
TEXT |= {"glm4v_moe": ("glm4_moe", "glm4_moe"), "glm_ocr": ("glm4", "glm4")}
KINDS |= dict.fromkeys(("glm4v_moe", "glm_ocr"), ("glm4v", "<|image|>"))
KINDS |= dict.fromkeys(("internvl", "internvl_rms"), ("internvl", "<IMG_CONTEXT>"))
TEXT |= {"kimi_vl": ("deepseek_v3", "deepseek_v3"), "lfm2_vl": ("lfm2", "lfm2"), "lighton_ocr": ("qwen3", "qwen3")}
TEXT |= {"llama4": ("llama4_text", "llama4_text"), "gemma4_unified": ("gemma4_unified_text", "gemma4_text")}
KINDS |= {"kimi_vl": ("kimivl", "<|media_pad|>"), "lfm2_vl": ("lfm2", "<image>"), "llama4": ("llama4", "<|patch|>")}
KINDS |= {"lighton_ocr": ("lightonocr", "<|image_pad|>"), "gemma4_unified": ("gemma4uv", "<|image|>")}


def made(name: str, folder: Path, form: Callable[[Array], Array] = lambda values: values) -> PreTrainedModel:
    """Write the two files of a model: ``model.gguf`` and ``mmproj-model-f32.gguf``."""
    whole = folder / "whole"
    model: Any = vision.make(whole, name)
    if name == "internvl_rms":
        model.model.vision_tower.layernorm = torch.nn.Identity()  # which converters leave out
    outer = vision.written_config(whole)
    given: dict[str, Any] = {**outer["text_config"], "model_type": TEXT[name][0]}
    given |= {key: outer[key] for key in ("tie_word_embeddings",) if key in outer}  # takes precedence
    if name == "glm_ocr":
        given["attention_bias"] = False  # which its class does not read
        given["rope_parameters"]["partial_rotary_factor"] = 1.0  # as in the published configuration
    part = AutoModelForCausalLM.from_config(AutoConfig.for_model(**given))
    whole_names = re.compile(r"^(model\.(language_model|text_model)|language_model\.model)\.")
    own = {
        whole_names.sub("model.", key).removeprefix("language_model."): tensor
        for key, tensor in model.state_dict().items()
    }
    assert not part.load_state_dict(own, strict=False).missing_keys
    part.save_pretrained(folder)
    written = {**vision.written_config(folder), "model_type": TEXT[name][1]}
    if TEXT[name][1] == "llama":
        written["sliding_window"] = None  # which is longer than these texts, and files of this kind have none
    (folder / "config.json").write_text(json.dumps(written))
    kind, token = KINDS[name]
    known = {number: text for text, number in vision.FAMILIES[name].tokens.items()} | {vision.IMAGE: token}
    write_gguf(folder, part, tokens=[known.get(i, f"t{i}") for i in range(256)])
    write_projector(whole, folder / "mmproj-model-f32.gguf", kind, form)
    return model


DAILY = ("gemma3", "qwen2_5_vl", "qwen3_vl", "mistral3", "smolvlm", "internvl_rms", "llava_next", "glm4v", "gemma4")
DAILY += ("kimi_vl", "lighton_ocr", "gemma4_unified")
ALONE = {"lfm2_vl": (64, 96), "llama4": (56, 56)}
"""Families whose files say nothing of tiles, so that images would be cut by the sizes of published models; and rows and
columns of an image."""


@one_in(2)
@pytest.mark.parametrize("name", [*DAILY, *(nightly(name) for name in KINDS if name not in (*DAILY, *ALONE))])
def test_a_tower_next_to_the_text_part(name: str, tmp_path: Path) -> None:
    model = made(name, tmp_path)
    with LLM(tmp_path / "model.gguf", **SETTINGS) as llm:
        for prompt, output in zip(PROMPTS, llm.generate(as_inputs(PROMPTS), SCORED), strict=True):
            assert worst_difference(name, model, prompt, output) < TOLERANCE
        llm.engine.check()


@pytest.mark.parametrize("name", ALONE)
def test_a_tower_alone(name: str, tmp_path: Path) -> None:
    made(name, tmp_path)
    whole, size, form = tmp_path / "whole", ALONE[name], WeightFormat(torch.float32, torch.device("cpu"))
    projector = open_projector(tmp_path / "model.gguf")
    assert projector is not None
    text = {**vision.written_config(whole)["text_config"], "architectures": [FILES[KINDS[name][0]].texts[0]]}
    sources: list[tuple[dict[str, Any], Any]] = [(projector.config(text, []), ProjectorTensors(projector))]
    sources.append((vision.written_config(whole), open_checkpoint(whole)))
    pixels = torch.randint(0, 256, (1, *size, 3), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    image = Pixels(pixels, (0, 0, 1, 1, *size), (0.5,) * 3, (0.5,) * 3)
    found = []
    for values, source in sources:
        config = read_vision(values)
        assert config is not None
        found.append(load_tower(values, config, source, form).tower(image))
    assert len(found[0]) > 1
    assert torch.equal(*found)


def test_towers_in_sixteen_bits(tmp_path: Path) -> None:
    model = made("gemma3", tmp_path, lambda values: values.astype(np.float16))
    with LLM(tmp_path / "model.gguf", **SETTINGS) as llm:
        (output,) = llm.generate(as_inputs(PROMPTS[:1]), SCORED)
    assert 0 < worst_difference("gemma3", model, PROMPTS[0], output) < 0.1


def test_the_most_exact_file_is_used(tmp_path: Path) -> None:
    assert projector_of(tmp_path / "a.gguf") is None
    for name in ("mmproj-Q8_0.gguf", "mmproj-model-f16.gguf", "mmproj-F32.gguf", "other.gguf"):
        (tmp_path / name).touch()
    assert projector_of(tmp_path / "a.gguf") == tmp_path / "mmproj-model-f16.gguf"
    assert projector_of(tmp_path) is None


def test_other_kinds_leave_the_text_part(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made("qwen2_5_vl", tmp_path)
    writer = gguf.GGUFWriter(tmp_path / "mmproj-a-bf16.gguf", "clip")
    writer.add_string("clip.projector_type", "ultravox")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with LLM(tmp_path / "model.gguf", **SETTINGS) as llm:
        assert llm.info.num_image_slots == 0
        assert "mmproj-a-bf16.gguf: images are refused: projector_type is ultravox, not gemma3" in caplog.text
        assert llm.generate([[5, 6, 7]], SCORED)[0].outputs[0].error is None


def test_the_tower_of_another_model_is_refused(tmp_path: Path) -> None:
    made("qwen2_5_vl", tmp_path)
    (tmp_path / "other").mkdir()
    made("gemma3", tmp_path / "other")
    (tmp_path / "mmproj-model-f32.gguf").unlink()
    (tmp_path / "other" / "model.gguf").unlink()
    (tmp_path / "model.gguf").rename(tmp_path / "other" / "model.gguf")
    with pytest.raises(CheckpointError, match="this tower is of Gemma3ForCausalLM, not of Qwen2_5_VL"):
        LLM(tmp_path / "other" / "model.gguf", **SETTINGS)


def test_a_repository_has_the_tower_next_to_the_file() -> None:
    files = ["a/mmproj-BF16.gguf", "mmproj-F16.gguf", "mmproj-F32.gguf", "x-Q4_K_M.gguf"]
    assert choose_projector(files, "x-Q4_K_M.gguf") == "mmproj-F16.gguf"
    assert choose_projector(files, "a/x-Q8_0.gguf") == "a/mmproj-BF16.gguf"
    assert choose_projector(files, "b/x-Q8_0.gguf") is None


@pytest.mark.parametrize(
    ("features", "message"),
    [([3, 7], r"is \[3, 7\]; the output of one layer is supported"), (7, "is 7, expected an array of numbers")],
)
def test_the_features_of_one_layer_are_read(features: list[int] | int, message: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "mmproj-a.gguf", "clip")
    writer.add_bool("clip.has_llava_projector", True)
    for key in ("image_size", "patch_size", "embedding_length", "feed_forward_length", "block_count"):
        writer.add_uint32(f"clip.vision.{key}", 8)
    writer.add_vision_head_count(2)
    if isinstance(features, list):
        writer.add_array("clip.vision.feature_layer", features)
    else:
        writer.add_uint32("clip.vision.feature_layer", features)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=f"feature_layer.* {message}"):
        open_projector(tmp_path / "model.gguf")
