"""Products with weights of every format: maps of a layer, what follows attention in one call, and experts.

Weights are random, in the form that kernels for GPUs read, in the configurations that the engine has without tuning.

Shapes: T rows, K inputs, N outputs; D model, F feed-forward, X experts, S of them chosen for a token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from octavo import ops
from octavo.ops.dispatch import REFERENCE, only
from octavo.ops.linear.grouped_linear import Number, PackedGroups, takes_groups
from octavo.ops.linear.linear import Fused
from octavo.ops.linear.scaled_linear import ScaledValues
from octavo.ops.moe import ClampedSwish, ExpertActivation, Experts, GroupedExperts
from octavo_bench.device.linear_case import ROWS_CHECKED, CaseOperands, LinearCase
from octavo_bench.device.measured_case import ALONE_BYTES, DEVICE, DTYPE, EPS, Call, Case, Floor, num_turns, random_rows
from octavo_fleet.sim.costs.roofline import MixtureShape

MOST_WEIGHTS = 16
TOKENS_CHECKED = 2
"""Of experts, which are unpacked one by one."""
Weight = Tensor | ScaledValues | PackedGroups
Made = TypeVar("Made")


class WeightForm(Protocol):
    """How a format's numbers are stored."""

    @property
    def rate(self) -> str:
        """See ``Case``."""

    def weight(self, N: int, K: int) -> Weight:
        """A random one, whose outputs for rows of unit variance have about unit variance."""


class DenseForm:
    """Numbers of 16 bits."""

    rate = "matmul_tflop_s"

    def weight(self, N: int, K: int) -> Tensor:
        """See ``WeightForm``."""
        return torch.empty(N, K, device=DEVICE, dtype=DTYPE).normal_(0, K**-0.5)


class ScaledRows(NamedTuple):
    """Numbers of 8 bits with a scale per output, multiplied by rows that are rounded to such numbers."""

    dtype: torch.dtype
    rate: str

    def weight(self, N: int, K: int) -> ScaledValues:
        """See ``WeightForm``."""
        unit = 30 if self.dtype == torch.int8 else 100
        values_NK = torch.empty(N, K, device=DEVICE, dtype=DTYPE).normal_(0, unit)
        values_NK = values_NK.clamp_(-4 * unit, 4 * unit).to(self.dtype)
        return ScaledValues(values_NK, (torch.rand(N, 1, device=DEVICE) + 0.5) / unit / K**0.5, K)


class NumberForm(NamedTuple):
    """Numbers of 4 or 8 bits with scales for groups of inputs; activations keep 16 bits."""

    number: Number
    group: int
    """Inputs with a scale in common; 0 for a scale per output."""
    has_zeros: bool = False
    has_minima: bool = False
    scales: torch.dtype = torch.bfloat16
    """Of scales and minima."""
    rate: str = "matmul_tflop_s"

    def weight(self, N: int, K: int) -> PackedGroups:
        """See ``WeightForm``."""
        if self.number == "e4m3":
            codes = torch.randn(N, K, device=DEVICE).mul_(20).to(torch.float8_e4m3fn).view(torch.uint8)
        elif self.number == "int8":
            codes = torch.randint(-128, 128, (N, K), device=DEVICE, dtype=torch.int8)
        else:
            first = -8 if self.number == "int4" else 0
            codes = torch.randint(first, first + 16, (N, K), device=DEVICE, dtype=torch.int8)
        size = N, K // (self.group or K)
        unit = {"int4": 5, "uint4": 5, "int8": 74, "e4m3": 20, "e2m1": 3}[self.number]
        scales = ((torch.rand(size, device=DEVICE) + 0.5) / unit / K**0.5).to(self.scales).float()
        zeros = torch.randint(-7, 8, size, device=DEVICE, dtype=torch.int8) if self.has_zeros else None
        minima = (scales * -7.5).to(self.scales).float() if self.has_minima else None
        return PackedGroups.pack(self.number, codes, scales, zeros, minima_NG=minima)

    def fits(self, K: int) -> bool:
        """Whether rows of K inputs can have it."""
        return not self.group or (K % self.group == 0 and takes_groups(self.number, K, self.group))


