"""What the tests of the CPU kernels share: when to skip, poisoned results, random blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.ops.attention.attention import GroupRows, HeadLayout, LayerCache, PagedRows, attention
from octavo.ops.linear.block_linear import KINDS, PackedBlocks
from octavo.ops.linear.scaled_linear import ScaledValues
from octavo.weights.gguf.block_formats import BLOCK_KINDS, BlockTensor, Groups
from octavo_kernels.cpu.host import FLOAT_FEATURES, missing
from tests.tiers import nightly

needs_float_kernels = pytest.mark.skipif(missing(FLOAT_FEATURES) is not None, reason=str(missing(FLOAT_FEATURES)))

FLOAT16_PLACES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "TQ1_0": [52],
    "TQ2_0": [64],
    "IQ1_M": [],
    "NVFP4": [],
}
"""Bytes of a block where a float16 factor begins, if not at its own beginning; any other byte may be anything."""
ALIKE = ("IQ1_S", "IQ2_S", "IQ2_XXS", "IQ3_S", "IQ3_XXS", "IQ4_NL", "NVFP4", "TQ1_0", "TQ2_0")
"""Kinds that are packed as others are."""
EVERY_KIND = [nightly(kind) if kind in ALIKE else kind for kind in sorted(KINDS)]
"""As values of a parameter."""


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0) -> BlockTensor:
    rng = np.random.default_rng(seed)
    length, num_bytes = BLOCK_KINDS[kind]
    data = rng.integers(0, 256, (rows, columns // length, num_bytes), dtype=np.uint8)
    for at in FLOAT16_PLACES.get(kind, [0]):
        factors = rng.uniform(-0.01, 0.01, (rows, columns // length, 1)).astype(np.float16)
        data[:, :, at : at + 2] = factors.view(np.uint8)
    if kind == "IQ1_M":  # the top bits of four words are a float16
        halves = rng.uniform(-0.01, 0.01, data.shape[:2]).astype(np.float16).view(np.uint16)
        for place in range(4):
            data[:, :, 49 + 2 * place] = data[:, :, 49 + 2 * place] & 15 | (halves >> 4 * place & 15) << 4
    return BlockTensor(kind, (rows, columns), data.reshape(rows, -1))


def random_ordered(rows: int, columns: int) -> PackedBlocks:
    """Four bits with minima in groups of 64, whose columns multiply inputs in another order."""
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 16, (rows, columns), dtype=np.uint8)
    scales, minima = (rng.uniform(-0.1, 0.1, (rows, columns // 64)).astype(np.float32) for _ in range(2))
    order = torch.from_numpy(rng.permutation(columns).astype(np.int32))
    return PackedBlocks.of_groups("int4", (rows, columns), 4, [Groups(numbers, 0, scales, minima)], order)


def poison_new_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what ``torch.empty`` gives with NaN, so that a result that is not written shows."""

    def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return made

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))


def attended(rows: int, context: int, dtype: torch.dtype) -> Tensor:
    """The outputs of the last rows of two sequences: 6 heads of 80, of which 3 share a kv head."""
    N, K, H, block_size = 6, 2, 80, 16
    num_blocks = -(-context // block_size)
    tables = torch.arange(2 * num_blocks, dtype=torch.int32).view(2, num_blocks)
    keys, values = torch.randn(2, 2 * num_blocks, K, block_size, H).to(dtype)
    position = torch.arange(context - rows, context)
    slots = (tables[:, position // block_size].long() * block_size + position % block_size).flatten()
    starts, lengths = torch.arange(0, 2 * rows + 1, rows, dtype=torch.int32), torch.full((2,), context)
    paged = PagedRows((GroupRows(slots, tables),), starts, lengths, rows)
    qkv = torch.randn(2 * rows, (N + 2 * K) * H)
    return attention(qkv, HeadLayout(N, K, H, H**-0.5), None, None, LayerCache(keys, values), paged)


def random_values(N: int, K: int, group: int) -> ScaledValues:
    """An FP8 weight with all numbers, subnormal ones and both zeros too."""
    codes = torch.randint(0, 256, (N, K), dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x80  # not numbers
    scales = torch.rand(N, -(-K // group)) * 1e-3 + 1e-5
    return ScaledValues(codes.view(torch.float8_e4m3fn), scales, group)
