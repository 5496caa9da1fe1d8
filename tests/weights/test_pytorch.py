"""PyTorch checkpoints: the same tensors as in safetensors, and nothing in them is run."""

from __future__ import annotations

import collections
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from octavo.build.build_engine import build_engine
from octavo.config import EngineConfig
from octavo.errors import CheckpointError
from octavo.sampling_params import SamplingParams
from octavo.types import Request
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.pytorch import PytorchCheckpoint
from octavo.weights.safetensors import SafetensorsCheckpoint
from tests.models import families

TENSORS = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.weight": torch.ones(4, dtype=torch.bfloat16)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def same(checkpoint: PytorchCheckpoint) -> bool:
    assert checkpoint.names() == set(TENSORS)
    return all(torch.equal(checkpoint.load(name, tuple(value.shape)), value) for name, value in TENSORS.items())


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "ckpt.pth"])
@pytest.mark.parametrize("is_zip", [True, False])
def test_one_file(folder: Path, name: str, is_zip: bool) -> None:
    torch.save(collections.OrderedDict(TENSORS), folder / name, _use_new_zipfile_serialization=is_zip)
    (folder / "training_args.bin").write_bytes(b"a pickle that nobody reads")
    checkpoint = PytorchCheckpoint(folder)
    assert same(checkpoint)
    assert checkpoint.describe("b.weight") == ("BF16", (4,))
    with pytest.raises(CheckpointError, match=r"'a.weight': has shape \(2, 3\), expected \(3, 2\)"):
        checkpoint.load("a.weight", (3, 2))
    with pytest.raises(CheckpointError, match="there is no tensor 'c'"):
        checkpoint.load("c", (1,))


def test_shards(folder: Path) -> None:
    for number, (name, tensor) in enumerate(TENSORS.items()):
        torch.save({name: tensor}, folder / f"pytorch_model-{number}.bin")
    index = '{"weight_map": {"a.weight": "pytorch_model-0.bin", "b.weight": "pytorch_model-1.bin"}}'
    (folder / "pytorch_model.bin.index.json").write_text(index)
    assert same(PytorchCheckpoint(folder))
    (folder / "pytorch_model-1.bin").unlink()
    with pytest.raises(CheckpointError, match=r"pytorch_model-1.bin: does not exist"):
        PytorchCheckpoint(folder)


def test_a_training_checkpoint(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    wrapped = {f"_orig_mod.module.{name}": tensor for name, tensor in TENSORS.items()}
    torch.save({"model": {**wrapped, "_orig_mod.module.epochs": 3}, "step": 7}, folder / "ckpt.pt")
    with caplog.at_level(logging.DEBUG):
        assert same(PytorchCheckpoint(folder))
    message, *each = [record.getMessage() for record in caplog.records if "ckpt.pt" in record.getMessage()]
    shown = {"a.weight": "F32 [2, 3]", "b.weight": "BF16 [4]"}
    assert each == [f"ckpt.pt: _orig_mod.module.{name}, {kind}, as {name}" for name, kind in shown.items()]
    removed = "prefix '_orig_mod.module.' removed"
    assert message == f"ckpt.pt: 2 tensors in 'model'; {removed}; left out: _orig_mod.module.epochs, step"


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("pwned",)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"a": Evil()}, "not a PyTorch file of tensors alone: Weights only load failed"),
        ([torch.ones(2)], "holds no dictionary of tensors by name, but a list"),
        ({1: torch.ones(2)}, "holds no dictionary of tensors by name"),
        ({"a": torch.ones(2).to_sparse()}, "tensor 'a' is not a plain dense tensor"),
        (b"cos\nsystem\n(S'touch pwned'\ntR.", "not a PyTorch file of tensors alone"),
        (b"", "not a PyTorch file of tensors alone"),
        (b"PK\x03\x04 no archive", "not a PyTorch file of tensors alone"),
    ],
    ids=["code", "list", "keys", "sparse", "pickle", "empty", "archive"],
)
def test_other_contents_are_refused(folder: Path, content: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    if isinstance(content, bytes):
        (folder / "pytorch_model.bin").write_bytes(content)
    else:
        torch.save(content, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=said):
        PytorchCheckpoint(folder)
    assert not (folder / "pwned").exists()


def test_which_file_is_meant_must_be_clear(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="found none"):
        PytorchCheckpoint(folder)
    for name in ("a.pt", "b.pt"):
        torch.save(TENSORS, folder / name)
    with pytest.raises(CheckpointError, match=r"found a.pt, b.pt"):
        PytorchCheckpoint(folder)
    (folder / "pytorch_model.bin").symlink_to("/etc/hostname")
    with pytest.raises(CheckpointError, match="outside"):
        PytorchCheckpoint(folder)


def test_gpt2_says_the_same_from_either_format(tmp_path: Path) -> None:
    """With what older exporters write: no prefix, the causal masks, and the tied head a second time."""
    families.make_checkpoint(tmp_path, "gpt2/small")
    tensors = load_file(tmp_path / "model.safetensors")
    saved = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    saved |= {"lm_head.weight": saved["wte.weight"], "h.0.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8)}
    torch.save(saved, tmp_path / "pytorch_model.bin")
    assert isinstance(open_checkpoint(tmp_path), SafetensorsCheckpoint)
    said = []
    for load_format in ("safetensors", "pt"):
        if load_format == "pt":
            (tmp_path / "model.safetensors").unlink()
        settings = {"model": str(tmp_path), "load_format": load_format, "device": "cpu", "num_kv_blocks": 16}
        engine, info = build_engine(EngineConfig.from_flat({**settings, "dtype": "float32"}))
        for number, prompt in enumerate(([3, 1, 4, 1, 5], [9, 2, 6])):
            engine.add(Request(number, prompt, SamplingParams(temperature=0, logprobs=2), max_tokens=8))
        outputs = []
        while engine.has_work:
            outputs += engine.step()
        said.append([(output.request_id, output.tokens, output.logprobs) for output in outputs])
        assert info.num_parameters == sum(tensor.numel() for tensor in tensors.values())
    assert said[0] == said[1]
    assert sum(len(tokens) for _, tokens, _ in said[0]) == 16
    with pytest.raises(CheckpointError, match="read with --load-format pt"):
        open_checkpoint(tmp_path)
