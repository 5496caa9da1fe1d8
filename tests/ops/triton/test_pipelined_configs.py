"""Tilings of the kernel whose copies overlap its products: they fit, and what it does not take gets none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.ops.linear.grouped_linear import Number, chunk_of
from octavo_kernels.hopper.pipelined_configs import (
    MOST_PROGRAMS,
    UNIT,
    PipelinedConfig,
    expert_config,
    fits,
    pipelined_configs,
    takes,
)
from octavo_kernels.hopper.streamed_configs import StreamedConfig
from octavo_kernels.triton.config_tables import ConfigTable
from octavo_kernels.triton.grouped.grouped_configs import ROW_BUCKETS, config_for, default_config, key_of
from octavo_kernels.triton.grouped.grouped_gemm import GroupedGemmConfig
from octavo_kernels.triton.grouped.grouped_gemv import GroupedGemvConfig
from octavo_kernels.triton.grouped.grouped_product import GroupedProduct
from octavo_kernels.triton.tuning.product_tuning import GroupedUse
from tests.ops.triton.on_hopper import MULTIPROCESSORS, SHARED_BYTES, as_on_hopper

CPU = torch.device("cpu")
PRODUCT = GroupedProduct("int4", 32, 6144, 4096, False)
REGISTERS = 1 << 16
"""Of a multiprocessor."""


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_hopper(monkeypatch)
    monkeypatch.setattr(ConfigTable, "of", lambda self, device: {})


@pytest.mark.parametrize("rows", ROW_BUCKETS[1:])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("number", ["int4", "uint4", "int8", "e4m3", "e2m1"])
def test_what_is_proposed_fits(number: Number, is_gated: bool, rows: int) -> None:
    for outputs, K, grouped in ((16, 256, True), (1024, 2560, True), (4096, 4096, False), (151936, 12288, True)):
        groups = K // chunk_of(number) if grouped else 1
        product = GroupedProduct(number, groups, outputs * (1 + is_gated), K, is_gated, has_zeros=True, scale_bytes=4)
        found = pipelined_configs(product, rows, CPU)
        assert 1 <= len(set(found)) == len(found) <= 6
        for config in found:
            words = config.block_n * UNIT * (2 if chunk_of(number) == 64 else 1) // 2
            stage = 2 * config.block_t * UNIT + (1 + is_gated) * words
            threads = 32 * config.warps + 128
            assert config.stages >= 3
            assert config.stages * stage < SHARED_BYTES
            assert threads * config.registers <= REGISTERS
            assert config.block_n % (16 * config.warps) == 0
            assert (1 + is_gated) * config.block_n * config.block_t <= 128 * 32 * config.warps
            tiles = -(-outputs // config.block_n) * -(-rows // config.block_t)
            resident = min(REGISTERS // (threads * config.registers), SHARED_BYTES // (config.stages * stage))
            assert config.programs <= min(resident * MULTIPROCESSORS, MOST_PROGRAMS)
            assert config.programs % tiles == 0 or tiles > config.programs


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": torch.float16},
        {"groups": 1, "K": 4092},  # rows that do not begin at multiples of 16 bytes
        {"N": 6148},  # scales that do not begin there either
        {"N": 6152, "has_zeros": True},  # nor zeros
        {"N": 6148, "scale_bytes": 4, "has_minima": True},  # nor minima
        {"N": 6160, "is_gated": True},  # ups that begin in the middle of a tile
    ],
    ids=str,
)
def test_what_it_does_not_take_goes_to_other_kernels(other: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    product = PRODUCT._replace(**other)
    assert not takes(product, CPU)
    assert pipelined_configs(product, 64, CPU) == []
    table = {key: PipelinedConfig(64, 16, 4, 8, 384, 80) for key in keys_of(product)}
    monkeypatch.setattr(ConfigTable, "of", lambda self, device: table)
    for T in (2, 8, 9, 64, 256):
        kind = GroupedGemvConfig if T <= 8 else GroupedGemmConfig
        assert isinstance(default_config(T, product, CPU), kind)
        assert isinstance(config_for(T, product, CPU), kind)


def keys_of(product: GroupedProduct) -> list[str]:
    return [key_of(product, rows) for rows in ROW_BUCKETS]


def test_an_entry_is_used_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = PRODUCT._replace(has_zeros=True, scale_bytes=4)  # the same key, but more bytes a stage
    for stages, fits_wide in ((26, True), (27, False)):
        entry = PipelinedConfig(64, 16, 4, stages, 192, 128)
        monkeypatch.setattr(ConfigTable, "of", lambda self, device, e=entry: dict.fromkeys(keys_of(PRODUCT), e))
        assert config_for(10, PRODUCT, CPU) == entry
        assert (config_for(10, wide, CPU) == entry) == fits_wide


def test_sizes_that_are_not_whole_are_taken() -> None:
    for other in (
        {"N": 4104},
        {"groups": 128},
        {"groups": 1, "K": 4008},
        {"N": 6176, "is_gated": True},
        {"has_zeros": True},
    ):
        assert takes(PRODUCT._replace(**other), CPU)


def test_two_to_1024_rows_take_it_by_default() -> None:
    assert isinstance(default_config(1, PRODUCT, CPU), StreamedConfig)
    for T in (2, 8, 9, 16, 17, 64, 100, 256, 257, 1024):
        assert isinstance(default_config(T, PRODUCT, CPU), PipelinedConfig)
    assert default_config(1025, PRODUCT, CPU) is None
    assert default_config(257, PRODUCT._replace(dtype=torch.float16), CPU) is None
    assert default_config(5, PRODUCT, CPU) == default_config(8, PRODUCT, CPU)
    assert default_config(9, PRODUCT, CPU) == default_config(16, PRODUCT, CPU)


def test_a_tile_is_cut_only_where_each_program_has_several() -> None:
    found = [default_config(rows, PRODUCT, CPU) for rows in (16, 64, 256)]
    assert [config.programs for config in found if isinstance(config, PipelinedConfig)] == [4 * 96, 2 * 96, 96]
    head = pipelined_configs(PRODUCT._replace(N=151936), 64, CPU)[0]
    assert head.programs == 2 * MULTIPROCESSORS
    short = pipelined_configs(GroupedProduct("int4", 4, 1024, 512, False), 16, CPU)[0]
    assert short.programs == 16, "four steps of 128 columns are too few to share"


@pytest.mark.parametrize("number", ["int4", "uint4", "int8", "e4m3", "e2m1"])
def test_tiles_of_experts_fit(number: Number) -> None:
    for rows, group in ((8, 32), (16, 32), (32, 64), (64, 128), (128, 32), (128, 0)):
        for is_gated in (False, True):
            groups = 2880 // group if group and 2880 % group == 0 else 1
            product = GroupedProduct(number, groups, 2880 * (1 + is_gated), 2880, is_gated, scale_bytes=4)
            config = expert_config(product, rows, CPU)
            assert config is not None
            assert config.block_t == rows
            assert fits(config, product, CPU)
            assert (config.programs // MULTIPROCESSORS) * 32 * (config.warps + 4) * config.registers <= REGISTERS
    assert expert_config(PRODUCT._replace(dtype=torch.float16), 16, CPU) is None


def test_other_kernels_are_measured_as_well() -> None:
    use = GroupedUse(6144, 4096, number="int4", groups=32)
    for rows in ROW_BUCKETS[1:]:
        configs = use.candidates(rows, CPU, use.num_candidates)
        kinds = [type(config) for config in configs]
        assert isinstance(configs[0], PipelinedConfig)
        assert len(set(configs)) == len(configs) <= 9
        assert kinds.count(PipelinedConfig) <= 6
        assert GroupedGemmConfig in kinds or GroupedGemvConfig in kinds
    half = GroupedUse(6144, 4096, torch.float16, number="int4", groups=32)
    assert not any(isinstance(config, PipelinedConfig) for config in half.candidates(16, CPU, 7))


def test_tiles_of_many_rows_keep_multiprocessors_busy() -> None:
    """What an H100 was fastest with: whole tiles on nearly all of its 132, the largest that give them."""
    output, down = (GroupedProduct("int4", K // 128, 4096, K, False) for K in (4096, 12288))
    for product, rows, expected in (
        (output, 128, (64, 128, 128)),
        (output, 512, (64, 256, 128)),
        (down, 1024, (128, 256, 128)),
    ):
        config = pipelined_configs(product, rows, CPU)[0]
        assert (config.block_n, config.block_t, config.programs) == expected


def test_rows_are_not_filled_up_to_the_largest_tiles() -> None:
    for rows in (384, 768):
        tiles = {config.block_t for config in pipelined_configs(PRODUCT, rows, CPU)}
        assert tiles == ({128, 256} if rows % 256 == 0 else {128})
