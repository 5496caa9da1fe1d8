"""Attention over the paged cache, and what stores keys and values in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.ops.attention.attention import (
    HeadLayout,
    LayerCache,
    PagedRows,
    RopeSet,
    attention,
    axis_angles,
    rotary_angles,
    store_keys,
)
from octavo.ops.attention.cached_rows import rotated_together, row_length
from octavo.ops.attention.choose_keys import ChosenKeys
from octavo.ops.attention.latent_attention import LatentHeads, latent_attention, store_latents
from octavo.ops.attention.partial_attention import check_heads, merge_parts, partial_attention
from octavo.ops.collective import ContextPart
from octavo.ops.linear.linear import head_linear
from octavo_kernels.cpu.attention.attention_passes import PART, first_seen, num_seen
from octavo_kernels.cpu.attention.attention_rows import STEP, prepare_task
from octavo_kernels.cpu.attention.attention_tiles import STATE, TILE, TILE_ROWS, attend_task
from octavo_kernels.cpu.attention.cached_rows import FORMATS, INT4
from octavo_kernels.cpu.calls import call, task_driver
from octavo_kernels.cpu.compiled import driver, inlined, rarely_used, task
from octavo_kernels.cpu.host import FLOAT_FEATURES, missing
from octavo_kernels.cpu.memory import fields, keep, read, view
from octavo_kernels.cpu.rows.columns import declines
from octavo_kernels.cpu.tensors import address, declines_floats, whole_vectors
from octavo_kernels.cpu.threads import run
from octavo_kernels.cpu.vector_ir import E4M3, E4M3_FACTOR, LANES

# ---- attention: ``attention`` in one call, straight from the block table; prefill and decode rows by the same code.


NUMBERS_A_PIECE = 2048
MULTIPLICATIONS_A_PIECE = 50_000
"""One or two microseconds for a single row, which waits for memory."""
PLAN = fields("num_tiles num_slots work")


@inlined
def _fits(a: Any, starts: Any, lengths: Any, slots: Any) -> bool:
    """Whether the step's lengths, slots and block numbers stay within its tensors."""
    if starts[0] != 0 or starts[a.S] > a.T:
        return False
    for s in range(a.S):
        blocks = (num_seen(a, lengths[s] - 1) + a.block_size - 1) // a.block_size
        if not 0 <= starts[s + 1] - starts[s] <= lengths[s] or blocks > a.table_width:
            return False
        table = view(a.tables + 4 * s * a.table_width, a.table_width, np.int32)
        for i in range(blocks):
            if not 0 <= table[i] < a.num_blocks:
                return False
    num_slots = a.num_blocks * a.block_size
    fits = True
    for slot in slots:
        fits &= slot < num_slots
    return fits


