"""Quantisation at load: the error of each format, and which matrices of a model are quantised."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.quant.formats import online_quantization
from octavo.quant.formats.online_quantization import quantized, quantized_head
from octavo.quant.stored.block_weight import GgufStored
from octavo.quant.stored.int_group_weight import GroupedStored
from octavo.quant.stored.stored_weight import DenseStored, StoredWeight, WeightFormat
from tests.ops.cpu_cases import needs_float_kernels
from tests.quant.test_stored import in_blocks

CPU = torch.device("cpu")
DENSE = WeightFormat(torch.float32, CPU)
MATRIX = torch.randn(70, 384, generator=torch.Generator().manual_seed(0)) * 0.02


def form(name: str | None, quantizes_head: bool = False, device: str = "cpu") -> WeightFormat:
    return WeightFormat(torch.float32, torch.device(device), True, name, quantizes_head)


def dense(name: str, matrix_NK: Tensor) -> Tensor:
    return quantized("map", DenseStored((matrix_NK,)), form(name)).dense(DENSE)


def relative_error(name: str, matrix_NK: Tensor) -> float:
    return float((dense(name, matrix_NK) - matrix_NK).norm() / matrix_NK.norm())


def test_fp8_is_the_nearest_number_of_each_row() -> None:
    found, scales = dense("fp8", MATRIX), MATRIX.abs().amax(1, keepdim=True) / 448
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    nearest = ((MATRIX / scales).abs().unsqueeze(2) - numbers).abs().min(2).values
    torch.testing.assert_close(((found - MATRIX) / scales).abs(), nearest, atol=2e-4, rtol=0)


def test_int8_is_within_half_a_step() -> None:
    steps = MATRIX.abs().amax(1, keepdim=True) / 127
    assert ((dense("int8", MATRIX) - MATRIX).abs() <= steps * 0.57).all()
    assert relative_error("int8", MATRIX) < 0.01


def test_int4_is_better_than_rounding_to_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = MATRIX.view(70, 3, 128)
    steps = groups.abs().amax(2, keepdim=True) / 7
    plain = float(((groups / steps).round() * steps - groups).norm() / groups.norm())
    found = relative_error("int4", MATRIX)
    assert found < 0.85 * plain
    monkeypatch.setattr(online_quantization, "CLIPS", (8.0,))
    assert found < relative_error("int4", MATRIX)


@pytest.mark.parametrize(("columns", "group", "bits"), [(384, 128, 4), (576, 64, 4), (96, 32, 4), (72, 72, 8)])
def test_int4_groups_divide_the_inputs(columns: int, group: int, bits: int) -> None:
    stored = quantized("map", DenseStored((torch.randn(5, columns),)), form("int4"))
    assert isinstance(stored, GroupedStored)
    assert (stored.group, stored.bits) == (group, bits)


@pytest.mark.parametrize("name", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_parts_and_slices_of_rows_change_nothing(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = MATRIX.to(dtype)
    whole = dense(name, matrix)
    monkeypatch.setitem(online_quantization.AT_ONCE, "cpu", 384 * 7)
    parts = DenseStored((matrix[:30], matrix[30:31], matrix[31:].t().contiguous().t()))
    assert torch.equal(quantized("map", parts, form(name)).dense(DENSE), whole)
    by_columns = [quantized("map", DenseStored((matrix,)), form(name)).shard(1, rank, 3) for rank in range(3)]
    assert torch.equal(torch.cat([part.dense(DENSE) for part in by_columns], dim=1), whole)


@pytest.mark.parametrize("name", ["fp8", "int8", "int4"])
def test_zeros_and_extreme_numbers_stay_finite(name: str) -> None:
    matrix = torch.zeros(8, 128)
    matrix[1, 3], matrix[2], matrix[3, 0], matrix[4] = 1.0, 1e-38, 3e38, -0.5
    matrix[5], matrix[6, :3] = 1e-9, torch.tensor([65504.0, 1e-3, -7e4])
    found = dense(name, matrix)
    assert found.isfinite().all()
    assert not found[0].any()
    torch.testing.assert_close(found[[1, 4]], matrix[[1, 4]], rtol=1e-3, atol=0)
    torch.testing.assert_close(found[5], matrix[5], rtol=0.07, atol=0)
    assert found[3, 0] > 2.9e38


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["fp8", "int8", "int4"])
def test_numbers_that_are_not_finite_are_refused(name: str, wrong: float) -> None:
    matrix = MATRIX.clone()
    matrix[17, 5] = wrong
    with pytest.raises(CheckpointError, match=r"model\.map has weights that are infinite or not numbers"):
        quantized("model.map", DenseStored((matrix,)), form(name))


def test_what_stays_as_it_is() -> None:
    stored = DenseStored((MATRIX,))
    one_output: StoredWeight = DenseStored((MATRIX[:1],))
    assert quantized("map", stored, DENSE) is stored
    assert quantized("gate", one_output, form("int4")) is one_output
    assert quantized_head("lm_head", stored, form("int4")) is stored
    blocks = in_blocks("Q4_0")(4, 64, 0)
    assert quantized_head("lm_head", blocks, form("int4", True)) is blocks
    assert isinstance(blocks, GgufStored)
    with pytest.raises(CheckpointError, match="map is quantised already"):
        quantized("map", blocks, form("fp8"))


def test_a_head_has_eight_bits() -> None:
    for name in (None, "fp8", "int8", "int4"):
        head = quantized_head("lm_head", DenseStored((MATRIX,)), form(name, True))
        assert isinstance(head, GroupedStored)
        assert (head.bits, head.group) == (8, 384)


@needs_float_kernels
@pytest.mark.parametrize(
    ("name", "expected"), [("fp8", 70 * 388), ("int8", 80 * (384 + 12)), ("int4", 80 * (192 + 12))]
)
def test_sizes_are_known_without_content(name: str, expected: int) -> None:
    """Integers are packed in panels of 16 rows, with a scale for 64 inputs."""
    for tensor, own in (
        (MATRIX, form(name)),
        (MATRIX.to("meta"), replace(form(name, device="meta"), outlined_for="cpu")),
    ):
        weight = quantized("map", DenseStored((tensor,)), own).pack(own)
        assert weight is not None
        assert (weight.num_bytes, weight.format) == (expected, name)
