"""How good the kernels for CUDA devices are: the time of each family's, and its share of the least possible.

Times are those of a CUDA graph whose calls read other weights, blocks or rows each, with programmatic dependent
launch. The floor is the larger of the bytes at the rate at which the GPU reads and the operations at the rate at which
it multiplies numbers of that type, both measured first. All kernels are compiled before, many at a time.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from octavo.errors import ConfigError
from octavo.system.kernel_compiler import start_compilers
from octavo_bench.device import ceilings
from octavo_bench.device.attention_cases import CACHES, AttentionCase, LatentCase
from octavo_bench.device.kernel_cases import head_case, layer_cases, sizes_of
from octavo_bench.device.measured_case import Case
from octavo_bench.device.product_cases import FORMS, ExpertsCase, MapCase, NumberForm, OutputCase
from octavo_bench.device.recurrences import LAYERS
from octavo_bench.device.row_cases import RecurrentCase, RouteCase, SampleCase, gate_case, norm_case
from octavo_bench.records.report import Say
from octavo_fleet.sim.costs.roofline import Shape, shape_of
from octavo_fleet.sim.shapes import SHAPES
from octavo_kernels.triton.graph_timing import microseconds
from octavo_kernels.triton.launch import compiling, pdl

CONTEXTS = (1024, 8192)
Make = Callable[[], Case]


def measure(
    models: Sequence[str], formats: Sequence[str], rows: Sequence[int], say: Say, deadline: float = float("inf")
) -> dict[str, Any]:
    """Figures of the kernels for a layer of each model, in each format of weights, for each number of rows.

    What there is no time for in ``deadline`` seconds is left out, and formats whose groups do not divide a model's
    rows are, and named. Raises ``ConfigError`` for models and formats that are not known.
    """
    started = time.monotonic()
    planned, left_out = _plan(models, formats)
    start_compilers()
    cases = [(model, make()) for model, make in planned]
    limits = ceilings.measure()
    say(f"weights and limits are there after {time.monotonic() - started:.0f} s")
    _compile([case for _, case in cases], rows)
    say(f"compiled after {time.monotonic() - started:.0f} s")
    result: dict[str, Any] = {**limits, "left_out": left_out, "rows": []}
    for model, case in cases:
        for T in _rows_of(case, rows):
            if time.monotonic() - started > deadline:
                return result
            result["rows"].append({"model": model, **_figures(case, T, limits)})
    say(f"measured after {time.monotonic() - started:.0f} s")
    return result


def _plan(models: Sequence[str], formats: Sequence[str]) -> tuple[list[tuple[str, Make]], list[str]]:
    """What makes the cases, with their models, and why others are left out. Raises ``ConfigError``, see ``measure``."""
    for name in formats:
        if name not in FORMS:
            raise ConfigError(f"formats: {name!r} is not one of {', '.join(FORMS)}")
    planned: list[tuple[str, Make]] = []
    left_out: list[str] = []
    for model in models:
        if model not in SHAPES:
            raise ConfigError(f"models: {model!r} is not one of {', '.join(SHAPES)}")
        shape, makes = shape_of(SHAPES[model]), list[Make]()
        if shape.recurrent is None and shape.latent is None:
            for name in formats:
                reason = _misfit(model, shape, name)
                makes += [] if reason else _products(model, shape, name)
                left_out += [reason] if reason else []
        planned += [(model, make) for make in [*makes, *_others(model, shape)]]
    return planned, left_out


def _misfit(model: str, shape: Shape, format: str) -> str:
    """Why no weight of the model has the format, if so."""
    form = FORMS[format]
    if not isinstance(form, NumberForm):
        return ""
    widths = [shape.hidden, shape.mixture.ffn] if shape.mixture else [each.K for each in layer_cases(model)]
    misfits = [
        f"{format} has groups of {form.group} inputs; {model} has rows of {K}" for K in widths if not form.fits(K)
    ]
    return misfits[0] if misfits else ""


def _products(model: str, shape: Shape, format: str) -> list[Make]:
    """Of a layer with weights of a format; experts have no kernels for rows that are rounded."""
    is_packed = isinstance(FORMS[format], NumberForm)
    if shape.mixture:
        clamp = SHAPES[model].get("swiglu_limit")
        make = functools.partial(ExpertsCase, shape.hidden, shape.mixture, clamp, format)
        return [make] if is_packed or format == "bf16" else []
    maps = layer_cases(model)
    makes: list[Make] = [functools.partial(MapCase, "linear", each, format) for each in maps]
    return [*makes, functools.partial(OutputCase, maps, format)] if is_packed else makes


def _others(model: str, shape: Shape) -> list[Make]:
    """What has no weights of several formats: a model with latents or recurrent states is measured for these alone."""
    if shape.recurrent is not None:
        if model not in LAYERS:
            raise ConfigError(f"models: of those with recurrent state, {', '.join(LAYERS)} are known, not {model}")
        rule, flops = "Mamba-2" if "mamba_num_heads" in SHAPES[model] else "gated delta rule", shape.recurrent.flops
        return [functools.partial(RecurrentCase, rule, LAYERS[model], flops, each) for each in (False, True)]
    if shape.latent is not None:
        return [functools.partial(LatentCase, shape.heads, shape.latent, context) for context in CONTEXTS]
    if shape.mixture is not None:
        return [functools.partial(RouteCase, shape.hidden, shape.mixture)]
    sizes = sizes_of(model)
    return [
        functools.partial(MapCase, "head", head_case(model), "bf16"),
        *(functools.partial(AttentionCase, sizes, context, cache, False) for cache in CACHES for context in CONTEXTS),
        *(functools.partial(AttentionCase, sizes, context, "bf16", True) for context in CONTEXTS),
        functools.partial(SampleCase, sizes.vocab, 0.0, 1.0),
        functools.partial(SampleCase, sizes.vocab, 1.0, 0.95),
        functools.partial(norm_case, sizes.hidden),
        functools.partial(gate_case, sizes.ffn),
    ]


def _rows_of(case: Case, rows: Sequence[int]) -> list[int]:
    return [T for T in rows if case.fewest_rows <= T <= case.most_rows]


def _compile(cases: Sequence[Case], rows: Sequence[int]) -> None:
    """Compile all kernels. One that fails is compiled again when it is measured, and fails there."""
    with contextlib.suppress(Exception), pdl(), compiling():
        for case in cases:
            for T in _rows_of(case, rows):
                with contextlib.suppress(Exception):
                    case.calls(T)[0]()


def _figures(case: Case, T: int, limits: Mapping[str, Any]) -> dict[str, Any]:
    """A record; of a kernel that does not run here, why, so that the others are measured nevertheless."""
    known = {"family": case.family, "kernel": case.name, "format": case.format, "T": T}
    try:
        taken, (num_bytes, flops) = microseconds(case.calls(T), with_pdl=True), case.work(T)
        with pdl():
            error = case.error(T)
    except Exception as failure:
        return {**known, "failed": f"{type(failure).__name__}: {failure}"[:200]}
    floor = max(num_bytes / limits["read_tb_s"], flops / limits[case.rate]) / 1e6
    figures = {"microseconds": round(taken, 2), "floor_microseconds": round(floor, 2), "bytes": num_bytes}
    figures |= {"flops": flops, "of_floor": round(floor / taken, 3)}
    return {**known, **figures, **({} if error is None else {"error": float(f"{error:.2g}")})}
