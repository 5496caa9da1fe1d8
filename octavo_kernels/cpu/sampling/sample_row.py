"""Sampling of one row, in compiled code.

A token's score is its scaled logit x = logit / temperature minus the logarithm of an exponential variate of
``ops.noise``; the kept token with the largest score wins. Nothing is sorted:

- The score of the likeliest token, which is always kept, is reached by few tokens. They are found with a bound of each
  score that needs no logarithm: as e = -log(1 - u) >= u, where u comes from 32 bits of a hash, no score is above
  x - log(u), and log2 of a float32 is at least its bits, read as a number with 23 binary places, minus 127.
- ``top_p`` keeps a token if those that are likelier have less than that share of the mass. The token with the largest
  score is looked at first. If it is not kept, neither are those that are no likelier, and the next one is looked at.

Numbers are float32 except sums of blocks. A row's blocks are summed in their order, so that results do not depend on
the number of threads.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from octavo.ops.sampling.noise import LARGEST_BELOW_ONE
from octavo.ops.sampling.sampling import BANNED, NOTHING_LEFT, OUT_OF_RANGE
from octavo_kernels.cpu.compiled import compiled, inlined
from octavo_kernels.cpu.memory import float_bits, int_bits, keep
from octavo_kernels.cpu.sampling.sort_keys import ALL_BUT_SIGN, of_sort_key, sort_key

BLOCK = 512
"""Tokens computed together: their numbers stay in the first-level cache."""
ROUNDING = np.float32(1e-4)
"""More than float32 loses in a bound and in a score, relative to them."""
INFINITY = np.float32(math.inf)
LEAST_LOGIT = np.float32(BANNED)
LARGEST_UNIFORM = np.float32(LARGEST_BELOW_ONE)
LOG2_E, LOG_2 = np.float32(math.log2(math.e)), np.float32(math.log(2))
LOG_2_UPPER, LOG_2_LOWER = np.float32(0.693359375), np.float32(-2.12194440e-4)
ROUNDER = np.float32(1.5 * 2**23)
"""Added to a small number, it leaves the nearest integer in the lowest bits."""
LEAST_EXPONENT = np.float32(-87.0)
BINARY_PLACES = np.float32(2.0**-23)


@inlined
def _scaled(logit: Any, temperature: Any) -> Any:
    return logit / temperature if logit > LEAST_LOGIT else -INFINITY


@inlined
def _scale(part: Any, temperature: Any, least: Any, scaled: Any) -> Any:
    """Fill ``scaled``; returns how many of its numbers are ``least`` or more."""
    count = 0
    for i in range(len(part)):
        scaled[i] = _scaled(part[i], temperature)
        count += scaled[i] >= least
    return count


@inlined
def _exp(x: Any) -> Any:
    """e ** x for x <= 0, and 0 below -87: see ``vector_ir.exp``."""
    shifted = x * LOG2_E + ROUNDER
    n = shifted - ROUNDER
    r = (x - n * LOG_2_UPPER) - n * LOG_2_LOWER
    series = np.float32(1 / 720)
    series = series * r + np.float32(1 / 120)
    series = series * r + np.float32(1 / 24)
    series = series * r + np.float32(1 / 6)
    series = series * r + np.float32(1 / 2)
    series = series * r + np.float32(1)
    series = series * r + np.float32(1)
    power = float_bits(np.int32(int_bits(series) + np.int32(int_bits(shifted) << np.int32(23))))
    return power if x >= LEAST_EXPONENT else np.float32(0)


@inlined
def _split_mix(x: Any) -> Any:
    """See ``noise``; of uint64, whose products and sums wrap around."""
    x += np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@compiled
def key_of(seed: Any, position: Any) -> Any:
    """``noise.key_of``: factor and offset, as uint32."""
    key = _split_mix(_split_mix(np.uint64(seed)) ^ np.uint64(position))
    return np.uint32((key >> np.uint64(32)) | np.uint64(1)), np.uint32(key & np.uint64(0xFFFFFFFF))


@inlined
def _bits(hashed: Any, factor: Any, offset: Any) -> Any:
    """The bits of a token's variate, see ``noise.exponentials``; all uint32. Without the casts numba would compute in
    64 bits, half as many at once."""
    x = np.uint32(np.uint32(hashed * factor) + offset)
    x = np.uint32(x ^ (x >> np.uint32(16)))
    x = np.uint32(x * np.uint32(0x7FEB352D))
    x = np.uint32(x ^ (x >> np.uint32(15)))
    x = np.uint32(x * np.uint32(0x846CA68B))
    return np.uint32(x ^ (x >> np.uint32(16)))


@inlined
def _score(x: Any, hashed: Any, factor: Any, offset: Any) -> Any:
    bits = _bits(hashed, factor, offset)
    uniform = min(np.float32((np.float64(bits) + 0.5) * 2.0**-32), LARGEST_UNIFORM)
    exponential = np.float32(-math.log1p(-np.float64(uniform)))
    return x - np.float32(math.log(np.float64(exponential)))


@compiled
def mass_from(logits: Any, temperature: Any, peak: Any, least: Any) -> Any:
    """The sum of e ** (x - peak) over the tokens whose x is at least ``least``."""
    total, powers = 0.0, np.empty(BLOCK, np.float32)
    for first in range(0, len(logits), BLOCK):
        part = logits[first : first + BLOCK]  # the compiler makes vectors of places counted from 0 only
        size = len(part)
        if not _scale(part, temperature, least, powers):
            continue
        for i in range(size):
            powers[i] = _exp(powers[i] - peak) if powers[i] >= least else np.float32(0)
        powers[size:] = np.float32(0)
        half = BLOCK // 2
        while half:
            for i in range(half):
                powers[i] += powers[half + i]
            half //= 2
        total += powers[0]
    keep(powers)
    return total


@compiled
def kth_largest(numbers: Any, k: int) -> Any:
    """Of at least k numbers. The largest so far are a heap; groups without a larger one than its least are passed."""
    heap, count, group = np.empty(k, np.int32), 0, 64
    for first in range(0, len(numbers), group):
        part, most = numbers[first : first + group], -ALL_BUT_SIGN
        for i in range(len(part)):
            most = max(most, sort_key(part[i]))
        if count == k and most <= heap[0]:
            continue
        for i in range(len(part)):
            key = sort_key(part[i])
            if count < k:
                place = count
                count += 1
                while place and heap[(place - 1) // 2] > key:
                    heap[place] = heap[(place - 1) // 2]
                    place = (place - 1) // 2
                heap[place] = key
            elif key > heap[0]:
                _replace_least(heap, key)
    least = heap[0]
    keep(heap)
    return of_sort_key(least)


@inlined
def _replace_least(heap: Any, key: Any) -> Any:
    place = 0
    while 2 * place + 1 < len(heap):
        child = 2 * place + 1
        if child + 1 < len(heap) and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= key:
            break
        heap[place] = heap[child]
        place = child
    heap[place] = key


@compiled
def list_possible(logits: Any, hashes: Any, temperature: Any, cut: Any, key: Any, reached: Any, places: Any) -> Any:
    """List the places of at least all tokens whose x is ``cut`` or more and whose score is ``reached`` or more.

    ``key`` are factor and offset of ``noise.key_of``. Returns how many there are.
    """
    count, bounds, factor, offset = 0, np.empty(BLOCK, np.float32), key[0], key[1]
    least = reached - ROUNDING * (np.float32(1) + abs(reached))
    for first in range(0, len(logits), BLOCK):
        part, hashes_here = logits[first : first + BLOCK], hashes[first : first + BLOCK]
        size, num_possible = len(part), 0
        if not _scale(part, temperature, cut, bounds):
            continue
        for i in range(size):
            half = np.int32(_bits(hashes_here[i], factor, offset) >> np.uint32(1))  # vectors have no unsigned numbers
            logarithm = np.float32(int_bits(np.float32(half))) * BINARY_PLACES - np.float32(127 + 31)
            bounds[i] = bounds[i] - logarithm * LOG_2 if bounds[i] >= cut else -INFINITY
            num_possible += bounds[i] >= least
        if num_possible == 0:
            continue
        for i in range(size):
            if bounds[i] >= least:
                places[count] = first + i
                count += 1
    keep(bounds)
    return count


@compiled
def sample_row(
    logits: Any, hashes: Any, best: int, temperature: Any, min_p: Any, top_k: int, top_p: Any, key: Any
) -> Any:
    """The place of the token drawn, or an error code as of ``ops.sample``; ``best`` is the place of the largest logit,
    which is a number."""
    peak = _scaled(logits[best], temperature)
    if peak == INFINITY:
        return OUT_OF_RANGE
    if peak == -INFINITY:
        return NOTHING_LEFT
    cut = -INFINITY
    if min_p > 0:
        cut = peak + np.float32(math.log(np.float64(min_p)))
    if 0 < top_k < len(logits):
        cut = max(cut, _scaled(kth_largest(logits, top_k), temperature))
    places = np.empty(len(logits), np.int32)
    count = list_possible(logits, hashes, temperature, cut, key, _score(peak, hashes[best], key[0], key[1]), places)
    scaled, scores = np.empty(count, np.float32), np.empty(count, np.float32)
    for i in range(count):
        scaled[i] = _scaled(logits[places[i]], temperature)
        scores[i] = _score(scaled[i], hashes[places[i]], key[0], key[1])
    place = places[_best_kept(logits, temperature, peak, cut, top_p, scaled, scores)]
    keep(places)
    keep(scaled)
    keep(scores)
    return place


@compiled
def _best_kept(logits: Any, temperature: Any, peak: Any, cut: Any, top_p: Any, scaled: Any, scores: Any) -> Any:
    """Of the tokens with these x and scores, the one with the largest score that is kept; one of them has ``peak``."""
    kept_from, dropped, share = peak if top_p < 1 else cut, -INFINITY, -1.0
    while True:
        best = -1
        for i in range(len(scores)):
            if (best < 0 or scores[i] > scores[best]) and scaled[i] > dropped:
                best = i
        x = scaled[best]
        if x >= kept_from:
            return best
        if share < 0:
            share = top_p * mass_from(logits, temperature, peak, cut)
        if mass_from(logits, temperature, peak, _next_above(x)) < share:
            return best
        dropped = x


@inlined
def _next_above(x: Any) -> Any:
    """The float32 after a finite one. Adding zero makes -0, which is as large as 0, a 0."""
    return of_sort_key(np.int32(sort_key(x + np.float32(0)) + np.int32(1)))
