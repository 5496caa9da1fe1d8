"""Projects the decode step of a model over several GPUs, from kernels that were timed on one.

Run ``python -m octavo_bench.projection MODEL PROFILE...`` with at least two records of ``octavo bench profile``, of
models of different sizes. The time of one matrix product, and of one layer's attention, is a line through what the
profiles have at the same batch size: a time that does not depend on the bytes, and a rate at which bytes are read. Each
of W ranks reads a W-th of the bytes. Kernels that every rank runs on all rows are taken as they are.

What this cannot measure is stated: ``--exchange-us`` and ``--link-gb-s`` of an all-reduce. The latency of a message
from the first rank to the others is measured here; it is hidden while steps are sent ahead.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from octavo_bench.report import keep
from octavo_fleet.sim.roofline import Shape, shape_of
from octavo_fleet.sim.shapes import SHAPES
from octavo_kernels.cpu.message_ring import Ring, RingReader, RingWriter, ring_bytes

VALUE_BYTES = 2
SHARED = ("copy", "norm", "other", "sampling")
"""Classes of kernels that every rank runs on all rows."""
MESSAGE = bytes(4096)
"""As long as the message of a decode step of some hundred sequences."""


@dataclass(frozen=True)
class CostLine:
    """Microseconds of a kernel by the bytes it reads."""

    start: float
    per_byte: float

    @classmethod
    def through(cls, points: Iterable[tuple[float, float]]) -> CostLine:
        """The least-squares line through (bytes, microseconds)."""
        per_byte, start = statistics.linear_regression(*zip(*points, strict=True))
        return cls(start, per_byte)

    def microseconds(self, num_bytes: float) -> float:
        """The time of one kernel."""
        return self.start + self.per_byte * num_bytes


@dataclass(frozen=True)
class MeasuredStep:
    """One profiled decode step, and the bytes that its kernels read."""

    step_us: float
    us_by_class: Mapping[str, float]
    matmuls: float
    """Number of matrix products."""
    layers: int
    matmul_bytes: float
    attention_bytes: float

    @classmethod
    def of(cls, shape: Shape, row: Mapping[str, Any]) -> MeasuredStep:
        """From a row of ``octavo bench profile``."""
        return cls(
            row["step_ms"]["median"] * 1e3,
            row["us_by_class"],
            4 * shape.layers + 1,
            shape.layers,
            shape.matrix_weights * VALUE_BYTES,
            row["batch"] * row["context"] * shape.kv_values_per_token * VALUE_BYTES,
        )

    @property
    def matmul(self) -> tuple[float, float]:
        """Mean bytes and microseconds of a matrix product, with the activation that may follow it."""
        taken = self.us_by_class["matmul"] + self.us_by_class.get("activation", 0.0)
        return self.matmul_bytes / self.matmuls, taken / self.matmuls

    @property
    def attention(self) -> tuple[float, float]:
        """Mean bytes and microseconds of a layer's attention."""
        return self.attention_bytes / self.layers, self.us_by_class["attention"] / self.layers


def project(
    measured: MeasuredStep,
    others: list[MeasuredStep],
    hidden: int,
    batch: int,
    ranks: int,
    exchange_us: float,
    link: float,
) -> dict[str, float]:
    """Microseconds of a step by part; ``link`` in bytes a second, one way."""
    matmul = CostLine.through(one.matmul for one in (measured, *others))
    attention = CostLine.through(one.attention for one in (measured, *others))
    shared = sum(measured.us_by_class.get(name, 0.0) for name in SHARED)
    pushed = (ranks - 1) * batch * hidden * VALUE_BYTES
    exchanges = 2 * measured.layers + 2  # two a layer, the embedding's, and that of the sampled candidates
    parts = {
        "matmul": measured.matmuls * matmul.microseconds(measured.matmul[0] / ranks),
        "attention": measured.layers * attention.microseconds(measured.attention[0] / ranks),
        "shared": shared,
        "exchange": exchanges * (exchange_us + pushed / link * 1e6) if ranks > 1 else 0.0,
    }
    return {name: round(us, 1) for name, us in {**parts, "step": sum(parts.values())}.items()}


def ring_microseconds(rounds: int = 2000) -> float:
    """Median time of a message through the ring to another process and of its answer, halved."""
    there, back = (Ring(np.frombuffer(mmap.mmap(-1, ring_bytes(1)), np.uint8), 1) for _ in range(2))
    other = multiprocessing.get_context("fork").Process(target=_echo, args=(there, back, rounds), daemon=True)
    other.start()
    writer, reader = RingWriter(there, lambda: None), RingReader(back, 0, lambda: None)
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        writer.write(MESSAGE)
        reader.next()
        times.append(time.perf_counter() - start)
    other.join()
    return statistics.median(times) / 2 * 1e6


def _echo(there: Ring, back: Ring, rounds: int) -> None:
    reader, writer = RingReader(there, 0, lambda: None), RingWriter(back, lambda: None)
    for _ in range(rounds):
        writer.write(reader.next())


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a shape by name, which one of the profiles is of")
    parser.add_argument("profiles", type=Path, nargs="+", help="records of `octavo bench profile`")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--exchange-us", type=float, default=4.5, help="latency of an all-reduce of few rows")
    parser.add_argument("--link-gb-s", type=float, default=360, help="GB/s from one GPU to the others, one way")
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args()
    rows = _rows(args)
    for row in rows:
        shown = ", ".join(f"{name} {us:,.0f}" for name, us in row["us"].items())
        speedup = row["measured_us"] / row["us"]["step"]
        print(f"batch {row['batch']:>3}, {row['ranks']} ranks: {shown} us; {speedup:.2f} times the speed of one GPU")
    ring = ring_microseconds()
    print(f"message from the first rank to another: {ring:.1f} us")
    assumed = {"exchange_us": args.exchange_us, "link_gb_s": args.link_gb_s}
    keep("projection", {"model": args.model, "assumed": assumed, "ring_us": round(ring, 1), "rows": rows}, args.output)


def _rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Each decode step of the model's profile, projected for each number of ranks."""
    results = [json.loads(path.read_text())["result"] for path in args.profiles]
    shapes = [shape_of(SHAPES[result["model"]]) for result in results]
    own = [result["model"] for result in results].index(args.model)
    found = []
    for row in results[own]["rows"]:
        if row["kind"] != "decode":
            continue
        same = [
            MeasuredStep.of(shape, other)
            for shape, result in zip(shapes, results, strict=True)
            for other in result["rows"]
            if all(other[name] == row[name] for name in ("kind", "batch", "context"))
        ]
        measured = same.pop(own)
        for ranks in args.ranks:
            parts = project(
                measured, same, shapes[own].hidden, row["batch"], ranks, args.exchange_us, args.link_gb_s * 1e9
            )
            found.append({"batch": row["batch"], "ranks": ranks, "measured_us": measured.step_us, "us": parts})
    return found


if __name__ == "__main__":
    main()
