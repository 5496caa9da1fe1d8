"""``gated_delta``, ``state_space`` and ``linear_attention`` for CUDA devices: gates, norms and state in one launch, one
row after the other.

A program has some columns of one head's state in registers while all rows of a sequence pass. It reads the state once
and writes it once, which for sequences of one row is all that takes time. A row's bits do not depend on the rows that
are computed with it, nor on how a prompt is cut, unless the state has fewer bits than float32: it is rounded once a
step. Sequences with many rows are computed in chunks instead, by ``chunked``, but for ``--batch-invariant``.

Shapes: S sequences, N heads, K numbers of a key, V of a value; a program's columns B of V.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.recurrent.gated_delta import DeltaHeads, gated_delta
from octavo.ops.recurrent.linear_attention import linear_attention
from octavo.ops.recurrent.recurrence import StateRows
from octavo.ops.recurrent.state_space import StateSpaceHeads, state_space
from octavo_kernels.triton.launch import after_predecessor, declines_floats, is_invariant, launch
from octavo_kernels.triton.recurrent.chunked import can_chunk, recur_chunks
from octavo_kernels.triton.recurrent.rules import (
    DELTA,
    DELTA_BY_CHANNEL,
    EPS,
    LINEAR,
    STATE_SPACE,
    Inputs,
    decay_of,
    load_row,
    normed,
    rate_and_bias,
    step_and_exponent,
)

COLUMNS = 64
"""Of a program, where columns do not depend on each other."""
DELTA_COLUMNS = 64
"""At a time of a program that has all: with fewer registers, some programs load while others compute."""
NUMBERS = 2048
"""Of a state for each warp."""
RECURRENT_ROWS = 33
"""Most rows of a sequence that are computed one after the other: a token and as many drafts as it may have."""
ANY = 2**31 - 1


@triton.jit
def _query_and_key(
    q_ptr: tl.tensor, k_ptr: tl.tensor, at: tl.tensor, is_key: tl.tensor, K: tl.constexpr, IS_DELTA: tl.constexpr,
    ACTIVATION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Of a row and head, normalised for the delta rules."""
    q, k = load_row(q_ptr + at, is_key, ACTIVATION), load_row(k_ptr + at, is_key, ACTIVATION)
    if IS_DELTA:
        q *= tl.rsqrt(tl.sum(q * q, 0) + EPS) * (K**-0.5)
        k *= tl.rsqrt(tl.sum(k * k, 0) + EPS)
    return q, k


@triton.jit
def _norm_rows(
    sums_ptr: tl.tensor, gate_ptr: tl.tensor, gate_stride: tl.tensor, factor_ptr: tl.tensor, out_ptr: tl.tensor,
    first: tl.tensor, end: tl.tensor, n: tl.tensor, eps: tl.tensor, N: tl.constexpr, V: tl.constexpr,
    WIDTH: tl.constexpr, GATE: tl.constexpr,
) -> None:  # fmt: skip
    """The outputs of head n of some rows, normalised and gated; those of row 0 go to ``out_ptr``."""
    v_V = tl.arange(0, WIDTH)
    norm = load_row(factor_ptr + v_V, v_V < V, None)
    t = first.to(tl.int64)
    for _ in range(first, end):
        out = tl.load(sums_ptr + (t * N + n) * V + v_V, mask=v_V < V, other=0.0)
        gate = load_row(gate_ptr + t * gate_stride + n * V + v_V, v_V < V, None)
        out = normed(out, gate, norm, eps, V, GATE).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + t * N * V + v_V, out, mask=v_V < V)
        t += 1


