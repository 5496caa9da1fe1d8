"""``route`` for CUDA devices: selection without sorting, by taking the best of those that are left.

Of a few rows one launch computes all: each program normalises one row and computes the logits of some experts, and the
last one of a row selects. Of many rows the logits are a matrix product, with a launch before it for the norm and one
behind it that selects.

Shapes: T tokens, D model, X experts, S experts selected per token, G groups of experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.linear.linear import PLAIN
from octavo.ops.moe import SMALLEST_SUM, Routing, keep_routes, local_expert_ids, route
from octavo_kernels.triton.launch import (
    after_predecessor,
    counters,
    declines_floats,
    empty_indices,
    is_invariant,
    launch,
)
from octavo_kernels.triton.linear.gemv import column_chunk, row_starts, weight_chunk
from octavo_kernels.triton.linear.invariant_linear import invariant_tiles
from octavo_kernels.triton.linear.linear import linear_triton
from octavo_kernels.triton.linear.skinny_gemm import skinny_gemm
from octavo_kernels.triton.norms import rms_norm_triton

FEW_ROWS, MOST_READ = 32, 11 << 20
"""So many rows may each read the weight, and so many bytes of it together, which are in the second-level cache after
the first. On an H200, 128 experts of a model of 2,048 take 5.0 us in place of 6.6 for 12 rows, and as long for 24."""
ROWS, BLOCK_D, WARPS = 2, 2048, 4
"""Experts and columns at a time of a program that computes logits."""
PAIRS = 256
"""Of a token and an expert, of a program that looks up where the experts are."""


@triton.jit
def _sort_key(worth: tl.tensor, is_allowed: tl.tensor) -> tl.tensor:
    """Integers in the order of floats, NaN among them; experts that are not allowed come last."""
    bits = worth.to(tl.int32, bitcast=True)
    key = tl.maximum(bits ^ ((bits >> 31) & 0x7FFFFFFF), -0x7FFFFFFE)
    return tl.where(is_allowed, key, -0x7FFFFFFF)


@triton.jit
def _place(key: tl.tensor, i: tl.tensor) -> tl.tensor:
    """How many entries come before each one; of equals the first comes first, so that places are distinct."""
    j = tl.arange(0, key.shape[0])
    is_before = (key[None, :] > key[:, None]) | ((key[None, :] == key[:, None]) & (j[None, :] < i[:, None]))
    return tl.sum(is_before.to(tl.int32), 1)


@triton.jit
def _place_of_best(key: tl.tensor, e: tl.tensor, CHOSEN: tl.constexpr) -> tl.tensor:
    """The places of the CHOSEN best entries, and CHOSEN for the others; of equals the first comes first."""
    left = (key.to(tl.int64) << 32) | (0x7FFFFFFF - e)
    place = tl.full(key.shape, CHOSEN, tl.int32)
    for s in range(CHOSEN):
        is_best = left == tl.max(left, 0)
        place = tl.where(is_best, s, place)
        left = tl.where(is_best, -0x7FFFFFFFFFFFFFFF, left)
    return place


@triton.jit
def _is_in_best_group(
    worth: tl.tensor, e: tl.tensor, X: tl.constexpr, GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr,
    HAS_CORRECTION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Whether each expert is in a group that is selected; a group is worth its best expert or its two best."""
    WIDE: tl.constexpr = triton.next_power_of_2(GROUPS)
    g = tl.arange(0, WIDE)
    is_own = (e // (X // GROUPS))[None, :] == g[:, None]
    own = tl.where(is_own & (e < X)[None, :], worth[None, :], float("-inf"))
    worth_G, best_G = tl.max(own, 1, return_indices=True)
    if HAS_CORRECTION:
        worth_G += tl.max(tl.where(e[None, :] == best_G[:, None], float("-inf"), own), 1)
    is_chosen = _place(_sort_key(worth_G, g < GROUPS), g) < CHOSEN_GROUPS
    return tl.max((is_own & is_chosen[:, None]).to(tl.int32), 0) > 0


@triton.jit
def _log1p(x: tl.tensor) -> tl.tensor:
    """``ln(1 + x)``, by what the sum lost to rounding: Goldberg, "What every computer scientist should know"."""
    total = 1.0 + x
    return tl.where(total == 1.0, x, tl.log(total) * (x / tl.where(total == 1.0, 1.0, total - 1.0)))


@triton.jit
def _choose(
    logits: tl.tensor, e: tl.tensor, t: tl.tensor, bias_ptr: tl.tensor, correction_ptr: tl.tensor, ids_ptr: tl.tensor,
    shares_ptr: tl.tensor, scale: tl.tensor, X: tl.constexpr, CHOSEN: tl.constexpr, SCORING: tl.constexpr,
    NORMALISES: tl.constexpr, GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, SMALLEST: tl.constexpr,
    CORRECTS_LOGITS: tl.constexpr, given_ptr: tl.tensor,
) -> None:  # fmt: skip
    """Select the experts of token t, or take those given, and store them from the best on."""
    if bias_ptr is not None:
        logits += tl.load(bias_ptr + e, mask=e < X, other=0.0)
    logits = tl.where(e < X, logits, float("-inf"))
    if SCORING == "softmax":
        scores = tl.exp(logits - tl.max(logits, 0))
        if not NORMALISES or correction_ptr is not None:
            scores /= tl.sum(scores, 0)
    elif SCORING == "sigmoid":
        scores = tl.sigmoid(logits)
    else:
        scores = tl.sqrt(tl.maximum(logits, 0.0) + _log1p(tl.exp(-tl.abs(logits))))
    worth = logits
    if correction_ptr is not None:
        worth = (logits if CORRECTS_LOGITS else scores) + tl.load(correction_ptr + e, mask=e < X, other=0.0)
    is_allowed = e < X
    if GROUPS > 1:
        is_allowed &= _is_in_best_group(worth, e, X, GROUPS, CHOSEN_GROUPS, correction_ptr is not None)
    place = _place_of_best(_sort_key(worth, is_allowed), e, CHOSEN)
    if given_ptr is not None:
        own = tl.full(place.shape, CHOSEN, tl.int32)
        for s in tl.static_range(CHOSEN):
            own = tl.where(e == tl.load(given_ptr + t.to(tl.int64) * CHOSEN + s), s, own)
        place = tl.where(tl.load(given_ptr + t.to(tl.int64) * CHOSEN) < 0, place, own)
    is_chosen = (place < CHOSEN) & (e < X)
    if NORMALISES:
        scores /= tl.sum(tl.where(is_chosen, scores, 0.0), 0) + SMALLEST
    at = t.to(tl.int64) * CHOSEN + place
    tl.store(ids_ptr + at, e.to(tl.int64), mask=is_chosen)
    tl.store(shares_ptr + at, scores * scale, mask=is_chosen)


@triton.jit(do_not_specialize=["scale"])
def route_kernel(
    x_ptr: tl.tensor, norm_ptr: tl.tensor, eps: tl.tensor, weight_ptr: tl.tensor, bias_ptr: tl.tensor,
    correction_ptr: tl.tensor, logits_ptr: tl.tensor, counters_ptr: tl.tensor, normed_ptr: tl.tensor,
    ids_ptr: tl.tensor, shares_ptr: tl.tensor, scale: tl.tensor,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, X: tl.constexpr, CHOSEN: tl.constexpr,
    SCORING: tl.constexpr, NORMALISES: tl.constexpr, GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr,
    SMALLEST: tl.constexpr, CORRECTS_LOGITS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """ROWS logits of a token; the program that completes a token's logits selects its experts."""
    CHUNKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    start, t = tl.program_id(0) * ROWS, tl.program_id(1)
    rows = weight_ptr + row_starts(start, X, D, ROWS, False, X % ROWS == 0)
    weights = weight_chunk(rows, 0, True, D, BLOCK_D)
    norm = column_chunk(norm_ptr, 0, D, BLOCK_D)
    after_predecessor(PDL)
    row = t.to(tl.int64) * D
    x = column_chunk(x_ptr + row, 0, D, BLOCK_D)
    squares = x * x
    for c in tl.static_range(1, CHUNKS):
        other = column_chunk(x_ptr + row, c, D, BLOCK_D)
        squares += other * other
    factor = tl.rsqrt(tl.sum(squares, 0) / D + eps)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for c in tl.static_range(CHUNKS):
        following = weights
        if c + 1 < CHUNKS:
            following = weight_chunk(rows, c + 1, True, D, BLOCK_D)
        if c > 0:
            x, norm = column_chunk(x_ptr + row, c, D, BLOCK_D), column_chunk(norm_ptr, c, D, BLOCK_D)
        normed = (x * factor * norm).to(normed_ptr.dtype.element_ty)
        k = c * BLOCK_D + tl.arange(0, BLOCK_D)
        tl.store(normed_ptr + row + k, normed, mask=(k < D) & (start == 0))
        acc += weights.to(tl.float32) * normed.to(tl.float32)[None, :]
        weights = following
    own = start + tl.arange(0, ROWS)
    tl.store(logits_ptr + t * X + own, tl.sum(acc, 1), mask=own < X)
    tl.debug_barrier()  # all threads have stored before one of them releases
    if tl.atomic_add(counters_ptr + t, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(counters_ptr + t, 0)
        e = tl.arange(0, triton.next_power_of_2(X))
        logits = tl.load(logits_ptr + t * X + e, mask=e < X, other=0.0, cache_modifier=".cg")
        _choose(
            logits, e, t, bias_ptr, correction_ptr, ids_ptr, shares_ptr, scale,
            X, CHOSEN, SCORING, NORMALISES, GROUPS, CHOSEN_GROUPS, SMALLEST, CORRECTS_LOGITS, None,
        )  # fmt: skip


@triton.jit(do_not_specialize=["scale"])
def choose_kernel(
    logits_ptr: tl.tensor, given_ptr: tl.tensor, bias_ptr: tl.tensor, correction_ptr: tl.tensor, ids_ptr: tl.tensor,
    shares_ptr: tl.tensor, scale: tl.tensor, X: tl.constexpr, CHOSEN: tl.constexpr, SCORING: tl.constexpr,
    NORMALISES: tl.constexpr, GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, SMALLEST: tl.constexpr,
    CORRECTS_LOGITS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """The experts of one token."""
    t, e = tl.program_id(0), tl.arange(0, triton.next_power_of_2(X))
    after_predecessor(PDL)
    logits = tl.load(logits_ptr + t.to(tl.int64) * X + e, mask=e < X, other=0.0)
    _choose(
        logits, e, t, bias_ptr, correction_ptr, ids_ptr, shares_ptr, scale,
        X, CHOSEN, SCORING, NORMALISES, GROUPS, CHOSEN_GROUPS, SMALLEST, CORRECTS_LOGITS, given_ptr,
    )  # fmt: skip


@triton.jit
def keep_routes_kernel(
    ids_ptr: tl.tensor, columns_ptr: tl.tensor, slots_ptr: tl.tensor, table_ptr: tl.tensor, T: tl.tensor,
    S: tl.constexpr, C: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """The experts that one router selected for one row."""
    t, m, s = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, triton.next_power_of_2(S))
    after_predecessor(PDL)
    slot = tl.load(slots_ptr + t)
    if slot >= 0:
        ids = tl.load(ids_ptr + (m * T + t) * S + s, mask=s < S)
        at = table_ptr + slot * C + tl.load(columns_ptr + m) + s
        tl.store(at, ids.to(table_ptr.dtype.element_ty), mask=s < S)


@keep_routes.kernel(device="cuda", name="triton", preference=10, supports=lambda dtype: None)
def keep_routes_triton(ids_MTS: Tensor, columns_M: Tensor, slots_T: Tensor, table_NC: Tensor) -> None:
    """See ``ops.keep_routes``."""
    M, T, S = ids_MTS.shape
    if T:
        launch(keep_routes_kernel, (T, M), ids_MTS, columns_M, slots_T, table_NC, T, S, table_NC.shape[1], num_warps=1)


@triton.jit
def local_ids_kernel(
    ids_ptr: tl.tensor, slots_ptr: tl.tensor, load_ptr: tl.tensor, out_ptr: tl.tensor, P: tl.tensor, W: tl.tensor,
    pairs_a_row: tl.tensor, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """The slots of the experts of some pairs, which are counted."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    after_predecessor(PDL)
    expert = tl.load(ids_ptr + pair, mask=pair < P, other=-1)
    slot = tl.load(slots_ptr + expert * W + pair // pairs_a_row % W, mask=expert >= 0, other=-1)
    tl.store(out_ptr + pair, slot, mask=pair < P)
    if load_ptr is not None:
        tl.atomic_add(load_ptr + expert, 1, mask=expert >= 0, sem="relaxed")


@local_expert_ids.kernel(device="cuda", name="triton", preference=10, supports=lambda dtype: None)
def local_expert_ids_triton(ids_TS: Tensor, slots_XW: Tensor, load_X: Tensor | None = None) -> Tensor:
    """See ``ops.local_expert_ids``."""
    (T, S), W = ids_TS.shape, slots_XW.shape[1]
    local_TS = empty_indices(T * S, torch.int64, ids_TS.device).view(T, S)
    if T:
        grid = (triton.cdiv(T * S, PAIRS),)
        tensors = ids_TS.contiguous(), slots_XW, load_X, local_TS
        launch(local_ids_kernel, grid, *tensors, T * S, W, S, PAIRS, num_warps=2)
    return local_TS


@route.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def route_triton(
    x_TD: Tensor, norm_D: Tensor | None, eps: float, weight_XD: Tensor, routing: Routing, given_TS: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``ops.route``; of experts of equal worth the first is selected."""
    (T, D), X, S = x_TD.shape, len(weight_XD), routing.num_chosen
    ids_TS = empty_indices(T * S, torch.int64, x_TD.device).view(T, S)
    shares_TS = torch.empty(T, S, dtype=torch.float32, device=x_TD.device)
    if not T:
        return (x_TD if norm_D is None else torch.empty_like(x_TD)), ids_TS, shares_TS
    vectors, results = (routing.bias_X, routing.correction_X), (ids_TS, shares_TS, routing.scale)
    rule = (X, S, routing.scoring, routing.normalises, *routing.groups, SMALLEST_SUM, routing.corrects_logits)
    are_few = T <= FEW_ROWS and T * weight_XD.nbytes <= MOST_READ
    if norm_D is None or not are_few or is_invariant() or given_TS is not None:
        normed_TD = x_TD if norm_D is None else rms_norm_triton(x_TD, norm_D, eps)
        logits_TX = _logits(normed_TD, weight_XD)
        given = None if given_TS is None else given_TS.contiguous()
        launch(choose_kernel, (T,), logits_TX, given, *vectors, *results, *rule, num_warps=1)
        return normed_TD, ids_TS, shares_TS
    normed_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    logits_TX = torch.empty(T, X, dtype=torch.float32, device=x_TD.device)
    launch(
        route_kernel, (triton.cdiv(X, ROWS), T), x_TD.contiguous(), norm_D, eps, weight_XD, *vectors,
        logits_TX, counters(x_TD.device, FEW_ROWS), normed_TD, *results,
        D, ROWS, min(BLOCK_D, triton.next_power_of_2(D)), *rule, num_warps=WARPS,
    )  # fmt: skip
    return normed_TD, ids_TS, shares_TS


def _logits(x_TD: Tensor, weight_XD: Tensor) -> Tensor:
    """Float32 [T, X]; products of 16-bit numbers are exact, so that tensor cores round no more than float32 does."""
    if weight_XD.dtype != x_TD.dtype:
        return linear_triton(x_TD.float(), weight_XD.float())
    (T, D), X = x_TD.shape, len(weight_XD)
    tiles = invariant_tiles(T, X, D, x_TD.dtype, is_gated=False)
    return skinny_gemm(x_TD, weight_XD, PLAIN, *tiles, out_dtype=torch.float32)
