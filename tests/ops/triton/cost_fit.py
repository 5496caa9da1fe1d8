"""Fits the numbers of ``linear_cost`` to recorded measurements, and says how good its choices are.

``python -m tests.ops.triton.cost_fit RECORD...`` fits them to the measurements of records, and prints for matrices that
are left out of the fit how much slower the chosen configuration is than the fastest that was measured.
"""

from __future__ import annotations

import json
import math
import random
import re
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any, NamedTuple

from octavo_bench.device.kernel_cases import head_case, layer_cases
from octavo_kernels.triton.linear.skinny_gemm import SkinnyConfig
from octavo_kernels.triton.tuning.linear_cost import CostConstants, Gpu, Product, microseconds

H200 = Gpu(multiprocessors=132, bandwidth=4_917_000, shared_bytes=227 * 1024, has_copy_engine=True)
START = CostConstants(2.0, 0.9, 2 * 4_917_000 / 132, 0.8, 0.3, 0.5, 0.3)
"""Where the search begins: plain guesses, such as twice the equal share of the bandwidth for a multiprocessor."""
NARROWER = 0.99
"""Of the width of the search after each trial."""


class MeasuredConfig(NamedTuple):
    """A configuration of a product, and its microseconds."""

    product: Product
    config: SkinnyConfig
    taken: float


def read(paths: Iterable[Path]) -> list[MeasuredConfig]:
    """The measurements of ``skinny`` kernels without a fused norm in records of kernels that were tuned.

    A product that several records have is that of the last one.
    """
    found: dict[Product, list[MeasuredConfig]] = {}
    for path in paths:
        in_record: dict[Product, list[MeasuredConfig]] = {}
        for note in _notes(json.loads(path.read_text())):
            if (measured := _parse(note)) is not None:
                in_record.setdefault(measured.product, []).append(measured)
        found |= in_record
    return [measured for group in found.values() for measured in group]


def _notes(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    parts = [part for part in record.values() if isinstance(part, dict) and "tuning" in part]
    for part in [record, *parts]:
        yield from (note for note in part.get("tuning", ()) if "config" in note)


def _parse(note: Mapping[str, Any]) -> MeasuredConfig | None:
    if not note["config"].startswith("SkinnyConfig") or not note.get("error", 0.0) < 1e-2:
        return None
    values = re.findall(r"(\w+)=('?\w+'?)", note["config"])
    fields = {name: json.loads(value.lower().replace("'", '"')) for name, value in values}
    return (
        None if fields["fuses_norm"] else MeasuredConfig(_product(note), SkinnyConfig(**fields), note["microseconds"])
    )


def _product(note: Mapping[str, Any]) -> Product:
    if "map" in note:  # the form of older records
        cases = {case.name: case for case in (*layer_cases(note["model"]), head_case(note["model"]))}
        return cases[note["map"]].use.product(note["rows"])
    N, K, gated, rows = re.fullmatch(r"(\d+)x(\d+)( gated)?, (\d+)", note["shape"]).groups()  # type: ignore[union-attr]
    return Product(int(N), int(K), int(rows), gated is not None)


def fit(measured: Sequence[MeasuredConfig], trials: int, start: CostConstants = START) -> CostConstants:
    """The numbers of the least relative error, by random search; fast configurations count most."""
    fastest = _fastest(measured)
    weights = [(fastest[item.product] / item.taken) ** 4 for item in measured]

    def loss(values: Sequence[float]) -> float:
        errors = (abs(math.log(_predicted(item, CostConstants(*values)) / item.taken)) for item in measured)
        return sum(weight * error for weight, error in zip(weights, errors, strict=True)) / sum(weights)

    generator, width = random.Random(0), 0.5
    best = astuple(start)
    least = loss(best)
    for _ in range(trials):
        tried = [v * math.exp(generator.gauss(0, width)) if generator.random() < 0.3 else v for v in best]
        if (found := loss(tried)) < least:
            best, least = tuple(tried), found
        width *= NARROWER
    return CostConstants(*best)


def regrets(measured: Iterable[MeasuredConfig], fitted: CostConstants) -> dict[Product, float]:
    """By how much, as a share, each product's configuration of the least predicted cost is slower than the fastest."""
    chosen: dict[Product, MeasuredConfig] = {}
    measured = list(measured)
    for item in measured:
        before = chosen.get(item.product)
        if before is None or _predicted(item, fitted) < _predicted(before, fitted):
            chosen[item.product] = item
    fastest = _fastest(measured)
    return {product: item.taken / fastest[product] - 1 for product, item in chosen.items()}


def left_out(measured: Sequence[MeasuredConfig], trials: int, parts: int = 10) -> dict[Product, float]:
    """The regrets of each matrix with numbers that are fitted to others: matrices are left out in ``parts`` parts."""
    matrices = sorted({(item.product.N, item.product.K) for item in measured})
    random.Random(1).shuffle(matrices)
    found: dict[Product, float] = {}
    for part in range(parts):
        out = set(matrices[part::parts])
        others = [item for item in measured if (item.product.N, item.product.K) not in out]
        own = (item for item in measured if (item.product.N, item.product.K) in out)
        found |= regrets(own, fit(others, trials))
    return found


def _predicted(item: MeasuredConfig, fitted: CostConstants) -> float:
    return microseconds(item.product, item.config, H200, fitted)


def _fastest(measured: Iterable[MeasuredConfig]) -> dict[Product, float]:
    found: dict[Product, float] = {}
    for item in measured:
        found[item.product] = min(item.taken, found.get(item.product, math.inf))
    return found


def main(paths: Sequence[Path], trials: int = 600) -> None:
    """Print the fit and the regrets of matrices left out of it."""
    measured = read(paths)
    print(fit(measured, trials))
    found = left_out(measured, trials)
    for product, regret in sorted(found.items(), key=lambda item: item[1]):
        print(f"{regret:7.3f}  {product}")
    print(f"{len(measured)} measurements; mean {statistics.mean(found.values()):.4f}, max {max(found.values()):.3f}")


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