FORMS: dict[str, WeightForm] = {
    "bf16": DenseForm(),
    "fp8-rows": ScaledRows(torch.float8_e4m3fn, "fp8_tflop_s"),
    "int8-rows": ScaledRows(torch.int8, "int8_tflop_s"),
    "fp8": NumberForm("e4m3", 128),
    "int8": NumberForm("int8", 0),
    "int4": NumberForm("int4", 128),
    "int4-zeros": NumberForm("int4", 128, has_zeros=True),
    "mxfp4": NumberForm("e2m1", 32),
    "nvfp4": NumberForm("e2m1", 16),
    "q4_0": NumberForm("int4", 32, scales=torch.float16),
    "q4_1": NumberForm("uint4", 32, has_minima=True, scales=torch.float16),
    "q8_0": NumberForm("int8", 32, scales=torch.float16),
    "q4_k": NumberForm("uint4", 32, has_minima=True, scales=torch.float32),
    "q6_k": NumberForm("int8", 16, scales=torch.float32),
}
"""As the engine stores them on a GPU."""


class MapCase(Case):
    """A linear map of a layer."""

    def __init__(self, family: str, case: LinearCase, format: str) -> None:
        form = FORMS[format]
        self.family, self.case, self.format, self.rate = family, case, format, form.rate
        self.name = f"{case.name} {case.N}x{case.K}"
        self.weights = _turns(lambda: form.weight(case.N, case.K))

    def calls(self, T: int) -> list[Call]:
        given = self.case.operands(T, DEVICE)
        return [functools.partial(_mapped, weight, self.case, given) for weight in self.weights]

    def work(self, T: int) -> Floor:
        return Floor(_num_bytes(self.weights[0]) + self.case.row_bytes(T), 2 * T * self.case.N * self.case.K)

    def error(self, T: int) -> float:
        first = self.weights[0]
        return self.case.error(T, _unpacked(first), functools.partial(_mapped, first, self.case))


def _mapped(weight: Weight, case: LinearCase, given: CaseOperands) -> Tensor:
    x_TK, norm_K, residual_TN = given
    fused = Fused(None, norm_K, EPS, residual_TN, case.activation)
    if isinstance(weight, PackedGroups):
        return ops.grouped_linear(x_TK, weight, fused)
    return (ops.scaled_linear if isinstance(weight, ScaledValues) else ops.linear)(x_TK, weight, fused)  # type: ignore[arg-type]


def _unpacked(weight: Weight) -> Tensor:
    if isinstance(weight, PackedGroups):
        return weight.unpack()
    return weight if isinstance(weight, Tensor) else weight.rows(torch.arange(len(weight.values_NK), device=DEVICE))


class OutputCase(Case):
    """What follows attention: the output projection to the down projection, which one kernel may compute for a row."""

    family, most_rows = "linear", 1

    def __init__(self, cases: Sequence[LinearCase], format: str) -> None:
        _, output, gate_up, down = cases
        self.maps, self.format, self.name = (output, gate_up, down), format, "o, gate_up and down"
        form = FORMS[format]
        self.weights = _turns(lambda: tuple(form.weight(each.N, each.K) for each in self.maps))

    def calls(self, T: int) -> list[Call]:
        given = self._given(T)
        return [functools.partial(ops.grouped_output_mlp, *self._arguments(given, weights)) for weights in self.weights]

    def work(self, T: int) -> Floor:
        rows = T * (self.maps[0].K + 2 * self.maps[0].N) * DTYPE.itemsize
        flops = sum(2 * T * each.N * each.K for each in self.maps)
        return Floor(_num_bytes(self.weights[0]) + rows, flops)

    def error(self, T: int) -> float:
        given = self._given(T)
        few = [part[:ROWS_CHECKED].float() for part in given[:2]] + [given[2].float()]
        with only(REFERENCE):
            expected = ops.grouped_output_mlp.reference(*self._arguments(few, self.weights[0]))
        return _difference(ops.grouped_output_mlp(*self._arguments(given, self.weights[0]))[:ROWS_CHECKED], expected)

    def _given(self, T: int) -> list[Tensor]:
        output = self.maps[0]
        norm = torch.rand(output.N, device=DEVICE, dtype=DTYPE) + 0.5
        return [random_rows(T, output.K), random_rows(T, output.N), norm]

    def _arguments(self, given: Sequence[Tensor], weights: Sequence[Weight]) -> tuple[Any, ...]:
        (attended, x, norm), (output, *rest) = given, weights
        return attended, x, output, norm, EPS, *rest, self.maps[1].activation


