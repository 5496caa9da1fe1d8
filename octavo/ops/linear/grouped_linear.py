"""Linear maps of weights with scales for groups of inputs, and what follows attention in one op."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from octavo.ops.dispatch import op
from octavo.ops.linear.linear import PLAIN, Activation, Fused, compose

# ---- grouped_linear
#
# A linear map whose weight is stored in numbers of 4 or 8 bits, with scales for groups of inputs.
#
# Shapes: T tokens, K inputs, N outputs, G groups of K / G inputs, B tiles of 16 outputs, C chunks of inputs.
#
# ``PackedGroups`` holds the numbers in 16-bit words, in the order in which kernels for GPUs load them::
#
#     4 bit   [B, C, 16, 32]   bits 4 p .. 4 p + 3 of word j of a chunk are its input 32 p + j, of 128
#     8 bit   [B, C, 16, 32]   bits 8 p .. 8 p + 7 of word j of a chunk are its input 32 p + j, of 64
#
# FP4 alone has its bits at other places of the word, see ``E2M1_PLACES``.
#
# So a tile's chunk is 1 KiB in one piece, and a mask and a shift give 32 neighbouring inputs at a time, two in each
# register as tensor cores want them. Outputs are filled up to whole tiles and inputs to whole chunks; what kernels read
# there is multiplied by 0.


Number = Literal["int4", "uint4", "int8", "e4m3", "e2m1"]
BITS: dict[Number, int] = {"int4": 4, "uint4": 4, "int8": 8, "e4m3": 8, "e2m1": 4}
"""Integers, and the floating-point numbers of FP8 and FP4."""
TILE = 16
WORDS = 32
HALF = WORDS // 2
"""Inputs that a tensor core multiplies at once, at least; the length of the shortest groups."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The number of each code of FP4: a sign bit, two exponent bits and one mantissa bit."""
E2M1_PLACES = ((15, 6), (12, 3), (14, 0), (13, 9))
"""Of each plane p, the bit of a word that is the sign of input 32 p + j, and the lowest of its three other bits: those
of plane 0 are where bfloat16 has them, those of plane 1 are there after one shift, and the others after two."""
LARGEST_COPY = 1 << 28
"""Entries of the largest weight of which kernels may make a dense copy for many tokens."""
_WORDS_AT_ONCE = 1 << 24


