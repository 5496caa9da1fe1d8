"""Random quantised weights: those of a ``DummyCheckpoint``, rounded to a format with one scale everywhere.

They have the values of an unquantised dummy, up to the error of the format.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from octavo.ops.linear.grouped_linear import E2M1
from octavo.quant.checkpoint_tensors import Tensors
from octavo.quant.module_matching import names_module
from octavo.quant.stored.float4 import Float4Stored
from octavo.quant.stored.groups import num_groups
from octavo.quant.stored.int_group_weight import GroupedStored
from octavo.quant.stored.scaled import ScaledStored
from octavo.weights.dummy import POOL_SIZE, repeated

LARGEST = 0.078125
"""Numbers are clipped to this: four standard deviations."""
UNQUANTISED = ("embed_tokens", "wte", "lm_head", "mlp.gate", "router", "block_sparse_moe.gate")
"""Modules that writers of quantised checkpoints usually leave out."""


def is_quantised_dummy(name: str, kept: tuple[str, ...], tensors: Tensors) -> bool:
    """Whether this module of a dummy is quantised: most are, but not those that ``kept`` names."""
    return tensors.is_dummy and not names_module((*UNQUANTISED, *kept), name)


def dummy_grouped(
    name: str, shape: tuple[int, int], bits: int, groups: int, has_zeros: bool, tensors: Tensors
) -> GroupedStored:
    """Integers of ``bits`` bits with ``groups`` groups; zero points are all 1."""
    step, largest = LARGEST / (1 << (bits - 1)), 1 << (bits - 1)

    def code(numbers: Tensor) -> Tensor:
        return (numbers / step).round_().add_(int(has_zeros)).clamp_(-largest, largest - 1).to(torch.int8)

    codes_NK = _coded(name, shape, tensors, code, torch.int8)
    scales_NG = torch.full((shape[0], groups), step, device=codes_NK.device)
    zeros_NG = torch.ones_like(scales_NG, dtype=torch.int8) if has_zeros else None
    return GroupedStored(codes_NK, scales_NG, zeros_NG, bits)


def dummy_scaled(
    name: str, shape: tuple[int, int], block: tuple[int, int], rounds_activations: bool, tensors: Tensors
) -> ScaledStored:
    """FP8 with scales for blocks of this size."""
    step = LARGEST / 448

    def code(numbers: Tensor) -> Tensor:
        return (numbers / step).clamp_(-448, 448).to(torch.float8_e4m3fn)  # makes numbers beyond 448 NaN

    values_NK = _coded(name, shape, tensors, code, torch.float8_e4m3fn)
    counts = [-(-size // part) for size, part in zip(shape, block, strict=True)]
    scales = torch.full(counts, step, device=values_NK.device)
    return ScaledStored(values_NK, scales, block, rounds_activations)


def dummy_float4(name: str, shape: tuple[int, int], group: int, divides: bool, tensors: Tensors) -> Float4Stored:
    """FP4: MXFP4 with groups of 32, NVFP4 with groups of 16. Raises ``CheckpointError`` naming the module."""
    counts = shape[0], num_groups(name, shape[1], group)

    def code(numbers: Tensor) -> Tensor:
        bounds = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(E2M1[:8])], device=numbers.device)
        numbers = numbers * 64  # so that the scales are a power of two
        codes = torch.bucketize(numbers.abs(), bounds).to(torch.uint8) + 8 * (numbers < 0).to(torch.uint8)
        return codes[::2] | (codes[1::2] << 4)

    pairs = _coded(name, shape, tensors, code, torch.uint8, per_value=2)
    device = pairs.device
    if group == 32:
        return Float4Stored(pairs, torch.full(counts, 127 - 6, dtype=torch.uint8, device=device))
    scales = torch.full(counts, 16.0, device=device).to(torch.float8_e4m3fn)
    return Float4Stored(pairs, scales, torch.full(counts[:1], 1024.0 if divides else 1 / 1024, device=device), divides)


def _coded(
    name: str,
    shape: tuple[int, int],
    tensors: Tensors,
    code: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
    per_value: int = 1,
) -> Tensor:
    """What ``code`` makes of the module's numbers: values of ``dtype``, each of ``per_value`` numbers of a row.

    The numbers repeat themselves, so those of one period are enough. PyTorch takes some tenths of a millisecond for
    each operation on the "meta" device, and a mixture has 100,000 matrices, so there the result is made at once.
    """
    count = math.prod(shape)
    numbers = tensors.numbers(f"{name}.weight", (min(count, per_value * POOL_SIZE),))
    if numbers.is_meta:
        return torch.empty(shape[0], shape[1] // per_value, dtype=dtype, device=numbers.device)
    return repeated(code(numbers), count // per_value).view(shape[0], -1)
