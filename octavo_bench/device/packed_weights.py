"""Time of products with packed weights on a GPU: maps of a layer, what follows attention, and experts, by format.

Weights are random, in the form that kernels for GPUs read. Times are those of a CUDA graph whose calls read other
weights each, with programmatic dependent launch, in the configurations that the engine would use.

Shapes: T rows, K inputs, N outputs; D model, F feed-forward, S experts chosen for a token.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from octavo import ops
from octavo.errors import ConfigError
from octavo.ops.linear.grouped_linear import Number, PackedGroups, takes_groups
from octavo.ops.linear.linear import Fused
from octavo.ops.moe import GroupedExperts
from octavo_bench.device import ceilings
from octavo_bench.device.kernel_cases import layer_cases
from octavo_bench.device.kernels import ALONE_BYTES, DEVICE, shares
from octavo_bench.device.linear_case import DTYPE, EPS, ROWS_CHECKED, CaseOperands, LinearCase
from octavo_fleet.sim.costs.roofline import MixtureShape, shape_of
from octavo_fleet.sim.shapes import SHAPES
from octavo_kernels.triton.graph_timing import microseconds
from octavo_kernels.triton.launch import compiling, pdl

MOST_TURNS = 16
Call = Callable[[], Tensor]
Made = TypeVar("Made")


class NumberForm(NamedTuple):
    """How a format's numbers are stored."""

    number: Number
    group: int
    """Inputs with a scale in common; 0 for a scale per output."""
    has_zeros: bool = False
    has_minima: bool = False
    scales: torch.dtype = torch.bfloat16
    """Of scales and minima."""

    def weight(self, N: int, K: int) -> PackedGroups:
        """A random one, whose outputs for rows of unit variance have about unit variance."""
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


FORMS: dict[str, NumberForm] = {
    "int4": NumberForm("int4", 128),
    "int4-zeros": NumberForm("int4", 128, has_zeros=True),
    "int8": NumberForm("int8", 0),
    "fp8": NumberForm("e4m3", 128),
    "mxfp4": NumberForm("e2m1", 32),
    "nvfp4": NumberForm("e2m1", 16),
    "q4_0": NumberForm("int4", 32, scales=torch.float16),
    "q4_1": NumberForm("uint4", 32, has_minima=True, scales=torch.float16),
    "q8_0": NumberForm("int8", 32, scales=torch.float16),
    "q4_k": NumberForm("uint4", 32, has_minima=True, scales=torch.float32),
    "q6_k": NumberForm("int8", 16, scales=torch.float32),
}
"""With activations of 16 bits, as the engine stores them on a GPU."""


def measure(
    models: Sequence[str], formats: Sequence[str], rows: Sequence[int], deadline: float = float("inf")
) -> dict[str, Any]:
    """Figures of the kernels for a layer of each model in each format, for each number of rows.

    What there is no time for in ``deadline`` seconds is left out, and formats whose groups do not divide a model's
    rows are, and named. Raises ``ConfigError`` for models and formats that are not known, and if nothing is left.
    """
    end = time.monotonic() + deadline
    for name in formats:
        if name not in FORMS:
            raise ConfigError(f"formats: {name!r} is not one of {', '.join(FORMS)}")
    misfits = {(model, name): _misfit(model, name) for model in models for name in formats}
    left_out = [reason for reason in misfits.values() if reason]
    if len(left_out) == len(misfits):
        raise ConfigError("formats: " + "; ".join(left_out))
    limits = ceilings.measure()
    result: dict[str, Any] = {**limits, "left_out": left_out, "rows": []}
    for model, name in [pair for pair, reason in misfits.items() if not reason]:
        for make in _cases(model, name):
            for figure in _figures(make(), rows, limits):
                if time.monotonic() > end:
                    return result
                result["rows"].append({"model": model, "format": name, **figure})
    return result


def _misfit(model: str, name: str) -> str:
    """Why no weight of the model has the format, if so. Raises ``ConfigError`` for a model that is not known."""
    form, mixed = FORMS[name], _mixed(model)
    widths = [mixed.hidden, mixed.mixture.ffn] if mixed else [each.K for each in layer_cases(model)]
    for K in widths:
        if form.group and (K % form.group or not takes_groups(form.number, K, form.group)):
            return f"{name} has groups of {form.group} inputs; {model} has rows of {K}"
    return ""


def _cases(model: str, name: str) -> list[Callable[[], Case]]:
    """What makes the cases of a model's layer; their weights are made with them."""
    form = FORMS[name]
    if mixed := _mixed(model):
        return [functools.partial(ExpertsCase, mixed.hidden, mixed.mixture, form)]
    maps = layer_cases(model)
    return [*(functools.partial(MapCase, each, form) for each in maps), functools.partial(OutputCase, maps, form)]


class SizedMixture(NamedTuple):
    """Sizes of a mixture's layer."""

    hidden: int
    mixture: MixtureShape


def _mixed(model: str) -> SizedMixture | None:
    shape = shape_of(SHAPES[model]) if model in SHAPES else None
    return SizedMixture(shape.hidden, shape.mixture) if shape and shape.mixture else None


