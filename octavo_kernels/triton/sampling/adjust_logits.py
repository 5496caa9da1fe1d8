"""``adjust_logits``: counts of a row's tokens are accumulated in the row of the result, which then replaces them.

Three kernels, as the counts of a row must be cleared before, and complete after, they are accumulated. In the first
two, programs of rows without penalties exit at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.sampling.sampling import BANNED, OVERFLOWN, Adjustments, adjust_logits
from octavo_kernels.triton.launch import after_predecessor, declines_floats, launch

CHUNK = 2048
TOKENS_AT_ONCE = 1024
COUNTING_PROGRAMS = 8
"""Programs that share a row's history."""

_CHUNK = tl.constexpr(CHUNK)
_TOKENS = tl.constexpr(TOKENS_AT_ONCE)
_BANNED = tl.constexpr(BANNED)
_OVERFLOWN = tl.constexpr(OVERFLOWN)
_IN_PROMPT = tl.constexpr(2**30)
"""The bit of a count that says that the token is in the prompt."""


@triton.jit
def _clear_kernel(counts_RV: tl.tensor, slot_R: tl.tensor, V: tl.tensor, PDL: tl.constexpr) -> None:
    chunk, row = tl.program_id(0), tl.program_id(1)
    after_predecessor(PDL)
    if tl.load(slot_R + row) >= 0:
        ids = chunk * _CHUNK + tl.arange(0, _CHUNK)
        tl.store(counts_RV + row.to(tl.int64) * V + ids, tl.zeros([_CHUNK], tl.int32), mask=ids < V)


