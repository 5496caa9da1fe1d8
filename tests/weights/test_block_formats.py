from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from octavo.errors import CheckpointError
from octavo.weights.gguf.block_formats import BLOCK_KINDS, VALUES_AT_ONCE, BlockTensor, dequantize
from tests.weights.gguf_bytes import HALVES, NUMBERS, random_blocks

QUANTISABLE = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


def reference(data: np.ndarray, kind: str) -> np.ndarray:
    return gguf.quants.dequantize(data, GGMLQuantizationType[kind])


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_table_is_that_of_the_format(kind: str) -> None:
    assert GGMLQuantizationType[kind].value == NUMBERS[kind]
    assert tuple(BLOCK_KINDS[kind]) == GGML_QUANT_SIZES[GGMLQuantizationType[kind]]


@pytest.mark.parametrize("kind", [kind for kind in BLOCK_KINDS if kind != "F32"])
def test_random_bytes_widen_exactly(kind: str) -> None:
    random = np.random.default_rng(1)
    per_row = 3 if BLOCK_KINDS[kind].length > 1 else 64
    rows = 57
    data = random_blocks(kind, rows * per_row, random).reshape(rows, -1)
    if BLOCK_KINDS[kind].length == 1:
        data = random.normal(size=(rows, per_row)).astype("<f2").view(np.uint8)
    found = dequantize(BlockTensor(kind, (rows, per_row * BLOCK_KINDS[kind].length), data))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, reference(data, kind))


@pytest.mark.parametrize("kind", QUANTISABLE)
def test_quantised_data_widens_exactly(kind: str) -> None:
    values = np.random.default_rng(2).normal(size=(33, 256)).astype(np.float32)
    data = np.ascontiguousarray(gguf.quants.quantize(values, GGMLQuantizationType[kind])).view(np.uint8)
    found = dequantize(BlockTensor(kind, values.shape, data))
    np.testing.assert_array_equal(found, reference(data, kind))
    assert np.abs(found - values).max() < 0.5


def test_float32_is_itself() -> None:
    values = np.random.default_rng(3).normal(size=(5, 7)).astype(np.float32)
    np.testing.assert_array_equal(dequantize(BlockTensor("F32", (5, 7), values.view(np.uint8))), values)


def test_tensors_larger_than_one_stretch_and_strided_rows() -> None:
    rows, columns = 2 * VALUES_AT_ONCE // 4096 + 3, 4096
    data = random_blocks("Q8_0", 2 * rows * columns // 32, np.random.default_rng(4)).reshape(2 * rows, -1)[::2]
    found = dequantize(BlockTensor("Q8_0", (rows, columns), data))
    np.testing.assert_array_equal(found, reference(np.ascontiguousarray(data), "Q8_0"))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize(
    ("kind", "at"),
    [(kind, at) for kind in BLOCK_KINDS if kind[0] in "QIT" and kind != "IQ1_M" for at in HALVES.get(kind, (0,))],
)
def test_scales_that_are_not_numbers_are_refused(kind: str, at: int, value: float) -> None:
    data = random_blocks(kind, 6, np.random.default_rng(5))
    data[3, at : at + 2] = np.array([value], dtype="<f2").view(np.uint8)
    blocks = BlockTensor(kind, (2, 3 * BLOCK_KINDS[kind].length), data.reshape(2, -1), "blk.0.attn_q.weight")
    with pytest.raises(CheckpointError, match=r"tensor blk\.0\.attn_q\.weight has scales that are infinite or not num"):
        dequantize(blocks)


@pytest.mark.parametrize(
    ("kind", "shape", "data_shape"),
    [("Q4_0", (2, 48), (2, 27)), ("Q4_0", (2, 64), (2, 35)), ("Q4_0", (3, 64), (2, 36)), ("Q1_0", (1, 128), (1, 18))],
)
def test_what_does_not_fit_is_refused(kind: str, shape: tuple[int, int], data_shape: tuple[int, int]) -> None:
    with pytest.raises(CheckpointError, match=kind):
        BlockTensor(kind, shape, np.zeros(data_shape, dtype=np.uint8))
