"""``encoder_attention`` for CUDA devices: a program has a tile of one text's rows for one head.

The softmax is taken while walking over the keys, as in ``prefill_attention``; tiles of keys begin at the text's first
row, so that a row's result is bitwise the same whatever the other texts are. Heads of 72 numbers, say, are 64 and 16
columns of a product, not 128.

Shapes: T tokens of several texts, N heads, K kv heads, H head dim, M rows of a tile, C keys of a tile.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.attention.attention import encoder_attention
from octavo_kernels.triton.attention.prefill_attention import PrefillTile, config_for
from octavo_kernels.triton.launch import after_predecessor, declines_floats, launch, shared_bytes
from octavo_kernels.triton.split_sums import LOG2_E, NO_SCORE

MOST_ROWS = PrefillTile(128, 64, 8, 3, 128)
"""For heads of up to 128 in 16 bits where a program may have as much shared memory; up to 96 columns two programs share
a multiprocessor."""
LEAST_SHARED = 160 * 1024


def widths(head_dim: int) -> tuple[int, int]:
    """Columns of the one or two products that a head takes, powers of two, in all as few as possible; 0: none."""
    whole = max(16, triton.next_power_of_2(head_dim))
    rest = max(16, triton.next_power_of_2(head_dim - whole // 2))
    return (whole // 2, rest) if 16 <= rest < whole // 2 else (whole, 0)


def tile_for(element: int, head_dim: int, room: int) -> PrefillTile:
    """The tile for queries of ``element`` bytes a number on a GPU with ``room`` bytes of shared memory a program."""
    if element == 2 and head_dim <= 128 and room >= LEAST_SHARED:
        return MOST_ROWS if sum(widths(head_dim)) <= 96 else MOST_ROWS._replace(registers=None)
    return config_for(element, triton.next_power_of_2(head_dim), room)


_in_graphs: dict[tuple[Any, ...], Tensor] = {}
"""Tiles that captured graphs use, which are never freed."""


def _tiles(ends: tuple[int, ...], rows: int, device: torch.device) -> Tensor:
    """As ``_new_tiles``, and kept if a graph is captured."""
    key = ends, rows, device
    if key not in _in_graphs:
        found = _new_tiles(*key)
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            return found
        _in_graphs[key] = found
    return _in_graphs[key]


@functools.lru_cache(maxsize=8)
def _new_tiles(ends: tuple[int, ...], rows: int, device: torch.device) -> Tensor:
    """The first row of each tile, and the first row and the end of its text: int32 [tiles, 3]. All layers of a step
    have the same."""
    found, start = [], 0
    for end in ends:
        found += [(first, start, end) for first in range(start, end, rows)]
        start = end
    on_host = torch.tensor(found, dtype=torch.int32, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)


@encoder_attention.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def encoder_attention_triton(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    ends: Sequence[int],
    scale: float,
    window: int = 0,
    bias_NM: Tensor | None = None,
) -> Tensor:
    """See ``ops.encoder_attention``."""
    T, N, H = q_TNH.shape
    q_TNH, k_TKH, v_TKH = (x if x.stride()[1:] == (H, 1) else x.contiguous() for x in (q_TNH, k_TKH, v_TKH))
    out_TNH = torch.empty(T, N, H, dtype=q_TNH.dtype, device=q_TNH.device)
    if not T:
        return out_TNH
    config = tile_for(q_TNH.element_size(), H, shared_bytes(q_TNH.device))
    tiles = _tiles(tuple(ends), config.rows, q_TNH.device)
    width, rest = widths(H)
    most = 0 if bias_NM is None else bias_NM.shape[1] // 2
    # fmt: off
    launch(
        encoder_attention_kernel, (len(tiles), N),
        q_TNH, k_TKH, v_TKH, out_TNH, tiles, bias_NM, LOG2_E.value * scale, window, most,
        q_TNH.stride(0), k_TKH.stride(0), v_TKH.stride(0), GROUP=N // k_TKH.shape[1], H=H, WIDTH=width, REST=rest,
        ROWS=config.rows, KEYS=config.keys, HAS_WINDOW=window > 0, STAGES=config.stages, num_warps=config.warps,
        maxnreg=config.registers,
    )
    # fmt: on
    return out_TNH


@triton.jit(do_not_specialize=["window", "most"])
def encoder_attention_kernel(
    q_ptr: tl.tensor, k_ptr: tl.tensor, v_ptr: tl.tensor, out_ptr: tl.tensor, tiles_ptr: tl.tensor,
    bias_ptr: tl.tensor, scale: tl.tensor, window: tl.tensor, most: tl.tensor, q_stride: tl.tensor,
    k_stride: tl.tensor, v_stride: tl.tensor, GROUP: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr,
    REST: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Compute one tile of one head; ``scale`` makes powers of two of products. Tiles of keys that all rows see to
    their end come first, without a mask; with a window there are none."""
    head = tl.program_id(1)
    first = tl.load(tiles_ptr + tl.program_id(0) * 3)
    start = tl.load(tiles_ptr + tl.program_id(0) * 3 + 1)
    end = tl.load(tiles_ptr + tl.program_id(0) * 3 + 2)
    row_M = first + tl.arange(0, ROWS)
    is_row_M = row_M < end
    begin, stop = start, end
    whole = start + (end - start) // KEYS * KEYS
    if HAS_WINDOW:  # tiles of keys begin at the same places for all rows
        begin = start + tl.maximum(first - window - start, 0) // KEYS * KEYS
        stop = tl.minimum(first + ROWS + window, end)
        whole = begin
    k_ptr += head // GROUP * H
    v_ptr += head // GROUP * H
    if bias_ptr is not None:
        bias_ptr += head * (2 * most + 1)
    after_predecessor(PDL)
    queries, sums = (), ()  # type: tuple[tl.tensor, ...], tuple[tl.tensor, ...]
    queries += (_rows(q_ptr + head * H, row_M, q_stride, is_row_M, 0, WIDTH, H, True),)
    sums += (tl.zeros([ROWS, WIDTH], tl.float32),)
    if REST > 0:
        queries += (_rows(q_ptr + head * H, row_M, q_stride, is_row_M, WIDTH, REST, H, True),)
        sums += (tl.zeros([ROWS, REST], tl.float32),)
    peak_M = tl.full([ROWS], NO_SCORE, tl.float32)
    sum_M = tl.zeros([ROWS], tl.float32)
    # fmt: off
    for at in tl.range(begin, whole, KEYS, num_stages=STAGES):
        sums, peak_M, sum_M = _fold(
            at, sums, peak_M, sum_M, queries, row_M, end, k_ptr, v_ptr, bias_ptr, scale, window, most, k_stride,
            v_stride, H, WIDTH, REST, KEYS, HAS_WINDOW, MASKED=False)
    for at in tl.range(whole, stop, KEYS, num_stages=STAGES if HAS_WINDOW else 1):
        sums, peak_M, sum_M = _fold(
            at, sums, peak_M, sum_M, queries, row_M, end, k_ptr, v_ptr, bias_ptr, scale, window, most, k_stride,
            v_stride, H, WIDTH, REST, KEYS, HAS_WINDOW, MASKED=True)
    # fmt: on
    to_M = out_ptr + row_M.to(tl.int64) * (tl.num_programs(1) * H) + head * H
    _store(to_M, sums[0] / sum_M[:, None], is_row_M, 0, WIDTH, H)
    if REST > 0:
        _store(to_M, sums[1] / sum_M[:, None], is_row_M, WIDTH, REST, H)


