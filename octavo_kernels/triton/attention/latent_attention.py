"""``latent_attention`` for CUDA devices: the cache's one key is read once for many heads, and is the value too.

A tile's rows are heads of one token, or of a few. Where a sequence has one row its context is split among programs,
whose sums ``latent_outputs`` adds (Dao et al., "Flash-Decoding", 2023); else a program iterates over the full context
of its rows (Dao et al., arXiv 2205.14135), or ``latent_prompts`` attends to keys and values of each head. All bounds
are read on the device, and so is how many programs share a context.

Shapes: T tokens, S sequences, N heads, P rotated part of a head, L latent, H = P + L, X = L or L + 1; a tile's rows M
and keys C.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.attention.attention import LayerCache, PagedRows
from octavo.ops.attention.choose_keys import ChosenKeys
from octavo.ops.attention.latent_attention import LatentHeads, latent_attention
from octavo.ops.attention.partial_attention import partial_latent_attention
from octavo.ops.collective import WHOLE_CONTEXT, ContextPart
from octavo.ops.linear.linear import head_linear
from octavo_kernels.triton.attention.latent_inputs import latent_inputs
from octavo_kernels.triton.attention.latent_outputs import (
    FEW_SUMS,
    MOST_SUMS,
    PROGRAMS,
    Parts,
    keys_of_run,
    latent_outputs,
    latent_sums,
    seen_from,
    single_row,
)
from octavo_kernels.triton.attention.latent_prompts import attend_prompts, expanded_tiles, room_for
from octavo_kernels.triton.attention.prefill_attention import MAX_SPARE, key_blocks
from octavo_kernels.triton.launch import (
    after_predecessor,
    declines_floats,
    is_invariant,
    launch,
    prefetch_lines,
    shared_bytes,
)
from octavo_kernels.triton.split_sums import LOG2_E, NO_SCORE, part_count, store_log


class LatentTile(NamedTuple):
    """How a tile is computed: its rows and keys, the warps that do it, and how many tiles of keys are in flight."""

    rows: int
    keys: int
    warps: int
    stages: int


FEW_HEADS, MANY_HEADS, ROWS = LatentTile(16, 64, 8, 3), LatentTile(32, 64, 8, 2), LatentTile(64, 64, 8, 2)
"""For one token of up to 16 heads, of more, and for several tokens; measured on an H100 with latents of 512."""
FITTING_KEYS = {220 * 1024: 64, 114 * 1024: 32, 0: 16}
"""Keys of a tile for which two stages of ROWS fit, by the bytes of shared memory that a program may have at least."""
FLOAT32 = LatentTile(16, 16, 8, 1)
"""Its products are made of multiply-adds."""


@latent_attention.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def latent_attention_triton(
    q_TW: Tensor,
    kv_TC: Tensor,
    heads: LatentHeads,
    cos_TR: Tensor,
    sin_TR: Tensor,
    cache: LayerCache,
    rows: PagedRows,
    chosen: ChosenKeys | None = None,
) -> Tensor:
    """See ``ops.latent_attention``. Where results may not depend on other rows, one kernel takes all rows."""
    assert cache.context is None, "the cache has a part of each context"
    (N, L, _), (T, R) = heads.key_map_NLP.shape, cos_TR.shape
    q_TNH = latent_inputs(q_TW, kv_TC, heads, cos_TR, sin_TR, cache.keys, rows.of(cache).slot_mapping_T)
    if chosen is not None:
        cache, rows = chosen.of(cache, rows)
    out_TNL = q_TNH.new_empty(T, N, L)
    is_decode = rows.max_query_len == 1
    has_single = (is_decode or len(rows.seq_lens_S) > 1) and not is_invariant()
    has_single |= chosen is not None
    given, parts = (q_TNH, 2 * R, cache, rows, heads.scale, out_TNL), None
    if has_single:
        splits = 1 if is_invariant() else None
        parts = attend_single_rows(*given, splits, sinks_N=heads.sinks_N, window=heads.window)
    room = room_for(q_TNH, heads, cache, rows)
    if not (is_decode and has_single):
        room_tiles = 0 if room is None else room.num_tiles
        attend_rows(*given, has_single, room_tiles, sinks_N=heads.sinks_N, window=heads.window)
    out_TNV: Tensor
    if is_decode and parts is not None:
        out_TNV = q_TNH.new_empty(T, N, heads.value_map_NVL.shape[1])
    else:
        out_TNV = head_linear(out_TNL, heads.value_map_NVL)
    if parts is not None:
        latent_outputs(parts, heads.value_map_NVL, rows, out_TNV)
    if room is not None:
        attend_prompts(q_TW.view(T, N, -1), q_TNH[..., : 2 * R], heads, cache, rows, room, out_TNV)
    return out_TNV


@partial_latent_attention.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def partial_latent_attention_triton(
    q_TNH: Tensor, latent_size: int, scale: float, cache: LayerCache, rows: PagedRows, part: ContextPart
) -> Tensor:
    """See ``ops.partial_latent_attention``."""
    assert part.size > 1, "results of single rows are added in parts"
    T, N, H = q_TNH.shape
    q_TNH, split = q_TNH.contiguous(), H - latent_size
    out_TNX = torch.empty(T, N, latent_size + 1, dtype=torch.float32, device=q_TNH.device)
    is_decode = rows.max_query_len == 1
    has_single = (is_decode or len(rows.seq_lens_S) > 1) and not is_invariant()
    if has_single:
        parts = attend_single_rows(q_TNH, split, cache, rows, scale, out_TNX, part=part)
        assert parts is not None
        latent_sums(parts, rows, part, out_TNX)
    if not (is_decode and has_single):
        attend_rows(q_TNH, split, cache, rows, scale, out_TNX, has_single, part=part)
    return out_TNX


def attend_single_rows(
    q_TNH: Tensor,
    split: int,
    cache: LayerCache,
    rows: PagedRows,
    scale: float,
    out_TNX: Tensor,
    splits: int | None = None,
    part: ContextPart = WHOLE_CONTEXT,
    sinks_N: Tensor | None = None,
    window: int = 0,
) -> Parts | None:
    """Attend for rows that are the only ones of their sequences; at most ``splits`` programs share a context.

    Returns the parts that ``latent_outputs`` or ``latent_sums`` adds, or ``None`` if neither programs nor ranks share
    contexts: ``out`` is filled then.
    """
    S, (_, N, H) = len(rows.seq_lens_S), q_TNH.shape
    keys, block_tables_SB = cache.keys, rows.of(cache).block_tables_SB
    config = _config(q_TNH, FEW_HEADS if N <= 16 else MANY_HEADS)
    tiles = triton.cdiv(N, config.rows)
    most = MOST_SUMS if rows.has_long_context else FEW_SUMS
    splits = splits or max(1, min(PROGRAMS // (S * tiles), most))
    shape = (S, tiles, splits, config.rows)
    is_shared = splits > 1 or part.size > 1
    sums = torch.empty(*shape, H - split, dtype=torch.float32, device=q_TNH.device) if is_shared else out_TNX
    logs = torch.empty(shape, dtype=torch.float32, device=q_TNH.device) if is_shared else None
    # fmt: off
    launch(
        single_rows_kernel, (splits * tiles * S,),  # a row whose keys are chosen is a sequence: no other axis has room
        q_TNH, keys, sums, logs, sinks_N, block_tables_SB, None if rows.max_query_len == 1 else rows.cu_seqlens_q,
        rows.seq_lens_S, scale * LOG2_E.value, block_tables_SB.stride(0), keys.stride(0), splits,
        **_constants(q_TNH, split, keys, config, part, window),
    )
    # fmt: on
    return None if logs is None else Parts(sums, logs, config.keys, window)


def attend_rows(
    q_TNH: Tensor,
    split: int,
    cache: LayerCache,
    rows: PagedRows,
    scale: float,
    out_TNX: Tensor,
    skip_single: bool = False,
    room_tiles: int = 0,
    part: ContextPart = WHOLE_CONTEXT,
    sinks_N: Tensor | None = None,
    window: int = 0,
) -> None:
    """Fill ``out`` for any numbers of rows: with latents, or as ``ops.partial_latent_attention`` does.

    With ``skip_single`` the rows of sequences that have exactly one are not written; those of sequences that are
    expanded in room for so many tiles never are.
    """
    T, N, _ = q_TNH.shape
    keys, block_tables_SB = cache.keys, rows.of(cache).block_tables_SB
    S, config = len(rows.seq_lens_S), _config(q_TNH, ROWS)
    heads = min(triton.next_power_of_2(N), config.rows)
    programs = T // (config.rows // heads) + min(S, MAX_SPARE)
    # fmt: off
    launch(
        rows_kernel, (programs, triton.cdiv(N, heads)),
        q_TNH, keys, out_TNX, sinks_N, block_tables_SB, rows.cu_seqlens_q, rows.seq_lens_S,
        scale * LOG2_E.value, S, room_tiles, block_tables_SB.stride(0), keys.stride(0),
        **_constants(q_TNH, split, keys, config, part, window), X=out_TNX.shape[2], HEADS=heads,
        SEQUENCES=max(128, triton.next_power_of_2(S)), SKIP_SINGLE=skip_single, SKIP_EXPANDED=room_tiles > 0,
    )
    # fmt: on


def _config(q_TNH: Tensor, config: LatentTile) -> LatentTile:
    """The configuration for this dtype and device."""
    if q_TNH.dtype == torch.float32:
        return FLOAT32
    room = shared_bytes(q_TNH.device)
    keys = next(keys for least, keys in FITTING_KEYS.items() if room >= least)
    return config if keys >= config.keys else config._replace(keys=keys, stages=2)


def _constants(
    q_TNH: Tensor, split: int, cache: Tensor, config: LatentTile, part: ContextPart, window: int
) -> dict[str, Any]:
    """Compile-time constants of both kernels."""
    _, N, H = q_TNH.shape
    assert q_TNH.is_contiguous()
    assert not window or part.size == 1, "parts of contexts have no windows"
    return {
        "RANK": part.rank,
        "PARTS": part.size,
        "N": N,
        "P": split,
        "L": H - split,
        "PP": max(16, triton.next_power_of_2(split)),
        "LP": max(16, triton.next_power_of_2(H - split)),
        "BLOCK_SIZE": cache.shape[2],
        "ROWS": config.rows,
        "KEYS": config.keys,
        "STAGES": config.stages,
        "WINDOW": window,
        "num_warps": config.warps,
    }


@triton.jit(do_not_specialize=["table_stride", "max_splits"])
def single_rows_kernel(
    q_ptr: tl.tensor, cache_ptr: tl.tensor, out_ptr: tl.tensor, logs_ptr: tl.tensor, sinks_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    cu_seqlens_ptr: tl.tensor, seq_lens_ptr: tl.tensor, scale: tl.tensor, table_stride: tl.tensor,
    block_stride: tl.tensor, max_splits: tl.tensor, RANK: tl.constexpr, PARTS: tl.constexpr, N: tl.constexpr,
    P: tl.constexpr, L: tl.constexpr, PP: tl.constexpr, LP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """A run of keys for ROWS heads of a sequence's one row; with ``logs``, ``out`` are the sums of runs."""
    TILES: tl.constexpr = tl.cdiv(N, ROWS)
    split, of_split = tl.program_id(0) % max_splits, tl.program_id(0) // max_splits
    tile, seq = of_split % TILES, of_split // TILES
    head_M, d_L = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, LP)
    # What was uploaded for the step is of kernels long before.
    row, length = single_row(seq, seq >= 0, cu_seqlens_ptr, seq_lens_ptr)
    length = part_count(length, RANK, PARTS)
    first, first_tile = seen_from(length, WINDOW, KEYS)
    keys_each = keys_of_run(length - first_tile, max_splits, KEYS)
    begin = first_tile + split * keys_each
    end = tl.minimum(begin + keys_each, length)
    tables_ptr += seq.to(tl.int64) * table_stride
    if PDL and begin < length:  # the first keys are on their way to the cache when the queries are there
        key_C = tl.minimum(begin + tl.arange(0, KEYS), end - 1)
        block_C = tl.load(tables_ptr + key_C // BLOCK_SIZE).to(tl.int64)
        at_C1 = cache_ptr + (block_C * block_stride + key_C % BLOCK_SIZE * (P + L))[:, None]
        prefetch_lines(at_C1, P + L)
    after_predecessor(PDL)
    if begin < length:
        q_ML, q_MP = _queries(q_ptr, row * N + head_M, head_M < N, P, L, PP, LP)
        peak_M, total_M, acc_ML = _walk(
            q_ML, q_MP, sinks_ptr, head_M, tl.zeros_like(head_M) + length - 1, first, begin, end, cache_ptr,
            tables_ptr, block_stride, scale, N, P, L, PP, LP, BLOCK_SIZE, KEYS, STAGES, WINDOW,
        )  # fmt: skip
        to_M = row * N + head_M
        if logs_ptr is not None:
            part = of_split.to(tl.int64) * max_splits + split
            to_M = part * ROWS + tl.arange(0, ROWS)
            tl.store(logs_ptr + to_M, peak_M + tl.log2(total_M))
        mean_ML = (acc_ML / total_M[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + to_M[:, None] * L + d_L[None, :], mean_ML, mask=(head_M < N)[:, None] & (d_L < L)[None, :])


@triton.jit(do_not_specialize=["S", "room_tiles", "table_stride"])
def rows_kernel(
    q_ptr: tl.tensor, cache_ptr: tl.tensor, out_ptr: tl.tensor, sinks_ptr: tl.tensor, tables_ptr: tl.tensor,
    cu_seqlens_ptr: tl.tensor, seq_lens_ptr: tl.tensor, scale: tl.tensor, S: tl.tensor, room_tiles: tl.tensor,
    table_stride: tl.tensor,
    block_stride: tl.tensor, RANK: tl.constexpr, PARTS: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    L: tl.constexpr, PP: tl.constexpr, LP: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr, X: tl.constexpr, HEADS: tl.constexpr,
    SEQUENCES: tl.constexpr, SKIP_SINGLE: tl.constexpr, SKIP_EXPANDED: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Tiles of HEADS heads of a few tokens, those of a sequence from its last rows, which see most, to its first."""
    TOKENS: tl.constexpr = ROWS // HEADS
    m_M, s_S, d_L = tl.arange(0, ROWS), tl.arange(0, SEQUENCES), tl.arange(0, LP)
    head_M = tl.program_id(1) * HEADS + m_M % HEADS
    after_predecessor(PDL)
    start_S = tl.load(cu_seqlens_ptr + s_S, mask=s_S < S, other=0)
    num_rows_S = tl.load(cu_seqlens_ptr + s_S + 1, mask=s_S < S, other=0) - start_S
    if SKIP_SINGLE:
        num_rows_S = tl.where(num_rows_S == 1, 0, num_rows_S)
    if SKIP_EXPANDED:
        is_expanded_S = expanded_tiles(cu_seqlens_ptr, seq_lens_ptr, S, room_tiles, SEQUENCES) > 0
        num_rows_S = tl.where(is_expanded_S, 0, num_rows_S)
    num_tiles_S = tl.cdiv(num_rows_S, TOKENS)
    end_tile_S = tl.cumsum(num_tiles_S)
    num_tiles = tl.sum(num_tiles_S)
    for done in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), num_stages=1, disable_licm=True):
        tile = num_tiles - 1 - done
        s = tl.sum((end_tile_S <= tile).to(tl.int32))
        stop = tl.load(cu_seqlens_ptr + s + 1)
        first = tl.load(cu_seqlens_ptr + s) + (tile - tl.sum(tl.where(s_S < s, num_tiles_S, 0))) * TOKENS
        shift = tl.load(seq_lens_ptr + s) - stop  # from a row to its position
        token_M = first + m_M // HEADS
        is_in_M = (token_M < stop) & (head_M < N)
        q_ML, q_MP = _queries(q_ptr, token_M * N + head_M, is_in_M, P, L, PP, LP)
        last_M = part_count(shift + token_M + 1, RANK, PARTS) - 1
        end = part_count(shift + tl.minimum(first + TOKENS, stop), RANK, PARTS)
        seen, begin = seen_from(shift + first + 1, WINDOW, KEYS)
        peak_M, total_M, acc_ML = _walk(
            q_ML, q_MP, sinks_ptr, head_M, last_M, seen, begin, end, cache_ptr,
            tables_ptr + s.to(tl.int64) * table_stride, block_stride, scale, N, P, L, PP, LP, BLOCK_SIZE, KEYS, STAGES,
            WINDOW,
        )  # fmt: skip
        to_M = out_ptr + (token_M * N + head_M).to(tl.int64) * X
        if X > L:
            total_M = store_log(to_M + L, peak_M, total_M, is_in_M)
        out_ML = (acc_ML / total_M[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(to_M[:, None] + d_L[None, :], out_ML, mask=is_in_M[:, None] & (d_L < L)[None, :])


@triton.jit
def _queries(
    q_ptr: tl.tensor, row_M: tl.tensor, is_in_M: tl.tensor, P: tl.constexpr, L: tl.constexpr, PP: tl.constexpr,
    LP: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The unrotated and the rotated parts of these queries; 0 where there is none."""
    p_P, d_L = tl.arange(0, PP), tl.arange(0, LP)
    at_M1 = q_ptr + (row_M.to(tl.int64) * (P + L))[:, None]
    q_MP = tl.load(at_M1 + p_P[None, :], mask=is_in_M[:, None] & (p_P < P)[None, :], other=0.0)
    q_ML = tl.load(at_M1 + P + d_L[None, :], mask=is_in_M[:, None] & (d_L < L)[None, :], other=0.0)
    return q_ML, q_MP


@triton.jit
def _walk(
    q_ML: tl.tensor, q_MP: tl.tensor, sinks_ptr: tl.tensor, head_M: tl.tensor, position_M: tl.tensor, seen: tl.tensor,
    begin: tl.tensor, end: tl.tensor, cache_ptr: tl.tensor, table_ptr: tl.tensor, block_stride: tl.tensor,
    scale: tl.tensor, N: tl.constexpr, P: tl.constexpr, L: tl.constexpr, PP: tl.constexpr, LP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Largest score, sum of weights and weighted latents over keys ``begin`` to ``end`` up to each row's position, none
    before ``seen``. With the first keys come the sinks of heads."""
    p_P, d_L = tl.arange(0, PP), tl.arange(0, LP)
    peak_M = tl.full([q_ML.shape[0]], NO_SCORE, tl.float32)
    total_M = tl.zeros([q_ML.shape[0]], tl.float32)
    acc_ML = tl.zeros([q_ML.shape[0], LP], tl.float32)
    if sinks_ptr is not None:
        sink_M = tl.load(sinks_ptr + head_M, mask=head_M < N, other=0.0) * LOG2_E
        peak_M = tl.where(begin <= seen, sink_M, peak_M)
        total_M = tl.where(begin <= seen, 1.0, total_M)
    block = key_blocks(table_ptr, begin, end, BLOCK_SIZE, KEYS)
    for at in tl.range(begin, end, KEYS, num_stages=STAGES):
        key_C = at + tl.arange(0, KEYS)
        is_key_C1 = (key_C < end)[:, None]  # slots behind may be NaN, which a weight of 0 would not undo
        if WINDOW > 0:  # and so may those before
            is_key_C1 = is_key_C1 & (key_C >= seen)[:, None]
        at_C1 = cache_ptr + block.to(tl.int64) * block_stride + (key_C % BLOCK_SIZE)[:, None] * (P + L)
        k_CL = tl.load(at_C1 + P + d_L[None, :], mask=is_key_C1 & (d_L < L)[None, :], other=0.0).to(q_ML.dtype)
        k_CP = tl.load(at_C1 + p_P[None, :], mask=is_key_C1 & (p_P < P)[None, :], other=0.0).to(q_ML.dtype)
        block = key_blocks(table_ptr, at + KEYS, end, BLOCK_SIZE, KEYS)
        scores_MC = tl.dot(q_MP, tl.trans(k_CP), input_precision="ieee")
        scores_MC = tl.dot(q_ML, tl.trans(k_CL), scores_MC, input_precision="ieee") * scale
        scores_MC = tl.where(key_C[None, :] <= tl.minimum(position_M, end - 1)[:, None], scores_MC, float("-inf"))
        if WINDOW > 0:
            scores_MC = tl.where(key_C[None, :] > position_M[:, None] - WINDOW, scores_MC, float("-inf"))
        top_M = tl.maximum(peak_M, tl.max(scores_MC, 1))
        weights_MC = tl.exp2(scores_MC - top_M[:, None])
        shrink_M = tl.exp2(peak_M - top_M)
        total_M = total_M * shrink_M + tl.sum(weights_MC, 1)
        acc_ML = tl.dot(weights_MC.to(k_CL.dtype), k_CL, acc_ML * shrink_M[:, None], input_precision="ieee")
        peak_M = top_M
    return peak_M, total_M, acc_ML
