"""Ragged steps of every op with recurrent state, for its reference and for its kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo import ops
from octavo.ops.recurrent.gated_delta import DeltaHeads
from octavo.ops.recurrent.gated_norm import Gate
from octavo.ops.recurrent.recurrence import StateRows
from octavo.ops.recurrent.selective_scan import ScanChannels
from octavo.ops.recurrent.state_space import StateSpaceHeads

Run = Callable[[Tensor, Tensor, StateRows], Tensor]


@dataclass(frozen=True)
class Case:
    """An op with its static parameters, as a function of inputs [T, ``width``], of a state and of ``StateRows``."""

    run: Run
    width: int
    state_shape: tuple[int, ...]
    """Of one slot."""

    def inputs(self, num_rows: int) -> Tensor:
        return torch.randn(num_rows, self.width)


def step(lengths: Sequence[tuple[int, int]], slots: Sequence[int], marks: Mapping[int, int] | None = None) -> StateRows:
    """Rows of sequences given as (rows of this step, length), and slots that keep the state after some rows."""
    starts = torch.tensor([0, *(rows for rows, _ in lengths)]).cumsum(0).to(torch.int32)
    seq_lens, of_slots = torch.tensor([[n for _, n in lengths], slots], dtype=torch.int32)
    marks_T = None
    if marks is not None:
        marks_T = torch.tensor([marks.get(row, -1) for row in range(int(starts[-1]))], dtype=torch.int32)
    return StateRows(starts, seq_lens, of_slots, max(rows for rows, _ in lengths), marks_T)


def conv_case(channels: int = 20, width: int = 4, *, has_bias: bool = True, activation: bool = True) -> Case:
    weight, bias = torch.randn(width, channels), torch.randn(channels) if has_bias else None

    def run(x: Tensor, state: Tensor, rows: StateRows) -> Tensor:
        of_type = None if bias is None else bias.to(x.dtype)
        return ops.causal_conv(x, weight.to(x.dtype), of_type, state, rows, "silu" if activation else None)

    return Case(run, channels, (width - 1, channels))


def gated_conv_case(channels: int = 20, width: int = 3) -> Case:
    weight = torch.randn(width, channels)
    return Case(
        lambda x, state, rows: ops.gated_conv(x, weight.to(x.dtype), None, state, rows),
        3 * channels,
        (width - 1, channels),
    )


def delta_case(
    key_heads: int = 2,
    heads: int = 4,
    key_dim: int = 12,
    value_dim: int = 20,
    *,
    by_channel: bool = False,
    gate: Gate = "silu",
    beta_scale: float = 1.0,
    is_tiled: bool = False,
    lowest: float = 0.0,
) -> Case:
    """The delta rule with decays near 1, so that old rows matter."""
    num_decays = heads * (key_dim if by_channel else 1)
    layout = DeltaHeads(
        *(key_heads, heads, key_dim, value_dim),
        torch.rand(heads) * 2 - (1 if lowest else 5),
        torch.randn(num_decays) * 0.5,
        torch.rand(value_dim) + 0.5,
        1e-6,
        gate,
        beta_scale,
        is_tiled,
        lowest,
    )
    widths = [sum(layout.sizes), num_decays, heads, heads * value_dim]

    def run(x: Tensor, state: Tensor, rows: StateRows) -> Tensor:
        qkv, dt, beta, gates = x.split_with_sizes(widths, dim=1)
        return ops.gated_delta(qkv, dt, beta, gates, layout, state, rows)

    return Case(run, sum(widths), (heads, key_dim, value_dim))


def state_space_case(
    heads: int = 4,
    head_dim: int = 20,
    groups: int = 2,
    state_size: int = 12,
    limits: tuple[float, float] = (0, math.inf),
) -> Case:
    layout = StateSpaceHeads(
        *(heads, head_dim, groups, state_size),
        torch.rand(heads) * 2 - 5,
        torch.randn(heads) * 0.5,
        torch.randn(heads),
        limits,
    )
    widths = [sum(layout.sizes), heads]

    def run(x: Tensor, state: Tensor, rows: StateRows) -> Tensor:
        xbc, dt = x.split_with_sizes(widths, dim=1)
        return ops.state_space(xbc, dt, layout, state, rows)

    return Case(run, sum(widths), (heads, state_size, head_dim))


def scan_case(channels: int = 20, state_size: int = 5) -> Case:
    layout = ScanChannels(torch.randn(state_size, channels) - 2, torch.randn(channels) * 0.5, torch.randn(channels))
    widths = [channels, channels, state_size, state_size]

    def run(x: Tensor, state: Tensor, rows: StateRows) -> Tensor:
        return ops.selective_scan(*x.split_with_sizes(widths, dim=1), layout, state, rows)

    return Case(run, sum(widths), (1, state_size, channels))


def linear_case(heads: int = 3, head_dim: int = 32, *, activation: bool = True) -> Case:
    decay = torch.exp(-torch.rand(heads) * 0.2)
    return Case(
        lambda x, state, rows: ops.linear_attention(x, decay, state, rows, "silu" if activation else None),
        3 * heads * head_dim,
        (heads, head_dim, head_dim),
    )


CASES: dict[str, Callable[[], Case]] = {
    "conv": conv_case,
    "conv of width 2": lambda: conv_case(width=2, has_bias=False, activation=False),
    "gated conv": gated_conv_case,
    "delta": delta_case,
    "delta by channel": lambda: delta_case(3, 3, 16, 16, by_channel=True, gate="sigmoid"),
    "delta of bounded decays": lambda: delta_case(3, 3, 12, 16, by_channel=True, lowest=-0.2),
    "delta with negative eigenvalues": lambda: delta_case(beta_scale=2.0),
    "state space": state_space_case,
    "state space with limits": lambda: state_space_case(groups=1, limits=(0.6, 0.9)),
    "scan": scan_case,
    "linear": linear_case,
    "linear without activation": lambda: linear_case(activation=False),
}


def in_chunks(case: Case, x: Tensor, state: Tensor, slot: int, chunks: Sequence[int]) -> Tensor:
    """The outputs for one sequence in chunks of these lengths."""
    outputs, begin = [], 0
    for chunk in chunks:
        end = begin + chunk
        outputs.append(case.run(x[begin:end], state, step([(chunk, end)], [slot])))
        begin = end
    assert begin == len(x)
    return torch.cat(outputs)


def with_marks(case: Case, x: Tensor, state: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Outputs, and states in 9 slots, after a step of 50 rows with marks; and those of steps that end there."""
    lengths, slots = [(1, 9), (40, 47), (1, 1), (8, 8)], [4, 0, 3, 6]
    marks, cut, outputs, begin = {0: 7, 1: 1, 5: 2, 39: 8, 45: 5}, state.clone(), list[Tensor](), 0
    for (count, length), slot in zip(lengths, slots, strict=True):
        last, past = begin + count, length - count - begin
        for end in sorted({last, *(row + 1 for row in marks if begin <= row < last)}):
            outputs.append(case.run(x[begin:end], cut, step([(end - begin, past + end)], [slot])))
            if end - 1 in marks:
                cut[marks[end - 1]] = cut[slot]
            begin = end
    found = case.run(x, state, step(lengths, slots, marks))
    return [(found, torch.cat(outputs)), (state, cut)]