@dataclass(frozen=True, eq=False)
class PackedGroups:
    """A weight [N, K] whose entries are ``(number - zero) * scale + minimum``."""

    number: Number
    shape: tuple[int, int]
    words: Tensor
    """int16 [B, C, 16, 32]"""
    scales_GN: Tensor
    """In the smallest of bfloat16, float16 and float32 that holds them exactly. G is 1 for a scale per output."""
    zeros_GN: Tensor | None = None
    """int8, of integers"""
    minima_GN: Tensor | None = None
    """Like scales; G is more than 1."""
    order_K: Tensor | None = None
    """int64: the input that each column multiplies; ``None``: column k multiplies input k."""

    @property
    def group(self) -> int:
        """Number of columns that share a scale."""
        return self.shape[1] // len(self.scales_GN)

    @property
    def format(self) -> str:
        """Name of the numbers' format."""
        return self.number

    @property
    def num_bytes(self) -> int:
        tensors = (self.words, self.scales_GN, self.zeros_GN, self.minima_GN, self.order_K)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @classmethod
    def pack(
        cls,
        number: Number,
        codes_NK: Tensor,
        scales_NG: Tensor,
        zeros_NG: Tensor | None = None,
        order_K: Tensor | None = None,
        minima_NG: Tensor | None = None,
    ) -> PackedGroups:
        """Pack codes of 8 bits each, integers or the bits of numbers, on the device that they are on.

        Raises ``ValueError`` for groups that kernels do not take; see ``takes_groups``.
        """
        (N, K), G = codes_NK.shape, scales_NG.shape[1]
        if K % G or not takes_groups(number, K, K // G) or (G == 1 and minima_NG is not None):
            raise ValueError(f"groups of {K / G:g} of {K} inputs cannot be packed as {number}")
        return cls(
            number,
            (N, K),
            _words(codes_NK.view(torch.uint8), number),
            _smallest_exact(scales_NG.T.contiguous()),
            None if zeros_NG is None else zeros_NG.T.contiguous(),
            None if minima_NG is None else _smallest_exact(minima_NG.T.contiguous()),
            order_K,
        )

    def unpack(self) -> Tensor:
        """The weight as float32 [N, K], columns in the order of inputs."""
        return self._rows_of(self.words, torch.arange(self.shape[0], device=self.words.device))

    def rows(self, ids_T: Tensor) -> Tensor:
        """Rows of the weight as float32 [T, K]."""
        tiles, row = self.words[ids_T // TILE], ids_T % TILE
        own = torch.take_along_dim(tiles, row[:, None, None, None], dim=2)
        return self._rows_of(own, ids_T)

    def _rows_of(self, words: Tensor, ids_T: Tensor) -> Tensor:
        """Float32 rows: of all in these tiles, as many as there are ids, which choose their scales."""
        T, K = len(ids_T), self.shape[1]
        fields = _fields(words.transpose(1, 2).unsqueeze(3).int(), self.number)
        numbers = _numbers(fields.reshape(-1, fields[0, 0].numel())[:T, :K], self.number)
        weight = numbers.view(T, -1, self.group)
        if self.zeros_GN is not None:
            weight = weight - self.zeros_GN.T[ids_T].unsqueeze(2)
        weight = weight * self.scales_GN.T[ids_T].float().unsqueeze(2)
        if self.minima_GN is not None:
            weight += self.minima_GN.T[ids_T].float().unsqueeze(2)
        weight = weight.flatten(1)
        return weight if self.order_K is None else torch.empty_like(weight).index_copy_(1, self.order_K, weight)


def chunk_of(number: Number) -> int:
    """Inputs of a chunk."""
    return WORDS * 16 // BITS[number]


def takes_groups(number: Number, K: int, group: int) -> bool:
    """Whether scales for groups of this length can be packed: 16, parts of chunks, whole chunks, or the whole row."""
    chunk = chunk_of(number)
    return group in (K, HALF) or group % chunk == 0 or (group % WORDS == 0 and chunk % group == 0)


def _words(codes_NK: Tensor, number: Number) -> Tensor:
    (N, K), bits, chunk = codes_NK.shape, BITS[number], chunk_of(number)
    planes = 16 // bits
    tiles, chunks = -(-N // TILE), -(-K // chunk)
    words = torch.zeros(tiles, chunks, TILE, WORDS, dtype=torch.int16, device=codes_NK.device)
    if words.is_meta:
        return words
    step = max(1, _WORDS_AT_ONCE // words[0].numel())
    for start in range(0, tiles, step):
        part, some = codes_NK[start * TILE : (start + step) * TILE], words[start : start + step].transpose(1, 2)
        fields = part.new_zeros(len(some) * TILE, chunks * chunk)
        torch.bitwise_and(part + 8 if number == "int4" else part, (1 << bits) - 1, out=fields[: len(part), :K])
        for plane, field in enumerate(fields.view(-1, TILE, chunks, planes, WORDS).unbind(3)):
            some.add_(field, alpha=1 << (bits * plane))
        if number == "e2m1":
            own = words[start : start + step].view(-1)
            torch.index_select(_e2m1_words(words.device), 0, own.int().bitwise_and_(0xFFFF), out=own)
    return words


@functools.cache
def _e2m1_words(device: torch.device) -> Tensor:
    """The word, int16, of every four codes of FP4: that of plane p is bits 4 p .. 4 p + 3 of an index."""
    signs, others = _places(device)
    codes = (torch.arange(1 << 16, dtype=torch.int32, device=device) >> _shifts("int4", device)) & 15
    return (((codes >> 3) << signs) + ((codes & 7) << others)).sum(0).to(torch.int16)


def _fields(words: Tensor, number: Number) -> Tensor:
    """Unsigned fields [..., planes, 32] of words [..., 1, 32], int32."""
    if number == "e2m1":
        signs, others = _places(words.device)
        fields = ((words >> signs & 1) << 3) + (words >> others & 7)
    else:
        fields = (words >> _shifts(number, words.device)) & ((1 << BITS[number]) - 1)
    return fields


def _shifts(number: Number, device: torch.device) -> Tensor:
    """Of each plane, [planes, 1]."""
    return torch.arange(0, 16, BITS[number], dtype=torch.int32, device=device).unsqueeze(1)


def _places(device: torch.device) -> tuple[Tensor, Tensor]:
    """``E2M1_PLACES`` of signs and of other bits, [planes, 1] each."""
    signs, others = torch.tensor(E2M1_PLACES, dtype=torch.int32, device=device).unsqueeze(2).unbind(1)
    return signs, others


def _numbers(fields: Tensor, number: Number) -> Tensor:
    """Values of unsigned fields in float32."""
    if number == "int4":
        return fields.float() - 8
    if number == "uint4":
        return fields.float()
    if number == "int8":
        return fields.to(torch.int8).float()
    if number == "e4m3":
        return fields.to(torch.uint8).view(torch.float8_e4m3fn).float()
    return torch.tensor(E2M1, device=fields.device)[fields]


def _smallest_exact(scales: Tensor) -> Tensor:
    for dtype in (torch.bfloat16, torch.float16):
        small = scales.to(dtype)
        if small.is_meta or torch.equal(small.float(), scales):
            return small
    return scales.float()


@op
def grouped_linear(x_TK: Tensor, packed: PackedGroups, fused: Fused = PLAIN) -> Tensor:
    """``ops.linear``, in the dtype of x.

    Activations keep their dtype: only the weight is quantised. Kernels may round scales and minima to the dtype of x,
    and then the entries of the weight, or multiply the rounding of float32 sums by 30. Numbers must be finite.
    """

    def multiply(normed_TK: Tensor) -> Tensor:
        bias = None if fused.bias_N is None else fused.bias_N.float()
        return functional.linear(normed_TK.float(), packed.unpack(), bias).to(x_TK.dtype)

    return compose(x_TK, fused, multiply)


# ---- grouped_output_mlp: What follows attention in a layer whose weights are stored in numbers of 4 or 8 bits.
# Shapes: T tokens, D model, F feed-forward, A attention's outputs.


@op
def grouped_output_mlp(
    attended_TA: Tensor,
    x_TD: Tensor,
    output: PackedGroups,
    norm_D: Tensor,
    eps: float,
    gate_up: PackedGroups,
    down: PackedGroups,
    activation: Activation,
) -> Tensor:
    """``x += output(attended)``, then ``x + down(act(gates) * ups)`` of ``gate_up(rms_norm(x))``, as three calls of
    ``grouped_linear``; x may be overwritten and returned.

    For few rows a kernel may do it at once. Weights: ``output`` [D, A], ``gate_up`` [2 F, D], ``down`` [D, F].
    """
    x_TD = grouped_linear(attended_TA, output, Fused(residual_TN=x_TD))
    inner_TF = grouped_linear(x_TD, gate_up, Fused(norm_K=norm_D, eps=eps, activation=activation))
    return grouped_linear(inner_TF, down, Fused(residual_TN=x_TD))
