"""Tilings of the kernel that streams a weight past one row: they fit, and what it does not take gets none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.ops.linear.grouped_linear import Number, chunk_of
from octavo_kernels.hopper.pipelined_configs import PipelinedConfig
from octavo_kernels.hopper.streamed_configs import (
    CHUNK_BYTES,
    OutputMLPConfig,
    StreamedConfig,
    output_mlp_config,
    streamed_configs,
    takes,
)
from octavo_kernels.triton.config_tables import ConfigTable
from octavo_kernels.triton.grouped.grouped_configs import config_for, default_config
from octavo_kernels.triton.grouped.grouped_gemv import GroupedGemvConfig
from octavo_kernels.triton.grouped.grouped_product import GroupedProduct
from tests.ops.triton.on_hopper import SHARED_BYTES, as_on_hopper

CPU = torch.device("cpu")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_hopper(monkeypatch)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("number", ["int4", "uint4", "int8", "e4m3"])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("K", [1024, 2048, 2560, 4096, 5120, 12288, 14336, 28672])
def test_a_third_of_a_multiprocessor_is_enough(number: Number, is_gated: bool, K: int) -> None:
    for outputs in (1024, 4096, 24576):
        found = streamed_configs(GroupedProduct(number, 1, outputs * (1 + is_gated), K, is_gated), CPU)
        assert found
        assert len(set(found)) == len(found)
        for config in found:
            steps, rest = divmod(K // chunk_of(number), config.warps * config.chunks)
            assert (rest, config.warps in (4, 8), config.stages >= 2) == (0, True, True)
            assert steps > 0
            ring = config.stages * config.chunks * config.warps * (1 + is_gated) * CHUNK_BYTES
            assert 3 * config.programs * (ring + 2 * K) < SHARED_BYTES


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("group", [16, 32, 64])
@pytest.mark.parametrize("K", [1024, 4096, 8192, 14336])
def test_scales_and_minima_of_short_groups_are_counted(K: int, group: int) -> None:
    product = GroupedProduct("uint4", K // group, 2 * 4096, K, True, has_minima=True, scale_bytes=4)
    found = streamed_configs(product, CPU)
    assert found
    for config in found:
        place = CHUNK_BYTES + 16 * 128 // group * 8
        ring = config.stages * config.chunks * config.warps * 2 * place
        assert 3 * config.programs * (ring + 2 * K + 4 * K // group) < SHARED_BYTES


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    "product",
    [
        GroupedProduct("int4", 32, 4096, 4096, False)._replace(K=4032),  # a part of a chunk
        GroupedProduct("int4", 32, 4104, 4096, False),  # a part of a tile
        GroupedProduct("int4", 3, 4096, 384, False),  # three chunks for four warps
    ],
)
def test_other_shapes_have_none(product: GroupedProduct) -> None:
    assert streamed_configs(product, CPU) == []
    assert isinstance(default_config(1, product, CPU), PipelinedConfig)
    assert isinstance(default_config(1, product._replace(dtype=torch.float16), CPU), GroupedGemvConfig)


@pytest.mark.usefixtures("hopper")
def test_one_row_streams_by_default_and_more_do_not() -> None:
    product = GroupedProduct("int4", 32, 6144, 4096, False)
    assert default_config(1, product, CPU) == StreamedConfig(8, 2, 3, 1)
    assert not isinstance(default_config(2, product, CPU), StreamedConfig)
    assert default_config(1, product._replace(N=24576, is_gated=True), CPU) == StreamedConfig(4, 1, 3, 2)


def test_without_gluon_there_are_none() -> None:
    assert streamed_configs(GroupedProduct("int4", 32, 6144, 4096, False), CPU) == []


@pytest.mark.usefixtures("hopper")
def test_weights_and_activations_that_it_takes() -> None:
    product = GroupedProduct("int4", 8, 64, 1024, False)
    assert takes(product, CPU)
    assert takes(product._replace(has_zeros=True), CPU)
    assert not takes(product._replace(groups=1, has_zeros=True), CPU)
    assert takes(product._replace(has_minima=True), CPU)
    assert takes(product._replace(groups=32), CPU), "several groups in a chunk"
    assert not takes(product._replace(dtype=torch.float16), CPU)


@pytest.mark.usefixtures("hopper")
def test_an_entry_is_passed_over_where_the_kernel_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    product, entry = GroupedProduct("int4", 32, 6144, 4096, False), StreamedConfig(4, 1, 2, 1)
    table = {"int4/128 6144x4096, 1": entry, "int4/128 6144x4096, 8": entry}
    monkeypatch.setattr(ConfigTable, "of", lambda self, device: table)
    assert config_for(1, product, CPU) == entry
    assert isinstance(config_for(1, product._replace(dtype=torch.float16), CPU), GroupedGemvConfig)
    assert config_for(1, product._replace(has_minima=True), CPU) == entry
    assert not isinstance(config_for(2, product, CPU), StreamedConfig)


def products_of(D: int, A: int, F: int, number: Number = "int4") -> list[GroupedProduct]:
    """What follows attention in a model of these sizes."""
    chunk = chunk_of(number)
    shapes = ((D, A, False), (2 * F, D, True), (D, F, False))
    return [GroupedProduct(number, K // chunk, N, K, is_gated) for N, K, is_gated in shapes]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("number", ["int4", "int8"])
@pytest.mark.parametrize(
    ("D", "A", "F"),
    [
        (1024, 2048, 3072),
        (2048, 2048, 8192),
        (2560, 4096, 9728),
        (4096, 4096, 12288),
        (4096, 4096, 14336),
        (5120, 8192, 25600),
        (8192, 8192, 28672),
    ],
)
def test_what_follows_attention_in_a_model_fits(D: int, A: int, F: int, number: Number) -> None:
    products = products_of(D, A, F, number)
    config = output_mlp_config(products, CPU)
    assert config is not None
    for product, chunks in zip(products, config.chunks, strict=True):
        assert product.chunks % (config.warps * chunks) == 0
        assert product.weights * chunks <= config.places
    ring = config.stages * config.places * config.warps * CHUNK_BYTES
    assert config.stages >= 3
    assert 3 * config.programs * (ring + 2 * max(A, D, F)) < 2 * SHARED_BYTES


@pytest.mark.usefixtures("hopper")
def test_steps_are_as_large_as_three_stages_leave_room_for() -> None:
    products = products_of(4096, 4096, 12288)
    assert output_mlp_config(products, CPU) == OutputMLPConfig(8, (4, 2, 4), 3, 1)
    short = [each._replace(number="uint4", groups=each.K // 32, has_minima=True) for each in products]
    assert output_mlp_config(short, CPU) == OutputMLPConfig(4, (4, 2, 4), 5, 1)


@pytest.mark.usefixtures("hopper")
def test_products_of_different_kinds_have_kernels_of_their_own() -> None:
    products = products_of(4096, 4096, 12288)
    assert output_mlp_config(products, CPU) is not None
    changes: list[dict[str, Any]] = [
        {"number": "uint4"},
        {"has_zeros": True},
        {"groups": 1},
        {"scale_bytes": 4},
        {"has_minima": True},
        {"groups": 192},
        {"K": 4032},
    ]
    for change in changes:
        assert output_mlp_config([*products[:2], products[2]._replace(**change)], CPU) is None
    assert output_mlp_config([each._replace(dtype=torch.float16) for each in products], CPU) is None
