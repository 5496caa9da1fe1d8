"""The operations of ``ops.compressed_attention`` for CUDA devices: each row by itself, with all bounds read on the
device, so that a row's bits depend on no other row.

Heads and entries are taken as their even and their odd numbers, which are the pairs that are rotated.

Shapes: T tokens, S sequences, N heads, H head dim, R rotated pairs, W numbers of a part of an entry; a program's pairs
P, heads M, keys C and entries E.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.attention.attention import HeadLayout, LayerCache, PagedRows, store_kv
from octavo.ops.attention.choose_keys import MOST_ROWS, MOST_SCORES
from octavo.ops.attention.compressed_attention import (
    Compression,
    choose_entries,
    compress,
    compressed_attention,
    turn_tails,
)
from octavo_kernels.triton.attention.choose_keys import seen_by_row
from octavo_kernels.triton.launch import after_predecessor, declines_floats, empty_indices, launch
from octavo_kernels.triton.sampling.truncation import ordered
from octavo_kernels.triton.split_sums import LOG2_E, NO_SCORE

HEADS, KEYS, FLOAT32_KEYS = 16, 32, 16
"""Of a program that attends; fewer keys where products are made of multiply-adds."""
ENTRIES = 64
"""Of a program that scores them."""
LAST = 2**31 - 1
HIDDEN = -(2**63)


def _bounds(rows: PagedRows) -> tuple[Tensor | None, Tensor]:
    """What ``seen_by_row`` takes: bounds of sequences, and their lengths."""
    return None if rows.max_query_len == 1 else rows.cu_seqlens_q, rows.seq_lens_S


def _sequences(rows: PagedRows) -> int:
    count: int = triton.next_power_of_2(len(rows.seq_lens_S))
    return max(16, count)


@triton.jit
def _turn(
    even_P: tl.tensor, odd_P: tl.tensor, i_P: tl.tensor, cos_ptr: tl.tensor, sin_ptr: tl.tensor, at: tl.tensor,
    H: tl.constexpr, R: tl.constexpr, BACK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """The pairs of a row, of which the last R are rotated by the angles at row ``at``."""
    r_P = i_P - (H // 2 - R)
    is_turned_P = (r_P >= 0) & (i_P < H // 2)
    cos_P = tl.load(cos_ptr + at * R + r_P, mask=is_turned_P, other=1.0)
    sin_P = tl.load(sin_ptr + at * R + r_P, mask=is_turned_P, other=0.0)
    if BACK:
        sin_P = -sin_P
    return even_P * cos_P - odd_P * sin_P, odd_P * cos_P + even_P * sin_P


@triton.jit(do_not_specialize=["eps"])
def turn_tails_kernel(
    x_ptr: tl.tensor, cos_ptr: tl.tensor, sin_ptr: tl.tensor, norm_ptr: tl.tensor, out_ptr: tl.tensor, eps: tl.tensor,
    N: tl.constexpr, H: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr, NORMS: tl.constexpr, BACK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One head of one row."""
    i_P, t = tl.arange(0, PAIRS), tl.program_id(0).to(tl.int64)
    is_pair_P, at = i_P < H // 2, (t * N + tl.program_id(1)) * H
    after_predecessor(PDL)
    even_P = tl.load(x_ptr + at + 2 * i_P, mask=is_pair_P, other=0.0).to(tl.float32)
    odd_P = tl.load(x_ptr + at + 2 * i_P + 1, mask=is_pair_P, other=0.0).to(tl.float32)
    if NORMS:
        scale = tl.rsqrt(tl.sum(even_P * even_P + odd_P * odd_P, 0) / H + eps)
        even_P, odd_P = even_P * scale, odd_P * scale
        if norm_ptr is not None:
            even_P *= tl.load(norm_ptr + 2 * i_P, mask=is_pair_P, other=0.0).to(tl.float32)
            odd_P *= tl.load(norm_ptr + 2 * i_P + 1, mask=is_pair_P, other=0.0).to(tl.float32)
        even_P = even_P.to(out_ptr.dtype.element_ty).to(tl.float32)
        odd_P = odd_P.to(out_ptr.dtype.element_ty).to(tl.float32)
    even_P, odd_P = _turn(even_P, odd_P, i_P, cos_ptr, sin_ptr, t, H, R, BACK)
    tl.store(out_ptr + at + 2 * i_P, even_P.to(out_ptr.dtype.element_ty), mask=is_pair_P)
    tl.store(out_ptr + at + 2 * i_P + 1, odd_P.to(out_ptr.dtype.element_ty), mask=is_pair_P)


