"""``block_embedding``: a row's numbers gathered from its panel; tied output heads use the same panels."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from octavo.ops.block_embedding import block_embedding
from octavo.ops.block_linear import PANEL, PackedBlocks
from octavo.ops.cpu.calls import call
from octavo.ops.cpu.compiled import compiled_driver, compiled_task
from octavo.ops.cpu.embedding import supports_ids
from octavo.ops.cpu.half import widen
from octavo.ops.cpu.memory import fields, keep, read, view
from octavo.ops.cpu.threads import run
from octavo.ops.cpu.vector_ir import FLOAT16, FLOAT32, FORMAT_BYTES

NUMBERS_A_PIECE = 1024
ARGUMENTS = fields(
    task=int,
    ids=int,
    values=int,
    scales=int,
    out=int,
    T=int,
    V=int,
    G=int,
    group=int,
    bits=int,
    zero_point=int,
    has_minima=int,
)


@functools.cache
def _task(scale_format: int) -> int:
    """Task over rows."""
    scale_bytes = FORMAT_BYTES[scale_format]

    def gather(arguments: int, begin: int, end: int) -> None:
        a = read(arguments, ARGUMENTS)
        ids, scales = view(a.ids, a.T, np.int64), np.empty(2 * PANEL, np.float32)
        group_bytes, parts = a.group * a.bits // 8 * PANEL, 1 + a.has_minima
        for t in range(begin, end):
            panel, row = ids[t] // PANEL, ids[t] % PANEL
            for g in range(a.G):
                at = panel * a.G + g
                widen(scale_format, a.scales + at * parts * PANEL * scale_bytes, scales.ctypes.data, parts * PANEL)
                scale, minimum = scales[row], scales[PANEL + row] if a.has_minima else np.float32(0)
                values = view(a.values + at * group_bytes, group_bytes, np.uint8)
                out = view(a.out + 4 * (t * a.G + g) * a.group, a.group, np.float32)
                for k in range(a.group):
                    # Four inputs of a row are adjacent; with four bits, the next four are in the same bytes.
                    step, half = (k // 8, k // 4 % 2) if a.bits == 4 else (k // 4, 0)
                    number = np.int32(values[(step * PANEL + row) * 4 + k % 4])
                    if a.bits == 4:
                        number = number >> 4 if half else number & 15
                    x = np.float32(number - a.zero_point) * scale
                    out[k] = x + minimum if a.has_minima else x
        keep(scales)

    return compiled_task(gather)


@functools.cache
def _driver() -> int:
    def drive(pool: int, arguments: int) -> int:
        a = read(arguments, ARGUMENTS)
        ids = view(a.ids, a.T, np.int64)
        for t in range(a.T):
            if not 0 <= ids[t] < a.V:
                return 1
        run(pool, a.task, arguments, a.T, max(1, NUMBERS_A_PIECE // (a.G * a.group)))
        return 0

    return compiled_driver(drive)


@block_embedding.kernel(device="cpu", name="numba", preference=10, supports=supports_ids)
def block_embedding_numba(token_ids_T: Tensor, packed: PackedBlocks) -> Tensor:
    """See ``ops.block_embedding``."""
    ids, (V, D) = token_ids_T.contiguous(), packed.shape
    out_TD = torch.empty(len(ids), D)
    arguments = np.empty(1, ARGUMENTS)
    addresses = ids.data_ptr(), packed.values.data_ptr(), packed.scales.data_ptr(), out_TD.data_ptr()
    form = D // packed.group, packed.group, packed.bits, packed.zero_point, int(packed.has_minima)
    task = _task(FLOAT16 if packed.scales.dtype == torch.float16 else FLOAT32)
    arguments[0] = (task, *addresses, len(ids), V, *form)
    call(_driver(), arguments, f"block_embedding: token ids must be from 0 to {V - 1}")
    return out_TD
