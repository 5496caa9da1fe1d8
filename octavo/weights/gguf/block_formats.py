"""Block-quantised weight formats and their dequantisation.

A row of weights is divided into blocks of equal length; each block holds low-bit numbers and the scales to dequantise
them with. The formats are those of the GGUF specification (``ggml`` documents them in ``ggml-common.h``); numbers are
little-endian.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.errors import CheckpointError
from octavo.weights.gguf import codebook_blocks
from octavo.weights.gguf.codebook_blocks import Bytes, Floats, half

VALUES_AT_ONCE = 1 << 20
"""Number of values dequantised at a time, which bounds temporary memory."""

if sys.byteorder != "little":
    raise ImportError("octavo.weights reads little-endian files by view; this machine is big-endian")


class BlockKind(NamedTuple):
    """One format: the number of weights and of bytes per block."""

    length: int
    num_bytes: int

    def row_bytes(self, num_values: int) -> int:
        """Bytes of a row of ``num_values`` weights, which must be a multiple of ``length``."""
        return num_values // self.length * self.num_bytes


BLOCK_KINDS: dict[str, BlockKind] = {
    "F32": BlockKind(1, 4),
    "F16": BlockKind(1, 2),
    "BF16": BlockKind(1, 2),
    "Q4_0": BlockKind(32, 18),
    "Q4_1": BlockKind(32, 20),
    "Q5_0": BlockKind(32, 22),
    "Q5_1": BlockKind(32, 24),
    "Q8_0": BlockKind(32, 34),
    "Q4_K": BlockKind(256, 144),
    "Q5_K": BlockKind(256, 176),
    "Q6_K": BlockKind(256, 210),
    "MXFP4": BlockKind(32, 17),
    "Q2_K": BlockKind(256, 84),
    "Q3_K": BlockKind(256, 110),
    "IQ1_S": BlockKind(256, 50),
    "IQ1_M": BlockKind(256, 56),
    "IQ2_XXS": BlockKind(256, 66),
    "IQ2_XS": BlockKind(256, 74),
    "IQ2_S": BlockKind(256, 82),
    "IQ3_XXS": BlockKind(256, 98),
    "IQ3_S": BlockKind(256, 110),
    "IQ4_NL": BlockKind(32, 18),
    "IQ4_XS": BlockKind(256, 136),
    "TQ1_0": BlockKind(256, 54),
    "TQ2_0": BlockKind(256, 66),
    "NVFP4": BlockKind(64, 36),
}


@dataclass(frozen=True, eq=False)
class BlockTensor:
    """A block-quantised weight matrix.

    ``shape`` is (rows, columns) in weights; ``data`` is uint8 [rows, row_bytes], where each row is a sequence of
    complete blocks. Raises ``CheckpointError`` if these do not match.
    """

    kind: str
    shape: tuple[int, int]
    data: Bytes
    name: str = ""
    """What errors call it: the names of the tensors in the file whose rows it has."""

    def __post_init__(self) -> None:
        if self.kind not in BLOCK_KINDS:
            raise CheckpointError(f"block kind {self.kind!r} is not one of {', '.join(BLOCK_KINDS)}")
        kind = BLOCK_KINDS[self.kind]
        rows, columns = self.shape
        if columns % kind.length:
            raise CheckpointError(f"{columns} columns are not whole {self.kind} blocks of {kind.length}")
        expected = (rows, kind.row_bytes(columns))
        if self.data.dtype != np.uint8 or self.data.shape != expected:
            raise CheckpointError(
                f"{self.kind} data of a {rows} x {columns} tensor must be uint8 {expected}, "
                f"got {self.data.dtype} {self.data.shape}"
            )


class Groups(NamedTuple):
    """Unpacked blocks: a weight is ``(number - zero_point) * scale + minimum``, in this order in float32.

    A group is a run of neighbouring weights that share a scale.
    """

    numbers: Bytes
    """[rows, columns]"""
    zero_point: int
    scales: Floats
    """[rows, groups]"""
    minima: Floats | None
    """[rows, groups]; ``None`` if the format has none."""
    factors: npt.NDArray[np.float16] | None = None
    """[rows, blocks, 1 or 2]: what scales, and minima, of a block are small multiples of, in formats that say so."""


def split_groups(tensor: BlockTensor) -> Groups:
    """Unpack a quantised tensor exactly. F32, F16 and BF16 are not supported, as they have no groups.

    Raises ``CheckpointError`` naming the tensor if scales or minima are infinite or not numbers.
    """
    rows, columns = tensor.shape
    zero_point, split = _FORMS[tensor.kind]
    blocks = _as_blocks(tensor)
    with np.errstate(invalid="ignore"):  # infinity times zero, which is refused below
        numbers, scales, minima = split(blocks)
    if not np.isfinite(scales).all() or (minima is not None and not np.isfinite(minima).all()):
        raise CheckpointError(f"tensor {tensor.name} has scales that are infinite or not numbers")
    minima = None if minima is None else minima.reshape(rows, -1)
    factors = None
    if places := _FACTORS.get(tensor.kind):
        halves = [
            np.float16(sign) * np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16) for at, sign in places
        ]
        factors = np.concatenate(halves, axis=1).reshape(rows, -1, len(places))
    return Groups(numbers.reshape(rows, columns), zero_point, scales.reshape(rows, -1), minima, factors)


def dequantize(tensor: BlockTensor) -> Floats:
    """The weights as float32 [rows, columns], exactly as the format defines them. Raises as ``split_groups``."""
    rows, columns = tensor.shape
    result = np.empty((rows, columns), dtype=np.float32)
    step = max(1, VALUES_AT_ONCE // max(1, columns))
    for start in range(0, rows, step):
        data = tensor.data[start : start + step]
        _widen(replace(tensor, shape=(len(data), columns), data=data), result[start : start + step])
    return result


def _widen(tensor: BlockTensor, out: Floats) -> None:
    if tensor.kind in _FLOATS:
        values = _as_blocks(tensor).view(_FLOATS[tensor.kind]).reshape(out.shape)
        if tensor.kind == "BF16":
            out.view(np.uint32)[:] = values.astype(np.uint32) << 16
        else:
            out[:] = values
        return
    numbers, zero_point, scales, minima, _ = split_groups(tensor)
    groups = out.reshape(*scales.shape, -1)
    groups[:] = numbers.reshape(groups.shape)
    groups -= zero_point
    groups *= scales[:, :, None]
    if minima is not None:
        groups += minima[:, :, None]


def _as_blocks(tensor: BlockTensor) -> Bytes:
    return np.ascontiguousarray(tensor.data).reshape(-1, BLOCK_KINDS[tensor.kind].num_bytes)


_FLOATS = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
"""How the values of unquantised formats are read; those of BF16 are the high halves of float32."""


# Quantised formats: blocks [n, num_bytes] -> numbers [n, length], scales [n, groups], minima [n, groups] or None.

_Parts = tuple[Bytes, Floats, Floats | None]


def _nibbles(packed: Bytes) -> Bytes:
    """[n, 16] bytes to [n, 32] numbers below 16: all low nibbles, then all high nibbles."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _fifth_bits(packed: Bytes) -> Bytes:
    """[n, 4] bytes to [n, 32] numbers that are 0 or 16."""
    return np.unpackbits(packed, axis=1, bitorder="little") * np.uint8(16)