class ExpertsCase(Case):
    """The experts of a layer, without router; each token's choice is equally likely, and other for each call."""

    family = "experts"

    def __init__(self, hidden: int, mixture: MixtureShape, clamp: float | None, format: str) -> None:
        """``clamp``: the limit of gpt-oss's gates; its biases are left out."""
        self.hidden, self.mixture, self.format = hidden, mixture, format
        self.name = f"{mixture.chosen} of {mixture.experts} experts, {hidden} to {mixture.ffn}"
        self.activation: ExpertActivation = "silu" if clamp is None else ClampedSwish(1.702, clamp)
        self.experts = _turns(self._make)

    def _make(self) -> Experts | GroupedExperts:
        X, D, F = self.mixture.experts, self.hidden, self.mixture.ffn
        gate_up, down = FORMS[self.format].weight(X * 2 * F, D), FORMS[self.format].weight(X * D, F)
        if isinstance(gate_up, PackedGroups) and isinstance(down, PackedGroups):
            return GroupedExperts(X, gate_up, down, self.activation)
        assert isinstance(gate_up, Tensor), "experts are dense or packed"
        assert isinstance(down, Tensor), "experts are dense or packed"
        return Experts(gate_up.view(X, 2 * F, D), down.view(X, D, F), self.activation)

    def calls(self, T: int) -> list[Call]:
        return [
            functools.partial(self._op, *self._given(T, turn), self.experts[turn % len(self.experts)])
            for turn in range(self._num_calls(T))
        ]

    @property
    def _op(self) -> Any:
        return ops.moe if isinstance(self.experts[0], Experts) else ops.grouped_moe

    def _num_calls(self, T: int) -> int:
        """So many that the chosen experts, which are read alone, are in no cache."""
        return num_turns(round(self._expert_bytes * self.mixture.experts_read(T)))

    @property
    def _expert_bytes(self) -> float:
        return _num_bytes(self.experts[0]) / self.mixture.experts

    def work(self, T: int) -> Floor:
        chosen = [len(torch.unique(self._given(T, turn)[1])) for turn in range(self._num_calls(T))]
        flops = 6 * T * self.mixture.chosen * self.hidden * self.mixture.ffn
        read = self._expert_bytes * sum(chosen) / len(chosen)
        return Floor(round(read) + 2 * T * self.hidden * DTYPE.itemsize, flops)

    def error(self, T: int) -> float:
        x, ids, shared = self._given(T, 0)
        few = x[:TOKENS_CHECKED].float(), ids[:TOKENS_CHECKED], shared[:TOKENS_CHECKED]
        with only(REFERENCE):  # kernels take no weights of 16 bits with rows of 32
            expected = self._op.reference(*few, self.experts[0])
        return _difference(self._op(x, ids, shared, self.experts[0])[:TOKENS_CHECKED], expected)

    def _given(self, T: int, turn: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, the experts that each token chooses, and their shares: the same at every call."""
        generator = torch.Generator(DEVICE).manual_seed(turn)
        x = torch.randn(T, self.hidden, device=DEVICE, generator=generator).to(DTYPE)
        scores = torch.rand(T, self.mixture.experts, device=DEVICE, generator=generator)
        chosen = scores.topk(self.mixture.chosen)
        return x, chosen.indices, chosen.values.softmax(-1)


def _difference(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def _turns(make: Callable[[], Made]) -> list[Made]:
    """So many weights that none is in a cache when its turn comes again."""
    made = [make(), make()]
    while sum(map(_num_bytes, made)) < ALONE_BYTES and len(made) < MOST_WEIGHTS:
        made.append(make())
    return made


def _num_bytes(made: Any) -> int:
    """Of a weight, or of the weights among the parts of something."""
    if isinstance(made, Tensor):
        return made.nbytes
    if isinstance(made, PackedGroups | ScaledValues):
        return made.num_bytes
    parts = vars(made).values() if isinstance(made, Experts) else made
    return sum(_num_bytes(part) for part in parts if isinstance(part, Tensor | PackedGroups | ScaledValues))
