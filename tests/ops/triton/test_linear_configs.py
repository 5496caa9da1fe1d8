"""The tables of configurations: what is written is read, and what is wrong is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from octavo.ops.triton import linear_configs
from octavo.ops.triton.config_tables import FOLDER, table_path
from octavo.ops.triton.gemv import GemvConfig
from octavo.ops.triton.linear_configs import LinearConfig, bucket_of, config_for, read_table, write_table
from octavo.ops.triton.skinny_gemm import SkinnyConfig

CPU = torch.device("cpu")
CONFIGS: dict[str, LinearConfig] = {
    "64x32, 1": GemvConfig(2, 1024, 4, programs=3, release="late"),
    "64x32, 16": SkinnyConfig(64, 128, 4, 3, splits=2, copy_engine=True),
    "64x32, 128": None,
}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_table(tmp_path / "gpu.json", CONFIGS)
    assert read_table(tmp_path / "gpu.json") == CONFIGS
    assert read_table(tmp_path / "another.json") == {}


@pytest.mark.parametrize(
    "fields", [{"kernel": "gemm"}, {}, {"kernel": "gemv", "rows": 1}, {"kernel": "cublas", "rows": 1}]
)
def test_a_wrong_entry_is_named(tmp_path: Path, fields: dict[str, object]) -> None:
    (tmp_path / "gpu.json").write_text(json.dumps({"linear": {"64x32, 16": fields}}))
    with pytest.raises(ValueError, match=r"gpu.json: linear, 64x32, 16: .*kernels are gemv, skinny, cublas"):
        read_table(tmp_path / "gpu.json")


def test_shipped_tables_can_be_read() -> None:
    for path in FOLDER.glob("*.json"):
        assert read_table(path), path.name


def test_a_device_uses_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_configs, "table_of", lambda device: CONFIGS)
    assert config_for(1, 64, 32, False, False, CPU) == CONFIGS["64x32, 1"]
    assert config_for(2, 64, 32, False, False, CPU) == CONFIGS["64x32, 16"]
    assert config_for(100, 64, 32, False, False, CPU) is None
    assert isinstance(config_for(17, 64, 32, False, False, CPU), SkinnyConfig)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("K", [64, 1024, 4096, 12288])
def test_there_is_a_default_for_any_shape(K: int, has_norm: bool) -> None:
    for T in (1, 2, 16, 17, 64):
        config = config_for(T, 50257, K, has_norm, False, CPU)
        assert isinstance(config, GemvConfig if T == 1 else SkinnyConfig)
    assert config_for(65, 50257, K, has_norm, False, CPU) is None
    assert config_for(4096, 50257, K, has_norm, False, CPU) is None


def test_buckets() -> None:
    assert [bucket_of(T) for T in (1, 2, 16, 17, 128, 129, 256, 257)] == [1, 16, 16, 32, 128, 256, 256, None]


def test_names_of_tables_have_no_spaces() -> None:
    assert table_path("NVIDIA H200").name == "NVIDIA_H200.json"