@triton.jit
def recurrence_kernel(
    q_ptr: tl.tensor, k_ptr: tl.tensor, v_ptr: tl.tensor, row_stride: tl.tensor, dt_ptr: tl.tensor,
    dt_stride: tl.tensor, beta_ptr: tl.tensor, beta_stride: tl.tensor, gate_ptr: tl.tensor, gate_stride: tl.tensor,
    a_log_ptr: tl.tensor, bias_ptr: tl.tensor, factor_ptr: tl.tensor, state_ptr: tl.tensor, sums_ptr: tl.tensor,
    out_ptr: tl.tensor, starts_ptr: tl.tensor, lengths_ptr: tl.tensor, slots_ptr: tl.tensor, most: tl.tensor,
    eps: tl.tensor, beta_scale: tl.tensor, low: tl.tensor, high: tl.tensor, RULE: tl.constexpr,
    ACTIVATION: tl.constexpr, GATE: tl.constexpr, N: tl.constexpr, SHARE: tl.constexpr, TILE: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, K_BLOCK: tl.constexpr, OWN: tl.constexpr, V_BLOCK: tl.constexpr,
    LOWEST: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """All rows of one sequence that has at most ``most``, for OWN columns of one head, V_BLOCK at a time; see
    ``Inputs``. Programs of the delta rules have all columns, as the norm is over them: they keep outputs in ``sums``
    [T, N, V], in float32, until all are there."""
    n, s, k_K = tl.program_id(0), tl.program_id(1), tl.arange(0, K_BLOCK)
    is_key = k_K < K
    IS_DELTA: tl.constexpr = RULE <= 1
    if RULE <= 2:
        rate, bias = rate_and_bias(a_log_ptr, bias_ptr, n, k_K, is_key, RULE, K)
    if not IS_DELTA:
        single = tl.load(factor_ptr + n)
    after_predecessor(PDL)
    first, end, slot = tl.load(starts_ptr + s), tl.load(starts_ptr + s + 1), tl.load(slots_ptr + s)
    head, target = n // SHARE, sums_ptr if IS_DELTA else out_ptr
    if (end > first) & (end - first <= most) & (slot >= 0):
        has_past = tl.load(lengths_ptr + s) > end - first
        for block in range(OWN // V_BLOCK):
            v_B = tl.program_id(2) * OWN + block * V_BLOCK + tl.arange(0, V_BLOCK)
            is_value = v_B < V
            at_KB = (slot.to(tl.int64) * N + n) * K * V + k_K[:, None] * V + v_B[None, :]
            is_in = is_key[:, None] & is_value[None, :]
            state_KB = tl.load(state_ptr + at_KB, mask=is_in & has_past, other=0.0).to(tl.float32)
            t = first.to(tl.int64)
            for _ in range(first, end):
                row = t * row_stride
                q, k = _query_and_key(q_ptr, k_ptr, row + head * K + k_K, is_key, K, IS_DELTA, ACTIVATION)
                v = load_row(v_ptr + row + n * V + v_B, is_value, ACTIVATION)
                u = v
                if RULE <= 2:
                    dt = dt_ptr + t * dt_stride
                    step, exponent = step_and_exponent(dt, bias, rate, n, k_K, is_key, low, high, RULE, K, LOWEST)
                    state_KB *= decay_of(exponent, RULE)
                else:
                    state_KB *= single
                if IS_DELTA:
                    beta = tl.load(beta_ptr + t * beta_stride + n).to(tl.float32)
                    u = beta_scale * tl.sigmoid(beta) * (v - tl.sum(state_KB * k[:, None], 0))
                if RULE == 2:
                    u = step * v
                state_KB += k[:, None] * u[None, :]
                out = tl.sum(state_KB * q[:, None], 0)
                if RULE == 2:
                    out += single * v
                tl.store(target + (t * N + n) * V + v_B, out.to(target.dtype.element_ty), mask=is_value)
                t += 1
            tl.store(state_ptr + at_KB, state_KB.to(state_ptr.dtype.element_ty), mask=is_in)
        if IS_DELTA:
            tl.debug_barrier()  # all threads have stored their sums before one of them loads those of others
            place = n % TILE * (N // TILE) + n // TILE
            out_ptr += place * V
            _norm_rows(sums_ptr, gate_ptr, gate_stride, factor_ptr, out_ptr, first, end, n, eps, N, V, OWN, GATE)


def recur(inputs: Inputs, state: Tensor, rows: StateRows) -> Tensor:
    """Launch the kernels; returns the outputs [T, N V]."""
    (N, K, V), S, rule = state.shape[1:], len(rows.slots_S), inputs.rule
    values = inputs.parts[2]
    out = torch.empty((len(values), N * V), dtype=values.dtype, device=values.device)
    if len(out) == 0 or S == 0:
        return out
    most = ANY
    if rows.max_query_len > RECURRENT_ROWS and not is_invariant() and can_chunk(inputs, K, V):
        most = RECURRENT_ROWS
        recur_chunks(inputs, state, rows, out, most)
    width, key_block = triton.next_power_of_2(V), triton.next_power_of_2(K)
    is_delta = rule in (DELTA, DELTA_BY_CHANNEL)
    own = width if is_delta else min(width, COLUMNS)
    block = min(own, DELTA_COLUMNS if is_delta else COLUMNS)
    strides = inputs.strides()
    sums = values.new_empty(len(out), N * V, dtype=torch.float32) if is_delta else None
    # fmt: off
    launch(
        recurrence_kernel, (N, S, triton.cdiv(V, own)), *inputs.parts, inputs.parts[0].stride(0), inputs.dt, strides[0],
        inputs.beta, strides[1], inputs.gate, strides[2], inputs.a_log, inputs.bias, inputs.factor, state, sums, out,
        rows.cu_seqlens_q, rows.seq_lens_S, rows.slots_S, most, inputs.eps, inputs.beta_scale, *inputs.limits,
        RULE=rule, ACTIVATION=inputs.activation, GATE=inputs.gate_kind, N=N, SHARE=inputs.share, TILE=inputs.tile, K=K,
        V=V, K_BLOCK=key_block, OWN=own, V_BLOCK=block, LOWEST=inputs.lowest,
        num_warps=min(32, max(4, key_block * block // NUMBERS)),
    )
    # fmt: on
    return out


def _rows(x: Tensor) -> Tensor:
    """x, or a copy of it whose rows' numbers lie side by side."""
    return x if x.stride(1) == 1 else x.contiguous()


@gated_delta.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def gated_delta_triton(
    qkv_TC: Tensor, dt: Tensor, beta_TN: Tensor, gate_TM: Tensor, heads: DeltaHeads, state: Tensor, rows: StateRows
) -> Tensor:
    """See ``ops.gated_delta``."""
    q, k, v = _rows(qkv_TC).split_with_sizes(heads.sizes, dim=-1)
    share = heads.num_heads // heads.num_key_heads
    inputs = Inputs(
        DELTA if heads.dt_bias.numel() == heads.num_heads else DELTA_BY_CHANNEL, (q, k, v), share, heads.norm_V,
        dt=_rows(dt), beta=_rows(beta_TN), gate=_rows(gate_TM), a_log=heads.a_log_N, bias=heads.dt_bias,
        gate_kind=heads.gate, eps=heads.norm_eps, beta_scale=heads.beta_scale, tile=share if heads.is_tiled else 1,
        lowest=heads.lowest,
    )  # fmt: skip
    return recur(inputs, state, rows)


@state_space.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def state_space_triton(xbc_TC: Tensor, dt_TN: Tensor, heads: StateSpaceHeads, state: Tensor, rows: StateRows) -> Tensor:
    """See ``ops.state_space``."""
    x, b, c = _rows(xbc_TC).split_with_sizes(heads.sizes, dim=-1)
    inputs = Inputs(
        STATE_SPACE, (c, b, x), heads.num_heads // heads.num_groups, heads.d_N,
        dt=_rows(dt_TN), a_log=heads.a_log_N, bias=heads.dt_bias_N, limits=heads.dt_limits,
    )  # fmt: skip
    return recur(inputs, state, rows)


@linear_attention.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def linear_attention_triton(
    qkv_TC: Tensor, decay_N: Tensor, state: Tensor, rows: StateRows, activation: Literal["silu"] | None = None
) -> Tensor:
    """See ``ops.linear_attention``."""
    q, k, v = _rows(qkv_TC).chunk(3, dim=-1)
    return recur(Inputs(LINEAR, (q, k, v), 1, decay_N, activation=activation), state, rows)
