"""Rows of tokens in the order of the tiles of their experts.

Shapes: T tokens, P pairs of a token and an expert, K columns.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.triton.launch import after_predecessor, launch

BLOCK_K = 1024


@triton.jit
def gather_kernel(
    x_ptr: tl.tensor, order_ptr: tl.tensor, used_ptr: tl.tensor, out_ptr: tl.tensor, K: tl.tensor,
    pairs_a_row: tl.tensor, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """A block of the row of one pair, to the pair's place in the order, if it has one."""
    place, k = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    after_predecessor(PDL)
    row = tl.load(order_ptr + place) // pairs_a_row
    mask = (k < K) & (place < tl.load(used_ptr + 1))
    x = tl.load(x_ptr + row.to(tl.int64) * K + k, mask=mask, other=0.0)
    tl.store(out_ptr + place.to(tl.int64) * K + k, x, mask=mask)


def gather_rows(x_TK: Tensor, order_P: Tensor, used: Tensor) -> Tensor:
    """The rows of the pairs that have a place in the order, [P, K]; see ``Tiles``."""
    P, K = len(order_P), x_TK.shape[1]
    out_PK = x_TK.new_empty(P, K)
    launch(
        gather_kernel, (P, triton.cdiv(K, BLOCK_K)), x_TK, order_P, used, out_PK, K, P // len(x_TK), BLOCK_K,
        num_warps=4,
    )  # fmt: skip
    return out_PK