def _q4_0(blocks: Bytes) -> _Parts:
    return _nibbles(blocks[:, 2:]), half(blocks, 0), None


def _q4_1(blocks: Bytes) -> _Parts:
    return _nibbles(blocks[:, 4:]), half(blocks, 0), half(blocks, 2)


def _q5_0(blocks: Bytes) -> _Parts:
    return _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), half(blocks, 0), None


def _q5_1(blocks: Bytes) -> _Parts:
    return _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8]), half(blocks, 0), half(blocks, 2)


def _q8_0(blocks: Bytes) -> _Parts:
    return blocks[:, 2:] ^ np.uint8(128), half(blocks, 0), None  # from int8 to uint8 with offset 128


def _scales_and_minima(blocks: Bytes) -> tuple[Floats, Floats]:
    """The eight scales and minima of each block, from its first 16 bytes: two float16 factors and 6-bit multiples.

    The first four of each are the low 6 bits of bytes 0-3 and 4-7. The last four have their low 4 bits
    in bytes 8-11 (scale below, minimum above) and their top 2 bits in the top of bytes 0-3 and 4-7.
    """
    low, middle, last = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([low & 63, (last & 15) | (low >> 6 << 4)], axis=1)
    minima = np.concatenate([middle & 63, (last >> 4) | (middle >> 6 << 4)], axis=1)
    return half(blocks, 0) * scales, -(half(blocks, 2) * minima)


