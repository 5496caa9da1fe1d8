"""The values of single rows with latent attention, from the sums of the programs that share their contexts.

A program adds the sums of one head of some rows, weighted by what each run of keys contributes, and maps them to some
of the head's values: adding costs no launch of its own, and is divided among as many programs as the map.

Shapes: S sequences, N heads, L latent, V values of a head; a tile's rows M, their runs R, its outputs B and the latent
numbers C that it takes at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.attention.attention import PagedRows
from octavo.ops.collective import ContextPart
from octavo_kernels.triton.launch import after_predecessor, launch
from octavo_kernels.triton.linear.head_linear import LEAST_ROWS, prefetch_outputs
from octavo_kernels.triton.split_sums import NO_SCORE, add_parts, part_count, store_heads

MOST_SUMS, FEW_SUMS = 128, 16
"""Sums of a row, for long contexts and others, at most; and of all rows of a program, which loads them at once."""
PROGRAMS = 132
"""Programs that fill a device."""
BLOCK_O, WARPS, STAGES = 64, 4, 2
SUMS_AT_ONCE = 16384
"""Numbers of the sums that a program holds in registers."""
ADDED_NUMBERS, ADDED_AT_ONCE = 64, 4
"""Of each head, for a program that only adds sums, and the sums that it loads at once."""
FLOAT32 = 32, 32
"""Outputs and latent numbers at a time where products are made of multiply-adds."""


class Parts(NamedTuple):
    """What the programs that share contexts left: the sums of the run r of sequence s are at [s, heads / G, r]."""

    sums_SPRGL: Tensor
    """float32: the mean of the latents, by weight, in groups of G heads."""
    logs_SPRG: Tensor
    """float32: the logarithm of the sum of weights, in base 2."""
    keys: int
    """Keys of a run are a multiple of this."""
    window: int = 0


def latent_outputs(parts: Parts, value_map_NVL: Tensor, rows: PagedRows, out_TNV: Tensor) -> None:
    """Fill ``out`` for the rows that are the only ones of their sequences."""
    (S, _, splits, group, _), (N, V, L) = parts.sums_SPRGL.shape, value_map_NVL.shape
    is_float32, runs = value_map_NVL.dtype == torch.float32, triton.next_power_of_2(splits)
    block_o = FLOAT32[0] if is_float32 else BLOCK_O
    tiles = triton.cdiv(V, block_o)
    seqs = min(MOST_SUMS // runs, LEAST_ROWS, triton.next_power_of_2(triton.cdiv(S * tiles * N, PROGRAMS)))
    at_once = FLOAT32[1] if is_float32 else SUMS_AT_ONCE // (runs * seqs)
    # fmt: off
    launch(
        latent_outputs_kernel, (triton.cdiv(S, seqs), tiles, N),
        parts.sums_SPRGL, parts.logs_SPRG, value_map_NVL, out_TNV,
        None if rows.max_query_len == 1 else rows.cu_seqlens_q, rows.seq_lens_S, S, splits,
        N=N, V=V, L=L, GROUP=group, KEYS=parts.keys, WINDOW=parts.window, SEQS=seqs, RUNS=runs, ROWS=LEAST_ROWS,
        BLOCK_O=block_o, BLOCK_L=min(at_once, triton.next_power_of_2(L)), STAGES=STAGES, num_warps=WARPS,
    )
    # fmt: on


def latent_sums(parts: Parts, rows: PagedRows, part: ContextPart, out_TNX: Tensor) -> None:
    """Fill ``out``, as ``ops.partial_latent_attention`` returns it, for the rows that are the only ones of their
    sequences."""
    (S, groups, splits, group, L), (_, N, X) = parts.sums_SPRGL.shape, out_TNX.shape
    # fmt: off
    launch(
        latent_sums_kernel, (S, groups, triton.cdiv(L, ADDED_NUMBERS)),
        parts.sums_SPRGL, parts.logs_SPRG, out_TNX, None if rows.max_query_len == 1 else rows.cu_seqlens_q,
        rows.seq_lens_S, splits, RANK=part.rank, PARTS=part.size, N=N, L=L, X=X, GROUP=group, KEYS=parts.keys,
        BLOCK_L=ADDED_NUMBERS, AT_ONCE=ADDED_AT_ONCE, num_warps=WARPS,
    )
    # fmt: on


@triton.jit(do_not_specialize=["max_splits"])
def latent_sums_kernel(
    sums_ptr: tl.tensor, logs_ptr: tl.tensor, out_ptr: tl.tensor, cu_seqlens_ptr: tl.tensor, seq_lens_ptr: tl.tensor,
    max_splits: tl.tensor, RANK: tl.constexpr, PARTS: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    X: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr, BLOCK_L: tl.constexpr, AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Some numbers of a group of heads of a sequence's one row; every program stores the logarithms, all the same."""
    seq, group = tl.program_id(0), tl.program_id(1)
    l_C, g_G = tl.program_id(2) * BLOCK_L + tl.arange(0, BLOCK_L), tl.arange(0, GROUP)
    row, length = single_row(seq, seq >= 0, cu_seqlens_ptr, seq_lens_ptr)
    own_length = part_count(length, RANK, PARTS)
    num_runs = tl.cdiv(own_length, keys_of_run(own_length, max_splits, KEYS))
    first = (seq.to(tl.int64) * tl.num_programs(1) + group) * max_splits * GROUP
    after_predecessor(PDL)
    sums = add_parts(sums_ptr + first * L, logs_ptr + first, num_runs, l_C, GROUP, L, BLOCK_L, AT_ONCE)
    head_G = group * GROUP + g_G
    store_heads(out_ptr + row * N * X, sums, head_G, (head_G < N) & (length > 0), l_C, None, L, X)


