"""Engines built from settings."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.build import build_engine as build
from octavo.build.build_engine import build_engine
from octavo.config import EngineConfig
from octavo.errors import CheckpointError, ConfigError
from octavo.grammar.masks import MatcherMasks
from octavo.ops import dispatch
from octavo.sampling_params import SamplingParams
from octavo.types import EngineInfo, Request
from octavo_kernels.cpu import threads
from tests.models.checkpoints import make_checkpoint
from tests.ops.cpu_cases import needs_float_kernels


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    make_checkpoint(made, "llama3_rope")
    return made


def generate(folder: Path, **settings: Any) -> tuple[EngineInfo, list[int]]:
    config = EngineConfig.from_flat({"model": str(folder), "device": "cpu", "num_kv_blocks": 40, **settings})
    engine, info = build_engine(config)
    engine.add(Request(1, [1, 2, 3, 4, 5], SamplingParams(temperature=0), 20))
    tokens = []
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            tokens += output.tokens
    return info, tokens


def test_an_engine_generates_and_says_what_it_is(folder: Path) -> None:
    info, tokens = generate(folder)
    model = make_checkpoint(folder, "llama3_rope")
    with torch.inference_mode():
        expected = model.generate(
            torch.tensor([[1, 2, 3, 4, 5]]), max_new_tokens=20, do_sample=False, eos_token_id=None
        )
    assert tokens == expected[0, 5:].tolist()
    assert (info.architecture, info.vocab_size, info.eos_token_ids) == ("LlamaForCausalLM", 97, (2,))
    assert (info.max_model_len, info.num_kv_blocks, info.dtype, info.device) == (128, 40, "float32", "cpu")
    assert info.num_parameters == sum(weight.numel() for weight in model.parameters())
    assert set(info.memory) == {"weights", "kv_cache", "activations", "logits"}
    assert {"linear", "attention", "rms_norm"} <= set(info.kernels)


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"dtype": "float16"}, {"kv_cache_dtype": "bfloat16"}])
def test_other_types_work_and_are_honoured(folder: Path, settings: dict[str, str]) -> None:
    wide, _ = generate(folder)
    info, tokens = generate(folder, **settings)
    assert len(tokens) == 20
    assert info.dtype == settings.get("dtype", "float32")
    assert info.memory["kv_cache"] == wide.memory["kv_cache"] // 2


def test_dummy_weights_need_only_a_config(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    first, again = generate(tmp_path, load_format="dummy"), generate(tmp_path, load_format="dummy")
    assert first == again
    assert generate(tmp_path, load_format="dummy", seed=1)[1] != first[1]


def test_errors_come_before_anything_is_loaded(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device: cuda"):
        generate(folder, device="cuda")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(CheckpointError):
        generate(tmp_path)
    with pytest.raises(ConfigError, match="max_model_len"):
        generate(folder, max_model_len=129)


def test_overrides_are_read_as_if_the_checkpoint_had_them(folder: Path, tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    overrides = {"max_position_embeddings": 256, "rope_scaling": scaling, "rope_parameters": None}
    shutil.copytree(folder, tmp_path / "edited")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "edited" / "config.json").write_text(json.dumps(config | overrides))
    info, tokens = generate(folder, hf_overrides=overrides, max_model_len=256)
    assert info.max_model_len == 256
    assert tokens == generate(tmp_path / "edited")[1]
    assert tokens != generate(folder)[1]
    for wrong in ("[]", "{", "[" * 10**6):
        with pytest.raises(ConfigError, match="hf_overrides"):
            generate(folder, hf_overrides=wrong)


def test_torch_has_as_many_threads_as_are_wanted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with dispatch.only("reference"):
        generate(folder)
    assert asked == [7]


@needs_float_kernels
def test_torch_leaves_the_cores_to_kernels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    generate(folder)
    assert (asked, threads.num_threads()) == ([1], 3)
    threads.set_num_threads(1)


@pytest.mark.parametrize(
    ("settings", "depth"),
    [
        ({}, 2),
        ({"async_scheduling": False}, 1),
        ({"speculative_config": '{"method": "ngram", "num_speculative_tokens": 2}'}, 2),
    ],
)
def test_async_scheduling_can_be_disabled(
    folder: Path, settings: dict[str, Any], depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps in flight, as on a GPU, also with speculation."""
    monkeypatch.setattr(build, "DEPTH", {"cpu": 2})
    config = EngineConfig.from_flat({"model": str(folder), "device": "cpu", "num_kv_blocks": 40, **settings})
    engine, _ = build_engine(config)
    assert engine.depth == depth


def test_an_engine_that_expects_grammars_has_their_vocabulary_when_it_is_ready(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(MatcherMasks, "_loaded", lambda masks: loaded.append(threading.current_thread().name))
    config = EngineConfig.from_flat({"model": str(folder), "device": "cpu", "num_kv_blocks": 40})
    build_engine(config)
    assert not loaded
    build_engine(config, expects_grammars=True)
    assert len(loaded) == 2, "it is loaded beside the weights, and awaited"
