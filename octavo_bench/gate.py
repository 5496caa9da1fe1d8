"""A threshold for figures: how good they must be compared with those of an earlier record, or of another engine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from octavo.errors import ConfigError
from octavo_bench.record_figures import OWN, Figure, figures

THROUGHPUT = re.compile(r"tok_s|tok/s|throughput|tokens_per_second|requests_s")


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

    ``names``: parts of the names of the figures that count; by default those of throughput. Without a baseline, a
    figure that is a ratio to another engine is compared with 1.
    """
    if baseline is None:
        found = [
            Compared(str(figure), figure.value, 1.0, figure.value)
            for figure in figures(record)
            if figure.is_ratio and (_counts(figure, names) or (not names and " " not in figure.name))
        ]
        if not found:
            raise ConfigError("fail_under: needs --baseline, for this record has no ratio to another engine")
        return found
    if baseline["benchmark"] != record["benchmark"]:
        raise ConfigError(f"baseline: a record of {baseline['benchmark']!r}, and not of {record['benchmark']!r}")
    own = {figure.key: figure for figure in figures(record)}
    found = [
        _compared(own.get(figure.key), figure)
        for figure in figures(baseline)
        if figure.engine in OWN and not figure.is_ratio and _counts(figure, names)
    ]
    if not found:
        known = dict.fromkeys(figure.name for figure in figures(baseline))
        raise ConfigError(f"gate: no figure of the baseline is meant; it has {', '.join(known)}")
    return found


def differences(record: Mapping[str, Any], baseline: Mapping[str, Any]) -> Iterator[str]:
    """What makes a comparison of the two doubtful."""
    ours, theirs = record.get("machine", {}), baseline.get("machine", {})
    for name in ("processor", "cores", "gpus"):
        if ours.get(name) != theirs.get(name):
            yield f"the baseline was measured with {name} {theirs.get(name)!r}, this with {ours.get(name)!r}"


def _counts(figure: Figure, names: Sequence[str]) -> bool:
    if names:
        return any(name in figure.name for name in names)
    return THROUGHPUT.search(figure.name) is not None


def _compared(own: Figure | None, baseline: Figure) -> Compared:
    if own is None:
        return Compared(str(baseline), None, baseline.value, 0.0)
    better, worse = (own.value, baseline.value) if baseline.is_higher_better else (baseline.value, own.value)
    share = better / worse if worse else 1.0 if not better else float("inf")
    return Compared(str(baseline), own.value, baseline.value, share)
