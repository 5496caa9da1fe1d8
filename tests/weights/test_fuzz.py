"""Damaged and hostile files: each loads or is refused, quickly and within 200 MB."""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from octavo.weights.checkpoint import open_checkpoint
from tests.tiers import nightly_after
from tests.weights import gguf_bytes as make
from tests.weights.test_gguf import HOSTILE

MAX_SECONDS = 2.0
ROOT = Path(__file__).parents[2]


def load_many(folder: Path, how: str, shapes: dict[str, tuple[int, ...]] | None = None) -> dict[str, str]:
    """Outcome of each file or folder inside ``folder``, from a confined process."""
    (folder.parent / "shapes.json").write_text(json.dumps(shapes or {}))
    result = subprocess.run(
        [sys.executable, "-m", "tests.weights.load_many", str(folder), how],
        cwd=folder.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, f"the loader died: {result.returncode} {result.stderr[-2000:]}"
    rows: list[dict[str, Any]] = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["name"] for row in rows] == sorted(path.name for path in folder.iterdir())
    slow = [row for row in rows if row["seconds"] > MAX_SECONDS]
    assert not slow
    bad = [row for row in rows if not row["outcome"].startswith(("loaded", "refused"))]
    assert not bad
    return {row["name"]: row["outcome"] for row in rows}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "files").mkdir()
    return tmp_path / "files"


def damaged(data: bytes, interesting: int, count: int, seed: int) -> list[bytes]:
    """Copies with one byte changed, mostly in the first ``interesting`` bytes, or cut short."""
    source = random.Random(seed)
    copies = []
    for index in range(count):
        at = source.randrange(len(data) if index % 10 == 0 else interesting)
        value = source.choice([0, 1, 0x7F, 0x80, 0xFF, data[at] ^ 1 << source.randrange(8)])
        copies.append(data[:at] if index % 5 == 1 else data[:at] + bytes([value]) + data[at + 1 :])
    return copies


@pytest.mark.parametrize("count", nightly_after(1, (500, 2000)))
def test_damaged_gguf_files(count: int, folder: Path, tmp_path: Path) -> None:
    whole = make.llama_file()
    (tmp_path / "whole.gguf").write_bytes(whole)
    checkpoint = open_checkpoint(tmp_path / "whole.gguf")
    places = checkpoint._places  # type: ignore[attr-defined]
    stored = {name: make.LLAMA_TENSORS[places[name].tensor][1] for name in checkpoint.names()}
    header_bytes = whole.index(b"blk.1.ffn_down.weight") + 64
    for index, data in enumerate([whole, *damaged(whole, header_bytes, count, seed=0)]):
        (folder / f"{index:04}.gguf").write_bytes(data)
    outcomes = list(load_many(folder, "load", stored).values())
    assert outcomes[0] == "loaded"
    assert outcomes.count("loaded") > count // 20  # a changed weight, or a letter in a text, goes unseen
    assert sum(outcome.startswith("refused") for outcome in outcomes) > count // 2


def test_hostile_gguf_files(folder: Path) -> None:
    for index, (data, _) in enumerate(HOSTILE.values()):
        (folder / f"{index:04}").write_bytes(data)
    assert all(outcome.startswith("refused") for outcome in load_many(folder, "open").values())


def test_the_costliest_gguf_files(folder: Path) -> None:
    """What is allowed, taken to its limits."""

    def strings(key: str, count: int, text: str) -> bytes:
        return make.string(key) + struct.pack("<IIQ", 9, 8, count) + make.string(text) * count

    wide = "\U0001f600"  # widens the whole string to four bytes a letter
    bulk = [make.pair(f"k{index}", wide + "a" * ((1 << 20) - 4)) for index in range(31)]
    files = {
        "many short strings": make.file([strings("k", 1 << 20, wide)]),
        "few long strings": make.file(bulk),
        "long strings in an array": make.file([strings("k", 31, wide + "a" * ((1 << 20) - 4))]),
        "many keys": make.file([make.pair(f"{index:05}", index) for index in range(1 << 16)]),
        "many tensors": make.file(
            tensors=[make.tensor(f"{index:05}{wide}", [8], 0, index * 32) for index in range(1 << 16)],
            data=bytes(1 << 21),
        ),
        "many numbers": make.file([make.string("k") + struct.pack("<IIQ", 9, 7, 33 << 20) + bytes(33 << 20)]),
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)
    outcomes = load_many(folder, "open")
    assert outcomes.pop("many numbers").startswith("refused")
    assert set(outcomes.values()) == {"loaded"}


def test_damaged_safetensors_and_configs(folder: Path) -> None:
    whole = save({"a.weight": torch.randn(4, 8), "b.weight": torch.randn(3).bfloat16()})
    config = json.dumps({"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "text": "ä"}).encode()
    header_bytes = 8 + int.from_bytes(whole[:8], "little")
    cases = [(data, config) for data in [whole, *damaged(whole, header_bytes, 400, seed=1)]]
    cases += [(whole, data) for data in damaged(config, len(config), 200, seed=2)]
    cases += [(whole, data) for data in HOSTILE_JSON]
    cases += [(len(data).to_bytes(8, "little") + data + bytes(64), config) for data in HOSTILE_JSON]
    for index, (weights, settings) in enumerate(cases):
        (folder / f"{index:04}").mkdir()
        (folder / f"{index:04}" / "model.safetensors").write_bytes(weights)
        (folder / f"{index:04}" / "config.json").write_bytes(settings)
    outcomes = list(load_many(folder, "load", {"a.weight": (4, 8), "b.weight": (3,)}).values())
    assert outcomes[0] == "loaded"
    assert all(outcome.startswith("refused") for outcome in outcomes[-2 * len(HOSTILE_JSON) :])
    assert sum(outcome.startswith("refused") for outcome in outcomes) > 300


HOSTILE_JSON = [
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"a": ' + b"[" * 500 + b"]" * 500 + b', "a": 1}',
    b"{" + b'"a": 1, ' * 1000 + b'"b": 2}',
    b'{"a": ' + b"9" * 10_000 + b"}",
    b'{"a": NaN}',
    b'{"a": "' + b"x" * (17 << 20) + b'"}',
    b'{"a": [' + b"[]," * (5 << 20) + b"[]]}",
    b'{"a": [' + b"{}," * (1 << 19) + b"{}]}",
    b'{"a": "' + b'\\"' * (7 << 20),
    b"[1, 2]",
    b"null",
    b"\xff\xfe\x00",
    b"",
]
