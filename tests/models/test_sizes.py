"""Sizes in a configuration that cannot be true are refused by name, at once and without memory."""

from __future__ import annotations

import json
import resource
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.build import build_engine as build
from octavo.config import EngineConfig
from octavo.errors import CheckpointError
from octavo.models import config_checks
from octavo.models.config_checks import check_dummy
from octavo.models.registry import read_config
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.sampling_params import SamplingParams
from octavo.types import Request
from octavo.weights.checkpoint import open_checkpoint
from tests.models.checkpoints import make_checkpoint

FORM = WeightFormat(torch.float32, torch.device("meta"))
MAX_SECONDS = 2.0
MAX_BYTES = 64 << 20
WRONG: list[tuple[dict[str, Any], str]] = [
    *(({"num_hidden_layers": count}, "num_hidden_layers is") for count in (3, 16_000, 10**9, 10**12)),
    *(({"head_dim": size}, "head_dim is") for size in (10, 10**4, 10**9, 10**12)),
    *(({"vocab_size": size}, "vocab_size is") for size in (98, 10**7, 10**9, 10**12)),
    *(({"hidden_size": size}, "hidden_size is") for size in (64, 10**6, 10**9, 10**12)),
    ({"num_attention_heads": 8, "head_dim": 8}, "num_attention_heads is 8"),
    ({"num_key_value_heads": 4}, "num_key_value_heads is 4"),
    ({"num_attention_heads": 10**9, "hidden_size": 10**9}, "hidden_size is"),
    ({"intermediate_size": 10**9}, "intermediate_size is"),
    *(({"eos_token_id": id}, "eos_token_id is .*; it must be a token id or a list") for id in (10**12, [2, -1], 2.0)),
    *(({"eos_token_id": id}, "eos_token_id is .*; it must be a token id or a list") for id in ("2", True, {}, [[2]])),
    *(({"bos_token_id": id}, "config: bos_token_id is ") for id in (-1, 1.0, "a")),
    ({"pad_token_id": -2}, "config: pad_token_id is -2"),
    ({"suppress_tokens": [1, None]}, r"config: suppress_tokens is \[1, None\]"),
]
DUMMY_WRONG: list[tuple[dict[str, Any], str]] = [
    ({"num_hidden_layers": 10**9}, "num_hidden_layers is"),
    ({"vocab_size": 10**9}, "vocab_size is"),
    ({"hidden_size": 10**12}, "hidden_size is"),
    ({"vocab_size": 10**7, "hidden_size": 2**16}, r"config: weights of \d+\.\d GiB, .* vocab_size 10000000"),
    ({"num_hidden_layers": 2**14, "hidden_size": 2**13}, "num_hidden_layers 16384"),
    ({"head_dim": 2**14, "num_attention_heads": 2**14, "num_key_value_heads": 2**14}, "head_dim 16384"),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    make_checkpoint(folder, "gqa")
    return folder


def changed(whole: Path, folder: Path, changes: dict[str, Any]) -> Path:
    shutil.copytree(whole, folder, dirs_exist_ok=True)
    (folder / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((whole / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def refuse(folder: Path, load_format: str, message: str) -> None:
    """Build an engine, and see it refused with little of anything."""
    settings = EngineConfig.from_flat({"model": str(folder), "load_format": load_format, "device": "cpu"})
    started, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=message):
        build.build_engine(settings)
    assert time.process_time() - started < MAX_SECONDS
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MAX_BYTES


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_sizes_that_the_checkpoint_does_not_have(
    whole: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    refuse(changed(whole, tmp_path, changes), "auto", message)


@pytest.mark.parametrize(("changes", "message"), DUMMY_WRONG)
def test_dummies_that_do_not_fit(whole: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    refuse(changed(whole, tmp_path, changes), "dummy", message)


@pytest.mark.parametrize("key", ["eos_token_id", "bos_token_id", "pad_token_id", "begin_suppress_tokens"])
def test_the_ids_in_a_generation_config_are_tokens(whole: Path, tmp_path: Path, key: str) -> None:
    folder = changed(whole, tmp_path, {})
    (folder / "generation_config.json").write_text(json.dumps({key: [1e12]}))
    refuse(folder, "auto", rf"generation config: {key} is \[1000000000000\.0\]; it must be a token id")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_ids_beyond_the_vocabulary_are_left_out_with_a_warning(
    whole: Path, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    ids = {"eos_token_id": [2, 97, 2**32 - 1], "pad_token_id": 97, "suppress_tokens": [98]}
    folder = changed(whole, tmp_path, ids if name == "config.json" else {})
    if name != "config.json":
        (folder / name).write_text(json.dumps(ids))
    engine, info = build.build_engine(EngineConfig.from_flat({"model": str(folder), "device": "cpu"}))
    assert info.eos_token_ids == (2,)
    assert "eos_token_id: 97, 4294967295 is not below the size of the vocabulary, 97: ignored" in caplog.text
    assert "pad_token_id: 97 is not" in caplog.text
    assert "suppress_tokens: 98 is not" in caplog.text
    prompt, params = [1, 2], SamplingParams(temperature=0.0, min_tokens=2)  # for which the ends are banned
    engine.add(Request(1, prompt, params, max_tokens=3, eos_token_ids=info.eos_token_ids))
    assert not any(output.error for _ in range(4) for output in engine.step())
    engine.close()
    assert changed(whole, tmp_path, {"pad_token_id": -1})  # as Llama's first files have it
    build.build_engine(EngineConfig.from_flat({"model": str(folder), "device": "cpu"}))[0].close()


def test_a_dummy_may_take_what_is_free(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared with the memory is what loading takes."""
    checkpoint = open_checkpoint(whole, "dummy")
    config = read_config({**checkpoint.config, "num_hidden_layers": 5})
    needed = config_checks.outline(config, checkpoint, FORM).num_bytes
    check_dummy(config, checkpoint, FORM, 1, 1, needed)
    with pytest.raises(CheckpointError, match="num_hidden_layers 5"):
        check_dummy(config, checkpoint, FORM, 1, 1, needed - 1)
    check_dummy(config, checkpoint, FORM, 2, 1, needed // 2)
    with pytest.raises(CheckpointError, match="num_hidden_layers 5"):
        check_dummy(config, checkpoint, FORM, 2, 1, needed // 2 - 1)