@inlined
def _cut(a: Any, starts: Any, lengths: Any, tiles: Any, plan: Any) -> None:
    """Split the step into tiles and count them; they are stored while there is room."""
    tile_tokens, n, slots, work = max(1, TILE_ROWS // (a.N // a.K)), 0, 0, 0
    for s in range(a.S):
        begin, end = starts[s], starts[s + 1]
        is_single = end - begin == 1
        for row in range(begin, end, tile_tokens):
            tokens = min(tile_tokens, end - row)
            start = lengths[s] - end + row
            most_seen = num_seen(a, start + tokens - 1)
            first_part, last_part = first_seen(a, start) // PART, (most_seen + PART - 1) // PART
            is_cut = is_single and last_part - first_part > 1
            for i in range(last_part - first_part if is_cut else 1):
                if n < len(tiles):
                    tile = tiles[n]
                    tile.sequence, tile.row, tile.num_tokens, tile.start = s, row, tokens, start
                    tile.first_part, tile.last_part = first_part + i, first_part + i + 1 if is_cut else last_part
                    tile.slot, tile.first_slot = slots if is_cut else -1, slots - i
                    tile.num_slots = last_part - first_part
                n += 1
                slots += is_cut
            work += (most_seen - first_seen(a, start)) * tokens * a.N * a.H * 2
    plan.num_tiles, plan.num_slots, plan.work = n, slots, work


@driver
def _attention_driver(pool: int, arguments: int) -> int:
    a = read(arguments, STEP)
    starts, lengths = view(a.starts, a.S + 1, np.int32), view(a.lengths, a.S, np.int32)
    if not _fits(a, starts, lengths, view(a.slots, a.T, np.int64)):
        return 1
    q, plans = np.empty(a.T * a.N * a.width, np.float32), np.empty(1, PLAN)
    a.q = q.ctypes.data
    run(pool, a.prepare, arguments, a.T, max(1, NUMBERS_A_PIECE // ((a.N + 2 * a.stored) * a.H)))
    plan = plans[0]
    _cut(a, starts, lengths, np.empty(0, TILE), plan)
    tiles = np.empty(plan.num_tiles, TILE)
    parts = np.empty(plan.num_slots * a.N * (STATE + a.width), np.float32)
    counts = np.zeros(plan.num_slots * a.K, np.int64)
    _cut(a, starts, lengths, tiles, plan)
    a.counts = counts.ctypes.data
    a.tiles, a.num_tiles, a.parts = tiles.ctypes.data, plan.num_tiles, parts.ctypes.data
    items = plan.num_tiles * a.K
    run(pool, a.attend, arguments, items, max(1, items * MULTIPLICATIONS_A_PIECE // max(1, plan.work)))
    keep((q, tiles, parts, counts, plans))
    return 0


MERGE = fields("parts out sinks P T N H")


@rarely_used
@driver
def _merge_driver(pool: int, arguments: int) -> int:
    a = read(arguments, MERGE)
    sinks, weights = view(a.sinks, a.N, np.float32), np.empty(a.P, np.float32)
    for i in range(a.T * a.N):
        largest, total = np.float32(-np.inf), np.float32(0)
        if a.sinks:
            largest = sinks[i % a.N]
        for p in range(a.P):
            weights[p] = view(a.parts + 4 * ((p * a.T * a.N + i + 1) * (a.H + 1) - 1), 1, np.float32)[0]
            largest = max(largest, weights[p])
        if a.sinks:
            total = np.exp(sinks[i % a.N] - largest)
        for p in range(a.P):
            weights[p] = np.exp(weights[p] - largest)
            total += weights[p]
        out = view(a.out + 4 * i * a.H, a.H, np.float32)
        out[:] = 0
        for p in range(a.P):
            part, weight = view(a.parts + 4 * (p * a.T * a.N + i) * (a.H + 1), a.H, np.float32), weights[p] / total
            for j in range(a.H):
                out[j] += weight * part[j]
    keep(weights)
    return 0


@merge_parts.kernel(device="cpu", name="numba", preference=10, supports=declines)
def merge_parts_numba(parts_PTNX: Tensor, sinks_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    """See ``ops.merge_parts``."""
    (P, T, N, X), parts_PTNX = parts_PTNX.shape, parts_PTNX.contiguous()
    out_TNH = torch.empty(T, N, X - 1)
    call(_merge_driver(), MERGE, (parts_PTNX.data_ptr(), out_TNH.data_ptr(), address(sinks_N), P, T, N, X - 1))
    return out_TNH.to(dtype)


def compile_attention(kv_dtype: torch.dtype) -> None:
    """Compile the slowest kernels of ``attention`` for caches of this type, or load them."""
    attend_task(FORMATS[kv_dtype])
    _attention_driver()


def _check(qkv_TW: Tensor, heads: HeadLayout, cache: LayerCache, slot_mapping_T: Tensor) -> None:
    N, K, H = heads.num_heads, heads.num_kv_heads, heads.head_dim
    shape = cache.keys.shape
    if cache.keys.dtype != cache.values.dtype or cache.keys.dtype not in FORMATS:
        raise ValueError(f"attention: caches of {cache.keys.dtype} and {cache.values.dtype}")
    own, is_even = (K, row_length(cache.keys.dtype, H)), N % K == 0
    if not is_even or qkv_TW.shape[1] != sum(heads.sizes) or shape[1::2] != own or cache.values.shape != shape:
        sizes = f"{N} heads and {K} kv heads of {H}"
        raise ValueError(f"attention: {sizes}, rows of {qkv_TW.shape[1]}, caches {list(shape)}")
    if not (cache.keys.is_contiguous() and cache.values.is_contiguous()):
        raise ValueError("attention: the caches must be contiguous")
    if len(slot_mapping_T) != len(qkv_TW):
        raise ValueError(f"attention: {len(slot_mapping_T)} slots for {len(qkv_TW)} rows")


def _scales(cache: LayerCache, head_dim: int) -> tuple[int, int, float]:
    """The last of STEP's arguments before the results."""
    factor = {E4M3: E4M3_FACTOR, INT4: 1 / rotated_together(head_dim)}.get(FORMATS[cache.keys.dtype], 1.0)
    if cache.scales is None:
        return 0, 0, factor
    return cache.scales.keys_K.data_ptr(), cache.scales.values_K.data_ptr(), factor


@attention.kernel(device="cpu", name="numba", preference=10, supports=declines_floats)
def attention_numba(
    qkv_TW: Tensor, heads: HeadLayout, cos_TR: Tensor | None, sin_TR: Tensor | None, cache: LayerCache, rows: PagedRows
) -> Tensor:
    """See ``ops.attention``; the caches must be contiguous.

    Raises ``IndexError`` when lengths, slots or block numbers do not fit the tensors.
    """
    assert cache.context is None, "the cache has a part of each context"
    return _attended(qkv_TW, heads, cos_TR, sin_TR, cache, rows).flatten(1).to(qkv_TW.dtype)


@partial_attention.kernel(device="cpu", name="numba", preference=10, supports=declines_floats)
def partial_attention_numba(
    qkv_TW: Tensor,
    heads: HeadLayout,
    cos_TR: Tensor | None,
    sin_TR: Tensor | None,
    cache: LayerCache,
    rows: PagedRows,
    part: ContextPart,
) -> Tensor:
    """See ``ops.partial_attention``; for caches and errors, ``attention_numba``."""
    check_heads(heads)
    return _attended(qkv_TW, heads, cos_TR, sin_TR, cache, rows, part)


def _attended(
    qkv_TW: Tensor,
    heads: HeadLayout,
    cos_TR: Tensor | None,
    sin_TR: Tensor | None,
    cache: LayerCache,
    rows: PagedRows,
    part: ContextPart | None = None,
) -> Tensor:
    """What ``partial_attention`` returns; without a part, outputs over the whole context alone, float32 [T, N, H]."""
    slots, tables = rows.of(cache)
    _check(qkv_TW, heads, cache, slots)
    N, K, H = heads.num_heads, heads.num_kv_heads, heads.head_dim
    qkv, T = qkv_TW.float().contiguous(), len(qkv_TW)
    R = 0
    if cos_TR is not None and sin_TR is not None:
        R = cos_TR.shape[1]
        if cos_TR.shape != sin_TR.shape or {cos_TR.dtype, sin_TR.dtype} != {torch.float32} or 2 * R > H:
            raise ValueError(f"attention: cos and sin must be float32 [T, at most {H // 2}]")
        cos_TR, sin_TR = cos_TR.contiguous(), sin_TR.contiguous()
    norms = [None if norm is None else whole_vectors(norm.float()) for norm in (heads.q_norm_H, heads.k_norm_H)]
    ints = tables, rows.cu_seqlens_q, rows.seq_lens_S
    tables, starts, lengths = (x.to(torch.int32).contiguous() for x in ints)
    slots = slots.contiguous()
    bias_TNE = None if heads.bias_TNE is None else heads.bias_TNE.float().contiguous()
    sinks = None if heads.sinks_N is None else heads.sinks_N.contiguous()
    if bias_TNE is not None and bias_TNE.shape[:2] != (T, N):
        raise ValueError(f"attention: bias {list(bias_TNE.shape)} for {T} rows of {N} heads")
    out_TNX = torch.empty(T, N, H if part is None else H + 1)
    number_format, num_blocks, block_size = FORMATS[cache.keys.dtype], cache.keys.shape[0], cache.keys.shape[2]
    values = (
        *(prepare_task(number_format), attend_task(number_format)),
        *(qkv.data_ptr(), T, N, K, 0 if heads.shares_cache else K, H, -(-H // LANES) * LANES, heads.scale),
        *(address(norms[0]), address(norms[1]), heads.norm_eps, address(cos_TR), address(sin_TR), R),
        *(slots.data_ptr(), cache.keys.data_ptr(), cache.values.data_ptr(), num_blocks, block_size),
        *(tables.data_ptr(), tables.shape[1], starts.data_ptr(), lengths.data_ptr(), len(lengths)),
        *(heads.window, heads.softcap, address(sinks), 0 if sinks is None or sinks.dim() == 1 else N),
        address(heads.slopes_N),
        *(address(bias_TNE), 0 if bias_TNE is None else bias_TNE.shape[2], *_scales(cache, H)),
        *(*(part or (0, 1)), out_TNX.data_ptr(), out_TNX.shape[2], *[0] * 5),
    )
    error = "attention: lengths, slots or block numbers do not fit the caches and tables"
    call(_attention_driver(), STEP, values, error)
    return out_TNX


# ---- rotary_angles: ``rotary_angles``: products in float32 as the contract defines them, cosines and sines rounded
# once.


ANGLES_A_PIECE = 64
ARGUMENTS = fields("task T piece positions frequencies cos sin R sets factors num_sets factor:float")


@task
def _task(arguments: int, begin: int, end: int) -> None:
    """Task over rows."""
    a = read(arguments, ARGUMENTS)
    positions = view(a.positions, a.T, np.int64)
    frequencies = view(a.frequencies, a.R * max(1, a.num_sets), np.float32)
    cos, sin = view(a.cos, a.T * a.R, np.float32), view(a.sin, a.T * a.R, np.float32)
    sets, factors = view(a.sets, a.T, np.int64), view(a.factors, a.num_sets, np.float32)
    for t in range(begin, end):
        position, first, factor = np.float32(positions[t]), 0, np.float32(a.factor)
        if a.sets:
            chosen = min(max(sets[t], 0), a.num_sets - 1)
            first, factor = chosen * a.R, factors[chosen]
        for i in range(a.R):
            angle = np.float64(position * frequencies[first + i])
            cos[t * a.R + i] = np.float32(np.cos(angle)) * factor
            sin[t * a.R + i] = np.float32(np.sin(angle)) * factor


def _supports(dtype: torch.dtype) -> str | None:
    return missing(FLOAT_FEATURES) if dtype == torch.int64 else f"positions must be int64, got {dtype}"


@rotary_angles.kernel(device="cpu", name="numba", preference=10, supports=_supports)
def rotary_angles_numba(
    positions_T: Tensor, frequencies_R: Tensor, factor: float, chosen: RopeSet | None = None
) -> tuple[Tensor, Tensor]:
    """See ``ops.rotary_angles``."""
    positions, frequencies = positions_T.contiguous(), frequencies_R.float().contiguous()
    num_sets = 0 if chosen is None else len(chosen.factors)
    T, R = len(positions), len(frequencies) // max(1, num_sets)
    cos_TR, sin_TR = torch.empty(T, R), torch.empty(T, R)
    addresses = positions.data_ptr(), frequencies.data_ptr(), cos_TR.data_ptr(), sin_TR.data_ptr()
    sets = (0, 0) if chosen is None else (chosen.sets_T.data_ptr(), chosen.factors.data_ptr())
    values = (_task(), T, max(1, ANGLES_A_PIECE // max(1, R)), *addresses, R, *sets, num_sets, factor)
    call(task_driver(), ARGUMENTS, values)
    return cos_TR, sin_TR


AXIS_ARGUMENTS = fields("task T piece positions shifts axes frequencies cos sin R A factor:float")


@rarely_used
@task
def _axis_task(arguments: int, begin: int, end: int) -> None:
    """Task over rows, whose position depends on the pair."""
    a = read(arguments, AXIS_ARGUMENTS)
    positions, frequencies = view(a.positions, a.T, np.int64), view(a.frequencies, a.R, np.float32)
    shifts, axes = view(a.shifts, a.A * a.T, np.int64), view(a.axes, a.R, np.int64)
    cos, sin = view(a.cos, a.T * a.R, np.float32), view(a.sin, a.T * a.R, np.float32)
    for t in range(begin, end):
        for i in range(a.R):
            position = np.float32(positions[t] + shifts[axes[i] * a.T + t])
            angle = np.float64(position * frequencies[i])
            cos[t * a.R + i] = np.float32(np.cos(angle)) * np.float32(a.factor)
            sin[t * a.R + i] = np.float32(np.sin(angle)) * np.float32(a.factor)


@axis_angles.kernel(device="cpu", name="numba", preference=10, supports=_supports)
def axis_angles_numba(
    positions_T: Tensor, shifts_AT: Tensor, axes_R: Tensor, frequencies_R: Tensor, factor: float
) -> tuple[Tensor, Tensor]:
    """See ``ops.axis_angles``."""
    positions, shifts, axes = positions_T.contiguous(), shifts_AT.contiguous(), axes_R.contiguous()
    frequencies = frequencies_R.float().contiguous()
    T, R = len(positions), len(frequencies)
    cos_TR, sin_TR = torch.empty(T, R), torch.empty(T, R)
    inputs = positions.data_ptr(), shifts.data_ptr(), axes.data_ptr(), frequencies.data_ptr()
    outputs = cos_TR.data_ptr(), sin_TR.data_ptr()
    piece = max(1, ANGLES_A_PIECE // max(1, R))
    call(task_driver(), AXIS_ARGUMENTS, (_axis_task(), T, piece, *inputs, *outputs, R, len(shifts), factor))
    return cos_TR, sin_TR


# ---- store_keys: ``store_keys``: the first half of ``attention``, by the same task.


@rarely_used
@driver
def _store_keys_driver(pool: int, arguments: int) -> int:
    a = read(arguments, STEP)
    for slot in view(a.slots, a.T, np.int64):
        if slot >= a.num_blocks * a.block_size:
            return 1
    q = np.empty(a.T * a.N * a.width, np.float32)
    a.q = q.ctypes.data
    run(pool, a.prepare, arguments, a.T, max(1, NUMBERS_A_PIECE // ((a.N + 2 * a.K) * a.H)))
    keep(q)
    return 0


@store_keys.kernel(device="cpu", name="numba", preference=10, supports=declines_floats)
def store_keys_numba(
    qkv_TW: Tensor, heads: HeadLayout, cos_TR: Tensor, sin_TR: Tensor, cache: LayerCache, slot_mapping_T: Tensor
) -> None:
    """See ``ops.store_keys``; the caches must be contiguous. Raises ``IndexError`` for slots that are not in them."""
    K, H, dtype = heads.num_kv_heads, heads.head_dim, cache.keys.dtype
    (T, W), (num_blocks, _, block_size, _) = qkv_TW.shape, cache.keys.shape
    N = W // H - 2 * K
    assert cache.keys.is_contiguous(), "the caches must be contiguous"
    assert cache.values.is_contiguous(), "the caches must be contiguous"
    assert W == (N + 2 * K) * H, f"rows of {W} numbers are not heads of {H}"
    qkv, slots = qkv_TW.float().contiguous(), slot_mapping_T.contiguous()
    cos_TR, sin_TR = cos_TR.contiguous(), sin_TR.contiguous()
    norm = None if heads.k_norm_H is None else whole_vectors(heads.k_norm_H.float())
    values: dict[str, float] = {"prepare": prepare_task(FORMATS[dtype]), "qkv": qkv.data_ptr(), "eps": heads.norm_eps}
    values |= {"T": T, "N": N, "K": K, "stored": K, "H": H, "width": -(-H // LANES) * LANES, "k_norm": address(norm)}
    values |= {"cos": cos_TR.data_ptr(), "sin": sin_TR.data_ptr(), "R": cos_TR.shape[1], "slots": slots.data_ptr()}
    values |= {"k_cache": cache.keys.data_ptr(), "v_cache": cache.values.data_ptr()}
    values |= {"num_blocks": num_blocks, "block_size": block_size}
    values |= zip(("k_scales", "v_scales", "factor"), _scales(cache, H), strict=True)
    found = tuple(values.get(name, 0) for name in STEP.names or ())
    call(_store_keys_driver(), STEP, found, "store_keys: slots do not fit the caches")


# ---- latent_attention: ``latent_attention`` for the CPU: the kernel of ``attention``, over a cache whose keys are
# the values, too.


@latent_attention.kernel(device="cpu", name="numba", preference=10, supports=declines_floats)
def latent_attention_numba(
    q_TW: Tensor,
    kv_TC: Tensor,
    heads: LatentHeads,
    cos_TR: Tensor,
    sin_TR: Tensor,
    cache: LayerCache,
    rows: PagedRows,
    chosen: ChosenKeys | None = None,
) -> Tensor:
    """See ``ops.latent_attention``; the cache must be contiguous."""
    q_TNH = store_latents(q_TW, kv_TC, heads, cos_TR, sin_TR, cache, rows)
    if chosen is not None:
        cache, rows = chosen.of(cache, rows)
    _, N, H = q_TNH.shape
    layout = HeadLayout(N, 1, H, heads.scale, window=heads.window, sinks_N=heads.sinks_N, shares_cache=True)
    out_TW = attention_numba(q_TNH.flatten(1), layout, None, None, cache, rows)
    return head_linear(out_TW.view(q_TNH.shape)[..., 2 * cos_TR.shape[1] :], heads.value_map_NVL)