@triton.jit
def _count_kernel(
    counts_RV: tl.tensor, history: tl.tensor, history_stride: tl.tensor, slot_R: tl.tensor, length_R: tl.tensor,
    num_prompt_tokens_R: tl.tensor, V: tl.tensor, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Count a strided share of one row's history."""
    row = tl.program_id(1)
    after_predecessor(PDL)
    slot = tl.load(slot_R + row)
    if slot >= 0:
        length, num_prompt_tokens = tl.load(length_R + row), tl.load(num_prompt_tokens_R + row)
        history += slot.to(tl.int64) * history_stride
        counts = counts_RV + row.to(tl.int64) * V
        for start in range(tl.program_id(0) * _TOKENS, length, tl.num_programs(0) * _TOKENS):
            at = start + tl.arange(0, _TOKENS)
            token = tl.load(history + at, mask=at < length, other=-1)
            is_token = (token >= 0) & (token < V)
            is_prompt = at < num_prompt_tokens
            tl.atomic_or(counts + token, _IN_PROMPT, mask=is_token & is_prompt, sem="relaxed")
            tl.atomic_add(counts + token, 1, mask=is_token & (at >= num_prompt_tokens), sem="relaxed")


@triton.jit
def _adjust_kernel(
    logits: tl.tensor, row_stride: tl.tensor, out_RV: tl.tensor, slot_R: tl.tensor, repetition_R: tl.tensor,
    frequency_R: tl.tensor, presence_R: tl.tensor, bias_ids_RB: tl.tensor, bias_RB: tl.tensor, banned_ids_RE: tl.tensor,
    mask_RW: tl.tensor, has_mask_R: tl.tensor, V: tl.tensor, B: tl.tensor, E: tl.tensor, W: tl.tensor,
    BIASES: tl.constexpr, BANS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One chunk of one row; BIASES and BANS are B and E rounded up to powers of two."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    after_predecessor(PDL)
    ids = chunk * _CHUNK + tl.arange(0, _CHUNK)
    out = out_RV + row.to(tl.int64) * V
    x = tl.load(logits + row.to(tl.int64) * row_stride + ids, mask=ids < V, other=0.0).to(tl.float32)
    has_penalties = tl.load(slot_R + row) >= 0
    counts = tl.zeros([_CHUNK], tl.int32)
    if has_penalties:
        counts = tl.load(out + ids, mask=ids < V, other=0.0).to(tl.int32, bitcast=True)
    x = tl.where(tl.abs(x) < float("inf"), x, float("nan"))
    if tl.load(has_mask_R + row) != 0:
        byte = ids // 8
        bits = tl.load(mask_RW + row.to(tl.int64) * W + byte, mask=byte < W, other=0).to(tl.int32)
        x = tl.where(((bits >> (ids % 8)) & 1 == 0) & (x == x), _BANNED, x)
    x = _ban_and_bias(x, ids, out, chunk, row, bias_ids_RB, bias_RB, banned_ids_RE, V, B, E, BIASES, BANS)
    if has_penalties:
        x = _penalize(x, counts, tl.load(repetition_R + row), tl.load(frequency_R + row), tl.load(presence_R + row))
    tl.store(out + ids, x, mask=ids < V)


@triton.jit
def _ban_and_bias(
    x: tl.tensor, ids: tl.tensor, out: tl.tensor, chunk: tl.tensor, row: tl.tensor, bias_ids_RB: tl.tensor,
    bias_RB: tl.tensor, banned_ids_RE: tl.tensor, V: tl.tensor, B: tl.tensor, E: tl.tensor, BIASES: tl.constexpr,
    BANS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The chunk's logits with the row's bans and biases, which threads exchange through the result's memory."""
    b, e = tl.arange(0, BIASES), tl.arange(0, BANS)
    bias_ids = tl.load(bias_ids_RB + row * B + b, mask=b < B, other=-1)
    banned_ids = tl.load(banned_ids_RE + row * E + e, mask=e < E, other=-1)
    is_biased = (bias_ids >= 0) & (bias_ids < V) & (bias_ids // _CHUNK == chunk)
    is_banned = (banned_ids >= 0) & (banned_ids < V) & (banned_ids // _CHUNK == chunk)
    if (tl.max(is_biased.to(tl.int32), 0) | tl.max(is_banned.to(tl.int32), 0)) != 0:
        tl.store(out + ids, x, mask=ids < V)
        tl.debug_barrier()
        old = tl.load(out + bias_ids, mask=is_biased, other=0.0)
        bias = tl.load(bias_RB + row * B + b, mask=is_biased, other=0.0)
        biased = _in_range(old + bias)  # in a number as large as BANNED, a bias is lost
        tl.store(out + bias_ids, biased, mask=is_biased)
        tl.debug_barrier()
        old = tl.load(out + banned_ids, mask=is_banned, other=0.0)
        tl.store(out + banned_ids, tl.where(old == old, _BANNED, old), mask=is_banned)
        tl.debug_barrier()
        x = tl.load(out + ids, mask=ids < V, other=0.0)
        tl.debug_barrier()
    return x


@triton.jit
def _penalize(
    x: tl.tensor, counts: tl.tensor, repetition: tl.tensor, frequency: tl.tensor, presence: tl.tensor
) -> tl.tensor:
    """Apply penalties to tokens that occurred; NaN and banned tokens are unchanged."""
    repeated = tl.where(x > 0, tl.div_rn(x, repetition + tl.zeros_like(x)), x * repetition)
    penalized = tl.where(counts != 0, repeated, x)
    occurrences = counts & (_IN_PROMPT - 1)
    subtracted = occurrences.to(tl.float32) * frequency + presence
    penalized = tl.where(occurrences > 0, penalized - subtracted, penalized)
    return tl.where((x == _BANNED) | (x != x), x, _in_range(penalized))


@triton.jit
def _in_range(x: tl.tensor) -> tl.tensor:
    """Replace infinities by BANNED and OVERFLOWN."""
    x = tl.where(x < _BANNED, _BANNED, x)
    return tl.where(x > _OVERFLOWN, _OVERFLOWN, x)


@adjust_logits.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def adjust_logits_triton(logits_RV: Tensor, adjustments: Adjustments) -> Tensor:
    """See ``ops.adjust_logits``; logits whose rows are not dense are copied."""
    R, V = logits_RV.shape
    a = adjustments
    logits_RV = logits_RV if logits_RV.stride(1) == 1 else logits_RV.contiguous()
    out_RV = torch.empty(R, V, dtype=torch.float32, device=logits_RV.device)
    if R == 0:
        return out_RV
    counts_RV = out_RV.view(torch.int32)
    chunks = (triton.cdiv(V, CHUNK), R)
    launch(_clear_kernel, chunks, counts_RV, a.slot_R, V)
    launch(
        _count_kernel, (COUNTING_PROGRAMS, R), counts_RV, a.history_SL, a.history_SL.stride(0), a.slot_R, a.length_R,
        a.num_prompt_tokens_R, V,
    )  # fmt: skip
    B, E = a.bias_ids_RB.shape[1], a.banned_ids_RE.shape[1]
    launch(
        _adjust_kernel, chunks, logits_RV, logits_RV.stride(0), out_RV, a.slot_R,
        *(a.repetition_R, a.frequency_R, a.presence_R),
        *(a.bias_ids_RB, a.bias_RB, a.banned_ids_RE, a.mask_RW, a.has_mask_R), *(V, B, E, a.mask_RW.shape[1]),
        BIASES=triton.next_power_of_2(max(B, 1)), BANS=triton.next_power_of_2(max(E, 1)), num_warps=8,
    )  # fmt: skip
    return out_RV
