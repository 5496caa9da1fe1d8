"""Recurrent state: where the rows of a step find it, and the recurrence of which several ops are made.

A layer with recurrent state keeps a fixed number of numbers for each sequence, in a *slot* of its pool. A step reads
the slot of each of its sequences, computes the rows one after the other, and leaves the state after the last row.

Shapes: T tokens of the step, S sequences, N heads, K numbers of a key, V numbers of a value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class StateRows(NamedTuple):
    """The sequences of a step's rows, and the slots of their states.

    A sequence whose first row of the step is its position 0 starts without a state, whatever its slot holds: slots need
    not be cleared. Nothing is stored for a sequence without rows, or with a negative slot; the results of its rows are
    unspecified, as are those of rows from ``cu_seqlens_q[S]`` on.
    """

    cu_seqlens_q: Tensor
    """int32 [S + 1]: rows ``cu_seqlens_q[s]`` to ``cu_seqlens_q[s + 1]`` belong to sequence s."""
    seq_lens_S: Tensor
    """int32: length of each sequence, the rows of this step included."""
    slots_S: Tensor
    """int32: the slot of each sequence, different for each of them; negative for padding."""
    max_query_len: int
    """Upper bound of a sequence's rows. With 1, row s belongs to sequence s."""
    marks_T: Tensor | None = None
    """int32: a slot in which the state after each row is kept as well, negative for none; ``None``: no row has one.
    Only backends whose device ``keeps_marked_states`` are given any."""

    def spans(self) -> Iterator[tuple[slice, int, bool]]:
        """For each sequence with rows and a slot: its rows, its slot, and whether it starts without a state."""
        starts, lengths, slots = self.cu_seqlens_q.tolist(), self.seq_lens_S.tolist(), self.slots_S.tolist()
        for s, (length, slot) in enumerate(zip(lengths, slots, strict=True)):
            num_rows = starts[s + 1] - starts[s]
            if num_rows > 0 and slot >= 0:
                yield slice(starts[s], starts[s + 1]), slot, length == num_rows

    def marks(self, own: slice) -> Iterator[tuple[int, int]]:
        """Those of ``own`` rows after which the state is kept as well, and the slots for it."""
        if self.marks_T is not None:
            marks = enumerate(self.marks_T[own].tolist(), own.start)
            yield from ((row, slot) for row, slot in marks if slot >= 0)


def wide_type(x: Tensor) -> torch.dtype:
    """The type in which sums are computed: float32 at least."""
    return torch.promote_types(x.dtype, torch.float32)


def recur(
    q_TNK: Tensor,
    k_TNK: Tensor,
    v_TNV: Tensor,
    decay_TNK: Tensor,
    state: Tensor,
    rows: StateRows,
    beta_TN: Tensor | None = None,
) -> Tensor:
    """``S = decay * S + k u^T; out = S^T q`` for each head and row, with ``u = v``; a new tensor [T, N, V].

    With ``beta``, ``u = beta * (v - (decay * S)^T k)``: the delta rule. ``state`` is [slots, N, K, V]; the last axis of
    ``decay`` may have a single factor for all K. The state is rounded to its dtype after every row, so that a sequence
    gives the same bits in any chunks.
    """
    out_TNV = torch.zeros(*q_TNK.shape[:2], v_TNV.shape[2], dtype=q_TNK.dtype, device=q_TNK.device)
    for own, slot, is_fresh in rows.spans():
        state_NKV, marks = torch.zeros_like(state[slot]) if is_fresh else state[slot], dict(rows.marks(own))
        for t in range(own.start, own.stop):
            decayed_NKV = state_NKV.to(q_TNK.dtype) * decay_TNK[t].unsqueeze(-1)
            u_NV = v_TNV[t]
            if beta_TN is not None:
                u_NV = beta_TN[t].unsqueeze(-1) * (u_NV - (decayed_NKV * k_TNK[t].unsqueeze(-1)).sum(dim=1))
            state_NKV = (decayed_NKV + k_TNK[t].unsqueeze(-1) * u_NV.unsqueeze(1)).to(state.dtype)
            out_TNV[t] = (state_NKV.to(q_TNK.dtype) * q_TNK[t].unsqueeze(-1)).sum(dim=1)
            if t in marks:
                state[marks[t]] = state_NKV
        state[slot] = state_NKV
    return out_TNV
