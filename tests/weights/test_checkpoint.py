from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from octavo.errors import CheckpointError
from octavo.weights.checkpoint import Checkpoint, open_checkpoint
from octavo.weights.dummy import POOL_SIZE, DummyCheckpoint
from tests.weights.gguf_bytes import llama_file


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(llama_file())
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file({"a.weight": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 3}))
    return tmp_path


def test_each_form_is_recognised(gguf: Path, folder: Path) -> None:
    opened: list[Checkpoint] = [open_checkpoint(gguf), open_checkpoint(folder), open_checkpoint(gguf, "gguf")]
    assert [type(item).__name__ for item in opened] == ["GGUFCheckpoint", "SafetensorsCheckpoint", "GGUFCheckpoint"]
    for path in (gguf, folder):
        dummy = open_checkpoint(path, "dummy", seed=3)
        assert isinstance(dummy, DummyCheckpoint)
        assert dummy.config == open_checkpoint(path).config
        assert dummy.is_dummy
        assert not dummy.has_blocks
        assert dummy.names() == set()


def test_what_does_not_match_is_refused(gguf: Path, folder: Path) -> None:
    for path, load_format in ((gguf, "safetensors"), (folder, "gguf")):
        with pytest.raises(CheckpointError, match=f"but {load_format} was asked for"):
            open_checkpoint(path, load_format)
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(folder / "missing")
    with pytest.raises(CheckpointError, match="give a GGUF file, or the folder"):
        open_checkpoint(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="hf_config_path has no effect"):
        open_checkpoint(gguf, config_folder=str(folder))


def test_a_dummy_needs_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert open_checkpoint(tmp_path, "dummy").config == {}


def test_dummy_weights_depend_on_name_and_seed_alone() -> None:
    dummy = DummyCheckpoint({}, {}, seed=1)
    weight = dummy.load("model.layers.0.mlp.up_proj.weight", (300, 200))
    assert weight.dtype == torch.float32
    assert weight.std() == pytest.approx(0.02, rel=0.02)
    assert abs(weight.mean()) < 0.001
    dummy.load("another", (10,))
    assert torch.equal(dummy.load("model.layers.0.mlp.up_proj.weight", (300, 200)), weight)
    assert not torch.equal(dummy.load("model.layers.1.mlp.up_proj.weight", (300, 200)), weight)
    assert not torch.equal(DummyCheckpoint({}, {}, 2).load("model.layers.0.mlp.up_proj.weight", (300, 200)), weight)
    assert dummy.load("model.norm.weight", (500,)).mean() == pytest.approx(1, abs=0.01)


def test_dummies_have_the_dtype_of_the_configuration() -> None:
    for key in ("dtype", "torch_dtype"):
        weight = DummyCheckpoint({key: "bfloat16"}, {}, seed=1).load("lm_head.weight", (30, 20))
        assert torch.equal(weight, DummyCheckpoint({}, {}, seed=1).load("lm_head.weight", (30, 20)).bfloat16())


def test_large_dummies_have_no_two_equal_rows() -> None:
    weight = DummyCheckpoint({}, {}, 0).load("lm_head.weight", (3 * POOL_SIZE // 1024 + 5, 1024))
    assert len(torch.unique(weight[:, :2], dim=0)) == len(weight)
