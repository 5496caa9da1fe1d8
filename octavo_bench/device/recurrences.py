"""How long the kernels with recurrent state take for prompts: in chunks, and one row after the other, on a GPU.

Times are those of one layer, of a CUDA graph whose calls use other rows and states each. The number of rows from which
chunks are faster is what ``RECURRENT_ROWS`` of the kernels stands for.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from octavo import ops
from octavo.errors import ConfigError
from octavo.ops.recurrent.gated_delta import DeltaHeads
from octavo.ops.recurrent.recurrence import StateRows
from octavo.ops.recurrent.state_space import StateSpaceHeads
from octavo_bench.device import ceilings
from octavo_kernels.triton.graph_timing import microseconds
from octavo_kernels.triton.recurrent import recurrence

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
TURNS = 4
"""Layers whose calls take turns."""
Run = Callable[[Tensor, Tensor, StateRows], Tensor]


class MeasuredLayer(NamedTuple):
    """A layer's recurrence, as a function of inputs [T, ``width``], of states, and of rows."""

    run: Run
    width: int
    state_shape: tuple[int, int, int]
    outputs: int


def delta_layer(key_heads: int, heads: int, size: int = 128, by_channel: bool = False) -> MeasuredLayer:
    """The gated delta rule; ``by_channel``: with a decay for each number of a key."""
    num_decays = heads * (size if by_channel else 1)
    statics = (torch.rand(heads) * 2 - 5).to(DEVICE), torch.randn(num_decays, device=DEVICE) / 2
    layout = DeltaHeads(key_heads, heads, size, size, *statics, torch.ones(size, device=DEVICE, dtype=DTYPE), 1e-6)
    widths = [sum(layout.sizes), num_decays, heads, heads * size]

    def run(x: Tensor, state: Tensor, rows: StateRows) -> Tensor:
        qkv, dt, beta, gate = x.split_with_sizes(widths, dim=1)
        return ops.gated_delta(qkv, dt, beta, gate, layout, state, rows)

    return MeasuredLayer(run, sum(widths), (heads, size, size), heads * size)


def state_space_layer(heads: int, head_dim: int, groups: int, state_size: int) -> MeasuredLayer:
    """Mamba-2."""
    rates, bias, d = (torch.randn(heads, device=DEVICE) / 2 for _ in range(3))
    layout = StateSpaceHeads(heads, head_dim, groups, state_size, rates - 4, bias, d)
    widths = [sum(layout.sizes), heads]

    def run(x: Tensor, state: Tensor, rows: StateRows) -> Tensor:
        xbc, dt = x.split_with_sizes(widths, dim=1)
        return ops.state_space(xbc, dt, layout, state, rows)

    return MeasuredLayer(run, sum(widths), (heads, state_size, head_dim), heads * head_dim)


def linear_layer(heads: int, size: int = 128) -> MeasuredLayer:
    """Lightning attention."""
    decay = torch.exp(-torch.rand(heads, device=DEVICE) * 0.2)

    def run(x: Tensor, state: Tensor, rows: StateRows) -> Tensor:
        return ops.linear_attention(x, decay, state, rows, "silu")

    return MeasuredLayer(run, 3 * heads * size, (heads, size, size), heads * size)


LAYERS: dict[str, Callable[[], MeasuredLayer]] = {
    "qwen3.5-9b": functools.partial(delta_layer, 16, 32),
    "qwen3.5-27b": functools.partial(delta_layer, 16, 48),
    "kimi-linear-48b": functools.partial(delta_layer, 32, 32, by_channel=True),
    "nemotron-h-8b": functools.partial(state_space_layer, 128, 64, 8, 128),
    "granite-4-h-small": functools.partial(state_space_layer, 128, 64, 1, 128),
    "minimax-text-01": functools.partial(linear_layer, 64),
}


def measure(models: Sequence[str], tokens: Sequence[int], sequences: Sequence[int]) -> dict[str, Any]:
    """A record for each model, length of prompts and number of prompts in a step. Raises ``ConfigError``."""
    for name in models:
        if name not in LAYERS:
            raise ConfigError(f"models: {name!r} is not one of {', '.join(LAYERS)}")
    return {**ceilings.measure(), "rows": list(_figures(models, tokens, sequences))}


def _figures(models: Sequence[str], lengths: Sequence[int], sequences: Sequence[int]) -> Iterator[dict[str, Any]]:
    for model, length, count in itertools.product(models, lengths, sequences):
        layer, T = LAYERS[model](), length * count
        starts = torch.arange(0, T + 1, length, dtype=torch.int32, device=DEVICE)
        slots = torch.arange(count, dtype=torch.int32, device=DEVICE)
        rows = StateRows(starts, torch.full_like(slots, length + 1), slots, length)
        turns = [torch.randn(T, layer.width, device=DEVICE).to(DTYPE) for _ in range(TURNS)]
        state = torch.randn(TURNS, count, *layer.state_shape, device=DEVICE)
        found, taken = [], []
        for few in (0, length):
            with mock.patch.object(recurrence, "RECURRENT_ROWS", few):
                own = state[0].clone()
                found.append((layer.run(turns[0], own, rows).double(), own.double()))
                calls = [functools.partial(layer.run, x, s, rows) for x, s in zip(turns, state.clone(), strict=True)]
                taken.append(microseconds(calls, with_pdl=True))
        errors = [float((x - right).norm() / right.norm()) for x, right in zip(*found, strict=True)]
        least = T * (layer.width + layer.outputs) * DTYPE.itemsize + 8 * count * math.prod(layer.state_shape)
        yield {
            "model": model,
            "tokens": length,
            "sequences": count,
            "chunks_microseconds": round(taken[0], 1),
            "rows_microseconds": round(taken[1], 1),
            "speedup": round(taken[1] / taken[0], 2),
            "tb_s": round(least / taken[0] / 1e6, 3),
            "difference": errors[0],
            "state_difference": errors[1],
        }
