"""The figures of any record of ``octavo bench``, in one form, for plots and for comparisons of two records.

A row of a record says what was measured (its *case*) and has figures: numbers, spreads (``{"median": ...}``), one of
these for each engine (``{"octavo": ..., "peer": ...}``), or one for each part (``{"matmul": ..., "copy": ...}``).
``figure_table`` knows which name is which.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from octavo_bench.records.figure_table import COUNTS, STATISTIC, case_names, is_figure, meaning, unknown

ENGINES = ("octavo", "peer", "vllm", "published", "measured", "predicted", "replayed")
OWN = ("", "octavo")
"""As which engine Octavo appears."""
BATCHES = ("batch tok/s", "memory ratio")
NOT_ROWS = (
    *("runs", "visits", "kernels", "gpus", "curve", "held", "queue", "findings", "by_second", "targets", "highest"),
)
"""Lists of a record that say more about the figures of others."""
AXES = {"latency s": "prompt tokens", "throughput tok/s": "output tokens", **dict.fromkeys(BATCHES, "sequences")}
"""What varies in a suite, where cases are numbers."""
LOAD = re.compile(r"concurrency (\d+)|([\d.]+) req/s")
NOTES = frozenset(["failed", "config", "quiet_finished", "verdict", "file", "old", "new", "equal_because"])
"""Words of a row that come of the measurement."""


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
    given: tuple[tuple[str, float | str], ...] = ()
    """The case by its names: numbers are quantities that a plot can have as its axis."""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.case, self.name, self.engine

    @property
    def is_ratio(self) -> bool:
        """Whether it compares two figures of the same record, such as those of two engines; above 1 is better."""
        return self.name in ("ratio", "speedup") or self.name.startswith(("ratio ", "times_better"))

    @property
    def is_higher_better(self) -> bool:
        return meaning(self.name).better == "more"

    def __str__(self) -> str:
        return ", ".join(part for part in (self.case, self.engine, self.name) if part)


def figures(record: Mapping[str, Any]) -> list[Figure]:
    """All figures, in the record's order. Those of the same case and name are numbered.

    Raises ``ConfigError`` for a number whose name is not in ``figure_table``.
    """
    found: list[Figure] = []
    seen: Counter[tuple[str, str, str]] = Counter()
    for section, row in rows_of(record["result"]):
        case, own = _row(row)
        case = ", ".join(part for part in (section, case) if part)
        for figure in own:
            told = ", ".join(part for part in (case, figure.case) if part)
            key = (told, figure.name, figure.engine)
            seen[key] += 1
            found.append(figure._replace(case=f"{told} #{seen[key]}" if seen[key] > 1 else told))
    return found


def rows_of(result: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The rows with the name of their section, then what the record says of all of them."""
    if isinstance(result.get("measured"), Mapping):  # of a head that was trained first
        result = {**result, **result["measured"]}
    lists = {
        name: value
        for name, value in result.items()
        if isinstance(value, list) and value and isinstance(value[0], Mapping) and name not in NOT_ROWS
    }
    for name, rows in lists.items():
        for row in rows:
            yield "" if name == "rows" else name, row
    yield "", {name: value for name, value in result.items() if not lists or is_figure(name)}


def _row(row: Mapping[str, Any]) -> tuple[str, list[Figure]]:
    """The case and the figures, in the two forms in which one field names the figure, and in the plain one."""
    if "suite" in row:
        pairs = [("octavo" if "published" in row else "", row["value"]), ("published", row.get("published"))]
        ratio = _of_engines(f"times_better {row['suite']}", [("", row.get("times_better"))])
        more = [
            figure
            for name, value in row.items()
            if name not in ("value", "published", "times_better")
            for figure in _plain(f"{row['suite'].rpartition(' ')[0]} {name}" if name == "p99_ms" else name, value)
        ]
        given = _given_of_suite(row["suite"], row["case"])
        return row["case"], [one._replace(given=given) for one in (*_of_engines(row["suite"], pairs), *ratio, *more)]
    if "figure" in row:
        pairs = [(engine, row.get(engine)) for engine in ENGINES]
        ratio = _of_engines(f"times_better {row['figure']}", [("", row.get("times_better"))])
        return row["workload"], [*_of_engines(row["figure"], pairs), *ratio]
    given = tuple(_quantity(name, value) for name, value in row.items() if _is_case(name, value))
    found = [
        figure._replace(given=(*given, *figure.given)) for name, value in row.items() for figure in _plain(name, value)
    ]
    cases = [(name, value) for name, value in row.items() if _is_case(name, value)]
    return ", ".join(f"{name} {value}" if not isinstance(value, str) else value for name, value in cases), found


def _given_of_suite(suite: str, case: str) -> tuple[tuple[str, float | str], ...]:
    """``"64"`` as a quantity, ``"short, 4"`` as a kind and a quantity, and a word as a kind."""
    kind, _, count = case.rpartition(", ")
    quantity: tuple[str, float | str] = (
        (AXES.get(suite, "case"), float(count)) if count.isdecimal() else ("kind", count)
    )
    return (("prompt", kind), ("clients", quantity[1])) if kind else (quantity,)


def _quantity(name: str, value: Any) -> tuple[str, float | str]:
    """``"concurrency 4"`` and ``"2.5 req/s"`` as the quantities that they are."""
    if name == "load" and (found := LOAD.fullmatch(value)):
        return ("concurrency", float(found[1])) if found[1] else ("request rate", float(found[2]))
    return name, value


def _is_case(name: str, value: object) -> bool:
    if isinstance(value, str):
        return name not in NOTES
    return isinstance(value, int | float) and not isinstance(value, bool) and name in case_names()


def _plain(name: str, value: Any) -> Iterator[Figure]:
    """The figures of one field of a row. Raises ``ConfigError`` for a number of unknown meaning."""
    if isinstance(value, Mapping) and "median" not in value:
        if not is_figure(name):
            if not value.keys().isdisjoint(ENGINES):
                raise unknown(name)
            return
        yield from _of_engines(name, [(engine, beside_measured(value, engine)) for engine in ENGINES])
        yield from _of_engines(f"ratio {name}", [("", value.get("ratio"))])
        for part, own in value.items():
            if STATISTIC.fullmatch(f"_{part}"):
                yield from _of_engines(f"{name}_{part}", [("", own)])
            elif part not in (*ENGINES, "ratio"):
                yield from (
                    figure._replace(case=part, given=(("part", part),)) for figure in _of_engines(name, [("", own)])
                )
    elif is_figure(name):
        yield from _of_engines(name, [("", value)])
    elif isinstance(value, int | float | Mapping) and type(value) is not bool and name not in COUNTS | case_names():
        raise unknown(name)


def beside_measured(value: Mapping[str, Any], engine: str) -> Any:
    """A prediction is kept as its distance from what was measured, as a share of it."""
    own, measured = value.get(engine), value.get("measured")
    if engine == "measured" or own is None or measured is None:
        return own
    return measured * (1 + own)


def _of_engines(name: str, values: list[tuple[str, Any]]) -> Iterator[Figure]:
    for engine, value in values:
        if isinstance(value, Mapping) and "median" in value:
            middle = float(value["median"])
            runs = value.get("all") or [middle]
            yield Figure("", name, engine, middle, value.get("min", min(runs)), value.get("max", max(runs)))
        elif isinstance(value, int | float):
            yield Figure("", name, engine, float(value), float(value), float(value))