def _figures(case: Case, rows: Sequence[int], limits: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    used = [T for T in rows if case.most_rows >= T]
    with pdl(), compiling():
        for T in used:
            case.calls(T)[0]()
    for T in used:
        taken = microseconds(case.calls(T), with_pdl=True)
        with pdl():
            error = case.error(T)
        yield {"kernel": case.name, "T": T, **shares(taken, *case.work(T), limits), "error": float(f"{error:.2g}")}


class Case(Protocol):
    """What is measured."""

    name: str
    most_rows: float

    def calls(self, T: int) -> list[Call]:
        """The same for T rows with one weight after another."""

    def work(self, T: int) -> tuple[int, int]:
        """Bytes that T rows cannot do without, and operations."""

    def error(self, T: int) -> float:
        """Norm of the difference from products of higher precision over their norm, for a few rows."""


class MapCase:
    """A linear map of a layer."""

    most_rows = float("inf")

    def __init__(self, case: LinearCase, form: NumberForm) -> None:
        self.case, self.name = case, f"{case.name} {case.N}x{case.K}"
        self.weights = _turns(lambda: form.weight(case.N, case.K))

    def calls(self, T: int) -> list[Call]:
        given = self.case.operands(T, DEVICE)
        return [functools.partial(self._run, weight, given) for weight in self.weights]

    def work(self, T: int) -> tuple[int, int]:
        return self.weights[0].num_bytes + self.case.row_bytes(T), 2 * T * self.case.N * self.case.K

    def error(self, T: int) -> float:
        first = self.weights[0]
        return self.case.error(T, first.unpack(), functools.partial(self._run, first))

    def _run(self, weight: PackedGroups, given: CaseOperands) -> Tensor:
        x_TK, norm_K, residual_TN = given
        return ops.grouped_linear(x_TK, weight, Fused(None, norm_K, EPS, residual_TN, self.case.activation))


class OutputCase:
    """What follows attention: the output projection to the down projection, which one kernel may compute for a row."""

    most_rows = 1.0

    def __init__(self, cases: Sequence[LinearCase], form: NumberForm) -> None:
        _, output, gate_up, down = cases
        self.maps, self.name = (output, gate_up, down), "output projection to down projection"
        self.weights = _turns(lambda: tuple(form.weight(each.N, each.K) for each in self.maps))

    def calls(self, T: int) -> list[Call]:
        given = self._given(T)
        return [functools.partial(ops.grouped_output_mlp, *self._arguments(given, weights)) for weights in self.weights]

    def work(self, T: int) -> tuple[int, int]:
        rows = T * (self.maps[0].K + 2 * self.maps[0].N) * DTYPE.itemsize
        operations = sum(2 * T * each.N * each.K for each in self.maps)
        return sum(weight.num_bytes for weight in self.weights[0]) + rows, operations

    def error(self, T: int) -> float:
        given = self._given(T)
        few = [part[:ROWS_CHECKED].float() for part in given[:2]] + [given[2].float()]
        expected = ops.grouped_output_mlp.reference(*self._arguments(few, self.weights[0]))
        return _difference(ops.grouped_output_mlp(*self._arguments(given, self.weights[0]))[:ROWS_CHECKED], expected)

    def _given(self, T: int) -> list[Tensor]:
        output = self.maps[0]
        rows = [torch.randn(T, width, device=DEVICE, dtype=DTYPE) for width in (output.K, output.N)]
        return [*rows, torch.rand(output.N, device=DEVICE, dtype=DTYPE) + 0.5]

    def _arguments(self, given: Sequence[Tensor], weights: Sequence[PackedGroups]) -> tuple[Any, ...]:
        (attended, x, norm), (output, *rest) = given, weights
        return attended, x, output, norm, EPS, *rest, self.maps[1].activation


class ExpertsCase:
    """The experts of a layer, without router; each token's choice is equally likely."""

    most_rows = float("inf")

    def __init__(self, hidden: int, mixture: MixtureShape, form: NumberForm) -> None:
        self.hidden, self.mixture, self.name = hidden, mixture, f"{mixture.chosen} of {mixture.experts} experts"
        self.experts = _turns(self._make(form))

    def _make(self, form: NumberForm) -> Callable[[], GroupedExperts]:
        X, D, F = self.mixture.experts, self.hidden, self.mixture.ffn
        return lambda: GroupedExperts(X, form.weight(X * 2 * F, D), form.weight(X * D, F))

    def calls(self, T: int) -> list[Call]:
        return [functools.partial(ops.grouped_moe, *self._given(T, turn), one) for turn, one in enumerate(self.experts)]

    def work(self, T: int) -> tuple[int, int]:
        chosen = [len(torch.bincount(self._given(T, turn)[1].flatten()).nonzero()) for turn in range(len(self.experts))]
        each = _num_bytes(self.experts[0]) / self.mixture.experts
        num_bytes = each * sum(chosen) / len(chosen)
        operations = 6 * T * self.mixture.chosen * self.hidden * self.mixture.ffn
        return round(num_bytes) + 2 * T * self.hidden * DTYPE.itemsize, operations

    def error(self, T: int) -> float:
        x, ids, shared = self._given(T, 0)
        few = x[:ROWS_CHECKED].float(), ids[:ROWS_CHECKED], shared[:ROWS_CHECKED]
        expected = ops.grouped_moe.reference(*few, self.experts[0])
        return _difference(ops.grouped_moe(x, ids, shared, self.experts[0])[:ROWS_CHECKED], expected)

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
    while sum(map(_num_bytes, made)) < ALONE_BYTES and len(made) < MOST_TURNS:
        made.append(make())
    return made


def _num_bytes(made: Any) -> int:
    parts = [made] if isinstance(made, PackedGroups) else [part for part in made if isinstance(part, PackedGroups)]
    return sum(part.num_bytes for part in parts)
