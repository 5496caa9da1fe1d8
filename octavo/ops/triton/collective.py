"""Collectives of ranks with a GPU each, over memory that they map from each other (CUDA IPC): one kernel, no barrier.

Every rank has a buffer with a slot for each rank in each of two phases, and a flag for each rank and program. In a
round, program b writes its part of the numbers to this rank's slot in every buffer, raises its flag there, waits for
the flags of all ranks in its own buffer, and reads its part of all slots in the order of ranks. The numbers are pushed,
so that nothing is read over the link. Program b of one rank waits for program b of the others only, and the grid never
changes, so each program counts its rounds by itself, in memory of the device: captured graphs can be replayed. A slot
is written again two rounds later; by then every rank has raised its flag for the round between.

A program that waited for LONGEST_WAIT polls stops with an assertion, which ends the CUDA context and so the process.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.triton.launch import after_predecessor, launch

PROGRAMS = 32
"""All must be resident on a device, beside whatever else is."""
BLOCK = 2048
SLOT_BYTES = 16 << 20
FLAG_BYTES = 4
LONGEST_WAIT = 1 << 27
"""Polls of the better part of a microsecond: minutes, as another rank may be compiling kernels."""


def buffer_bytes(size: int, slot_bytes: int = SLOT_BYTES) -> int:
    """Bytes of each rank's buffer, which must be zeros at first."""
    return _data_at(size) + 2 * size * slot_bytes


def _data_at(size: int) -> int:
    return -(-FLAG_BYTES * size * PROGRAMS // 256) * 256


class PeerCollective:
    """The collective of one rank; see ``ops.collective``. Calls are ordered by the current stream."""

    def __init__(self, addresses_W: Tensor, rank: int, slot_bytes: int = SLOT_BYTES) -> None:
        """``addresses``: int64 on this rank's device, where the buffer of each rank is mapped."""
        self.rank, self.size = rank, len(addresses_W)
        self._addresses_W = addresses_W
        self._slot_bytes = slot_bytes
        self._rounds = torch.zeros(PROGRAMS, dtype=torch.int32, device=addresses_W.device)

    def all_reduce(self, x_TD: Tensor, residual_TD: Tensor | None = None) -> Tensor:
        """See ``Collective``."""
        x_TD = x_TD.contiguous()
        out_TD = x_TD if residual_TD is None else residual_TD
        assert out_TD.is_contiguous(), "all_reduce adds to the residual in place"
        x, out = x_TD.view(-1), out_TD.view(-1)
        most = self._slot_bytes // x.itemsize
        for begin in range(0, len(x), most):
            part = slice(begin, begin + most)
            self._launch(x[part], None if residual_TD is None else out[part], out[part], False)
        return out_TD

    def all_gather(self, x: Tensor) -> Tensor:
        """See ``Collective``; the bytes of ``x`` must be a multiple of 4."""
        words = x.contiguous().view(-1).view(torch.int32)
        out_WN = torch.empty(self.size, len(words), dtype=torch.int32, device=x.device)
        most = self._slot_bytes // words.itemsize
        for begin in range(0, len(words), most):
            self._launch(words[begin : begin + most], None, out_WN[:, begin:], True)
        return out_WN.view(x.dtype).view(self.size, *x.shape)

    def _launch(self, x: Tensor, residual: Tensor | None, out: Tensor, gathers: bool) -> None:
        launch(
            _exchange_kernel,
            (PROGRAMS,),
            x,
            residual,
            out,
            self._addresses_W,
            self._rounds,
            len(x),
            out.stride(0) if gathers else 0,
            self._slot_bytes // x.itemsize,
            RANK=self.rank,
            SIZE=self.size,
            DATA_AT=_data_at(self.size),
            GATHERS=gathers,
            PROGRAMS=PROGRAMS,
            BLOCK=BLOCK,
            LONGEST_WAIT=LONGEST_WAIT,
            num_warps=8,
            sanitize_overflow=False,
        )


@triton.jit(do_not_specialize=["count", "stride"], debug=True)
def _exchange_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    addresses: tl.tensor,
    rounds: tl.tensor,
    count: tl.tensor,
    stride: tl.tensor,
    slot_size: tl.tensor,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    DATA_AT: tl.constexpr,
    GATHERS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    LONGEST_WAIT: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    kind: tl.constexpr = tl.pointer_type(x.dtype.element_ty)
    flag_kind: tl.constexpr = tl.pointer_type(tl.int32)
    lane = tl.arange(0, BLOCK)
    after_predecessor(PDL)
    number = tl.load(rounds + program) + 1  # wraps around, as comparisons do
    slots = (number & 1).to(tl.int64) * SIZE
    for p in tl.static_range(SIZE):
        slot = (tl.load(addresses + p) + DATA_AT).to(kind) + (slots + RANK) * slot_size
        for first in range(program * BLOCK, count, PROGRAMS * BLOCK):
            i = first + lane
            tl.store(slot + i, tl.load(x + i, mask=i < count), mask=i < count)
    tl.debug_barrier()  # the release below covers the writes of all threads
    for p in tl.static_range(SIZE):
        flag = tl.load(addresses + p).to(flag_kind) + RANK * PROGRAMS + program
        tl.atomic_xchg(flag, number, sem="release", scope="sys")
    own = tl.load(addresses + RANK)
    for r in tl.static_range(SIZE):
        flag = own.to(flag_kind) + r * PROGRAMS + program
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        polls = 0
        while (seen - number < 0) & (polls < LONGEST_WAIT):
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
            polls += 1
        tl.device_assert(polls < LONGEST_WAIT, "a rank does not come")
    tl.debug_barrier()
    data = (own + DATA_AT).to(kind) + slots * slot_size
    for first in range(program * BLOCK, count, PROGRAMS * BLOCK):
        i = first + lane
        if GATHERS:
            for r in tl.static_range(SIZE):
                words = tl.load(data + r * slot_size + i, mask=i < count)
                tl.store(out + r * stride.to(tl.int64) + i, words, mask=i < count)
        else:
            total = tl.load(data + i, mask=i < count).to(tl.float32)
            for r in tl.static_range(1, SIZE):
                total += tl.load(data + r * slot_size + i, mask=i < count).to(tl.float32)
            if residual is not None:
                total += tl.load(residual + i, mask=i < count).to(tl.float32)
            tl.store(out + i, total.to(out.dtype.element_ty), mask=i < count)
    tl.debug_barrier()
    tl.store(rounds + program, number)
