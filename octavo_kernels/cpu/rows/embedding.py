"""Lookups of token ids in tables, whole or a rank's part."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.ops.embedding import embedding, local_vocab_ids, mask_remote_rows
from octavo_kernels.cpu.calls import call
from octavo_kernels.cpu.compiled import compiled_driver, driver, inlined
from octavo_kernels.cpu.half import widen
from octavo_kernels.cpu.host import FLOAT_FEATURES, missing
from octavo_kernels.cpu.memory import fields, read, view
from octavo_kernels.cpu.tensors import FORMATS
from octavo_kernels.cpu.vector_ir import FORMAT_BYTES

# ---- embedding: ``embedding``: rows copied as bytes, for any dtype, or widened to float32.


EMBEDDING_ARGUMENTS = fields("ids table out T V row_bytes")


@inlined
def has_known_ids(a: Any) -> bool:
    """Whether all T ids of a call are rows of its table, 0 to V - 1."""
    ids = view(a.ids, a.T, np.int64)
    are_known = True
    for t in range(a.T):
        are_known &= 0 <= ids[t] < a.V
    return are_known


@functools.cache
def _widening_driver(number_format: int) -> int:
    item = FORMAT_BYTES[number_format]

    def drive(pool: int, arguments: int) -> int:
        a = read(arguments, EMBEDDING_ARGUMENTS)
        if not has_known_ids(a):
            return 1
        ids, D = view(a.ids, a.T, np.int64), a.row_bytes // item
        for t in range(a.T):
            widen(number_format, a.table + ids[t] * a.row_bytes, a.out + 4 * D * t, D)
        return 0

    return compiled_driver(drive)


@driver
def _embedding_driver(pool: int, arguments: int) -> int:
    a = read(arguments, EMBEDDING_ARGUMENTS)
    if not has_known_ids(a):
        return 1
    ids = view(a.ids, a.T, np.int64)
    for t in range(a.T):
        row = view(a.table + ids[t] * a.row_bytes, a.row_bytes, np.uint8)
        out = view(a.out + t * a.row_bytes, a.row_bytes, np.uint8)
        for i in range(a.row_bytes):  # numba takes much longer to compile an assignment of slices
            out[i] = row[i]
    return 0


def supports_ids(dtype: torch.dtype) -> str | None:
    """Why token ids of this dtype are declined; ``None`` if they are supported."""
    return missing(FLOAT_FEATURES) if dtype == torch.int64 else f"token ids must be int64, got {dtype}"


@embedding.kernel(device="cpu", name="numba", preference=10, supports=supports_ids)
def embedding_numba(token_ids_T: Tensor, table_VD: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """See ``ops.embedding``."""
    ids, table, (V, D) = token_ids_T.contiguous(), table_VD.contiguous(), table_VD.shape
    widens = dtype is not None and dtype != table.dtype
    out_TD = torch.empty(len(ids), D, dtype=torch.float32 if widens else table.dtype)
    values = (ids.data_ptr(), table.data_ptr(), out_TD.data_ptr(), len(ids), V, D * table.itemsize)
    chosen = _widening_driver(FORMATS[table.dtype]) if widens else _embedding_driver()
    call(chosen, EMBEDDING_ARGUMENTS, values, f"embedding: token ids must be from 0 to {V - 1}")
    return out_TD


# ---- local_vocab_ids: ``local_vocab_ids`` as a compiled call, so that recorded steps contain it.


LOCAL_VOCAB_IDS_ARGUMENTS = fields("ids out T first count")


@driver
def _local_vocab_ids_driver(pool: int, arguments: int) -> int:
    a = read(arguments, LOCAL_VOCAB_IDS_ARGUMENTS)
    ids, out = view(a.ids, a.T, np.int64), view(a.out, a.T, np.int64)
    for t in range(a.T):
        own = ids[t] - a.first
        out[t] = own if 0 <= own < a.count else 0
    return 0


@local_vocab_ids.kernel(device="cpu", name="numba", preference=10, supports=supports_ids)
def local_vocab_ids_numba(token_ids_T: Tensor, first: int, count: int) -> Tensor:
    """See ``ops.local_vocab_ids``."""
    ids = token_ids_T.contiguous()
    out_T = torch.empty(len(ids), dtype=torch.int64)
    values = (ids.data_ptr(), out_T.data_ptr(), len(ids), first, count)
    call(_local_vocab_ids_driver(), LOCAL_VOCAB_IDS_ARGUMENTS, values)
    return out_T


# ---- mask_remote_rows: ``mask_remote_rows`` as a compiled call, so that recorded steps contain it.


MASK_REMOTE_ROWS_ARGUMENTS = fields("x ids T first count row_bytes")


@driver
def _mask_remote_rows_driver(pool: int, arguments: int) -> int:
    a = read(arguments, MASK_REMOTE_ROWS_ARGUMENTS)
    ids = view(a.ids, a.T, np.int64)
    for t in range(a.T):
        if not a.first <= ids[t] < a.first + a.count:
            view(a.x + t * a.row_bytes, a.row_bytes, np.uint8)[:] = 0
    return 0


def _supports(dtype: torch.dtype) -> str | None:
    return missing(FLOAT_FEATURES)


@mask_remote_rows.kernel(device="cpu", name="numba", preference=10, supports=_supports)
def mask_remote_rows_numba(x_TD: Tensor, token_ids_T: Tensor, first: int, count: int) -> Tensor:
    """See ``ops.mask_remote_rows``."""
    assert x_TD.is_contiguous(), "rows are overwritten in place"
    ids = token_ids_T.contiguous()
    values = (x_TD.data_ptr(), ids.data_ptr(), len(ids), first, count, x_TD.shape[1] * x_TD.itemsize)
    call(_mask_remote_rows_driver(), MASK_REMOTE_ROWS_ARGUMENTS, values)
    return x_TD