@turn_tails.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def turn_tails_triton(
    x_TNH: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    *,
    eps: float | None = None,
    norm_H: Tensor | None = None,
    turns_back: bool = False,
) -> Tensor:
    """See ``ops.turn_tails``."""
    (T, N, H), R = x_TNH.shape, cos_TR.shape[1]
    assert H % 2 == 0, "pairs are of neighbouring numbers"
    out_TNH = torch.empty_like(x_TNH, memory_format=torch.contiguous_format)
    if T:
        launch(
            turn_tails_kernel, (T, N), x_TNH.contiguous(), cos_TR, sin_TR, norm_H, out_TNH, eps or 0.0, N=N, H=H, R=R,
            PAIRS=triton.next_power_of_2(H // 2), NORMS=eps is not None, BACK=turns_back, num_warps=1,
        )  # fmt: skip
    return out_TNH


@triton.jit
def _add(
    row_ptr: tl.tensor, bias_ptr: tl.tensor, i_P: tl.tensor, peaks: tl.tensor, totals: tl.tensor, sums: tl.tensor,
    W: tl.constexpr, GATES: tl.constexpr, HALF: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """The largest gate, the sum of weights and that of weighted values of each number, with those of one more token.

    ``HALF``: whether numbers are the even or the odd ones.
    """
    is_pair_P = i_P < W // 2
    at_P = 2 * i_P + HALF
    value_P = tl.load(row_ptr + at_P, mask=is_pair_P, other=0.0).to(tl.float32)
    gate_P = tl.load(row_ptr + GATES + at_P, mask=is_pair_P, other=0.0).to(tl.float32)
    gate_P += tl.load(bias_ptr + at_P, mask=is_pair_P, other=0.0)
    top_P = tl.maximum(peaks, gate_P)
    shrink_P, weight_P = tl.exp(peaks - top_P), tl.exp(gate_P - top_P)
    return top_P, totals * shrink_P + weight_P, sums * shrink_P + weight_P * value_P


@triton.jit(do_not_specialize=["eps", "S", "input_stride", "entry_stride", "inputs_blocks", "entries_blocks"])
def compress_kernel(
    inputs_ptr: tl.tensor, entries_ptr: tl.tensor, bias_ptr: tl.tensor, norm_ptr: tl.tensor, cos_ptr: tl.tensor,
    sin_ptr: tl.tensor, input_tables_ptr: tl.tensor, entry_tables_ptr: tl.tensor, bounds_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor, eps: tl.tensor, S: tl.tensor, input_stride: tl.tensor, entry_stride: tl.tensor,
    inputs_blocks: tl.tensor, entries_blocks: tl.tensor, X: tl.constexpr, FIRST: tl.constexpr, GATES: tl.constexpr,
    W: tl.constexpr, ENTRY: tl.constexpr, ENTRY_FIRST: tl.constexpr, RATE: tl.constexpr, OVERLAPS: tl.constexpr,
    R: tl.constexpr, BLOCK_SIZE: tl.constexpr, PAIRS: tl.constexpr, SEQUENCES: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One part of the entry of the group that a row completes, if it does."""
    row, i_P = tl.program_id(0), tl.arange(0, PAIRS)
    after_predecessor(PDL)
    seq, seen = seen_by_row(row, bounds_ptr, seq_lens_ptr, S, SEQUENCES)
    if (seen > 0) & (seen % RATE == 0):
        input_tables_ptr += seq.to(tl.int64) * inputs_blocks
        peak_even, peak_odd = tl.full([PAIRS], NO_SCORE, tl.float32), tl.full([PAIRS], NO_SCORE, tl.float32)
        total_even, total_odd = tl.zeros([PAIRS], tl.float32), tl.zeros([PAIRS], tl.float32)
        sum_even, sum_odd = tl.zeros([PAIRS], tl.float32), tl.zeros([PAIRS], tl.float32)
        COUNT: tl.constexpr = 2 * RATE if OVERLAPS else RATE
        for position in tl.range(tl.maximum(seen - COUNT, 0), seen):
            place = position % RATE
            half = FIRST
            if OVERLAPS:
                half = FIRST + tl.where(position >= seen - RATE, W, 0)
            block = tl.load(input_tables_ptr + position // BLOCK_SIZE).to(tl.int64)
            row_ptr = inputs_ptr + block * input_stride + (position % BLOCK_SIZE) * X + half
            own_bias_ptr = bias_ptr + place * (2 * W if OVERLAPS else W) + (half - FIRST)
            peak_even, total_even, sum_even = _add(
                row_ptr, own_bias_ptr, i_P, peak_even, total_even, sum_even, W, GATES, 0
            )
            peak_odd, total_odd, sum_odd = _add(row_ptr, own_bias_ptr, i_P, peak_odd, total_odd, sum_odd, W, GATES, 1)
        kind = entries_ptr.dtype.element_ty
        even_P, odd_P = (sum_even / total_even).to(kind).to(tl.float32), (sum_odd / total_odd).to(kind).to(tl.float32)
        is_pair_P = i_P < W // 2
        even_P, odd_P = tl.where(is_pair_P, even_P, 0.0), tl.where(is_pair_P, odd_P, 0.0)
        scale = tl.rsqrt(tl.sum(even_P * even_P + odd_P * odd_P, 0) / W + eps)
        even_P *= scale * tl.load(norm_ptr + 2 * i_P, mask=is_pair_P, other=0.0).to(tl.float32)
        odd_P *= scale * tl.load(norm_ptr + 2 * i_P + 1, mask=is_pair_P, other=0.0).to(tl.float32)
        even_P, odd_P = even_P.to(kind).to(tl.float32), odd_P.to(kind).to(tl.float32)
        even_P, odd_P = _turn(even_P, odd_P, i_P, cos_ptr, sin_ptr, row.to(tl.int64), W, R, False)
        end = seen - 1
        block = tl.load(entry_tables_ptr + seq.to(tl.int64) * entries_blocks + end // BLOCK_SIZE).to(tl.int64)
        to_ptr = entries_ptr + block * entry_stride + (end % BLOCK_SIZE // RATE) * ENTRY + ENTRY_FIRST
        tl.store(to_ptr + 2 * i_P, even_P.to(kind), mask=is_pair_P)
        tl.store(to_ptr + 2 * i_P + 1, odd_P.to(kind), mask=is_pair_P)


@compress.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def compress_triton(
    given_TX: Tensor,
    how: Compression,
    cos_TR: Tensor,
    sin_TR: Tensor,
    inputs: LayerCache,
    entries: LayerCache,
    rows: PagedRows,
) -> None:
    """See ``ops.compress``."""
    given_T1X, (T, X) = given_TX.unsqueeze(1), given_TX.shape
    store_kv(given_T1X, given_T1X, inputs.keys, inputs.keys, rows.of(inputs).slot_mapping_T)
    tables = rows.of(inputs).block_tables_SB, rows.of(entries).block_tables_SB
    block_size, first, entry_first = inputs.keys.shape[2], 0, 0
    for bias_MC, norm_W in zip(how.biases, how.norms, strict=True):
        W = len(norm_W)
        assert W % 2 == 0, "pairs are of neighbouring numbers"
        launch(
            compress_kernel, (T,), inputs.keys, entries.keys, bias_MC, norm_W, cos_TR, sin_TR, *tables, *_bounds(rows),
            how.norm_eps, len(rows.seq_lens_S), inputs.keys.stride(0), entries.keys.stride(0),
            *(table.stride(0) for table in tables), X=X, FIRST=first, GATES=X // 2, W=W, ENTRY=entries.keys.shape[3],
            ENTRY_FIRST=entry_first, RATE=how.rate, OVERLAPS=how.overlaps, R=cos_TR.shape[1], BLOCK_SIZE=block_size,
            PAIRS=triton.next_power_of_2(W // 2), SEQUENCES=_sequences(rows), num_warps=2,
        )  # fmt: skip
        first, entry_first = first + bias_MC.shape[1], entry_first + W


@triton.jit(do_not_specialize=["first", "S", "longest", "table_stride", "entry_stride"])
def entry_scores_kernel(
    q_ptr: tl.tensor, weights_ptr: tl.tensor, entries_ptr: tl.tensor, ranks_ptr: tl.tensor, tables_ptr: tl.tensor,
    bounds_ptr: tl.tensor, seq_lens_ptr: tl.tensor, first: tl.tensor, S: tl.tensor, longest: tl.tensor,
    table_stride: tl.tensor, entry_stride: tl.tensor, J: tl.constexpr, W: tl.constexpr, JP: tl.constexpr,
    WP: tl.constexpr, ENTRY: tl.constexpr, RATE: tl.constexpr, BLOCK_SIZE: tl.constexpr, ENTRIES: tl.constexpr,
    SEQUENCES: tl.constexpr, LAST: tl.constexpr, HIDDEN: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """The ranks of some entries for one row: scores, and of equal ones those of lower numbers first."""
    row, j_J, w_W = first + tl.program_id(1), tl.arange(0, JP), tl.arange(0, WP)
    e_E = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    after_predecessor(PDL)
    seq, seen = seen_by_row(row, bounds_ptr, seq_lens_ptr, S, SEQUENCES)
    is_seen_E = e_E < seen // RATE
    at_JW = (row.to(tl.int64) * J + j_J)[:, None] * W + w_W[None, :]
    q_JW = tl.load(q_ptr + at_JW, mask=(j_J < J)[:, None] & (w_W < W)[None, :], other=0.0)
    weights_J = tl.load(weights_ptr + row.to(tl.int64) * J + j_J, mask=j_J < J, other=0.0)
    end_E = (e_E + 1) * RATE - 1
    block_E = tl.load(tables_ptr + seq.to(tl.int64) * table_stride + end_E // BLOCK_SIZE, mask=is_seen_E, other=0)
    at_E = block_E.to(tl.int64) * entry_stride + (end_E % BLOCK_SIZE // RATE) * ENTRY + (ENTRY - W)
    is_in_EW = is_seen_E[:, None] & (w_W < W)[None, :]
    k_EW = tl.load(entries_ptr + at_E[:, None] + w_W[None, :], mask=is_in_EW, other=0.0).to(q_JW.dtype)
    products_JE = tl.maximum(tl.dot(q_JW, tl.trans(k_EW), input_precision="ieee"), 0.0)
    score_E = tl.sum(products_JE * weights_J[:, None], 0)
    rank_E = tl.where(is_seen_E, (ordered(score_E) << 32) | (LAST - e_E), HIDDEN)
    tl.store(ranks_ptr + tl.program_id(1).to(tl.int64) * longest + e_E, rank_E, mask=e_E < longest)


@choose_entries.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def choose_entries_triton(
    q_TJI: Tensor, weights_TJ: Tensor, rate: int, count: int, block_size: int, entries: LayerCache, rows: PagedRows
) -> Tensor:
    """See ``ops.choose_entries``; of equal scores the first are chosen."""
    (T, J, W), tables_SB = q_TJI.shape, rows.of(entries).block_tables_SB
    longest, q_TJI, weights_TJ = tables_SB.shape[1] * block_size // rate, q_TJI.contiguous(), weights_TJ.contiguous()
    most, at_once = min(count, longest), max(1, min(T, MOST_ROWS, MOST_SCORES // max(1, longest)))
    chosen_TE = torch.full((T, count), -1, dtype=torch.int32, device=q_TJI.device)
    ranks = empty_indices(at_once * longest, torch.int64, q_TJI.device).view(at_once, longest)
    for first in range(0, T if most else 0, at_once):
        num_rows = min(at_once, T - first)
        launch(
            entry_scores_kernel, (triton.cdiv(longest, ENTRIES), num_rows), q_TJI, weights_TJ, entries.keys, ranks,
            tables_SB, *_bounds(rows), first, len(rows.seq_lens_S), longest, tables_SB.stride(0),
            entries.keys.stride(0), J=J, W=W, JP=max(16, triton.next_power_of_2(J)),
            WP=max(16, triton.next_power_of_2(W)), ENTRY=entries.keys.shape[3], RATE=rate, BLOCK_SIZE=block_size,
            ENTRIES=ENTRIES, SEQUENCES=_sequences(rows), LAST=LAST, HIDDEN=HIDDEN,
        )  # fmt: skip
        best = ranks[:num_rows].topk(most, dim=1).values
        found = torch.where(best == HIDDEN, longest, LAST - (best & LAST)).sort(dim=1).values
        chosen_TE[first : first + num_rows, :most] = found.masked_fill_(found == longest, -1)
    return chosen_TE


@triton.jit
def _attend(
    q_MH: tl.tensor, at_C: tl.tensor, is_key_C: tl.tensor, keys_ptr: tl.tensor, h_H: tl.tensor, peak_M: tl.tensor,
    total_M: tl.tensor, acc_MH: tl.tensor, scale: tl.tensor, H: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Largest score, sum of weights and weighted keys, with those of some more keys."""
    is_in_CH = is_key_C[:, None] & (h_H < H)[None, :]
    k_CH = tl.load(keys_ptr + at_C[:, None] + h_H[None, :], mask=is_in_CH, other=0.0).to(q_MH.dtype)
    scores_MC = tl.dot(q_MH, tl.trans(k_CH), input_precision="ieee") * scale
    scores_MC = tl.where(is_key_C[None, :], scores_MC, float("-inf"))
    top_M = tl.maximum(peak_M, tl.max(scores_MC, 1))
    weights_MC, shrink_M = tl.exp2(scores_MC - top_M[:, None]), tl.exp2(peak_M - top_M)
    total_M = total_M * shrink_M + tl.sum(weights_MC, 1)
    acc_MH = tl.dot(weights_MC.to(k_CH.dtype), k_CH, acc_MH * shrink_M[:, None], input_precision="ieee")
    return top_M, total_M, acc_MH


@triton.jit(do_not_specialize=["S", "count", "key_stride", "entry_stride", "key_blocks", "entry_blocks"])
def compressed_attention_kernel(
    q_ptr: tl.tensor, keys_ptr: tl.tensor, entries_ptr: tl.tensor, chosen_ptr: tl.tensor, sinks_ptr: tl.tensor,
    out_ptr: tl.tensor, key_tables_ptr: tl.tensor, entry_tables_ptr: tl.tensor, bounds_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor, scale: tl.tensor, S: tl.tensor, count: tl.tensor, key_stride: tl.tensor,
    entry_stride: tl.tensor, key_blocks: tl.tensor, entry_blocks: tl.tensor, N: tl.constexpr, H: tl.constexpr,
    HP: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, ENTRY: tl.constexpr,
    RATE: tl.constexpr, BLOCK_SIZE: tl.constexpr, SEQUENCES: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Some heads of one row."""
    row, h_H, c_C = tl.program_id(0), tl.arange(0, HP), tl.arange(0, KEYS)
    head_M = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    peak_M, total_M = tl.full([HEADS], NO_SCORE, tl.float32), tl.zeros([HEADS], tl.float32)
    if sinks_ptr is not None:
        peak_M = tl.load(sinks_ptr + head_M, mask=head_M < N, other=0.0) * LOG2_E
        total_M += 1.0
    after_predecessor(PDL)
    seq, seen = seen_by_row(row, bounds_ptr, seq_lens_ptr, S, SEQUENCES)
    if seen > 0:
        at_MH = (row.to(tl.int64) * N + head_M)[:, None] * H + h_H[None, :]
        is_in_MH = (head_M < N)[:, None] & (h_H < H)[None, :]
        q_MH, acc_MH = tl.load(q_ptr + at_MH, mask=is_in_MH, other=0.0), tl.zeros([HEADS, HP], tl.float32)
        key_tables_ptr += seq.to(tl.int64) * key_blocks
        for at in tl.range(tl.maximum(seen - WINDOW, 0), seen, KEYS):
            key_C = at + c_C
            block_C = tl.load(key_tables_ptr + key_C // BLOCK_SIZE, mask=key_C < seen, other=0).to(tl.int64)
            at_C = block_C * key_stride + (key_C % BLOCK_SIZE) * H
            peak_M, total_M, acc_MH = _attend(
                q_MH, at_C, key_C < seen, keys_ptr, h_H, peak_M, total_M, acc_MH, scale, H
            )
        if RATE > 0:
            num_entries = seen // RATE
            if chosen_ptr is not None:
                num_entries = tl.minimum(num_entries, count)
            entry_tables_ptr += seq.to(tl.int64) * entry_blocks
            for at in tl.range(0, num_entries, KEYS):
                entry_C = at + c_C
                is_entry_C = entry_C < num_entries
                if chosen_ptr is not None:
                    entry_C = tl.load(chosen_ptr + row.to(tl.int64) * count + entry_C, mask=is_entry_C, other=0)
                end_C = (entry_C + 1) * RATE - 1
                block_C = tl.load(entry_tables_ptr + end_C // BLOCK_SIZE, mask=is_entry_C, other=0).to(tl.int64)
                at_C = block_C * entry_stride + (end_C % BLOCK_SIZE // RATE) * ENTRY
                peak_M, total_M, acc_MH = _attend(
                    q_MH, at_C, is_entry_C, entries_ptr, h_H, peak_M, total_M, acc_MH, scale, H
                )
        out_MH = (acc_MH / total_M[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at_MH, out_MH, mask=is_in_MH)


@compressed_attention.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def compressed_attention_triton(
    q_TNH: Tensor,
    heads: HeadLayout,
    cache: LayerCache,
    rows: PagedRows,
    entries: LayerCache | None = None,
    rate: int = 0,
    chosen_TE: Tensor | None = None,
) -> Tensor:
    """See ``ops.compressed_attention``."""
    (T, N, H), q_TNH = q_TNH.shape, q_TNH.contiguous()
    out_TNH = torch.empty_like(q_TNH)
    far = cache if entries is None else entries
    tables = rows.of(cache).block_tables_SB, rows.of(far).block_tables_SB
    keys = FLOAT32_KEYS if q_TNH.dtype == torch.float32 else KEYS
    if T:
        launch(
            compressed_attention_kernel, (T, triton.cdiv(N, HEADS)), q_TNH, cache.keys, far.keys, chosen_TE,
            heads.sinks_N, out_TNH, *tables, *_bounds(rows), heads.scale * LOG2_E.value, len(rows.seq_lens_S),
            0 if chosen_TE is None else chosen_TE.shape[1], cache.keys.stride(0), far.keys.stride(0),
            *(table.stride(0) for table in tables), N=N, H=H, HP=max(16, triton.next_power_of_2(H)), HEADS=HEADS,
            KEYS=keys, WINDOW=heads.window, ENTRY=far.keys.shape[3], RATE=0 if entries is None else rate,
            BLOCK_SIZE=cache.keys.shape[2], SEQUENCES=_sequences(rows), num_warps=4,
        )  # fmt: skip
    return out_TNH
