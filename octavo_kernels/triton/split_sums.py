"""Sums of a softmax split among several programs: each stores its part, and the last to finish adds them.

Shapes: G heads filled up to a power of two, H head dim, D: H filled up likewise, X numbers of a head's result.

Sums are three tensors: the largest score of each head in base 2 [G], its sum of weights 2^(score - largest) [G], and
its weighted sum of values [G, D] (Milakov and Gimelshein, arXiv 1805.02867). Parts are added in the order of their
positions, so the result does not depend on which program is last.

Where ranks divide contexts (``ops.partial_attention``), sums are those of a rank's positions, and a head's result ends
with the logarithm of its sum of weights: X = H + 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E, LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
NO_SCORE = tl.constexpr(-1.0e30)
"""The running maximum before the first key: finite, so that no difference of maxima is NaN."""


@triton.jit
def part_count(length: tl.tensor, RANK: tl.constexpr, PARTS: tl.constexpr) -> tl.tensor:
    """How many of the first positions a rank has: ``ContextPart.count``."""
    if PARTS > 1:
        length = (length - RANK + PARTS - 1) // PARTS
    return length


@triton.jit
def store_log(to: tl.tensor, peak: tl.tensor, total: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Store the natural logarithm of sums of weights; returns what to divide values by, where sums may be 0."""
    is_empty = total == 0
    total = tl.where(is_empty, 1.0, total)
    tl.store(to, tl.where(is_empty, float("-inf"), (peak + tl.log2(total)) * LN_2), mask=mask)
    return total


@triton.jit
def leave_part(
    values: tl.tensor, logs: tl.tensor, counter: tl.tensor, sums: tl.tensor, part: tl.tensor, num_parts: tl.tensor,
    g: tl.tensor, d: tl.tensor, G: tl.constexpr, H: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Store a part; returns whether this program is the last to do so. The counter is zero before and after."""
    peak, total, acc = sums
    row = part * G + g
    tl.store(logs + row, peak + tl.log2(total), mask=g < G)
    tl.store(values + (row * H)[:, None] + d, acc / total[:, None], mask=(g < G)[:, None] & (d < H))
    tl.debug_barrier()  # all threads have stored before one of them releases
    is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_parts - 1
    tl.store(counter, 0, mask=is_last)
    return is_last


@triton.jit
def add_parts(
    values: tl.tensor, logs: tl.tensor, num_parts: tl.tensor, d: tl.tensor, G: tl.constexpr, H: tl.constexpr,
    D: tl.constexpr, AT_ONCE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The sums of all parts. They come from other multiprocessors, so the first-level cache is bypassed."""
    peak = tl.full([G], float("-inf"), tl.float32)
    total = tl.zeros([G], tl.float32)
    acc = tl.zeros([G, D], tl.float32)
    for begin in range(0, num_parts, AT_ONCE):
        part = begin + tl.arange(0, AT_ONCE)
        row = part[:, None] * G + tl.arange(0, G)
        is_part = (part < num_parts)[:, None]
        log = tl.load(logs + row, mask=is_part, other=float("-inf"), cache_modifier=".cg")
        is_value = is_part[:, :, None] & (d < H)
        value = tl.load(values + row[:, :, None] * H + d, mask=is_value, other=0.0, cache_modifier=".cg")
        higher = tl.maximum(peak, tl.max(log, 0))
        fade = tl.exp2(peak - higher)
        weights = tl.exp2(log - higher)
        total = total * fade + tl.sum(weights, 0)
        acc = acc * fade[:, None] + tl.sum(weights[:, :, None] * value, 0)
        peak = higher
    return peak, total, acc


@triton.jit
def store_heads(
    out: tl.tensor, sums: tl.tensor, head: tl.tensor, is_head: tl.tensor, d: tl.tensor, sinks: tl.tensor,
    H: tl.constexpr, X: tl.constexpr,
) -> None:  # fmt: skip
    """Divide and write; a sink is an additional weight in its head's sum."""
    peak, total, acc = sums
    if sinks is not None:
        total += tl.exp2(tl.load(sinks + head, mask=is_head, other=0.0) * LOG2_E - peak)
    if X > H:
        total = store_log(out + head * X + H, peak, total, is_head)
    tl.store(out + (head * X)[:, None] + d, acc / total[:, None], mask=is_head[:, None] & (d < H))
