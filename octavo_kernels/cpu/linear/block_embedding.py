"""``block_embedding``: a row's numbers gathered from its panel; tied output heads use the same panels."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from octavo.ops.linear.block_linear import BLOCK, FACTOR_BYTES, PANEL, PackedBlocks, block_embedding
from octavo_kernels.cpu.calls import call
from octavo_kernels.cpu.compiled import compiled_task, driver
from octavo_kernels.cpu.half import widen
from octavo_kernels.cpu.linear.block_scales import MULTIPLES, format_of
from octavo_kernels.cpu.memory import fields, keep, read, view
from octavo_kernels.cpu.rows.embedding import has_known_ids, supports_ids
from octavo_kernels.cpu.threads import run
from octavo_kernels.cpu.vector_ir import FLOAT16, FORMAT_BYTES

NUMBERS_A_PIECE = 1024
ARGUMENTS = fields("task ids values scales out T V G group bits zero_point has_minima")


@functools.cache
def _task(scale_format: int) -> int:
    """Task over rows."""
    is_multiple = scale_format >= MULTIPLES
    float_format = FLOAT16 if is_multiple else scale_format
    float_bytes = FORMAT_BYTES[float_format]

    def gather(arguments: int, begin: int, end: int) -> None:
        a = read(arguments, ARGUMENTS)
        ids, scales = view(a.ids, a.T, np.int64), np.empty(2 * PANEL, np.float32)
        group_bytes, parts = a.group * a.bits // 8 * PANEL, 1 + a.has_minima
        for t in range(begin, end):
            panel, row = ids[t] // PANEL, ids[t] % PANEL
            for g in range(a.G):
                at = panel * a.G + g
                if is_multiple:
                    each = BLOCK // a.group
                    block = a.scales + at // each * (parts * PANEL * (FACTOR_BYTES + each))
                    multiples = view(block + parts * PANEL * (FACTOR_BYTES + at % each), parts * PANEL, np.int8)
                    widen(FLOAT16, block, scales.ctypes.data, parts * PANEL)
                    for part in range(parts):
                        scales[PANEL * part + row] *= np.float32(multiples[PANEL * part + row])
                else:
                    place = a.scales + at * parts * PANEL * float_bytes
                    widen(float_format, place, scales.ctypes.data, parts * PANEL)
                scale, minimum = scales[row], scales[PANEL + row] if a.has_minima else np.float32(0)
                values = view(a.values + at * group_bytes, group_bytes, np.uint8)
                out = view(a.out + 4 * (t * a.G + g) * a.group, a.group, np.float32)
                for k in range(a.group):
                    # Four inputs of a row are adjacent; with fewer bits, the next four are in the same bytes.
                    step = k // 4 if a.bits == 8 else k // 8
                    number = np.int32(values[(step * PANEL + row) * 4 + k % 4])
                    if a.bits < 8:
                        number = number >> 4 if k // 4 % 2 else number & 15
                    if 4 < a.bits < 8:
                        high = np.int32(values[(a.group // 8 * PANEL + row) * 4 + k % 4]) >> (a.bits - 4) * (k // 4)
                        number |= (high & (1 << (a.bits - 4)) - 1) << 4
                    x = np.float32(number - a.zero_point) * scale
                    out[k] = x + minimum if a.has_minima else x
        keep(scales)

    return compiled_task(gather)


@driver
def _driver(pool: int, arguments: int) -> int:
    a = read(arguments, ARGUMENTS)
    if not has_known_ids(a):
        return 1
    run(pool, a.task, arguments, a.T, max(1, NUMBERS_A_PIECE // (a.G * a.group)))
    return 0


@block_embedding.kernel(device="cpu", name="numba", preference=10, supports=supports_ids)
def block_embedding_numba(token_ids_T: Tensor, packed: PackedBlocks) -> Tensor:
    """See ``ops.block_embedding``."""
    ids, (V, D) = token_ids_T.contiguous(), packed.shape
    out_TD = torch.empty(len(ids), D)
    addresses = ids.data_ptr(), packed.values.data_ptr(), packed.scales.data_ptr(), out_TD.data_ptr()
    form = D // packed.group, packed.group, packed.bits, packed.zero_point, int(packed.has_minima)
    task = _task(format_of(packed))
    values = (task, *addresses, len(ids), V, *form)
    call(_driver(), ARGUMENTS, values, f"block_embedding: token ids must be from 0 to {V - 1}")
    return out_TD
