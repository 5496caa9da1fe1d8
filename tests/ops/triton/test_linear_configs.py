"""The tables of configurations: what is written is read, and what is wrong is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from octavo_kernels.triton import config_tables
from octavo_kernels.triton.config_tables import FOLDER, ConfigTable, forget_tables, own_path, table_path
from octavo_kernels.triton.grouped import grouped_configs
from octavo_kernels.triton.linear.gemv import GemvConfig
from octavo_kernels.triton.linear.linear_configs import TABLE, LinearConfig, bucket_of, config_for
from octavo_kernels.triton.linear.skinny_gemm import SkinnyConfig

CPU = torch.device("cpu")
CONFIGS: dict[str, LinearConfig] = {
    "64x32, 1": GemvConfig(2, 1024, 4, programs=3, release="late"),
    "64x32, 16": SkinnyConfig(64, 128, 4, 3, splits=2, copy_engine=True),
    "64x32, 128": None,
}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    TABLE.write(tmp_path / "gpu.json", CONFIGS)
    assert TABLE.read(tmp_path / "gpu.json") == CONFIGS
    assert TABLE.read(tmp_path / "another.json") == {}


@pytest.mark.parametrize(
    "fields", [{"kernel": "gemm"}, {}, {"kernel": "gemv", "rows": 1}, {"kernel": "cublas", "rows": 1}]
)
def test_a_wrong_entry_is_named(tmp_path: Path, fields: dict[str, object]) -> None:
    (tmp_path / "gpu.json").write_text(json.dumps({"linear": {"64x32, 16": fields}}))
    with pytest.raises(ValueError, match=r"gpu.json: linear, 64x32, 16: .*kernels are gemv, skinny, cublas"):
        TABLE.read(tmp_path / "gpu.json")


GEMV = {"kernel": "gemv", "rows": 1, "block_k": 1024, "warps": 4}
WRONG: list[tuple[object, str]] = [
    ([], "must be an object"),
    ({**GEMV, "warps": 10**30}, "warps is 1000000000000000000000000000000; it must be a power of two from 1 to 32"),
    ({**GEMV, "warps": 0}, "warps is 0"),
    ({**GEMV, "block_k": 1000}, "block_k is 1000; it must be a power of two from 1 to 8192"),
    ({**GEMV, "block_k": "1024"}, "block_k is '1024'"),
    ({**GEMV, "programs": -1}, "programs is -1; it must be a number from 0 to 4096"),
    ({**GEMV, "programs": True}, "programs is True"),
    ({**GEMV, "rows": 1.5}, "rows is 1.5"),
    ({**GEMV, "release": "__import__('os')"}, "it must be early, late, never"),
    ({"kernel": "skinny", "block_n": 64, "block_k": 64, "warps": 4, "stages": 3, "copy_engine": 1}, "must be bool"),
]


@pytest.mark.parametrize(("fields", "reason"), WRONG)
def test_an_entry_that_no_kernel_can_have_is_left_out_alone(
    gpu: torch.device, fields: object, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        TABLE.parse("here", cast(Any, fields))
    path = own_path(gpu)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"linear": {"64x32, 1": GEMV, "64x32, 16": fields}}))
    assert TABLE.of(gpu) == {"64x32, 1": GemvConfig(1, 1024, 4)}
    assert f"{path.name}: linear, 64x32, 16: " in caplog.text
    TABLE.use({"64x32, 32": {"kernel": "cublas"}}, gpu)
    assert {*json.loads(path.read_text())["linear"]} == {"64x32, 1", "64x32, 32"}


@pytest.mark.parametrize("text", ["[]", '{"linear": []}', "1", "[" * 10**6])
def test_a_file_of_another_form_is_not_used(gpu: torch.device, text: str, caplog: pytest.LogCaptureFixture) -> None:
    own_path(gpu).parent.mkdir(parents=True)
    own_path(gpu).write_text(text)
    assert TABLE.of(gpu) == {}
    TABLE.use({"64x32, 32": {"kernel": "cublas"}}, gpu)
    assert own_path(gpu).read_text() == text
    assert "must have sections of entries" in caplog.text


def test_shipped_tables_can_be_read() -> None:
    for path in FOLDER.glob("*.json"):
        assert TABLE.read(path), path.name


def test_a_device_uses_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ConfigTable, "of", lambda self, device: CONFIGS)
    assert config_for(1, 64, 32, False, CPU) == CONFIGS["64x32, 1"]
    assert config_for(2, 64, 32, False, CPU) == CONFIGS["64x32, 16"]
    assert config_for(100, 64, 32, False, CPU) is None
    assert isinstance(config_for(17, 64, 32, False, CPU), SkinnyConfig)
    assert config_for(1, 64, 32, True, CPU) != CONFIGS["64x32, 1"]  # gates and ups are another product


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("K", [64, 1024, 4096, 12288])
def test_there_is_a_default_for_any_shape(K: int, is_gated: bool) -> None:
    for T in (1, 2, 16, 17, 64):
        config = config_for(T, 50258, K, is_gated, CPU)
        assert config is None or isinstance(config, GemvConfig if T == 1 else SkinnyConfig)
    assert (config_for(128, 50258, K, is_gated, CPU) is None) == (not is_gated)
    assert config_for(65, 50258, K, is_gated, CPU) is None
    assert config_for(4096, 50258, K, is_gated, CPU) is None


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[torch.device]:
    """A CUDA device that has neither a table nor measurements, and a cache folder."""
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test")
    monkeypatch.setattr(config_tables, "_driver_version", lambda: "1.2")
    forget_tables()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    yield torch.device("cuda:0")
    forget_tables()


def test_what_was_measured_is_used_and_kept_for_the_next_start(gpu: torch.device) -> None:
    entries = {key: TABLE.fields_of(config) for key, config in CONFIGS.items()}
    TABLE.use({key: entries[key] for key in ("64x32, 1", "64x32, 128")}, gpu)
    TABLE.use({"64x32, 16": entries["64x32, 16"]}, gpu)
    assert TABLE.of(gpu) == TABLE.of(torch.device("cuda")) == CONFIGS
    forget_tables()
    assert TABLE.of(gpu) == CONFIGS
    assert config_for(128, 64, 32, False, gpu) is None
    assert own_path(gpu).name.startswith("NVIDIA_Test-1.2-triton")


def test_ops_share_the_file_of_measurements(gpu: torch.device) -> None:
    grouped = {"int4/128 64x256, 16": {"kernel": "cublas"}}
    TABLE.use({"64x32, 128": {"kernel": "cublas"}}, gpu)
    grouped_configs.TABLE.use(grouped, gpu)
    forget_tables()
    assert TABLE.of(gpu) == {"64x32, 128": None}
    assert grouped_configs.TABLE.of(gpu) == dict.fromkeys(grouped)


def test_what_was_measured_on_this_machine_comes_before_the_shipped_table(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    key = "4096x4096, 16"
    shipped = TABLE.of(gpu)[key]
    TABLE.use({key: {"kernel": "cublas"}}, gpu)
    forget_tables()
    assert TABLE.of(gpu)[key] is None
    assert shipped is not None


def test_a_broken_file_of_measurements_is_ignored(gpu: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    path = own_path(gpu)
    path.parent.mkdir(parents=True)
    path.write_text('{"linear": {"64x32, 1": {"kernel": "gone"}}}')
    assert TABLE.of(gpu) == {}
    path.write_text("{")
    forget_tables()
    assert TABLE.of(gpu) == {}
    assert "not used" in caplog.text


def test_buckets() -> None:
    assert [bucket_of(T) for T in (1, 2, 16, 17, 128, 129, 256, 257)] == [1, 16, 16, 32, 128, 256, 256, None]


def test_names_of_tables_have_no_spaces() -> None:
    assert table_path("NVIDIA H200").name == "NVIDIA_H200.json"
