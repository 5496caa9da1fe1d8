"""Quantised weights packed for CUDA kernels keep their values exactly."""

from __future__ import annotations

import pytest
import torch

from octavo.ops.linear.block_linear import KINDS
from octavo.ops.linear.grouped_linear import PackedGroups
from octavo.quant.stored.block_weight import GgufStored
from octavo.quant.stored.float4 import Float4Stored
from octavo.quant.stored.int_group_weight import GroupedStored
from octavo.quant.stored.packed import GroupedWeight, group_length
from octavo.quant.stored.scaled import ScaledStored
from octavo.quant.stored.stored_weight import StoredWeight, WeightFormat, filled
from tests.quant.test_stored import Make, grouped, in_blocks, mxfp4, nvfp4, scaled

CPU = torch.device("cpu")
FORM = WeightFormat(torch.float32, CPU)
PACKED: dict[str, Make] = {
    "int4, groups of 128": grouped(4, 128),
    "int4, groups of 32 with zeros": grouped(4, 32, has_zeros=True),
    "int4 in activation order": grouped(4, 64, has_zeros=True, is_ordered=True),
    "int3": grouped(3, 128),
    "int8, a scale per output": grouped(8, 1024),
    "int5": grouped(5, 64, has_zeros=True),
    "groups that are divided": grouped(4, 192),
    "fp8, a scale per tensor": scaled(0, 0),
    "fp8, a scale per output": scaled(1, 0),
    "fp8 in blocks": scaled(8, 128),
    "fp8 in blocks, the last ones shorter": scaled(5, 160),
    "mxfp4": mxfp4,
    "nvfp4": nvfp4(divides=True),
    "groups of 16": grouped(4, 16),
}
PACKED |= {kind: in_blocks(kind) for kind in sorted(KINDS)}
NOT_PACKED: dict[str, Make] = {"groups of 8": grouped(4, 8), "groups of 1": grouped(4, 1)}


def pack(stored: StoredWeight) -> PackedGroups | None:
    assert isinstance(stored, GroupedStored | ScaledStored | Float4Stored | GgufStored)
    return stored.packed_groups(CPU)


@pytest.mark.parametrize("name", PACKED)
def test_packed_weights_keep_their_values(name: str) -> None:
    columns = 960 if name == "groups that are divided" else 1024
    stored = PACKED[name](37, columns, 1)
    packed = pack(stored)
    assert packed is not None
    assert torch.equal(packed.unpack(), filled([stored], FORM))
    rows = torch.tensor([36, 0, 17])
    assert torch.equal(GroupedWeight(packed, torch.float32).rows(rows), packed.unpack()[rows])


@pytest.mark.parametrize("name", NOT_PACKED)
def test_groups_that_no_kernel_takes_are_not_packed(name: str) -> None:
    assert pack(NOT_PACKED[name](16, 1024, 1)) is None


def test_fp8_with_a_nan_is_not_packed() -> None:
    stored = scaled(0, 0)(16, 64, 1)
    assert isinstance(stored, ScaledStored)
    stored.values_NK.view(torch.uint8)[3, 5] = 0xFF
    assert pack(stored) is None


def test_a_quantised_model_takes_the_bytes_of_its_numbers_and_scales() -> None:
    packed = pack(grouped(4, 128)(64, 1024, 1))
    assert packed is not None
    assert GroupedWeight(packed, torch.bfloat16).num_bytes == 64 * 1024 // 2 + 64 * 8 * 2


@pytest.mark.parametrize(
    ("K", "group", "length"),
    [(1024, 128, 128), (1024, 1024, 1024), (1000, 1000, 1000), (960, 192, 32), (1024, 48, 16), (1024, 24, None)],
)
def test_lengths_of_groups(K: int, group: int, length: int | None) -> None:
    assert group_length("int4", K, group) == length