@triton.jit
def keys_of_run(length: tl.tensor, max_splits: tl.tensor, KEYS: tl.constexpr) -> tl.tensor:
    """How many keys of a context a program takes, a multiple of KEYS."""
    return tl.cdiv(tl.maximum(tl.cdiv(length, max_splits), 1), KEYS) * KEYS


@triton.jit
def seen_from(length: tl.tensor, WINDOW: tl.constexpr, KEYS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The first key that the last row of a context sees, and where the tile of keys begins that has it."""
    first = length * 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    return first, first // KEYS * KEYS


@triton.jit
def single_row(
    seq: tl.tensor, is_seq: tl.tensor, cu_seqlens_ptr: tl.tensor, seq_lens_ptr: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """The rows of these sequences, and their contexts' lengths, which are 0 for those that have no or several rows.

    Without ``cu_seqlens`` a row has the number of its sequence.
    """
    length = tl.load(seq_lens_ptr + seq, mask=is_seq, other=0)
    row = seq
    if cu_seqlens_ptr is not None:
        row = tl.load(cu_seqlens_ptr + seq, mask=is_seq, other=0)
        length = tl.where(tl.load(cu_seqlens_ptr + seq + 1, mask=is_seq, other=0) == row + 1, length, 0)
    return row.to(tl.int64), length


@triton.jit(do_not_specialize=["S", "max_splits"])
def latent_outputs_kernel(
    sums_ptr: tl.tensor, logs_ptr: tl.tensor, map_ptr: tl.tensor, out_ptr: tl.tensor, cu_seqlens_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor, S: tl.tensor, max_splits: tl.tensor, N: tl.constexpr, V: tl.constexpr, L: tl.constexpr,
    GROUP: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, SEQS: tl.constexpr, RUNS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_L: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """A tile of one head's values, of SEQS rows; ROWS is what tensor cores take at least."""
    n, o_B = tl.program_id(2), tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    s_M, r_R = tl.program_id(0) * SEQS + tl.arange(0, SEQS), tl.arange(0, RUNS)
    map_ptr += n.to(tl.int64) * V * L
    prefetch_outputs(map_ptr, o_B, L, V, PDL)
    _, length_M = single_row(s_M, s_M < S, cu_seqlens_ptr, seq_lens_ptr)
    num_keys_M = length_M - seen_from(length_M, WINDOW, KEYS)[1]
    num_runs_M = tl.cdiv(num_keys_M, keys_of_run(num_keys_M, max_splits, KEYS))
    is_run_RM = r_R[:, None] < num_runs_M[None, :]
    GROUPS: tl.constexpr = (N + GROUP - 1) // GROUP
    first_M = (s_M * GROUPS + n // GROUP).to(tl.int64) * max_splits
    part_RM = (first_M[None, :] + r_R[:, None]) * GROUP + n % GROUP
    after_predecessor(PDL)
    logs_RM = tl.load(logs_ptr + part_RM, mask=is_run_RM, other=NO_SCORE)
    weights_RM = tl.where(is_run_RM, tl.exp2(logs_RM - tl.max(logs_RM, 0)[None, :]), 0.0)
    weights_RM /= tl.maximum(tl.sum(weights_RM, 0), 1e-30)[None, :]
    out_MB = tl.zeros([ROWS, BLOCK_O], tl.float32)
    for begin in tl.range(0, L, BLOCK_L, num_stages=STAGES):
        l_C = begin + tl.arange(0, BLOCK_L)
        at_RMC = sums_ptr + part_RM[:, :, None] * L + l_C[None, None, :]
        sums_RMC = tl.load(at_RMC, mask=is_run_RM[:, :, None] & (l_C < L)[None, None, :], other=0.0)
        latents_MC = tl.sum(weights_RM[:, :, None] * sums_RMC, 0).to(out_ptr.dtype.element_ty)
        latents_MC = tl.broadcast_to(latents_MC[:, None, :], [SEQS, ROWS // SEQS, BLOCK_L])
        latents_MC = tl.reshape(latents_MC, [ROWS, BLOCK_L])
        at_BC = map_ptr + (o_B * L)[:, None] + l_C[None, :]
        map_BC = tl.load(at_BC, mask=(o_B < V)[:, None] & (l_C < L)[None, :], other=0.0)
        out_MB = tl.dot(latents_MC, tl.trans(map_BC), out_MB, input_precision="ieee")
    own_M = tl.arange(0, ROWS)  # rows are repeated so that they are as many as tensor cores take
    own_s_M = tl.program_id(0) * SEQS + own_M // (ROWS // SEQS)
    own_row_M, own_length_M = single_row(own_s_M, own_s_M < S, cu_seqlens_ptr, seq_lens_ptr)
    is_own_M = (own_M % (ROWS // SEQS) == 0) & (own_length_M > 0)
    to_MB = out_ptr + ((own_row_M * N + n) * V)[:, None] + o_B[None, :]
    tl.store(to_MB, out_MB.to(out_ptr.dtype.element_ty), mask=is_own_M[:, None] & (o_B < V)[None, :])
