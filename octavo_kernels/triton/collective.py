"""Collectives of ranks with a GPU each, over memory that they map from each other (CUDA IPC): one kernel, no barrier.

Every rank has a buffer with a slot for each rank in each of two phases, and numbers its launches, whose order is the
same on all ranks. A program pushes its part of the numbers to this rank's slot in the buffers of the others, so that
nothing is read over a link, waits for their parts in its own buffer, and takes all parts in the order of ranks.
Launches alternate between the phases: a slot is written again two launches later, and by then every other rank has
begun the launch between, and so ended the one that read the slot. A launch counts itself in memory of the device:
captured graphs can be replayed. Each rank begins with the one behind it, so that no two push to the same at a time.

How a program knows that a part has arrived depends on the size. *Small* messages are pairs of 32 bits of the message
and the launch's number, written at once, as in the protocol LL of NCCL: twice the bytes, but one trip over the link.
For *large* ones, a program raises a flag behind what it has written. It does so block by block: while a block is on
its way, it takes the one before.

In *one shot*, every rank sends its message of M bytes to all: (W - 1) M bytes leave it. In *two shots*, each sums a
W-th of the messages, and sends the sums to all: 2 (W - 1) / W M bytes, but the link's latency twice. Both give the same
bits. Which way is taken is decided by the bytes, and those that the link carries while a rank waits: SHOT_BYTES.

Where ranks exchange, each sends every other one something else: of the P parts of its message, that of the rank's place
among P neighbours. Ranks that are no neighbours get a part as well, so that all wait for all.

A program that waited for LONGEST_WAIT polls stops with an assertion, which ends the CUDA context and so the process.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.collective import gathered_rows
from octavo_kernels.triton.launch import after_predecessor, launch

PROGRAMS = 128
"""All must be resident on a device: it has at least as many multiprocessors, or room for several on each."""
SMALL_BLOCK = 512
"""Words of 32 bits that a program exchanges in a small message."""
LARGE_BLOCK = 4096
"""Words for each rank that a program of a large message moves at a time, where there are enough for all programs:
enough bytes on the way for the link's latency."""
SHOT_BYTES = 1 << 20
"""What a link carries in the time that a shot with flags takes longer than a small message (H100: 2.5 us)."""
SMALL_WORDS = PROGRAMS * SMALL_BLOCK
SLOT_BYTES = 16 << 20
WORD_BYTES = 4
PAIR_BYTES = 8
FLAG_BYTES = 8
UNIT_BYTES = 16
"""Messages are multiples of what a thread reads or writes at once."""
LONGEST_WAIT = 1 << 29
"""Polls of 0.3 us (H100): minutes, as another rank may be compiling kernels."""


def buffer_bytes(size: int, slot_bytes: int = SLOT_BYTES) -> int:
    """Bytes of each rank's buffer, which must be zeros at first."""
    return _data_at(size) + 2 * size * slot_bytes


def _pairs_at(size: int) -> int:
    return FLAG_BYTES * size * PROGRAMS


def _data_at(size: int) -> int:
    return _pairs_at(size) + 2 * size * SMALL_WORDS * PAIR_BYTES


