"""Blocks of few bits for each weight: codes into codebooks (IQ1 to IQ4), digits of base three (TQ1 and TQ2), and NVFP4.

A code of IQ1 to IQ3 stands for four or eight neighbouring weights; ``codebooks.npz`` has what each stands for, which is
part of the formats (``ggml-common.h`` documents them).

Shapes: n blocks of L weights, G groups of a block that share a scale, C codes of a group of E weights each.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Signed = npt.NDArray[np.int8]
Floats = npt.NDArray[np.float32]
Parts = tuple[Bytes, Floats, None]
"""Numbers [n, L], scales [n, G], and no minima: a weight is ``(number - ZERO) * scale``, see ``ZERO_POINTS``."""

FOUR_BIT_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int8)
"""What the codes of IQ4 stand for."""
FP4_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.int8)
"""Twice the value of each code of NVFP4."""
GROUP = 32
DELTA = 8
"""What a number of IQ1 counts: eighths, as all weights of a group are shifted by one up or down."""


@functools.cache
def codebook(name: str) -> Signed:
    """What the codes of a format stand for, [codes, E]."""
    with np.load(Path(__file__).with_name("codebooks.npz"), allow_pickle=False) as books:
        found: Signed = books[name]
    return found


def half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte ``at`` of each block, as float32 [n, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _words(blocks: Bytes, begin: int, end: int, dtype: str) -> npt.NDArray[np.uint32]:
    """The little-endian words between two bytes of each block."""
    return np.ascontiguousarray(blocks[:, begin:end]).view(dtype).astype(np.uint32)


def _bits(packed: npt.NDArray[np.unsignedinteger], shifts: range, width: int) -> npt.NDArray[np.unsignedinteger]:
    """``width`` bits from each shift on, along a new last axis."""
    steps = np.array(shifts, dtype=packed.dtype)
    return packed[..., None] >> steps & packed.dtype.type((1 << width) - 1)


def _signs(bits: Bytes) -> Signed:
    """[..., bytes] to 1 or -1 for each bit, the lowest first: [..., bytes, 8]."""
    return np.int8(1) - np.int8(2) * np.unpackbits(bits[..., None], axis=-1, bitorder="little").view(np.int8)


def _even_signs(codes: npt.NDArray[np.integer]) -> Signed:
    """The signs for codes of seven bits: the eighth bit makes their number of ones even."""
    bits = codes.astype(np.uint8)
    ones = np.unpackbits(bits[..., None], axis=-1).sum(axis=-1, dtype=np.uint8) & np.uint8(1)
    return _signs(bits | ones << np.uint8(7))


def _signed(name: str, codes: npt.NDArray[np.integer], signs: Signed, scales: Floats) -> Parts:
    """Weights that ``codes`` [n, ...] stand for, times their signs."""
    magnitudes = codebook(name)[codes]
    numbers = magnitudes.reshape(len(codes), -1) * signs.reshape(len(codes), -1)
    return (numbers.astype(np.int16) + ZERO_POINTS[name.upper()]).astype(np.uint8), scales, None


def iq2_xxs(blocks: Bytes) -> Parts:
    words = _words(blocks, 2, 66, "<u4").reshape(len(blocks), 8, 2)
    codes = np.ascontiguousarray(words[:, :, 0]).view(np.uint8)
    scales = half(blocks, 0) * ((words[:, :, 1] >> 28).astype(np.float32) + np.float32(0.5)) * np.float32(0.25)
    return _signed("iq2_xxs", codes, _even_signs(_bits(words[:, :, 1], range(0, 28, 7), 7)), scales)


def _nibble_scales(blocks: Bytes, begin: int, end: int) -> Floats:
    """The scales of groups of 16: half a step more than a nibble of each, times a fourth of the block's factor."""
    nibbles = _bits(blocks[:, begin:end], range(0, 8, 4), 4).reshape(len(blocks), -1).astype(np.float32)
    return half(blocks, 0) * (nibbles + np.float32(0.5)) * np.float32(0.25)


def iq2_xs(blocks: Bytes) -> Parts:
    words = _words(blocks, 2, 66, "<u2")
    return _signed("iq2_xs", words & 511, _even_signs(words >> 9), _nibble_scales(blocks, 66, 74))


def iq2_s(blocks: Bytes) -> Parts:
    high = _bits(blocks[:, 66:74], range(0, 8, 2), 2).reshape(len(blocks), -1).astype(np.uint16)
    codes = blocks[:, 2:34] | high << np.uint16(8)
    return _signed("iq2_s", codes, _signs(blocks[:, 34:66]), _nibble_scales(blocks, 74, 82))


def iq3_xxs(blocks: Bytes) -> Parts:
    words = _words(blocks, 66, 98, "<u4")
    scales = half(blocks, 0) * ((words >> 28).astype(np.float32) + np.float32(0.5)) * np.float32(0.5)
    return _signed("iq3_xxs", blocks[:, 2:66], _even_signs(_bits(words, range(0, 28, 7), 7)), scales)


def iq3_s(blocks: Bytes) -> Parts:
    high = np.unpackbits(blocks[:, 66:74], axis=1, bitorder="little").astype(np.uint16)
    nibbles = _bits(blocks[:, 106:110], range(0, 8, 4), 4).reshape(len(blocks), -1).astype(np.float32)
    scales = half(blocks, 0) * (1 + 2 * nibbles)
    return _signed("iq3_s", blocks[:, 2:66] | high << np.uint16(8), _signs(blocks[:, 74:106]), scales)