def _nibble_groups(packed: Bytes) -> Bytes:
    """[n, 128] bytes to [n, 8, 32]: each run of 32 bytes holds a group of low nibbles and one of high nibbles."""
    runs = packed.reshape(-1, 4, 32)
    return np.stack([runs & 15, runs >> 4], axis=2).reshape(-1, 8, 32)


def _q4_k(blocks: Bytes) -> _Parts:
    return _nibble_groups(blocks[:, 16:]), *_scales_and_minima(blocks)


def _q5_k(blocks: Bytes) -> _Parts:
    group = np.arange(8, dtype=np.uint8)[:, None]
    fifth_bits = (blocks[:, None, 16:48] >> group & np.uint8(1)) << np.uint8(4)
    return _nibble_groups(blocks[:, 48:]) | fifth_bits, *_scales_and_minima(blocks)


def _q6_k(blocks: Bytes) -> _Parts:
    low = blocks[:, :128].reshape(-1, 2, 2, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    # Each half of a block is four runs of 32: the low nibbles of its two byte runs, then the high ones.
    nibbles = np.concatenate([low & 15, low >> 4], axis=2)
    top_bits = high >> np.array([0, 2, 4, 6], dtype=np.uint8)[:, None] & np.uint8(3)
    return nibbles | top_bits << np.uint8(4), half(blocks, 208) * blocks[:, 192:208].view(np.int8), None


def _two_bits(packed: Bytes) -> Bytes:
    """[n, 64] bytes to [n, 256] numbers below 4: of each run of 32 bytes the lowest bits, then the next."""
    runs = packed.reshape(-1, 2, 1, 32)
    return (runs >> np.array([0, 2, 4, 6], dtype=np.uint8)[:, None] & np.uint8(3)).reshape(-1, 256)


def _q2_k(blocks: Bytes) -> _Parts:
    scales, minima = blocks[:, :16] & 15, blocks[:, :16] >> 4
    return _two_bits(blocks[:, 16:80]), half(blocks, 80) * scales, -(half(blocks, 82) * minima)


def _q3_k(blocks: Bytes) -> _Parts:
    """The third bits are those of one byte for eight runs of 32; 6-bit scales have their low four bits in eight bytes,
    their high two in four."""
    third = (blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)).reshape(-1, 256)
    low, high = blocks[:, 96:104], blocks[:, None, 104:108]
    top = (high >> np.array([0, 2, 4, 6], dtype=np.uint8)[:, None] & np.uint8(3)).reshape(-1, 16)
    multiples = (np.concatenate([low & 15, low >> 4], axis=1) | top << np.uint8(4)).astype(np.float32) - 32
    return _two_bits(blocks[:, 32:96]) | third << np.uint8(2), half(blocks, 108) * multiples, None


_FP4_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12], dtype=np.uint8)
_FP4 = np.concatenate([12 + _FP4_DOUBLED, 12 - _FP4_DOUBLED])
"""Twice the value of each code, plus 12 so that none is negative."""


def _mxfp4(blocks: Bytes) -> _Parts:
    return _FP4[_nibbles(blocks[:, 1:])], np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128), None


_FORMS: dict[str, tuple[int, Callable[[Bytes], _Parts]]] = {
    "Q4_0": (8, _q4_0),
    "Q4_1": (0, _q4_1),
    "Q5_0": (16, _q5_0),
    "Q5_1": (0, _q5_1),
    "Q8_0": (128, _q8_0),
    "Q4_K": (0, _q4_k),
    "Q5_K": (0, _q5_k),
    "Q6_K": (32, _q6_k),
    "MXFP4": (12, _mxfp4),
    "Q2_K": (0, _q2_k),
    "Q3_K": (4, _q3_k),
    **{kind: (codebook_blocks.ZERO_POINTS[kind], split) for kind, split in codebook_blocks.FORMS.items()},
}
"""The zero point, and the function that unpacks blocks."""

_FACTORS = {
    "Q2_K": ((80, 1), (82, -1)),
    "Q3_K": ((108, -1),),
    "Q4_K": ((0, 1), (2, -1)),
    "Q5_K": ((0, 1), (2, -1)),
    "Q6_K": ((208, 1),),
}
"""Where the float16 factors of a block's scales and minima are, and the signs with which multiples of them are minima,
or from -31 to 32."""