def _longest_messages(size: int) -> tuple[int, int]:
    """The bytes up to which messages are small, and those up to which sums take one shot.

    Small messages take 2 (W - 1) M, one shot (W - 1) M + SHOT_BYTES, two shots 2 (W - 1) / W M + 2 SHOT_BYTES.
    """
    others = max(size - 1, 1)
    one_shot = SHOT_BYTES * size // (others * max(size - 2, 1))
    return min(SMALL_WORDS * WORD_BYTES, SHOT_BYTES // others), one_shot if size > 2 else SLOT_BYTES


class PeerCollective:
    """The collective of one rank; see ``ops.collective``. Calls are ordered by the current stream."""

    def __init__(self, addresses_W: Tensor, rank: int, slot_bytes: int = SLOT_BYTES) -> None:
        """``addresses``: int64 on this rank's device, where the buffer of each rank is mapped."""
        self.rank, self.size = rank, len(addresses_W)
        self._addresses_W = addresses_W
        self._slot_bytes = slot_bytes
        self._launches = torch.zeros(PROGRAMS, dtype=torch.int64, device=addresses_W.device)
        self.small_bytes, one_shot = _longest_messages(self.size)
        self.one_shot_bytes = min(one_shot, slot_bytes)

    def all_reduce(self, x_TD: Tensor, residual_TD: Tensor | None = None) -> Tensor:
        """See ``Collective``."""
        x = _padded(x_TD)
        residual = None if residual_TD is None else _padded(residual_TD)
        out = x if residual is None else residual
        most = max(self.size // 2, 1) * self._slot_bytes // x.itemsize  # more than a slot takes two shots
        for begin in range(0, len(x), most):
            piece = slice(begin, begin + most)
            self._launch(x[None, piece], None if residual is None else residual[piece], out[piece], False)
        return out[: x_TD.numel()].view(x_TD.shape)

    def all_gather(self, x: Tensor) -> Tensor:
        """See ``Collective``."""
        return self._gathered(_padded(x)[None])[:, : x.numel()].reshape(self.size, *x.shape)

    def exchange(self, x_TPX: Tensor) -> Tensor:
        """See ``Collective``."""
        T, P, X = x_TPX.shape
        first, x_Pn = self.rank - self.rank % P, x_TPX.transpose(0, 1).reshape(P, T * X)
        if missing := -x_Pn[0].nbytes % UNIT_BYTES:
            x_Pn = torch.nn.functional.pad(x_Pn, (0, missing // x_Pn.itemsize))
        return self._gathered(x_Pn)[first : first + P, : T * X].view(P, T, X)

    def _gathered(self, x_Pn: Tensor) -> Tensor:
        """What each rank has for this one, given what this one has for each of P neighbours: a new tensor [W, n]."""
        n = x_Pn.shape[1]
        out_Wn = torch.empty(self.size, n, dtype=x_Pn.dtype, device=x_Pn.device)
        most = self._slot_bytes // x_Pn.itemsize
        for begin in range(0, n, most):
            self._launch(x_Pn[:, begin : begin + most], None, out_Wn[:, begin:], True)
        return out_Wn

    def all_to_all(self, x_RD: Tensor, places_R: Tensor, num_places: int) -> Tensor:
        """See ``Collective``."""
        return gathered_rows(self, x_RD, places_R, num_places)

    def _launch(self, x_Pn: Tensor, residual: Tensor | None, out: Tensor, gathers: bool) -> None:
        num_bytes = x_Pn[0].nbytes
        strides = [x.stride(0) * x.itemsize // UNIT_BYTES for x in (x_Pn, out)]
        exchange: dict[str, Any] = {"PARTS": len(x_Pn), "GATHERS": gathers}
        large = {"DATA_AT": _data_at(self.size), "SLOT": self._slot_bytes // WORD_BYTES, "PROGRAMS": PROGRAMS}
        if num_bytes <= self.small_bytes:
            kernel = _small_exchange_kernel
            sizes = {**exchange, "PAIRS_AT": _pairs_at(self.size), "SLOT": SMALL_WORDS, "BLOCK": SMALL_BLOCK}
        elif gathers or num_bytes <= self.one_shot_bytes:
            kernel = _large_exchange_kernel
            sizes = {**exchange, **large, "BLOCK": _large_block(num_bytes, LARGE_BLOCK)}
        else:
            kernel, strides = _two_shot_kernel, []
            sizes = {**large, "BLOCK": _large_block(num_bytes // self.size, LARGE_BLOCK // 2)}
        launch(
            kernel, (PROGRAMS,), x_Pn, residual, out, self._addresses_W, self._launches, num_bytes // UNIT_BYTES,
            *strides, RANK=self.rank, SIZE=self.size, LONGEST_WAIT=LONGEST_WAIT, **sizes, num_warps=8,
            sanitize_overflow=False,
        )  # fmt: skip


def _large_block(num_bytes: int, most: int) -> int:
    """The words that a program moves at a time, of so many bytes for each rank: fewer where programs had nothing."""
    return most if num_bytes // WORD_BYTES > PROGRAMS * most // 2 else most // 4


def _padded(x: Tensor) -> Tensor:
    """The numbers in a row, with zeros behind them to a multiple of UNIT_BYTES; themselves where they are one."""
    x = x.contiguous().view(-1)
    missing = -x.nbytes % UNIT_BYTES // x.itemsize
    return torch.cat([x, x.new_zeros(missing)]) if missing else x


@triton.jit(do_not_specialize=["count", "x_stride", "stride"], debug=True)
def _small_exchange_kernel(
    x: tl.tensor, residual: tl.tensor, out: tl.tensor, addresses: tl.tensor, launches: tl.tensor, count: tl.tensor,
    x_stride: tl.tensor, stride: tl.tensor, RANK: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr,
    PAIRS_AT: tl.constexpr, SLOT: tl.constexpr, GATHERS: tl.constexpr, BLOCK: tl.constexpr,
    LONGEST_WAIT: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """``count`` units of 16 bytes for each rank. They are moved as words of 32 bits: one number of 32 bits, or two of
    16."""
    program = tl.program_id(0)
    kind: tl.constexpr = x.dtype.element_ty
    word: tl.constexpr = tl.pointer_type(tl.int32)
    after_predecessor(PDL)
    number = _count(launches + program)
    i = program * BLOCK + tl.arange(0, BLOCK)
    is_ours = i < count * 4
    if program * BLOCK < count * 4:
        slots = (number & 1) * SIZE
        words = tl.load(_part(x, RANK, x_stride, PARTS) + i, mask=is_ours, other=0)
        for d in tl.static_range(1, SIZE):
            sent = words
            if d % PARTS != 0:
                sent = tl.load(_part(x, (RANK + d) % SIZE, x_stride, PARTS) + i, mask=is_ours, other=0)
            pairs = (number << 32) | (sent.to(tl.int64) & 0xFFFFFFFF)
            place = _place(addresses, (RANK + d) % SIZE, PAIRS_AT, tl.int64)
            tl.store(place + (slots + RANK) * SLOT + i, pairs, mask=is_ours)
        tl.debug_barrier()  # no thread polls before all have written
        own = _place(addresses, RANK, PAIRS_AT, tl.int64) + slots * SLOT + i
        target = out.to(word, bitcast=True) + i
        low, high = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
        for r in tl.static_range(SIZE):
            part = words
            if r != RANK:
                part = _arrived(own + r * SLOT, is_ours, number.to(tl.int32), LONGEST_WAIT)
            if GATHERS:
                tl.store(target + r * stride.to(tl.int64) * 4, part, mask=is_ours)
            else:
                low += _low(part, kind)
                high += _high(part, kind)
        if not GATHERS:
            if residual is not None:
                part = tl.load(residual.to(word, bitcast=True) + i, mask=is_ours, other=0)
                low += _low(part, kind)
                high += _high(part, kind)
            tl.store(target, _word(low, high, kind), mask=is_ours)


@triton.jit
def _part(x: tl.tensor, rank: tl.constexpr, x_stride: tl.tensor, PARTS: tl.constexpr) -> tl.tensor:
    """The words that a rank gets."""
    return x.to(tl.pointer_type(tl.int32), bitcast=True) + rank % PARTS * x_stride.to(tl.int64) * 4


@triton.jit
def _count(launches: tl.tensor) -> tl.tensor:
    """The number of this launch, which this program has counted."""
    number = tl.load(launches) + 1
    tl.debug_barrier()  # every warp reads the count, and one of them writes it
    tl.store(launches, number)
    return number


@triton.jit
def _place(addresses: tl.tensor, rank: tl.constexpr, AT: tl.constexpr, kind: tl.constexpr) -> tl.tensor:
    """A place in a rank's buffer. That it is aligned lets a thread move 16 bytes at once."""
    buffer = tl.load(addresses + rank).to(tl.pointer_type(kind))
    return tl.multiple_of(buffer, 16) + AT // (kind.primitive_bitwidth // 8)


@triton.jit
def _arrived(pairs: tl.tensor, is_ours: tl.tensor, number: tl.tensor, LONGEST_WAIT: tl.constexpr) -> tl.tensor:
    """The words of these pairs, when all have this launch's number; older pairs are not 2**32 launches old."""
    found = tl.load(pairs, mask=is_ours, other=0, volatile=True)
    polls = 0
    while (tl.sum((((found >> 32).to(tl.int32) != number) & is_ours).to(tl.int32)) > 0) & (polls < LONGEST_WAIT):
        found = tl.load(pairs, mask=is_ours, other=0, volatile=True)
        polls += 1
    tl.device_assert(polls < LONGEST_WAIT, "a rank does not come")
    return found.to(tl.int32)


@triton.jit
def _low(words: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    """The first number of each word."""
    if kind.primitive_bitwidth == 32:
        return words.to(kind, bitcast=True).to(tl.float32)
    else:  # noqa: RET505 (only one of two branches may be compiled)
        return (words & 0xFFFF).to(tl.int16).to(kind, bitcast=True).to(tl.float32)


@triton.jit
def _high(words: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    """The second number of each word, zero where there is one."""
    if kind.primitive_bitwidth == 32:
        return tl.zeros(words.shape, tl.float32)
    else:  # noqa: RET505
        return (words >> 16).to(tl.int16).to(kind, bitcast=True).to(tl.float32)


@triton.jit
def _word(low: tl.tensor, high: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    if kind.primitive_bitwidth == 32:
        return low.to(kind).to(tl.int32, bitcast=True)
    else:  # noqa: RET505
        first = low.to(kind).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return first | (high.to(kind).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit(do_not_specialize=["count", "x_stride", "stride"], debug=True)
def _large_exchange_kernel(
    x: tl.tensor, residual: tl.tensor, out: tl.tensor, addresses: tl.tensor, launches: tl.tensor, count: tl.tensor,
    x_stride: tl.tensor, stride: tl.tensor, RANK: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr,
    DATA_AT: tl.constexpr, SLOT: tl.constexpr, GATHERS: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
    LONGEST_WAIT: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """``count`` units of 16 bytes for each rank, moved as words."""
    program = tl.program_id(0)
    kind: tl.constexpr = x.dtype.element_ty
    word: tl.constexpr = tl.pointer_type(tl.int32)
    after_predecessor(PDL)
    number = _count(launches + program)
    slots = (number & 1) * SIZE
    source, num_words = _part(x, RANK, x_stride, PARTS), count * 4
    data, target = _place(addresses, RANK, DATA_AT, tl.int32) + slots * SLOT, out.to(word, bitcast=True)
    num_blocks = _num_blocks(program, num_words, PROGRAMS, BLOCK)
    for k in range(num_blocks + 1):
        i = (k * PROGRAMS + program) * BLOCK + tl.arange(0, BLOCK)
        if k < num_blocks:
            own = tl.load(source + i, mask=i < num_words)
            for d in tl.static_range(1, SIZE):
                part = own
                if d % PARTS != 0:
                    part = tl.load(_part(x, (RANK + d) % SIZE, x_stride, PARTS) + i, mask=i < num_words)
                slot = _place(addresses, (RANK + d) % SIZE, DATA_AT, tl.int32) + (slots + RANK) * SLOT
                tl.store(slot + i, part, mask=i < num_words)
        if k > 0:
            _wait(addresses, program, number, k - 1, RANK, SIZE, PROGRAMS, LONGEST_WAIT)
            i -= PROGRAMS * BLOCK
            if GATHERS:
                for r in tl.static_range(SIZE):
                    place = source if r == RANK else data + r * SLOT
                    part = tl.load(place + i, mask=i < num_words)
                    tl.store(target + r * stride.to(tl.int64) * 4 + i, part, mask=i < num_words)
            else:
                total = _total(source + i, data + i, residual, i, i < num_words, kind, RANK, SIZE, SLOT)
                tl.store(target + i, total, mask=i < num_words)
        if k < num_blocks:
            _tell(addresses, program, number, k, RANK, SIZE, PROGRAMS)


@triton.jit(do_not_specialize=["count"], debug=True)
def _two_shot_kernel(
    x: tl.tensor, residual: tl.tensor, out: tl.tensor, addresses: tl.tensor, launches: tl.tensor, count: tl.tensor,
    RANK: tl.constexpr, SIZE: tl.constexpr, DATA_AT: tl.constexpr, SLOT: tl.constexpr, PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr, LONGEST_WAIT: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """The sum of ``count`` units of 16 bytes, moved as words. Half of a slot is for messages, half for sums."""
    program = tl.program_id(0)
    kind: tl.constexpr = x.dtype.element_ty
    word: tl.constexpr = tl.pointer_type(tl.int32)
    after_predecessor(PDL)
    number = _count(launches + program)
    slots = (number & 1) * SIZE
    source, target, num_words = x.to(word, bitcast=True), out.to(word, bitcast=True), count * 4
    data = _place(addresses, RANK, DATA_AT, tl.int32) + slots * SLOT
    length = tl.cdiv(count, SIZE) * 4  # of each rank's part of the sum; the last ones may be shorter
    num_blocks = _num_blocks(program, length, PROGRAMS, BLOCK)
    for k in range(tl.where(num_blocks > 0, num_blocks + 2, 0)):
        j = (k * PROGRAMS + program) * BLOCK + tl.arange(0, BLOCK)
        if k < num_blocks:
            for d in tl.static_range(1, SIZE):
                i = (RANK + d) % SIZE * length + j
                is_there = (j < length) & (i < num_words)
                slot = _place(addresses, (RANK + d) % SIZE, DATA_AT, tl.int32) + (slots + RANK) * SLOT
                tl.store(slot + j, tl.load(source + i, mask=is_there), mask=is_there)
        if k > 0:
            _wait(addresses, program, number, k - 1, RANK, SIZE, PROGRAMS, LONGEST_WAIT)
            j -= PROGRAMS * BLOCK
            if k <= num_blocks:
                i = RANK * length + j
                is_there = (j < length) & (i < num_words)
                total = _total(source + i, data + j, residual, i, is_there, kind, RANK, SIZE, SLOT)
                tl.store(target + i, total, mask=is_there)
                for d in tl.static_range(1, SIZE):
                    slot = _place(addresses, (RANK + d) % SIZE, DATA_AT, tl.int32) + (slots + RANK) * SLOT
                    tl.store(slot + SLOT // 2 + j, total, mask=is_there)
        if k > 1:
            j -= PROGRAMS * BLOCK
            for d in tl.static_range(1, SIZE):
                i = (RANK + d) % SIZE * length + j
                is_there = (j < length) & (i < num_words)
                total = tl.load(data + (RANK + d) % SIZE * SLOT + SLOT // 2 + j, mask=is_there)
                tl.store(target + i, total, mask=is_there)
        if k <= num_blocks:
            _tell(addresses, program, number, k, RANK, SIZE, PROGRAMS)


@triton.jit
def _num_blocks(program: tl.tensor, num_words: tl.tensor, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """How many of the blocks are a program's: every one of PROGRAMS."""
    return tl.cdiv(tl.maximum(num_words - program * BLOCK, 0), PROGRAMS * BLOCK)


@triton.jit
def _total(
    own: tl.tensor, slots: tl.tensor, residual: tl.tensor, i: tl.tensor, is_there: tl.tensor, kind: tl.constexpr,
    RANK: tl.constexpr, SIZE: tl.constexpr, SLOT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The words of a block of the sum, given pointers to this rank's, and to those of rank 0 in its slot."""
    low, high = tl.zeros(i.shape, tl.float32), tl.zeros(i.shape, tl.float32)
    for r in tl.static_range(SIZE):
        part = tl.load(own if r == RANK else slots + r * SLOT, mask=is_there)
        low += _low(part, kind)
        high += _high(part, kind)
    if residual is not None:
        part = tl.load(residual.to(tl.pointer_type(tl.int32), bitcast=True) + i, mask=is_there)
        low += _low(part, kind)
        high += _high(part, kind)
    return _word(low, high, kind)


@triton.jit
def _tell(
    addresses: tl.tensor, program: tl.tensor, number: tl.tensor, k: tl.tensor, RANK: tl.constexpr, SIZE: tl.constexpr,
    PROGRAMS: tl.constexpr,
) -> None:  # fmt: skip
    """Tell the same program of every other rank that this one has written its ``k``-th blocks: a thread for each rank,
    so that they wait at once until what is written can be seen."""
    ranks = tl.arange(0, triton.next_power_of_2(SIZE))
    others = (ranks < SIZE) & (ranks != RANK)
    buffers = tl.load(addresses + ranks, mask=others, other=0).to(tl.pointer_type(tl.int64))
    tl.debug_barrier()  # the release covers the writes of all threads
    flags = buffers + (RANK * PROGRAMS + program)
    tl.atomic_xchg(flags, tl.full(ranks.shape, 0, tl.int64) + ((number << 32) + k), others, sem="release", scope="sys")


@triton.jit
def _wait(
    addresses: tl.tensor, program: tl.tensor, number: tl.tensor, k: tl.tensor, RANK: tl.constexpr, SIZE: tl.constexpr,
    PROGRAMS: tl.constexpr, LONGEST_WAIT: tl.constexpr,
) -> None:  # fmt: skip
    """Wait until the same program of every other rank has written its ``k``-th blocks."""
    ranks = tl.arange(0, triton.next_power_of_2(SIZE))
    others = (ranks < SIZE) & (ranks != RANK)
    flags = _place(addresses, RANK, 0, tl.int64) + (ranks * PROGRAMS + program)
    none = tl.full(ranks.shape, 0, tl.int64)
    polls, missing = 0, 1
    while (missing > 0) & (polls < LONGEST_WAIT):
        seen = tl.atomic_add(flags, none, others, sem="acquire", scope="sys")
        missing = tl.sum(((seen < (number << 32) + k) & others).to(tl.int32))
        polls += 1
    tl.device_assert(polls < LONGEST_WAIT, "a rank does not come")
    tl.debug_barrier()
