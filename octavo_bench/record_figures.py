"""The figures of any record of ``octavo bench``, in one form, for plots and for comparisons of two records.

A row of a record begins with what was measured (its *case*); then come figures, whose names end with their units:
numbers, spreads (``{"median": ...}``), or one of these for each engine (``{"octavo": ..., "peer": ...}``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

HIGHER = re.compile(
    r"tok_s|tok/s|throughput|tokens_per_second|requests_s|goodput|times_better|ratio|speedup|tb_s|[gt]flop_s|mfu"
    r"|context_tokens"
)
LOWER = re.compile(r"(_|\b)(ms|us|s|seconds|microseconds|mj|mib|tpot|ttft|itl)(_|\b)")
ENGINES = ("octavo", "peer", "vllm", "published")
OWN = ("", "octavo")
"""As which engine Octavo appears."""
NOT_ROWS = ("runs", "visits", "kernels", "gpus")
"""Lists of a record that say more about the figures of others."""


class Figure(NamedTuple):
    """One number with where it stands in its record."""

    case: str
    """What was measured, such as "4, 512": the same in records of equal commands."""
    name: str
    engine: str
    """Of ``ENGINES``, or "" where there is one engine only."""
    value: float
    low: float
    high: float
    """Minimum and maximum of the rounds; both are the value where there was one."""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.case, self.name, self.engine

    @property
    def is_ratio(self) -> bool:
        """Whether it compares two figures of the same record, such as those of two engines; above 1 is better."""
        return self.name.startswith(("ratio", "times_better", "speedup"))

    @property
    def is_higher_better(self) -> bool:
        return HIGHER.search(self.name) is not None

    def __str__(self) -> str:
        return ", ".join(part for part in (self.case, self.engine, self.name) if part)


def figures(record: Mapping[str, Any]) -> list[Figure]:
    """All figures, in the record's order. Those of the same case and name are numbered."""
    found: list[Figure] = []
    seen: Counter[tuple[str, str, str]] = Counter()
    for section, row in _rows(record["result"]):
        case, own = _row(row)
        case = ", ".join(part for part in (section, case) if part)
        for figure in own:
            key = (case, figure.name, figure.engine)
            seen[key] += 1
            found.append(figure._replace(case=f"{case} #{seen[key]}" if seen[key] > 1 else case))
    return found


def _rows(result: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The rows with the name of their section; a record without rows is one itself."""
    lists = {
        name: value
        for name, value in result.items()
        if isinstance(value, list) and value and isinstance(value[0], Mapping) and name not in NOT_ROWS
    }
    if not lists:
        yield "", result
    for name, rows in lists.items():
        for row in rows:
            yield "" if name == "rows" else name, row


def _row(row: Mapping[str, Any]) -> tuple[str, list[Figure]]:
    """The case and the figures, in the two forms in which one field names the figure, and in the plain one."""
    if "suite" in row:
        pairs = [("octavo" if "published" in row else "", row["value"]), ("published", row.get("published"))]
        ratio = _of_engines(f"times_better {row['suite']}", [("", row.get("times_better"))])
        return row["case"], [*_of_engines(row["suite"], pairs), *ratio]
    if "figure" in row and "octavo" in row:
        pairs = [(engine, row.get(engine)) for engine in ENGINES]
        ratio = _of_engines(f"times_better {row['figure']}", [("", row.get("times_better"))])
        return row["workload"], [*_of_engines(row["figure"], pairs), *ratio]
    case: list[str] = []
    found: list[Figure] = []
    for name, value in row.items():
        has_unit = HIGHER.search(name) is not None or LOWER.search(name) is not None
        if isinstance(value, Mapping) and "median" not in value and has_unit:
            found += _of_engines(name, [(engine, value.get(engine)) for engine in ENGINES])
            found += _of_engines(f"ratio {name}", [("", value.get("ratio"))])
        elif has_unit:
            found += _of_engines(name, [("", value)])
        elif isinstance(value, str | int | float) and not isinstance(value, bool) and not found:
            case.append(f"{name} {value}" if isinstance(value, int | float) else value)
    return ", ".join(case), found


def _of_engines(name: str, values: list[tuple[str, Any]]) -> Iterator[Figure]:
    for engine, value in values:
        if isinstance(value, Mapping) and "median" in value:
            middle = float(value["median"])
            runs = value.get("all") or [middle]
            yield Figure("", name, engine, middle, value.get("min", min(runs)), value.get("max", max(runs)))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield Figure("", name, engine, float(value), float(value), float(value))
