"""The recurrence of ops with state, one row after the other, for CUDA devices: gates, norms and state in one launch.

A program has some columns of one head's state in registers while all rows of a sequence pass. It reads the state once
and writes it once, which for sequences of one row is all that takes time. A row's bits do not depend on the rows that
are computed with it, nor on how a prompt is cut, unless the state has fewer bits than float32: it is rounded once a
step.

Shapes: S sequences, N heads, K numbers of a key, V of a value; a program's columns B of V.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.gated_delta import L2_EPS
from octavo.ops.recurrence import StateRows
from octavo_kernels.triton.launch import after_predecessor, launch
from octavo_kernels.triton.recurrent.gated_norm import gate_factor

DELTA, DELTA_BY_CHANNEL, STATE_SPACE, LINEAR = range(4)
COLUMNS = 64
"""Of a program, where columns do not depend on each other."""
EPS = tl.constexpr(L2_EPS)


@triton.jit
def softplus(x: tl.tensor) -> tl.tensor:
    """``log(1 + e^x)`` in float32, also where e^x is small beside 1 (Kahan's way to log(1 + y))."""
    y = tl.exp(-tl.abs(x))
    sum_ = 1.0 + y
    log = tl.where(sum_ == 1.0, y, tl.log(sum_) * (y / tl.where(sum_ == 1.0, 1.0, sum_ - 1.0)))
    return tl.maximum(x, 0.0) + log


@triton.jit
def load_row(ptrs: tl.tensor, mask: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """Numbers in float32, through the activation."""
    x = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        x *= tl.sigmoid(x)
    return x


@triton.jit
def step_of(
    dt_ptr: tl.tensor, bias: tl.tensor, n: tl.tensor, k_K: tl.tensor, is_key: tl.tensor, low: tl.tensor,
    high: tl.tensor, RULE: tl.constexpr, K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """A head's time step, or one for each number of its key."""
    if RULE == 1:
        step = softplus(load_row(dt_ptr + n * K + k_K, is_key, None) + bias)
    else:
        step = softplus(tl.load(dt_ptr + n).to(tl.float32) + bias)
        if RULE == 2:
            step = tl.minimum(tl.maximum(step, low), high)
    return step


@triton.jit
def rate_and_bias(
    a_log_ptr: tl.tensor, bias_ptr: tl.tensor, n: tl.tensor, k_K: tl.tensor, is_key: tl.tensor, RULE: tl.constexpr,
    K: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Of a head's decay, where it depends on the row."""
    rate = -tl.exp(tl.load(a_log_ptr + n))
    bias = load_row(bias_ptr + n * K + k_K, is_key, None) if RULE == 1 else tl.load(bias_ptr + n)
    return rate, bias


@triton.jit
def decay_of(exponent: tl.tensor, RULE: tl.constexpr) -> tl.tensor:
    """Factors of the rows of a state."""
    decay = tl.exp(exponent)
    if RULE == 1:
        decay = decay[:, None]
    return decay


@triton.jit
def normed(
    out: tl.tensor, gate_ptrs: tl.tensor, is_value: tl.tensor, norm: tl.tensor, eps: tl.tensor, V: tl.constexpr,
    GATE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """A head's output, normalised and gated."""
    scale = tl.rsqrt(tl.sum(out * out, 0) / V + eps)
    return out * scale * norm * gate_factor(load_row(gate_ptrs, is_value, None), GATE)


@triton.jit
def recurrence_kernel(
    q_ptr: tl.tensor, k_ptr: tl.tensor, v_ptr: tl.tensor, row_stride: tl.tensor, dt_ptr: tl.tensor,
    dt_stride: tl.tensor, beta_ptr: tl.tensor, beta_stride: tl.tensor, gate_ptr: tl.tensor, gate_stride: tl.tensor,
    a_log_ptr: tl.tensor, bias_ptr: tl.tensor, factor_ptr: tl.tensor, state_ptr: tl.tensor, out_ptr: tl.tensor,
    starts_ptr: tl.tensor, lengths_ptr: tl.tensor, slots_ptr: tl.tensor, eps: tl.tensor, beta_scale: tl.tensor,
    low: tl.tensor, high: tl.tensor, RULE: tl.constexpr, ACTIVATION: tl.constexpr, GATE: tl.constexpr,
    N: tl.constexpr, SHARE: tl.constexpr, K: tl.constexpr, V: tl.constexpr, K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """All rows of one sequence, for V_BLOCK columns of one head.

    ``factor`` is the weight of the output's norm [V] of the delta rules, whose programs have all columns; d [N] of
    STATE_SPACE; each head's decay [N] of LINEAR.
    """
    n, s = tl.program_id(0), tl.program_id(1)
    k_K, v_B = tl.arange(0, K_BLOCK), tl.program_id(2) * V_BLOCK + tl.arange(0, V_BLOCK)
    is_key, is_value = k_K < K, v_B < V
    IS_DELTA: tl.constexpr = RULE <= 1
    if RULE <= 2:
        rate, bias = rate_and_bias(a_log_ptr, bias_ptr, n, k_K, is_key, RULE, K)
    if IS_DELTA:
        norm = load_row(factor_ptr + v_B, is_value, None)
    else:
        single = tl.load(factor_ptr + n)
    after_predecessor(PDL)
    first, end, slot = tl.load(starts_ptr + s), tl.load(starts_ptr + s + 1), tl.load(slots_ptr + s)
    if (end > first) & (slot >= 0):
        has_past = tl.load(lengths_ptr + s) > end - first
        at_KB = (slot.to(tl.int64) * N + n) * K * V + k_K[:, None] * V + v_B[None, :]
        is_in = is_key[:, None] & is_value[None, :]
        state_KB = tl.load(state_ptr + at_KB, mask=is_in & has_past, other=0.0).to(tl.float32)
        t = first.to(tl.int64)
        for _ in range(first, end):
            row, head = t * row_stride, n // SHARE
            q = load_row(q_ptr + row + head * K + k_K, is_key, ACTIVATION)
            k = load_row(k_ptr + row + head * K + k_K, is_key, ACTIVATION)
            v = load_row(v_ptr + row + n * V + v_B, is_value, ACTIVATION)
            u = v
            if IS_DELTA:
                q *= tl.rsqrt(tl.sum(q * q, 0) + EPS) * (K**-0.5)
                k *= tl.rsqrt(tl.sum(k * k, 0) + EPS)
            if RULE <= 2:
                step = step_of(dt_ptr + t * dt_stride, bias, n, k_K, is_key, low, high, RULE, K)
                state_KB *= decay_of(rate * step, RULE)
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
            if IS_DELTA:
                out = normed(out, gate_ptr + t * gate_stride + n * V + v_B, is_value, norm, eps, V, GATE)
            tl.store(out_ptr + (t * N + n) * V + v_B, out.to(out_ptr.dtype.element_ty), mask=is_value)
            t += 1
        tl.store(state_ptr + at_KB, state_KB.to(state_ptr.dtype.element_ty), mask=is_in)


def recur(
    rule: int,
    parts: tuple[Tensor, Tensor, Tensor],
    share: int,
    state: Tensor,
    rows: StateRows,
    out: Tensor,
    *,
    dt: Tensor | None = None,
    beta: Tensor | None = None,
    gate: Tensor | None = None,
    a_log: Tensor | None = None,
    bias: Tensor | None = None,
    factor: Tensor,
    activation: str | None = None,
    gate_kind: str = "silu",
    eps: float = 0.0,
    beta_scale: float = 1.0,
    limits: tuple[float, float] = (0.0, float("inf")),
) -> Tensor:
    """Launch the kernel; ``parts`` are queries, keys and values, columns of one tensor. Returns ``out``."""
    (N, K, V), S = state.shape[1:], len(rows.slots_S)
    if len(out) == 0 or S == 0:
        return out
    width = triton.next_power_of_2(V)
    block = width if rule in (DELTA, DELTA_BY_CHANNEL) else min(width, COLUMNS)
    key_block = triton.next_power_of_2(K)
    strides: list[Any] = [0 if x is None else x.stride(0) for x in (dt, beta, gate)]
    # fmt: off
    launch(
        recurrence_kernel, (N, S, triton.cdiv(V, block)), *parts, parts[0].stride(0), dt, strides[0], beta, strides[1],
        gate, strides[2], a_log, bias, factor, state, out, rows.cu_seqlens_q, rows.seq_lens_S, rows.slots_S, eps,
        beta_scale, *limits, RULE=rule, ACTIVATION=activation, GATE=gate_kind, N=N, SHARE=share, K=K, V=V,
        K_BLOCK=key_block, V_BLOCK=block, num_warps=8 if key_block * block >= 128 * 128 else 4,
    )
    # fmt: on
    return out
