"""How long attention of single rows takes over a long context on a GPU, by the type of the KV cache.

Times are those of one layer, of a CUDA graph whose calls read other caches each, with all that a layer does between its
projections: the row's key and value are stored as well. The floor is the time in which the GPU reads the context's
bytes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from octavo import ops
from octavo.errors import ConfigError
from octavo.ops.attention import GroupRows, HeadLayout, LayerCache, PagedRows
from octavo.ops.cache_rows import INT4, STORED, pack_rows
from octavo.weights.dtypes import DTYPES
from octavo_bench import ceilings
from octavo_kernels.triton.attention import decode_attention
from octavo_kernels.triton.configs.decode_attention import DecodeConfig
from octavo_kernels.triton.graph_timing import microseconds
from octavo_kernels.triton.launch import compiling

DEVICE, DTYPE, BLOCK_SIZE = torch.device("cuda"), torch.bfloat16, 64
KINDS = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "int4": STORED[INT4]}
ALONE_BYTES = 400_000_000
"""Of the caches that take turns at least: several times any cache of the GPU."""
SWEPT = [
    DecodeConfig(tile, warps, splits, stages=stages, registers=registers)
    for tile, warps, splits, stages in itertools.product((32, 64), (2, 4, 8), (32, 64), (2, 3, 4))
    for registers in ((None, 128) if warps == 4 else (None,))
]


def measure(
    kinds: Sequence[str], contexts: Sequence[int], sequences: Sequence[int], heads: Sequence[int], sweep: bool
) -> dict[str, Any]:
    """A record for each type, number of sequences and context; ``heads``: query heads, KV heads and head dim.

    With ``sweep``, each is measured with every tiling of ``SWEPT``, and ``fastest`` has the best three. Raises
    ``ConfigError``.
    """
    known = {**DTYPES, **KINDS}
    for kind in kinds:
        if kind not in known:
            raise ConfigError(f"kinds: {kind!r} is not one of {', '.join(known)}")
    if len(heads) != 3:
        raise ConfigError(f"heads: {heads} are not three numbers: query heads, KV heads, head dim")
    N, K, H = heads
    layout, limits = HeadLayout(N, K, H, H**-0.5), ceilings.measure()
    rows = [
        _figures(kind, known[kind], count, context, layout, limits["read_tb_s"], sweep)
        for kind, count, context in itertools.product(kinds, sequences, contexts)
    ]
    return {**limits, "heads": list(heads), "rows": rows}


def _figures(
    kind: str, dtype: torch.dtype, count: int, context: int, heads: HeadLayout, tb_s: float, sweep: bool
) -> dict[str, Any]:
    calls, num_bytes = _layers(dtype, count, context, heads)
    taken, floor = microseconds(calls, with_pdl=True), num_bytes / tb_s / 1e6
    found: dict[str, Any] = {
        "cache": kind,
        "sequences": count,
        "context": context,
        "microseconds": round(taken, 1),
        "gb_s": round(num_bytes / taken / 1e3),
        "floor_microseconds": round(floor, 1),
        "times_floor": round(taken / floor, 3),
    }
    if sweep:
        with compiling():
            for _ in _swept(calls[0]):
                pass
        times = {config: microseconds(calls, with_pdl=True) for config in _swept(lambda: None)}
        found["fastest"] = [f"{times[config]:.1f}: {config}" for config in sorted(times, key=times.__getitem__)[:3]]
    return found


def _swept(call: Callable[[], object]) -> Iterator[DecodeConfig]:
    """The tilings, while each is in use, after a call with it."""
    for config in SWEPT:
        with mock.patch.object(decode_attention, "config_for", lambda *sizes, config=config, **more: config):
            call()
            yield config


def _layers(
    dtype: torch.dtype, count: int, context: int, heads: HeadLayout
) -> tuple[list[functools.partial[Tensor]], int]:
    """The attention of layers, and the bytes of one layer's context."""
    K, H = heads.num_kv_heads, heads.head_dim
    each = -(-context // BLOCK_SIZE)
    some = torch.randn(BLOCK_SIZE, K, BLOCK_SIZE, H, device=DEVICE)  # blocks, many times over
    stored = pack_rows(some, dtype) if dtype in STORED.values() else some.to(dtype)
    num_bytes = 2 * count * context * stored[0, :, 0].nbytes
    tables = torch.randperm(count * each, device=DEVICE).int().view(count, each)
    last = tables[:, -1].long() * BLOCK_SIZE + (context - 1) % BLOCK_SIZE
    lens = torch.full((count,), context, device=DEVICE, dtype=torch.int32)
    starts = torch.arange(count + 1, device=DEVICE, dtype=torch.int32)
    rows = PagedRows((GroupRows(last, tables),), starts, lens, 1, has_long_context=context > 4096)
    angles = torch.rand(count, H // 2, device=DEVICE)
    qkv = torch.randn(count, sum(heads.sizes), device=DEVICE).to(DTYPE)
    order = torch.arange(count * each, device=DEVICE) % len(stored)

    def blocks() -> Tensor:
        return stored.view(torch.uint8)[order].view(stored.dtype)

    layers = [LayerCache(blocks(), blocks()) for _ in range(max(2, -(-ALONE_BYTES // num_bytes)))]
    return [functools.partial(ops.attention, qkv, heads, angles, angles, cache, rows) for cache in layers], num_bytes
