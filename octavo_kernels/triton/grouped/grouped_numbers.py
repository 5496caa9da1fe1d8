"""The numbers of ``PackedGroups`` words in a kernel's registers: a mask and a shift for two, without conversions.

Two neighbouring words are one register. A shift brings the fields that are wanted to the low end of both halves, and
other bits are cut off. Integers become the mantissas of numbers of 16 bits by giving them a fixed exponent, which one
subtraction removes (Kim et al., arXiv 2211.10017). The bits of small floating-point numbers become those of large ones
at another place, and a power of two makes up for the exponents' offsets; this is exact for subnormal numbers as well.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.ops.linear.grouped_linear import BITS, E2M1_PLACES, TILE, WORDS, Number, PackedGroups
from octavo_kernels.triton.launch import has_assembly

_TILE, _WORDS, _PLACES = tl.constexpr(TILE), tl.constexpr(WORDS), tl.constexpr(E2M1_PLACES)
_ASSEMBLY = "{{.reg .b32 a, b; {}}}"
_MASK_OR = "lop3.b32 {0}, {1}, {2:#x}, {3}, 0xEA;"  # {0} = {1} & {2} | {3}


def _shift(target: str, source: str, right: int) -> str:
    """Shift to the right, or to the left if negative."""
    if right == 0:
        return f"mov.b32 {target}, {source};"
    return f"{'shr' if right > 0 else 'shl'}.b32 {target}, {source}, {abs(right)};"


def _both(half: int) -> int:
    return half << 16 | half


def _int4(plane: int, is_bfloat16: bool, zero: int | None) -> str:
    """Numbers less ``zero``; ``None`` leaves them above the fixed exponent's number."""
    one, base = (0x3F80, 0x4300) if is_bfloat16 else (0x3C00, 0x6400)
    shifted = _shift("a", "$1", 4 * plane)
    if zero is None:
        return shifted + _MASK_OR.format("$0", "a", _both(0xF), f"{_both(base):#x}")
    offset = base + 0x8000 + zero  # -(128 + zero), -(1024 + zero)
    masked = _MASK_OR.format("a", "a", _both(0xF), f"{_both(base):#x}")
    return shifted + masked + _fma(_both(one), _both(offset), is_bfloat16)


def _int8(plane: int, is_bfloat16: bool) -> str:
    """The low seven bits, less 128 where the sign is set."""
    base = f"{_both(0x4300 if is_bfloat16 else 0x6400):#x}"
    return (
        _shift("b", "$1", 8 * plane)
        + _MASK_OR.format("a", "b", _both(0x7F), base)
        + _MASK_OR.format("b", "b", _both(0x80), base)
        + (
            f"{{.reg .b32 m; mov.b32 m, {_both(0xBF80):#x}; fma.rn.bf16x2 $0, b, m, a;}}"
            if is_bfloat16
            else "sub.f16x2 $0, a, b;"
        )
    )


def _float(number: Number, plane: int, is_bfloat16: bool) -> str:
    """Register a: numbers times two to the power of minus ``_bias``, as their sign goes to the highest bit, exponent
    and mantissa below the high end of the exponent."""
    mantissa = 7 if is_bfloat16 else 10
    if number == "e2m1":
        size, low = 3, mantissa - 1
        sign, field = E2M1_PLACES[plane]
    else:
        size, low = 7, mantissa - 3
        sign, field = 8 * plane + 7, 8 * plane
    mask = ((1 << size) - 1) << low
    moved = _shift("a", "$1", field - low)
    if sign - field == 15 - low:
        return moved + f"and.b32 a, a, {_both(mask | 0x8000):#x};"
    return (
        moved
        + _shift("b", "$1", sign - 15)
        + f"and.b32 b, b, {_both(0x8000):#x};"
        + _MASK_OR.format("a", "a", _both(mask), "b")
    )


def _bias(number: Number, is_bfloat16: bool) -> int:
    """Of exponents of 16-bit numbers, less that of the small ones."""
    return (127 if is_bfloat16 else 15) - (7 if number == "e4m3" else 1)


def _scaled(number: Number, is_bfloat16: bool) -> str:
    """What follows ``_float``: the numbers themselves."""
    power = (_bias(number, is_bfloat16) + (127 if is_bfloat16 else 15)) << (7 if is_bfloat16 else 10)
    return _fma(_both(power), _both(0x8000), is_bfloat16)