def _shifted(codes: npt.NDArray[np.integer], is_down: npt.NDArray[np.bool_], scales: Floats) -> Parts:
    """Weights of IQ1 in eighths, for ``codes`` [n, 32] of eight weights each, which are shifted up or down by one."""
    eighths = codebook("iq1_s")[codes] * np.int8(DELTA) + np.where(is_down, np.int8(-1), np.int8(1))[..., None]
    return (eighths + ZERO_POINTS["IQ1_S"]).astype(np.uint8).reshape(len(codes), -1), scales / np.float32(DELTA), None


def iq1_s(blocks: Bytes) -> Parts:
    high = _words(blocks, 34, 50, "<u2")
    codes = blocks[:, 2:34] | (_bits(high, range(0, 12, 3), 3).reshape(len(blocks), -1) << 8)
    scales = half(blocks, 0) * (2 * (high >> 12 & 7) + 1).astype(np.float32)
    return _shifted(codes, np.repeat(high >= 1 << 15, 4, axis=1), scales.astype(np.float32))


def iq1_m(blocks: Bytes) -> Parts:
    words = _words(blocks, 48, 56, "<u2").astype(np.uint16)
    tops = words >> 12 << np.array([0, 4, 8, 12], dtype=np.uint16)
    factors = np.bitwise_or.reduce(tops, axis=1, keepdims=True).astype(np.uint16).view(np.float16).astype(np.float32)
    nibbles = _bits(blocks[:, 32:48], range(0, 8, 4), 4).reshape(len(blocks), -1).astype(np.uint16)
    codes = blocks[:, :32] | (nibbles & 7) << np.uint16(8)
    scales = factors * (2 * _bits(words, range(0, 12, 3), 3).reshape(len(blocks), -1) + 1).astype(np.float32)
    return _shifted(codes, nibbles >= 8, scales)


def _levels(packed: Bytes, levels: Signed, half: int, zero_point: int) -> Bytes:
    """What nibbles stand for: of each run of ``half`` bytes all low ones, then all high ones."""
    runs = packed.reshape(len(packed), -1, half)
    codes = np.concatenate([runs & 15, runs >> 4], axis=2).reshape(len(packed), -1)
    numbers: Bytes = (levels[codes].astype(np.int16) + zero_point).astype(np.uint8)
    return numbers


def iq4_nl(blocks: Bytes) -> Parts:
    return _levels(blocks[:, 2:], FOUR_BIT_LEVELS, 16, ZERO_POINTS["IQ4_NL"]), half(blocks, 0), None


def iq4_xs(blocks: Bytes) -> Parts:
    low = _bits(blocks[:, 4:8], range(0, 8, 4), 4).reshape(len(blocks), -1)
    high = _bits(_words(blocks, 2, 4, "<u2")[:, 0], range(0, 16, 2), 2).astype(np.uint8)
    scales = half(blocks, 0) * ((low | high << np.uint8(4)).astype(np.float32) - 32)
    return _levels(blocks[:, 8:], FOUR_BIT_LEVELS, 16, ZERO_POINTS["IQ4_XS"]), scales, None


def tq1_0(blocks: Bytes) -> Parts:
    """Five digits of base three in a byte, as a fraction of 256: the first digits of 32, 16 and 4 bytes, then the
    second ones and so on."""
    digits = []
    for begin, end, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        powers = np.array([3**i for i in range(count)], dtype=np.uint8)[:, None]
        shifted = blocks[:, None, begin:end] * powers  # the digits before it overflow
        digits.append((shifted.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(len(blocks), -1))
    return np.concatenate(digits, axis=1), np.repeat(half(blocks, 52), 256 // GROUP, axis=1), None


def tq2_0(blocks: Bytes) -> Parts:
    digits = _bits(blocks[:, :64].reshape(-1, 2, 32), range(0, 8, 2), 2).transpose(0, 1, 3, 2).astype(np.uint8)
    return digits.reshape(len(blocks), -1), np.repeat(half(blocks, 64), 256 // GROUP, axis=1), None


def nvfp4(blocks: Bytes) -> Parts:
    """Scales of groups of 16 are unsigned E4M3; 127 is 0."""
    stored = blocks[:, :4]
    exponents, fractions = (stored >> 3 & 15).astype(np.int32), (stored & 7).astype(np.float32)
    scales = np.where(exponents == 0, np.ldexp(fractions, -10), np.ldexp(1 + fractions / 8, exponents - 8)).astype(
        np.float32
    )
    scales[stored == 127] = 0
    return _levels(blocks[:, 4:], FP4_DOUBLED, 8, ZERO_POINTS["NVFP4"]), scales, None


ZERO_POINTS = {
    "IQ1_M": 9,
    "IQ1_S": 9,
    "IQ2_S": 128,
    "IQ2_XS": 128,
    "IQ2_XXS": 128,
    "IQ3_S": 16,
    "IQ3_XXS": 128,
    "IQ4_NL": 128,
    "IQ4_XS": 128,
    "NVFP4": 12,
    "TQ1_0": 1,
    "TQ2_0": 1,
}
"""The number that stands for zero."""
FORMS = {
    "IQ1_M": iq1_m,
    "IQ1_S": iq1_s,
    "IQ2_S": iq2_s,
    "IQ2_XS": iq2_xs,
    "IQ2_XXS": iq2_xxs,
    "IQ3_S": iq3_s,
    "IQ3_XXS": iq3_xxs,
    "IQ4_NL": iq4_nl,
    "IQ4_XS": iq4_xs,
    "NVFP4": nvfp4,
    "TQ1_0": tq1_0,
    "TQ2_0": tq2_0,
}
"""The function that unpacks the blocks of a kind."""
