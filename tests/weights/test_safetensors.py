from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file

from octavo.errors import CheckpointError
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.safetensors import INDEX_NAME, SafetensorsCheckpoint

TENSORS = {
    "a.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b.weight": torch.ones(4, dtype=torch.bfloat16),
    "c.weight": torch.ones(4, 1, dtype=torch.float16),
    "positions": torch.arange(4).to(torch.uint16),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 3}))
    return tmp_path


@pytest.fixture
def sharded(folder: Path) -> Path:
    names = sorted(TENSORS)
    for index, shard in enumerate((names[:2], names[2:])):
        save_file({name: TENSORS[name] for name in shard}, folder / f"shard-{index}.safetensors")
    write_index(folder, {name: f"shard-{index // 2}.safetensors" for index, name in enumerate(names)})
    return folder


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def check_tensors(checkpoint: SafetensorsCheckpoint) -> None:
    assert checkpoint.names() == set(TENSORS)
    for name in ("a.weight", "b.weight", "c.weight"):
        found = checkpoint.load(name, tuple(TENSORS[name].shape))
        assert found.dtype == TENSORS[name].dtype
        assert torch.equal(found, TENSORS[name])


def test_one_file(folder: Path) -> None:
    save_file(TENSORS, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    checkpoint = SafetensorsCheckpoint(folder)
    check_tensors(checkpoint)
    assert checkpoint.config == {"hidden_size": 3}
    assert checkpoint.generation_config == {"eos_token_id": [1, 2]}


def test_shards(sharded: Path) -> None:
    checkpoint = SafetensorsCheckpoint(sharded)
    check_tensors(checkpoint)
    assert checkpoint.generation_config == {}


def test_loading_says_what_is_wrong(sharded: Path) -> None:
    checkpoint = SafetensorsCheckpoint(sharded)
    with pytest.raises(CheckpointError, match=r"there is no tensor 'lm_head.weight'"):
        checkpoint.load("lm_head.weight", (4, 3))
    message = r"shard-0.safetensors: tensor 'a.weight': has shape \(2, 3\), expected \(3, 2\)"
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load("a.weight", (3, 2))
    with pytest.raises(CheckpointError, match="tensor 'positions': has dtype U16, supported are F32, F16, BF16"):
        checkpoint.load("positions", (4,))


@pytest.mark.parametrize("name", ["../evil", "/etc/passwd", "a/b.safetensors", "..", "", "x\0y", "a\\b", "."])
def test_an_index_leads_nowhere_else(sharded: Path, name: str) -> None:
    write_index(sharded, {"a.weight": name})
    with pytest.raises(CheckpointError, match="is not allowed, it must be a bare name"):
        SafetensorsCheckpoint(sharded)


def test_an_index_that_does_not_agree(sharded: Path) -> None:
    write_index(sharded, {"a.weight": "shard-7.safetensors"})
    with pytest.raises(CheckpointError, match=r"names the file 'shard-7.safetensors', which does not exist"):
        SafetensorsCheckpoint(sharded)
    write_index(sharded, {"z.weight": "shard-0.safetensors"})
    with pytest.raises(CheckpointError, match=r"tensor 'z.weight' is not in 'shard-0.safetensors'"):
        SafetensorsCheckpoint(sharded)
    for bad in ([], None, {"a.weight": 3}):
        write_index(sharded, bad)
        with pytest.raises(CheckpointError, match="weight_map must map tensor names to file names"):
            SafetensorsCheckpoint(sharded)


def test_a_name_in_two_shards(sharded: Path) -> None:
    save_file({"a.weight": torch.ones(1), "c.weight": torch.ones(1)}, sharded / "shard-1.safetensors")
    write_index(sharded, {"a.weight": "shard-0.safetensors", "c.weight": "shard-1.safetensors"})
    with pytest.raises(CheckpointError, match=r"'a.weight' is both in 'shard-0.safetensors' and in 'shard-1"):
        SafetensorsCheckpoint(sharded)


def test_a_name_twice_in_one_file(folder: Path) -> None:
    data = save({"a": torch.ones(2), "b": torch.ones(2)}).replace(b'"b"', b'"a"')
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match="'a' appears twice"):
        SafetensorsCheckpoint(folder)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 16]}}, "not a sound safetensors file"),
        ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16 << 40]}}, "not a sound safetensors file"),
        ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]}}, "not a sound safetensors file"),
        ({"a": {"dtype": "F99", "shape": [4], "data_offsets": [0, 16]}}, "not a sound safetensors file"),
        ({"a": {"dtype": "F32", "shape": 4, "data_offsets": [0, 16]}}, "tensor 'a': has no dtype and shape"),
        ({"a": 3}, "tensor 'a': has no dtype and shape"),
    ],
)
def test_headers_that_lie(folder: Path, header: object, message: str) -> None:
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    with pytest.raises(CheckpointError, match=message):
        SafetensorsCheckpoint(folder)


def test_a_header_larger_than_allowed(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="header of 1152921504606846976 bytes, at most 16777216"):
        SafetensorsCheckpoint(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_formats_that_can_run_code_need_a_flag(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    with pytest.raises(CheckpointError, match=f"found {name}. Weights must be safetensors files, .*--load-format pt"):
        SafetensorsCheckpoint(folder)


def test_nothing_in_a_folder_is_run(folder: Path) -> None:
    save_file(TENSORS, folder / "model.safetensors")
    evil = {"auto_map": {"AutoConfig": "evil.Config"}, "trust_remote_code": True, "text_config": {"auto_map": "evil"}}
    (folder / "config.json").write_text(json.dumps(evil))
    (folder / "evil.py").write_text(f"open({str(folder / 'pwned')!r}, 'w')")
    code = f"from octavo.weights.checkpoint import *; open_checkpoint(Path({str(folder)!r})).load('b.weight', (4,))"
    subprocess.run([sys.executable, "-O", "-c", code], check=True, cwd=Path(__file__).parents[2])
    assert not (folder / "pwned").exists()


def test_a_folder_without_configuration(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no config.json"):
        open_checkpoint(tmp_path)
