"""``draft_rows``: a program for each sequence."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.drafting import DraftRows, draft_rows
from octavo_kernels.triton.launch import after_predecessor, empty_indices, launch


@draft_rows.kernel(device="cuda", name="triton", preference=10, supports=lambda dtype: None)
def draft_rows_triton(
    positions_T: Tensor,
    last_rows_S: Tensor,
    capacities_S: Tensor,
    block_tables_GSB: Tensor,
    num_passes: int,
    block_size: int,
) -> DraftRows:
    """See ``ops.draft_rows``."""
    P, (G, S, B), device = num_passes, block_tables_GSB.shape, positions_T.device
    longs = empty_indices((1 + G) * P * S, torch.int64, device)
    ints = empty_indices(P * S + S + 1, torch.int32, device)
    positions_PS, slots_GPS = longs[: P * S].view(P, S), longs[P * S :].view(G, P, S)
    found = DraftRows(positions_PS, slots_GPS, ints[: P * S].view(P, S), ints[P * S :])
    launch(
        _rows_kernel,
        (S,),
        *(positions_T, last_rows_S, capacities_S, block_tables_GSB, *found),
        *(S, B, block_tables_GSB.stride(0), block_tables_GSB.stride(1)),
        P=P,
        PASSES=triton.next_power_of_2(P),
        GROUPS=G,
        BLOCK_SIZE=block_size,
        SEQS=triton.next_power_of_2(S),
        num_warps=1,
    )
    return found


@triton.jit(do_not_specialize=["num_seqs", "table_width", "group_stride"])
def _rows_kernel(
    positions: tl.tensor, last_rows: tl.tensor, capacities: tl.tensor, tables: tl.tensor, out_positions: tl.tensor,
    out_slots: tl.tensor, out_lens: tl.tensor, out_starts: tl.tensor, num_seqs: tl.tensor, table_width: tl.tensor,
    group_stride: tl.tensor, table_stride: tl.tensor, P: tl.constexpr, PASSES: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SEQS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    seq, p, s = tl.program_id(0), tl.arange(0, PASSES), tl.arange(0, SEQS)
    after_predecessor(PDL)
    capacity = tl.load(capacities + seq)
    position = tl.load(positions + tl.load(last_rows + seq)) + 1 + p
    is_pass, at = p < P, p * num_seqs + seq
    tl.store(out_positions + at, position, mask=is_pass)
    tl.store(out_lens + at, tl.minimum(position + 1, capacity).to(tl.int32), mask=is_pass)
    for group in tl.static_range(GROUPS):
        table = tables + group * group_stride + seq.to(tl.int64) * table_stride
        entry = tl.minimum(position // BLOCK_SIZE, table_width - 1)
        block = tl.load(table + entry, mask=is_pass, other=0).to(tl.int64)
        slot = tl.where(position < capacity, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        tl.store(out_slots + group * P * num_seqs + at, slot, mask=is_pass)
    has_row = tl.load(capacities + s, mask=s <= seq, other=0) > 0
    tl.store(out_starts + seq * 0, 0, mask=seq == 0)
    tl.store(out_starts + seq + 1, tl.sum(has_row.to(tl.int32), 0))
