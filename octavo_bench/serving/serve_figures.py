"""Throughput, latency percentiles and goodput of the answers to a load."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from octavo.errors import ConfigError
from octavo_bench.serving.http_client import TimedAnswer

METRICS = ("ttft", "itl", "tpot", "e2el")
"""Time to first token; between two events of an answer; mean time of a token after the first; from sending to the
last token."""
PERCENTILES = (50.0, 90.0, 95.0, 99.0)


def parse_goodput(texts: Sequence[str]) -> dict[str, float]:
    """``["ttft:300", "itl:25"]`` as milliseconds by metric. Raises ``ConfigError``."""
    targets: dict[str, float] = {}
    for text in texts:
        name, _, limit = text.partition(":")
        try:
            targets[name] = float(limit)
        except ValueError:
            raise ConfigError(f"goodput: {text!r} is not METRIC:MILLISECONDS, such as ttft:300") from None
        if name not in METRICS:
            raise ConfigError(f"goodput: {name!r} is not one of {', '.join(METRICS)}")
        if not targets[name] > 0:
            raise ConfigError(f"goodput: {text!r}: the milliseconds must be above 0")
    return targets


def figures(
    answers: Sequence[TimedAnswer],
    seconds: float,
    percentiles: Sequence[float] = PERCENTILES,
    targets: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """The figures of one load; ``targets`` in milliseconds by metric. Latencies are of answers without an error.

    A request counts for goodput if it is within every target; of its gaps, that is the mean.
    """
    good = [answer for answer in answers if answer.error is None]
    num_output = sum(answer.num_output for answer in good)
    num_prompt = sum(answer.num_prompt for answer in good)
    found: dict[str, Any] = {
        "requests_s": round(len(good) / seconds, 3),
        "output_tok_s": round(num_output / seconds, 2),
        "total_tok_s": round((num_prompt + num_output) / seconds, 2),
        "duration_s": round(seconds, 3),
        "completed": len(good),
        "failed": len(answers) - len(good),
        "prompt_tokens": num_prompt,
        "output_tokens": num_output,
    }
    if targets:
        num_within = sum(is_within(answer, targets) for answer in good)
        found["goodput_requests_s"] = round(num_within / seconds, 3)
        found["goodput_share"] = round(num_within / len(answers), 4) if answers else 0.0
    for metric in METRICS:
        samples = [1e3 * value for answer in good for value in _samples(answer, metric)]
        if samples:
            found[f"{metric}_mean_ms"] = round(float(np.mean(samples)), 3)
            for percent, value in zip(percentiles, np.percentile(samples, percentiles), strict=True):
                found[f"{metric}_p{percent:g}_ms"] = round(float(value), 3)
    return found


def errors(answers: Sequence[TimedAnswer]) -> dict[str, int]:
    """How often each error occurred: at most ten of them."""
    counts: dict[str, int] = {}
    for answer in answers:
        if answer.error is not None and (answer.error in counts or len(counts) < 10):
            counts[answer.error] = counts.get(answer.error, 0) + 1
    return counts


def write_csv(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """One line for each load, with a header. What is not a number or a word is left out."""
    names = list(dict.fromkeys(name for row in rows for name, value in row.items() if not isinstance(value, dict)))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def _samples(answer: TimedAnswer, metric: str) -> list[float]:
    """Seconds of one answer."""
    if metric == "itl":
        return answer.gaps
    value = {"ttft": answer.ttft, "tpot": answer.tpot, "e2el": answer.e2el}[metric]
    return [] if value is None else [value]


def is_within(answer: TimedAnswer, targets: Mapping[str, float]) -> bool:
    """Whether an answer is within all limits, in milliseconds by metric; of its gaps, the mean counts."""
    for metric, limit in targets.items():
        samples = _samples(answer, metric)
        if samples and 1e3 * float(np.mean(samples)) > limit:
            return False
    return True
