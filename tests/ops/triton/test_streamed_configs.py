"""Tilings of the kernel that streams a weight past one row: they fit, and what it does not take gets none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from octavo.ops.grouped_linear import Number, chunk_of
from octavo.ops.triton import grouped_configs, streamed_configs
from octavo.ops.triton.grouped_configs import GroupedProduct, default_config
from octavo.ops.triton.grouped_gemv import GroupedGemvConfig
from octavo.ops.triton.streamed_configs import CHUNK_BYTES, StreamedConfig, takes
from tests.ops.triton.test_grouped_linear import random_groups

CPU = torch.device("cpu")
SHARED = 227 * 1024


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the device were a GPU of 132 multiprocessors on which the kernel runs."""
    monkeypatch.setattr(streamed_configs, "has_gluon", lambda device: True)
    for module in (streamed_configs, grouped_configs):
        monkeypatch.setattr(module, "shared_bytes", lambda device: SHARED)
        monkeypatch.setattr(module, "num_multiprocessors", lambda device: 132)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("number", ["int4", "uint4", "int8", "e4m3"])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("K", [1024, 2048, 2560, 4096, 5120, 12288, 14336, 28672])
def test_two_kernels_fit_on_a_multiprocessor(number: Number, is_gated: bool, K: int) -> None:
    for outputs in (1024, 4096, 24576):
        found = GroupedProduct(number, 1, outputs * (1 + is_gated), K, is_gated).streamed(CPU)
        assert found
        assert len(set(found)) == len(found)
        for config in found:
            steps, rest = divmod(K // chunk_of(number), config.warps * config.chunks)
            assert (rest, config.warps in (4, 8), config.stages >= 2) == (0, True, True)
            assert steps > 0
            ring = config.stages * config.chunks * config.warps * (1 + is_gated) * CHUNK_BYTES
            assert 2 * config.programs * (ring + 2 * K) < SHARED


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    "product",
    [
        GroupedProduct("int4", 32, 4096, 4096, False)._replace(K=4032),  # a part of a chunk
        GroupedProduct("int4", 64, 4096, 4096, False),  # two groups in a chunk
        GroupedProduct("int4", 32, 4104, 4096, False),  # a part of a tile
        GroupedProduct("int4", 3, 4096, 384, False),  # three chunks for four warps
    ],
)
def test_other_shapes_have_none(product: GroupedProduct) -> None:
    assert product.streamed(CPU) == []
    assert isinstance(default_config(1, product, CPU), GroupedGemvConfig)


@pytest.mark.usefixtures("hopper")
def test_one_row_streams_by_default_and_more_do_not() -> None:
    product = GroupedProduct("int4", 32, 6144, 4096, False)
    assert default_config(1, product, CPU) == StreamedConfig(8, 4, 3, 1)
    assert isinstance(default_config(2, product, CPU), GroupedGemvConfig)
    assert default_config(1, product._replace(N=24576, is_gated=True), CPU) == StreamedConfig(4, 1, 5, 2)


def test_without_gluon_there_are_none() -> None:
    assert GroupedProduct("int4", 32, 6144, 4096, False).streamed(CPU) == []


def test_rows_and_weights_that_it_takes() -> None:
    row = torch.zeros(1, 1024, dtype=torch.bfloat16)
    plain = random_groups("cpu", "int4", 64, 1024, 128)
    assert takes(row, plain)
    assert takes(row, random_groups("cpu", "int4", 64, 1024, 128, zeros=True))
    assert not takes(row, random_groups("cpu", "int4", 64, 1024, 0, zeros=True))
    assert not takes(row, replace(plain, minima_GN=plain.scales_GN))
    assert not takes(row.half(), plain)
    assert not takes(row.expand(2, -1), plain)
