"""Truncation of a row by ``min_p``, ``top_k`` and ``top_p``, without sorting it.

The vocabulary lies in groups whose largest logits are known. A bound below which no token can stay leaves few groups
alive; among their tokens the least score to keep is found by narrowing an interval of floats, three pivots at a time.
One program does a row. Logits are compared as scores, ``logit * scale``, as the draw compares them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo_kernels.triton.split_sums import LOG2_E

GROUP = 128
"""Neighbouring tokens whose largest logit is known."""

LOWEST = tl.constexpr(-3.4028234663852886e38)
_GROUP = tl.constexpr(GROUP)
_GROUPS_AT_ONCE = tl.constexpr(32)
_COARSE = tl.constexpr(16)


@triton.jit
def ordered(x: tl.tensor) -> tl.tensor:
    """Integers (int64) in the order of these float32 numbers, zeros being equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def least_kept(
    logits: tl.tensor, live: tl.tensor, peaks: tl.tensor, masses: tl.tensor, scale: tl.tensor, min_p: tl.tensor,
    top_k: tl.tensor, top_p: tl.tensor, V: tl.tensor, CHUNKS: tl.constexpr, GROUPS: tl.constexpr, SHIFT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The score from which on tokens of a row stay in the draw, see ``ops.sample.least_kept``.

    ``peaks`` are the largest logits of the groups and ``masses`` the sums of exp(score - largest score) of CHUNKS
    chunks of groups, both padded to a power of two by what is read here. ``live`` is scratch, int32, for every group.
    """
    num_groups = tl.cdiv(V, _GROUP)
    g = tl.arange(0, CHUNKS * GROUPS)
    peaks_G = tl.load(peaks + g, mask=g < num_groups, other=float("-inf"))
    largest = tl.max(peaks_G, 0)
    top = largest * scale
    is_counted = (top_k > 0) & (top_k < V)
    cut = tl.full([], float("-inf"), tl.float32)
    floor = tl.full([], LOWEST, tl.float32)
    total = tl.full([], 0.0, tl.float32)
    if min_p > 0:
        cut = top + tl.log(min_p)
        floor = _below(cut / scale, largest)
    if is_counted & (top_k <= num_groups):
        floor = tl.maximum(floor, _bound_of_count(peaks_G, largest, top_k))
    if (top_p < 1) & (min_p <= 0) & ((top_k <= 0) | (top_k >= V)):
        total = _total_mass(peaks, masses, scale, top, num_groups, CHUNKS, GROUPS)
        floor = _below((top + tl.log(total * (1 - top_p) / V)) / scale, largest)
    if is_counted | (top_p < 1):
        num_live = _list_live(live, peaks_G, g, floor)
        if is_counted:
            last = _search(logits, live, num_live, V, scale, largest, floor, top_k.to(tl.float32), True, SHIFT)
            cut = tl.maximum(cut, last * scale)
        if top_p < 1:
            if total == 0:
                total, _, _ = _weigh(logits, live, num_live, V, scale, top, cut, cut, cut, False)
            last = _search(logits, live, num_live, V, scale, largest, floor, total * top_p, False, SHIFT)
            cut = tl.maximum(cut, last * scale)
    return cut


@triton.jit
def _below(logit: tl.tensor, largest: tl.tensor) -> tl.tensor:
    """A logit surely below this one: rounding of logits up to ``largest`` is allowed for."""
    return tl.maximum(logit - 1e-5 * (tl.abs(logit) + tl.abs(largest)) - 1e-3, LOWEST)


@triton.jit
def _bound_of_count(peaks_G: tl.tensor, largest: tl.tensor, count: tl.tensor) -> tl.tensor:
    """A logit that at least ``count`` groups, hence as many tokens, reach."""
    low, high = ordered(tl.full([], LOWEST, tl.float32)) >> _COARSE, (ordered(largest) >> _COARSE) + 1
    while high - low > 1:
        middle = low + ((high - low) >> 1)
        reach = tl.sum((peaks_G >= _float_of(middle, _COARSE)).to(tl.int32), 0)
        low, high = tl.where(reach >= count, middle, low), tl.where(reach >= count, high, middle)
    return _float_of(low, _COARSE)


@triton.jit
def _total_mass(
    peaks: tl.tensor, masses: tl.tensor, scale: tl.tensor, top: tl.tensor, num_groups: tl.tensor, CHUNKS: tl.constexpr,
    GROUPS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The sum of exp(score - top) of the row."""
    c = tl.arange(0, CHUNKS)
    g = c[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
    peaks_C = tl.max(tl.load(peaks + g, mask=g < num_groups, other=LOWEST), 1)
    masses_C = tl.load(masses + c, mask=c * GROUPS < num_groups, other=0.0)
    return tl.sum(masses_C * tl.exp2((peaks_C * scale - top) * LOG2_E), 0)


@triton.jit
def _list_live(live: tl.tensor, peaks_G: tl.tensor, g: tl.tensor, floor: tl.tensor) -> tl.tensor:
    """Store the groups that reach ``floor``; returns their number."""
    is_live_G = (peaks_G >= floor).to(tl.int32)
    tl.store(live + tl.cumsum(is_live_G, 0) - 1, g, mask=is_live_G > 0)
    tl.debug_barrier()  # other threads of the program will read them
    return tl.sum(is_live_G, 0)


@triton.jit
def _search(
    logits: tl.tensor, live: tl.tensor, num_live: tl.tensor, V: tl.tensor, scale: tl.tensor, largest: tl.tensor,
    floor: tl.tensor, target: tl.tensor, COUNT: tl.constexpr, SHIFT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The largest logit from which on the tokens weigh at least ``target``, or ``floor``.

    The interval is one of ``ordered`` numbers without their last SHIFT bits, which are the same in all logits.
    """
    low, high = ordered(floor) >> SHIFT, (ordered(largest) >> SHIFT) + 1
    while high - low > 1:
        step = high - low
        k1, k2, k3 = low + (step >> 2), low + (step >> 1), low + ((3 * step) >> 2)
        p1, p2, p3 = _float_of(k1, SHIFT) * scale, _float_of(k2, SHIFT) * scale, _float_of(k3, SHIFT) * scale
        w1, w2, w3 = _weigh(logits, live, num_live, V, scale, largest * scale, p1, p2, p3, COUNT)
        low = tl.where(w3 >= target, k3, tl.where(w2 >= target, k2, tl.where(w1 >= target, k1, low)))
        high = tl.where(w1 < target, k1, tl.where(w2 < target, k2, tl.where(w3 < target, k3, high)))
    return _float_of(low, SHIFT)


@triton.jit
def _weigh(
    logits: tl.tensor, live: tl.tensor, num_live: tl.tensor, V: tl.tensor, scale: tl.tensor, top: tl.tensor,
    pivot_1: tl.tensor, pivot_2: tl.tensor, pivot_3: tl.tensor, COUNT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """For each pivot the sum of exp(score - top), or the number, of the live groups' tokens that reach it."""
    sum_1 = tl.zeros([_GROUPS_AT_ONCE, _GROUP], tl.float32)
    sum_2 = sum_1
    sum_3 = sum_1
    for first in range(0, num_live, _GROUPS_AT_ONCE):
        at = first + tl.arange(0, _GROUPS_AT_ONCE)
        groups = tl.load(live + at, mask=at < num_live, other=V)
        ids = groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
        is_token = (at < num_live)[:, None] & (ids < V)
        scores = tl.load(logits + ids, mask=is_token, other=0.0).to(tl.float32) * scale
        weights = 1.0 if COUNT else tl.exp2((scores - top) * LOG2_E)
        weights = tl.where(is_token, weights, 0.0)
        sum_1 += tl.where(scores >= pivot_1, weights, 0.0)
        sum_2 += tl.where(scores >= pivot_2, weights, 0.0)
        sum_3 += tl.where(scores >= pivot_3, weights, 0.0)
    return tl.sum(sum_1), tl.sum(sum_2), tl.sum(sum_3)


@triton.jit
def _float_of(key: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """The number nearest to 0 of those whose ``ordered`` numbers begin with these bits."""
    bits = tl.where(key < 0, ~(~key << SHIFT), key << SHIFT).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
