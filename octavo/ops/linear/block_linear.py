"""Linear maps and embeddings of weights in quantised blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from octavo.ops.dispatch import op, op_of_ids
from octavo.ops.linear.linear import PLAIN, Fused, compose
from octavo.weights.gguf.block_formats import BlockTensor, Groups, split_groups

# ---- block_linear
#
# A linear map whose weight is stored in quantised blocks.
#
# Shapes: T tokens, K inputs, N outputs, G groups of inputs that share a scale, P panels of 16 outputs.
#
# ``PackedBlocks`` holds a ``BlockTensor``'s numbers in the order in which a vector unit loads them. Panel by
# panel and group by group, four inputs of row 0, the same four of row 1, and so on to row 15::
#
#     8 bit   [P, G, group / 4, 16, 4]   one byte a number
#     4 bit   [P, G, group / 8, 16, 4]   low halves: inputs 8 s + 0..3 of the group; high halves: 8 s + 4..7
#     5, 6    their low 4 bits like this, then [P, G, 1, 16, 4]: bits (bits - 4) i on of a byte are input 4 i + 0..3's
#
# with the scales, and the minima of the formats that have them, as [P, G, 1 or 2, 16]. The last panel is padded with
# zeros.
#
# Where the scales of a block of 256 inputs are small multiples of a float16, as those of Q4_K to Q6_K, that is how they
# are stored, in a fourth to a third of the bytes: [P, K / 256, bytes], each block the factors [1 or 2, 16] as float16,
# then for each of its groups the multiples [1 or 2, 16] as int8.


PANEL = 16
BLOCK = 256
"""Inputs whose scales may have a factor in common."""
FACTOR_BYTES = 2
FOUR_BIT_KINDS = frozenset({"Q2_K", "Q3_K", "Q4_0", "Q4_1", "Q4_K", "TQ1_0", "TQ2_0"})
FIVE_BIT_KINDS = frozenset({"IQ1_S", "IQ3_S", "Q5_0", "Q5_1", "Q5_K"})
EIGHT_BIT_KINDS = frozenset({"IQ1_M", "NVFP4", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ3_XXS", "IQ4_NL", "IQ4_XS", "Q8_0"})
NUMBER_BITS = {
    **dict.fromkeys(FOUR_BIT_KINDS, 4),
    **dict.fromkeys(FIVE_BIT_KINDS, 5),
    "Q6_K": 6,
    **dict.fromkeys(EIGHT_BIT_KINDS, 8),
}
"""The width of the packed numbers of each kind, which may be wider than those in the file."""
KINDS = frozenset(NUMBER_BITS)
"""The block kinds that can be packed."""
JOINED_KINDS = frozenset({"Q2_K", "Q3_K"})
"""Kinds whose numbers, less their zero point, fit 8 bits even times the multiple of their scale."""
JOINED = 64
"""Activations of such kinds that are rounded together."""

ROWS_AT_ONCE = 64 * PANEL
"""Rows to give to ``PackedBlocks.of_groups`` at a time, which bounds temporary memory."""


@dataclass(frozen=True, eq=False)
class PackedBlocks:
    """A weight [N, K] as panels; entries are ``(number - zero_point) * scale + minimum``, exactly as in the blocks."""

    kind: str
    shape: tuple[int, int]
    bits: int
    zero_point: int
    values: Tensor
    """uint8 [P, G, steps, 16, 4]"""
    scales: Tensor
    """[P, G, 1 or 2, 16] in float16 where that is exact, else in float32; or as multiples, uint8 [P, K / 256, bytes]"""
    order: Tensor | None = None
    """int32 [K]: the input that each column multiplies; ``None``: column k multiplies input k."""

    @property
    def group(self) -> int:
        """Number of inputs that share a scale."""
        return self.shape[1] // self.values.shape[1]

    @property
    def joins_groups(self) -> bool:
        """Whether several groups of the weight are multiplied by one of activations."""
        return self.has_multiples and self.kind in JOINED_KINDS

    @property
    def x_group(self) -> int:
        """Number of inputs whose activations are rounded together."""
        return JOINED if self.joins_groups else self.group

    @property
    def has_multiples(self) -> bool:
        """Whether scales are stored as multiples of factors."""
        return self.scales.dtype == torch.uint8

    @property
    def has_minima(self) -> bool:
        return self._num_parts == 2

    @property
    def _num_parts(self) -> int:
        """1, or 2 with minima; by shapes alone, as it is asked for in every step."""
        if not self.has_multiples:
            return self.scales.shape[2]
        return self.scales.shape[2] // (PANEL * (FACTOR_BYTES + self.values.shape[1] // self.scales.shape[1]))

    def float_scales(self, panels: slice | Tensor = slice(None)) -> Tensor:
        """Scales, and minima, of these panels: float32 [panels, G, 1 or 2, 16]."""
        scales = self.scales[panels]
        if not self.has_multiples:
            return scales.float()
        (P, blocks, _), parts = scales.shape, self._num_parts
        each = self.values.shape[1] // blocks
        factors, multiples = scales.split_with_sizes([PANEL * FACTOR_BYTES * parts, PANEL * each * parts], dim=2)
        wide = factors.contiguous().view(torch.float16).view(P, blocks, 1, parts, PANEL).float()
        return (multiples.contiguous().view(torch.int8).view(P, blocks, each, parts, PANEL) * wide).flatten(1, 2)

    @property
    def format(self) -> str:
        """Name of the numbers' format."""
        return self.kind

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes + (0 if self.order is None else self.order.nbytes)

    def rows(self, ids_T: Tensor) -> Tensor:
        """Rows of the weight as float32 [T, K]."""
        x_TK = block_embedding(ids_T, self)
        return x_TK if self.order is None else torch.empty_like(x_TK).index_copy_(1, self.order.long(), x_TK)

    @classmethod
    def pack(cls, tensor: BlockTensor) -> PackedBlocks:
        """Repack blocks into panels. Raises ``ValueError`` if the kind is not in ``KINDS``, and as ``split_groups``."""
        if tensor.kind not in KINDS:
            raise ValueError(f"blocks of kind {tensor.kind} cannot be packed; these can: {', '.join(sorted(KINDS))}")
        parts = (tensor.data[start : start + ROWS_AT_ONCE] for start in range(0, tensor.shape[0], ROWS_AT_ONCE))
        blocks = (replace(tensor, shape=(len(data), tensor.shape[1]), data=data) for data in parts)
        return cls.of_groups(tensor.kind, tensor.shape, NUMBER_BITS[tensor.kind], map(split_groups, blocks))

    @classmethod
    def of_groups(
        cls, kind: str, shape: tuple[int, int], bits: int, parts: Iterable[Groups], order: Tensor | None = None
    ) -> PackedBlocks:
        """Pack rows of numbers of 4, 5, 6 or 8 ``bits``, in parts of ``ROWS_AT_ONCE`` rows (the last may have fewer).

        ``kind`` names the format. The parts have one zero point.
        """
        values, scales, multiples, zero_point = [], [], [], 0
        for groups in parts:
            zero_point = groups.zero_point
            values.append(_value_panels(groups, bits))
            panels = _scale_panels(groups)
            multiples.append(_as_multiples(panels, groups))
            scales.append(panels)
        packed = torch.from_numpy(np.concatenate(values))
        if all(part is not None for part in multiples):
            stored = np.concatenate([part for part in multiples if part is not None])
        else:
            stored = _smallest_exact(np.concatenate(scales))
        return cls(kind, shape, bits, zero_point, packed, torch.from_numpy(stored), order)

    def numbers(self, panels: slice | Tensor = slice(None)) -> Tensor:
        """The numbers of these panels, four inputs of each row at a time: uint8 [panels, G, group / 4, 16, 4]."""
        values = self.values[panels]
        if self.bits == 8:
            return values
        halves = values[:, :, : self.group // 8]
        low = torch.stack((halves & 15, halves >> 4), dim=3).flatten(2, 3)
        if self.bits == 4:
            return low
        width = self.bits - 4
        shifts = width * torch.arange(self.group // 4, dtype=torch.uint8)
        return low | (values[:, :, -1:] >> shifts[:, None, None] & (1 << width) - 1) << 4

    def unpack(self) -> Tensor:
        """The weight as float32 [N, K], its columns in the order of inputs."""
        N, K = self.shape
        P, G = self.values.shape[:2]
        numbers = self.numbers().permute(0, 3, 1, 2, 4).reshape(P, PANEL, G, self.group)
        parts = self.float_scales().permute(2, 0, 3, 1).unsqueeze(-1)  # [1 or 2, P, 16, G, 1]
        weight = (numbers.float() - self.zero_point) * parts[0]
        if self.has_minima:
            weight += parts[1]
        weight = weight.view(P * PANEL, K)[:N]
        return weight if self.order is None else torch.empty_like(weight).index_copy_(1, self.order.long(), weight)


Number = TypeVar("Number", np.uint8, np.float32)


def _pad_rows(rows: npt.NDArray[Number]) -> npt.NDArray[Number]:
    return np.pad(rows, [(0, -len(rows) % PANEL), (0, 0)])


def _value_panels(groups: Groups, bits: int) -> npt.NDArray[np.uint8]:
    if bits in (5, 6):
        low = _value_panels(groups._replace(numbers=groups.numbers & np.uint8(15)), 4)
        high = _value_panels(groups._replace(numbers=groups.numbers >> np.uint8(4)), 8)
        shifts = np.uint8(bits - 4) * np.arange(high.shape[2], dtype=np.uint8)
        return np.concatenate([low, np.bitwise_or.reduce(high << shifts[:, None, None], axis=2, keepdims=True)], axis=2)
    numbers, G = _pad_rows(groups.numbers), groups.scales.shape[1]
    fours = numbers.view(np.uint32).reshape(len(numbers) // PANEL, PANEL, G, -1, 8 // bits).transpose(0, 2, 4, 3, 1)
    panels = np.ascontiguousarray(fours[:, :, 0])
    if bits == 4:
        panels |= fours[:, :, 1] << np.uint32(4)  # no number is wider than a half
    return panels[..., None].view(np.uint8)


def _scale_panels(groups: Groups) -> npt.NDArray[np.float32]:
    parts = [groups.scales] if groups.minima is None else [groups.scales, groups.minima]
    rows = np.stack([_pad_rows(part) for part in parts], axis=1)  # [rows, parts, G]
    panels = rows.reshape(-1, PANEL, len(parts), rows.shape[2]).transpose(0, 3, 2, 1)
    return np.ascontiguousarray(panels, dtype=np.float32)


def _as_multiples(panels: npt.NDArray[np.float32], groups: Groups) -> npt.NDArray[np.uint8] | None:
    """Scale panels as multiples of the groups' factors; ``None`` without factors, or if that is not exact."""
    if groups.factors is None:
        return None
    factors = np.pad(groups.factors, [(0, -len(groups.factors) % PANEL), (0, 0), (0, 0)])
    P, (_, blocks, parts) = len(panels), factors.shape
    factors = np.ascontiguousarray(factors.reshape(P, PANEL, blocks, parts).transpose(0, 2, 3, 1))
    wide, scales = factors[:, :, None].astype(np.float32), panels.reshape(P, blocks, -1, parts, PANEL)
    with np.errstate(all="ignore"):
        multiples = np.nan_to_num(np.rint(scales / wide), posinf=0, neginf=0).clip(-128, 127).astype(np.int8)
        if not np.array_equal(multiples * wide, scales):
            return None
    return np.concatenate([part.reshape(P, blocks, -1).view(np.uint8) for part in (factors, multiples)], axis=2)


def _smallest_exact(scales: npt.NDArray[np.float32]) -> npt.NDArray[np.floating]:
    with np.errstate(over="ignore"):
        small = scales.astype(np.float16)
    return small if np.array_equal(small, scales) else scales


@op
def block_linear(x_TK: Tensor, packed: PackedBlocks, fused: Fused = PLAIN) -> Tensor:
    """``ops.linear``, all in float32.

    The reference is exact up to float32 rounding. Kernels may round each group of a row of activations, which is of
    ``packed.x_group`` inputs, to 8 bits: an error of at most scale / 2 = max |x| / 254 for each activation of the
    group, so that::

        |y - exact| <= sum over groups of max |x| / 254 * sum |weight|     (and float32 rounding)

    They may round the largest numbers of some groups first, then the remainders; this choice depends on the row only.

    A row of a kernel's result is bitwise a function of that row of ``x`` alone.
    """

    def multiply(normed_TK: Tensor) -> Tensor:
        return functional.linear(normed_TK, packed.unpack(), fused.bias_N)

    return compose(x_TK, fused, multiply)


# ---- block_embedding: Embedding lookup in a table of quantised blocks. Shapes: T tokens, D model, V vocabulary, P
# panels, G groups of a row.


@op_of_ids
def block_embedding(token_ids_T: Tensor, packed: PackedBlocks) -> Tensor:
    """Row ``token_ids[t]`` (int64) of the table [V, D] for each t, dequantised exactly; a new float32 tensor [T, D].

    Columns are those of the panels, whatever ``packed.order``.
    Raises ``IndexError`` for an id that is not in the table.
    """
    T, (V, D) = len(token_ids_T), packed.shape
    if T and not 0 <= int(token_ids_T.min()) <= int(token_ids_T.max()) < V:
        raise IndexError(f"block_embedding: token ids must be from 0 to {V - 1}")
    panels_T, rows_T = token_ids_T // PANEL, token_ids_T % PANEL
    each_T = torch.arange(T, device=token_ids_T.device)
    numbers = packed.numbers(panels_T)[each_T, :, :, rows_T].flatten(2)  # [T, G, group]
    scales = packed.float_scales(panels_T)[each_T, :, :, rows_T]  # [T, G, 1 or 2]
    x = (numbers.float() - packed.zero_point) * scales[..., :1]
    return (x + scales[..., 1:] if packed.has_minima else x).view(T, D)