def _fma(factor: int, addend: int, is_bfloat16: bool) -> str:
    kind = "bf16x2" if is_bfloat16 else "f16x2"
    return f"{{.reg .b32 f, g; mov.b32 f, {factor:#x}; mov.b32 g, {addend:#x}; fma.rn.{kind} $0, a, f, g;}}"


def offset_of(packed: PackedGroups, dtype: torch.dtype) -> int:
    """By how much numbers may be too large in registers, for kernels that subtract it from sums; 0 if it does not pay.

    It costs the sums of x, and accuracy: sums grow by a factor of 30. In float16 it would be 200.
    """
    if packed.number not in ("int4", "uint4") or dtype != torch.bfloat16 or len(packed.scales_GN) == 1:
        return 0
    return 128 + (8 if packed.number == "int4" else 0)


def assembly(packed: PackedGroups, dtype: torch.dtype, offset: int = 0) -> tuple[str, ...] | None:
    """For each plane of words, PTX that makes numbers of this type of two words; ``None`` where PTX cannot be used.

    The numbers are too large by ``offset``, which is 0 or ``offset_of`` them.
    """
    if not has_assembly(packed.words.device):
        return None
    number, is_bfloat16 = packed.number, dtype == torch.bfloat16
    return tuple(_ASSEMBLY.format(_text(number, plane, is_bfloat16, offset)) for plane in range(16 // BITS[number]))


def entry_offset(packed: PackedGroups) -> int:
    """By how much larger than they are zeros may be given to ``entry_assembly`` in bfloat16."""
    return 128 if packed.number == "uint4" and packed.zeros_GN is not None else 0


def entry_assembly(packed: PackedGroups, dtype: torch.dtype, offset: int = 0) -> tuple[str, ...] | None:
    """For each plane of words, PTX that makes entries of the weight in this type of two words, or ``None`` as above.

    Its operands are the words and their zeros, which are too large by ``offset`` (0 or ``entry_offset``), scales and
    minima. It ignores what the weight has not, and a scale for each output. All is multiply-add, which GPUs before
    Hopper have in bfloat16, too: a number less its zero is exact, and an entry is rounded once.
    """
    if not has_assembly(packed.words.device):
        return None
    is_bfloat16 = dtype == torch.bfloat16
    kind, minus_one = ("bf16x2", 0xBF80) if is_bfloat16 else ("f16x2", 0xBC00)
    planes = range(16 // BITS[packed.number])
    if scale_factor(packed, dtype) != 1:
        scaled = f"{{.reg .b32 z; mov.b32 z, {_both(0x8000):#x}; fma.rn.{kind} $0, a, $3, z;}}"
        return tuple(_ASSEMBLY.format(_float(packed.number, plane, is_bfloat16) + scaled) for plane in planes)
    ends = ""
    if packed.zeros_GN is not None:
        ends += f"{{.reg .b32 n; mov.b32 n, {_both(minus_one):#x}; fma.rn.{kind} $0, $2, n, $0;}}"
    if packed.minima_GN is not None:
        ends += f"fma.rn.{kind} $0, $0, $3, $4;"
    elif len(packed.scales_GN) > 1:
        ends += f"{{.reg .b32 z; mov.b32 z, {_both(0x8000):#x}; fma.rn.{kind} $0, $0, $3, z;}}"
    return tuple(_ASSEMBLY.format(_text(packed.number, plane, is_bfloat16, offset) + ends) for plane in planes)


SUM_FACTOR = tl.constexpr(2.0**16)
"""By which entries are too small where their scales have a ``scale_factor``; float32 sums make up for it."""


def scale_factor(packed: PackedGroups, dtype: torch.dtype) -> float:
    """By how much larger than they are scales must be given to ``entry_assembly``, so that one multiplication makes up
    for the exponents' offset and for ``SUM_FACTOR``, too; 1 where it does not. Scales may be 2 ** 17 all the same."""
    has_scales = len(packed.scales_GN) > 1 and packed.minima_GN is None
    if not has_assembly(packed.words.device) or not has_scales or dtype != torch.bfloat16:
        return 1.0
    return 2.0 ** _bias(packed.number, True) / float(SUM_FACTOR.value) if packed.number in ("e4m3", "e2m1") else 1.0


def entry_of_uint4(plane: int) -> str:
    """PTX that makes the entries of this plane of two words in bfloat16; its operands are the words, their scales, and
    what is added, as ``entry_assembly`` has minima."""
    return _ASSEMBLY.format(_int4(plane, True, 0) + "fma.rn.bf16x2 $0, $0, $2, $3;")


def int8_of_two(plane: int) -> str:
    """PTX that makes the numbers of this plane of two words of INT8 in bfloat16."""
    return _ASSEMBLY.format(_int8(plane, True))


def pairs_of_e4m3() -> str:
    """PTX that makes the numbers of both planes of two words of E4M3 in float16, for GPUs that have float8."""
    return (
        "{.reg .b32 a; .reg .b16 l, h; prmt.b32 a, $2, 0, 0x3120; mov.b32 {l, h}, a; "
        "cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h;}"
    )


def _text(number: Number, plane: int, is_bfloat16: bool, offset: int) -> str:
    if number in ("int4", "uint4"):
        return _int4(plane, is_bfloat16, None if offset else 8 if number == "int4" else 0)
    if number == "int8":
        return _int8(plane, is_bfloat16)
    return _float(number, plane, is_bfloat16) + _scaled(number, is_bfloat16)


@triton.jit
def word_rows(n: tl.tensor, chunks: tl.tensor) -> tl.tensor:
    """Where the words of these outputs begin."""
    return (n // _TILE).to(tl.int64) * chunks * (_TILE * _WORDS) + n % _TILE * _WORDS


@triton.jit
def numbers(
    words: tl.tensor, NUMBER: tl.constexpr, PLANE: tl.constexpr, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr
) -> tl.tensor:
    """The numbers of a plane of 16-bit words in DTYPE, a float of 16 bits, exactly; by PTX or by plain arithmetic."""
    if ASSEMBLY is not None:
        values = tl.inline_asm_elementwise(ASSEMBLY[PLANE], "=r,r", [words], dtype=DTYPE.value, is_pure=True, pack=2)
    elif NUMBER == "int4":
        values = (((words >> (4 * PLANE)) & 15) - 8).to(tl.float32).to(DTYPE)
    elif NUMBER == "uint4":
        values = ((words >> (4 * PLANE)) & 15).to(tl.float32).to(DTYPE)
    elif NUMBER == "int8":
        values = (words >> (8 * PLANE)).to(tl.int8).to(tl.float32).to(DTYPE)
    elif NUMBER == "e4m3":
        values = (words >> (8 * PLANE)).to(tl.int8).to(tl.float8e4nv, bitcast=True).to(DTYPE)
    else:
        field = words >> _PLACES[PLANE][1]
        exponent, mantissa = ((field >> 1) & 3).to(tl.float32), (field & 1).to(tl.float32)
        size = tl.where(exponent == 0, 0.5 * mantissa, tl.exp2(exponent - 1) * (1 + 0.5 * mantissa))
        values = tl.where((words >> _PLACES[PLANE][0]) & 1 == 1, -size, size).to(DTYPE)
    return values


@triton.jit
def less(values: tl.tensor, zeros: tl.tensor, ASSEMBLY: tl.constexpr) -> tl.tensor:
    """Numbers less zeros, which float32 holds; exact, so the registers of tensor cores may hold it as it is."""
    if ASSEMBLY is not None:
        difference = values - zeros.to(values.dtype)
    else:  # the interpreter has no arithmetic of bfloat16
        difference = (values.to(tl.float32) - zeros).to(values.dtype)
    return difference


@triton.jit
def entries(
    words: tl.tensor, zeros: tl.tensor, scales: tl.tensor, minima: tl.tensor, NUMBER: tl.constexpr,
    PLANE: tl.constexpr, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The entries of the weight for a plane of words [N, W], as ``entry_assembly`` has them; zeros, scales and minima
    are [N] in DTYPE, or ``None``."""
    if ASSEMBLY is not None:
        own_zeros, own_scales, own_minima = words, words, words
        if zeros is not None:
            own_zeros = zeros[:, None].broadcast_to(words.shape)
        if scales is not None:
            own_scales = scales[:, None].broadcast_to(words.shape)
        if minima is not None:
            own_minima = minima[:, None].broadcast_to(words.shape)
        operands = [words, own_zeros, own_scales, own_minima]
        values = tl.inline_asm_elementwise(
            ASSEMBLY[PLANE], "=r,r,r,r,r", operands, dtype=DTYPE.value, is_pure=True, pack=2
        )
    else:  # the interpreter has no arithmetic of bfloat16
        exact = numbers(words, NUMBER, PLANE, DTYPE, ASSEMBLY).to(tl.float32)
        if zeros is not None:
            exact -= zeros.to(tl.float32)[:, None]
        if scales is not None:
            exact *= scales.to(tl.float32)[:, None]
        if minima is not None:
            exact += minima.to(tl.float32)[:, None]
        values = exact.to(DTYPE)
    return values
