"""A threshold for figures: how good they must be compared with those of an earlier record, or of another engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from octavo.errors import ConfigError
from octavo_bench.records.figure_table import case_names, meaning
from octavo_bench.records.record_figures import OWN, Figure, figures

BY_DEFAULT = ("failed", "failed_requests", "same_tokens", "right")
"""Counted besides throughputs: a server is not faster for answering fewer requests, or wrongly."""
MAY_DIFFER = {"seed", "device", "model"}
"""Of what was measured: two such records can be compared, and a warning says so."""


class Compared(NamedTuple):
    """One figure: ``share`` is 1 if it is as good as the baseline, above if it is better."""

    name: str
    value: float | None
    """``None``: the record has no such figure."""
    baseline: float
    share: float

    def is_good(self, least: float) -> bool:
        return self.value is not None and self.share >= least

    def line(self, least: float) -> str:
        verdict = "passed" if self.is_good(least) else "FAILED"
        if self.value is None:
            return f"{self.name}: missing (baseline {self.baseline:g}): {verdict}"
        return f"{self.name}: {self.value:g} (baseline {self.baseline:g}): {self.share:.3f}: {verdict}"


def read_record(path: Path) -> dict[str, Any]:
    """A record of ``octavo bench``. Raises ``ConfigError``."""
    try:
        record = json.loads(path.read_text())
        if not isinstance(record["result"], Mapping):
            raise TypeError("its result is not an object")
        return {"benchmark": "", **record}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not a record of `octavo bench`: {error}") from None


def compare(record: Mapping[str, Any], baseline: Mapping[str, Any] | None, names: Sequence[str] = ()) -> list[Compared]:
    """Each figure of the baseline that counts, with that of the record. Raises ``ConfigError`` if there is none.

    ``names``: words of the names of the figures that count; by default throughputs and ``BY_DEFAULT``. Without a
    baseline, a figure that is a ratio to another engine is compared with 1.
    """
    if baseline is None:
        own_ratios = [figure for figure in figures(record) if figure.is_ratio]
        found = [
            Compared(str(figure), figure.value, 1.0, figure.value)
            for figure in _counted(own_ratios, names, lambda figure: _is_throughput(figure) or " " not in figure.name)
        ]
        if not found:
            raise ConfigError("fail_under: needs --baseline, for this record has no ratio to another engine")
        return found
    _check_same_work(record, baseline)
    own = {figure.key: figure for figure in figures(record)}
    theirs = [figure for figure in figures(baseline) if figure.engine in OWN and not figure.is_ratio]
    found = [
        _compared(own.get(figure.key), figure)
        for figure in _counted(theirs, names, lambda figure: _is_throughput(figure) or figure.name in BY_DEFAULT)
    ]
    if not found:
        raise ConfigError(f"gate: no throughput in the baseline; it has {_names(theirs)}")
    return found


def _names(found: Sequence[Figure]) -> str:
    return ", ".join(dict.fromkeys(figure.name for figure in found))


def _check_same_work(record: Mapping[str, Any], baseline: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` if one has less to do than the other."""
    if baseline["benchmark"] != record["benchmark"]:
        raise ConfigError(f"baseline: a record of {baseline['benchmark']!r}, and not of {record['benchmark']!r}")
    for name in case_names() - MAY_DIFFER:
        ours, theirs = record["result"].get(name), baseline["result"].get(name)
        if ours != theirs and all(isinstance(value, int | float | str) for value in (ours, theirs)):
            raise ConfigError(f"baseline: was measured with {name} {theirs}, and this with {ours}")


def differences(record: Mapping[str, Any], baseline: Mapping[str, Any]) -> Iterator[str]:
    """What makes a comparison of the two doubtful."""
    ours, theirs = record.get("machine", {}), baseline.get("machine", {})
    pairs = [(name, ours.get(name), theirs.get(name)) for name in ("processor", "cores", "gpus")]
    pairs += [(name, record["result"].get(name), baseline["result"].get(name)) for name in sorted(MAY_DIFFER)]
    for name, own, other in pairs:
        if own != other:
            yield f"the baseline was measured with {name} {other!r}, this with {own!r}"


def _counted(found: Sequence[Figure], names: Sequence[str], by_default: Callable[[Figure], bool]) -> Iterator[Figure]:
    """Those that count. Raises ``ConfigError`` for a name that no figure with a better direction has."""
    found = [figure for figure in found if meaning(figure.name).better != "neither"]
    words = {figure.name: _words(figure.name) for figure in found}
    for name in names:
        if not any(_words(name) in other for other in words.values()):
            raise ConfigError(
                f"gate: {name!r} means no figure of the baseline that can be better; these can: {_names(found)}"
            )
    for figure in found:
        if any(_words(name) in words[figure.name] for name in names) if names else by_default(figure):
            yield figure


def _words(name: str) -> str:
    """So that "ratio" is part of "memory ratio", and not of "duration"."""
    return f" {name.replace('_', ' ').replace('/', ' ')} "


def _is_throughput(figure: Figure) -> bool:
    name = figure.name.removeprefix("ratio ").removeprefix("times_better ")
    return meaning(name).unit in ("tokens/s", "requests/s") and meaning(name).better == "more"


def _compared(own: Figure | None, baseline: Figure) -> Compared:
    if own is None:
        return Compared(str(baseline), None, baseline.value, 0.0)
    better, worse = (own.value, baseline.value) if baseline.is_higher_better else (baseline.value, own.value)
    if better > 0 and worse > 0:
        return Compared(str(baseline), own.value, baseline.value, better / worse)
    share = 1.0 if better == worse else float("inf") if better > worse else 0.0  # there is no quotient
    return Compared(str(baseline), own.value, baseline.value, share)