@triton.jit
def _fold(
    at: tl.tensor, sums: tl.tuple, peak_M: tl.tensor, sum_M: tl.tensor, queries: tl.tuple, row_M: tl.tensor,
    end: tl.tensor, k_ptr: tl.tensor, v_ptr: tl.tensor, bias_ptr: tl.tensor, scale: tl.tensor, window: tl.tensor,
    most: tl.tensor, k_stride: tl.tensor, v_stride: tl.tensor, H: tl.constexpr, WIDTH: tl.constexpr,
    REST: tl.constexpr, KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr, MASKED: tl.constexpr,
) -> tuple[tl.tuple, tl.tensor, tl.tensor]:  # fmt: skip
    """Add the tile of keys from ``at`` on to the sums."""
    key_C = at + tl.arange(0, KEYS)
    is_key_C = key_C < end
    k_CH = _rows(k_ptr, key_C, k_stride, is_key_C, 0, WIDTH, H, MASKED)
    scores_MC = tl.dot(queries[0], tl.trans(k_CH), input_precision="ieee")
    if REST > 0:
        k_CR = _rows(k_ptr, key_C, k_stride, is_key_C, WIDTH, REST, H, MASKED)
        scores_MC = tl.dot(queries[1], tl.trans(k_CR), scores_MC, input_precision="ieee")
    v_CH = _rows(v_ptr, key_C, v_stride, is_key_C, 0, WIDTH, H, MASKED)
    distance_MC = key_C[None, :] - row_M[:, None]
    if bias_ptr is not None:
        place_MC = tl.minimum(tl.maximum(distance_MC, -most), most) + most
        scores_MC = scores_MC * scale + tl.load(bias_ptr + place_MC) * LOG2_E
        scale = 1.0
    if MASKED:
        is_seen_MC = is_key_C[None, :]
        if HAS_WINDOW:
            is_seen_MC = is_seen_MC & (distance_MC <= window) & (distance_MC >= -window)
        scores_MC = tl.where(is_seen_MC, scores_MC, float("-inf"))
    top_M = tl.maximum(peak_M, tl.max(scores_MC, 1) * scale)
    weights_MC = tl.exp2(scores_MC * scale - top_M[:, None])
    shrink_M = tl.exp2(peak_M - top_M)
    sum_M = sum_M * shrink_M + tl.sum(weights_MC, 1)
    weights_MC = weights_MC.to(v_CH.dtype)
    next_sums = ()  # type: tuple[tl.tensor, ...]
    next_sums += (tl.dot(weights_MC, v_CH, sums[0] * shrink_M[:, None], input_precision="ieee"),)
    if REST > 0:
        v_CR = _rows(v_ptr, key_C, v_stride, is_key_C, WIDTH, REST, H, MASKED)
        next_sums += (tl.dot(weights_MC, v_CR, sums[1] * shrink_M[:, None], input_precision="ieee"),)
    return next_sums, top_M, sum_M


@triton.jit
def _rows(
    ptr: tl.tensor, row_M: tl.tensor, stride: tl.tensor, is_row_M: tl.tensor, FROM: tl.constexpr, WIDTH: tl.constexpr,
    H: tl.constexpr, MASKED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """WIDTH columns of rows; 0 behind a head's end and, if MASKED, for what is no row."""
    h_H = FROM + tl.arange(0, WIDTH)
    at_MH = ptr + row_M[:, None].to(tl.int64) * stride + h_H[None, :]
    if MASKED:
        return tl.load(at_MH, mask=is_row_M[:, None] & (h_H < H)[None, :], other=0.0)
    if FROM + WIDTH > H:
        return tl.load(at_MH, mask=(h_H < H)[None, :], other=0.0)
    return tl.load(at_MH)


@triton.jit
def _store(
    to_M: tl.tensor, out_MH: tl.tensor, is_row_M: tl.tensor, FROM: tl.constexpr, WIDTH: tl.constexpr, H: tl.constexpr
) -> None:
    h_H = FROM + tl.arange(0, WIDTH)
    mask = is_row_M[:, None] & (h_H < H)[None, :]
    tl.store(to_M[:, None] + h_H[None, :], out_MH.to(to_M.dtype.element_ty), mask=mask)
