"""What a step computes besides products and attention: recurrences, routers, samplers, norms and activations.

Shapes: T rows, V vocabulary, X experts, D model.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from octavo import ops
from octavo.ops.moe import Routing
from octavo.ops.recurrent.recurrence import StateRows
from octavo.ops.sampling.sampling import SampleParams
from octavo_bench.device.measured_case import ALONE_BYTES, DEVICE, DTYPE, EPS, Call, Case, Floor, num_turns, random_rows
from octavo_bench.device.recurrences import MeasuredLayer
from octavo_fleet.sim.costs.roofline import MixtureShape

MOST_SEQUENCES = 256


class RecurrentCase(Case):
    """A recurrence in float32: a row for each of T sequences, or T rows of one."""

    family = "recurrence"

    def __init__(self, rule: str, make: Callable[[], MeasuredLayer], row_flops: int, is_prompt: bool) -> None:
        layer = make()
        self.layer, self.row_flops, self.is_prompt = layer, row_flops, is_prompt
        self.name = f"{rule}, {'rows of one sequence' if is_prompt else 'a row of each sequence'}"
        self.format = "float32 states"
        self.fewest_rows, self.most_rows = (2, 1 << 30) if is_prompt else (1, MOST_SEQUENCES)
        self.state_bytes = 4 * math.prod(layer.state_shape)
        slots = max(2 if is_prompt else MOST_SEQUENCES, ALONE_BYTES // self.state_bytes)
        self.state = torch.randn(slots, *layer.state_shape, device=DEVICE)

    def calls(self, T: int) -> list[Call]:
        x = random_rows(T, self.layer.width)
        turns = num_turns(self._num_sequences(T) * self.state_bytes)
        return [functools.partial(self.layer.run, x, self.state, self._rows(T, turn)) for turn in range(turns)]

    def work(self, T: int) -> Floor:
        rows = T * (self.layer.width + self.layer.outputs) * DTYPE.itemsize
        return Floor(rows + 2 * self._num_sequences(T) * self.state_bytes, T * self.row_flops)

    def _num_sequences(self, T: int) -> int:
        return 1 if self.is_prompt else T

    def _rows(self, T: int, turn: int) -> StateRows:
        S = self._num_sequences(T)
        starts = torch.arange(0, T + 1, T // S, dtype=torch.int32, device=DEVICE)
        slots = (torch.arange(S, dtype=torch.int32, device=DEVICE) + turn * S) % len(self.state)
        return StateRows(starts, torch.full_like(slots, T // S + 1), slots, T // S)


class RouteCase(Case):
    """The norm before a mixture, its router, and the choice of experts."""

    family = "router"

    def __init__(self, hidden: int, mixture: MixtureShape) -> None:
        self.routing = Routing(mixture.chosen, normalises=True)
        self.name = f"{mixture.chosen} of {mixture.experts} experts, from {hidden}"
        self.norm = torch.rand(hidden, device=DEVICE).to(DTYPE)
        turns = num_turns(mixture.experts * hidden * DTYPE.itemsize)
        self.weights = torch.randn(turns, mixture.experts, hidden, device=DEVICE).div_(hidden**0.5).to(DTYPE)

    def calls(self, T: int) -> list[Call]:
        x = random_rows(T, len(self.norm))
        return [functools.partial(ops.route, x, self.norm, EPS, weight, self.routing) for weight in self.weights]

    def work(self, T: int) -> Floor:
        X, D = self.weights.shape[1:]
        chosen = 12 * T * self.routing.num_chosen  # ids of 8 bytes and shares of 4
        return Floor((X + 2 * T) * D * DTYPE.itemsize + chosen, 2 * T * X * D)


class SampleCase(Case):
    """Sampling from logits."""

    family = "sampling"

    def __init__(self, vocab: int, temperature: float, top_p: float) -> None:
        self.vocab, self.temperature, self.top_p = vocab, temperature, top_p
        self.name = f"{f'top-p of {top_p:g}' if temperature else 'greedy'}, from {vocab:,} logits"

    def calls(self, T: int) -> list[Call]:
        def column(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full((T,), value, dtype=dtype, device=DEVICE)

        seeds = torch.arange(T, device=DEVICE)
        top_k, position = column(0, torch.int32), column(100, torch.int32)
        params = SampleParams(column(self.temperature), column(0.0), top_k, column(self.top_p), seeds, position)
        turns = num_turns(T * self.vocab * DTYPE.itemsize)
        return [functools.partial(ops.sample, 2 * random_rows(T, self.vocab), params) for _ in range(turns)]

    def work(self, T: int) -> Floor:
        return Floor(T * self.vocab * DTYPE.itemsize, 0)


class RowsCase(Case):
    """A kernel from rows to rows."""

    family = "rows"

    def __init__(self, name: str, run: Callable[[Tensor], Tensor], width: int, outputs: int) -> None:
        self.name, self.run, self.width, self.outputs = f"{name}, {width} to {outputs}", run, width, outputs

    def calls(self, T: int) -> list[Call]:
        turns = num_turns(self.work(T).bytes)
        return [functools.partial(self.run, random_rows(T, self.width)) for _ in range(turns)]

    def work(self, T: int) -> Floor:
        return Floor(T * (self.width + self.outputs) * DTYPE.itemsize, 0)


def norm_case(width: int) -> RowsCase:
    """RMSNorm."""
    weight = torch.rand(width, device=DEVICE).to(DTYPE)
    return RowsCase("RMSNorm", lambda x: ops.rms_norm(x, weight, EPS), width, width)


def gate_case(width: int) -> RowsCase:
    """SiLU of gates times ups, ``width`` of each."""
    return RowsCase("SiLU and product", ops.silu_and_mul, 2 * width, width)
