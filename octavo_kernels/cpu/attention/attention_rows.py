"""Preparation of a step's rows for attention: heads are normed and rotated, keys and values stored in the cache."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from octavo_kernels.cpu.attention.cached_rows import rotate, row_bytes, row_writer
from octavo_kernels.cpu.compiled import compiled_task, inlined
from octavo_kernels.cpu.memory import fields, keep, read, view
from octavo_kernels.cpu.rows.norms import normalise_row

STEP = fields(
    "prepare attend qkv T N K stored H width scale:float q_norm k_norm eps:float cos sin R slots k_cache v_cache "
    "num_blocks block_size tables table_width starts lengths S window softcap:float sinks sinks_stride slopes bias "
    "extent k_scales v_scales factor:float part num_parts out out_width q tiles num_tiles parts counts"
)
"""Arguments of the tasks of one call; addresses are 0 for absent tensors. ``width`` is H rounded up to a multiple of
16; ``stored`` is K, or 0 where another layer has stored the keys and values; ``bias`` is float32 [T, N, extent]. From
the sinks of a row to those of the next are ``sinks_stride`` numbers. What is stored are keys and values over their
scales, float32 [K]; what is read of them has to be multiplied by ``factor`` besides. The caches hold positions
``part``, ``part + num_parts`` and so on. Results are float32 [T, N, out_width], where that of H + 1 has the logarithm
of the softmax's sum last.

The last five are set by the driver: queries float32 [T, N, width], the tiles, scratch for their parts, and how many
parts of a row are stored, int64 [slots, K] of which each row uses the first of its slots.
"""


@inlined
def _turn(x: Any, cos: Any, sin: Any) -> None:
    R = len(cos)
    for i in range(R):
        first, second = x[i], x[R + i]
        x[i] = first * cos[i] - second * sin[i]
        x[R + i] = second * cos[i] + first * sin[i]


@inlined
def _prepare_head(a: Any, t: int, head: int, norm: int, x: Any) -> None:
    """Write head ``head`` of row t's queries or keys to ``x``, whose padding stays zero."""
    source = view(a.qkv + 4 * (t * (a.N + 2 * a.stored) + head) * a.H, a.H, np.float32)
    for i in range(a.H):
        x[i] = source[i]
    if norm:
        normalise_row(x.ctypes.data, norm, x.ctypes.data, a.width, a.H, a.eps)
    if a.cos:
        at = 4 * t * a.R
        _turn(x, view(a.cos + at, a.R, np.float32), view(a.sin + at, a.R, np.float32))


@inlined
def _divide(x: Any, scale: Any, out: Any) -> None:
    for i in range(len(x)):
        out[i] = x[i] / scale


@functools.cache
def prepare_task(number_format: int) -> int:
    """Task over rows."""
    write = row_writer(number_format)

    def prepare(arguments: int, begin: int, end: int) -> None:
        a = read(arguments, STEP)
        x, y = np.zeros(a.width, np.float32), np.zeros(a.width, np.float32)
        for t in range(begin, end):
            for head in range(a.N):
                _prepare_head(a, t, head, a.q_norm, x)
                query = view(a.q + 4 * (t * a.N + head) * a.width, a.width, np.float32)
                scale = np.float32(a.scale * a.factor)
                if a.k_scales:
                    scale *= view(a.k_scales, a.K, np.float32)[head // (a.N // a.K)]
                for i in range(a.width):
                    query[i] = x[i] * scale
                rotate(number_format, query)
            slot = view(a.slots, a.T, np.int64)[t]
            if slot < 0:
                continue
            block, place = slot // a.block_size, slot % a.block_size
            for head in range(a.stored):
                at = row_bytes(number_format, a.H) * ((block * a.K + head) * a.block_size + place)
                _prepare_head(a, t, a.N + head, a.k_norm, x)
                value = view(a.qkv + 4 * (t * (a.N + 2 * a.stored) + a.N + a.stored + head) * a.H, a.H, np.float32)
                k_scale = v_scale = np.float32(1)
                if a.k_scales:
                    k_scale = view(a.k_scales, a.K, np.float32)[head]
                    v_scale = view(a.v_scales, a.K, np.float32)[head]
                _divide(x, k_scale, x)
                _divide(value, v_scale, y)
                write(number_format, x, a.H, a.k_cache + at)
                write(number_format, y, a.H, a.v_cache + at)
        keep((x, y))

    return compiled_task(prepare)
