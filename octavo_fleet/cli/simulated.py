"""The results of ``octavo simulate`` as tables for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from octavo.cli.terminal import table

LATENCIES = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2el": "end to end"}
STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")


def summary(result: Mapping[str, Any]) -> str:
    """The fleet, the latencies in milliseconds, and what they cost; with ``found`` the fleets of a search."""
    parts = [_fleet(result["spec"])]
    if "found" in result:
        parts.append(_found(result["found"]))
    parts += [_latencies(result), table([*_totals(result)])]
    return "\n\n".join(parts)


def _fleet(spec: Mapping[str, Any]) -> str:
    each = f", each on {spec['tensor_parallel']} devices" if spec["tensor_parallel"] > 1 else ""
    count = spec["replicas"]
    load = ""
    if spec["concurrency"] is not None:
        load = f", {spec['concurrency']} clients"
    elif spec["rate"] is not None:
        load = f", {spec['rate']:g} requests/s offered"
    fleet = f"{count} replica{'s'[: count > 1]} of {spec['model']} on {spec['device']}{each}"
    return f"{fleet}; workload {spec['workload']}{load}"


def _found(rows: list[Mapping[str, Any]]) -> str:
    names = ("devices", "replicas", "tensor_parallel_size", "max_num_batched_tokens")
    head = [*names, "TTFT p99 ms", "TPOT p99 ms", "within targets"]
    body = [
        [
            *(str(row[name]) for name in names),
            *(_ms(row[name]) for name in ("ttft_p99", "tpot_p99")),
            f"{row['good_share']:.1%}",
        ]
        for row in rows
    ]
    return table([head, *body], right=range(len(head)))


def _latencies(result: Mapping[str, Any]) -> str:
    rows = [[label, *(_ms(result[name][column]) for column in STATISTICS)] for name, label in LATENCIES.items()]
    return table([["milliseconds", *STATISTICS], *rows], right=range(1, len(STATISTICS) + 1))


def _totals(result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and values of the other results."""
    refused, failed = result["refused"], result["failed"]
    lost = f" ({refused:,} refused, {failed:,} failed)" if refused or failed else ""
    yield "requests", f"{result['requests']:,} in {result['seconds']:,.1f} s{lost}"
    yield "offered", f"{result['offered_per_second']:,.2f} requests/s"
    yield "throughput", f"{result['requests_per_second']:,.2f} requests/s, until the last answer"
    yield (
        "",
        f"{result['output_tokens_per_second']:,.0f} output tokens/s, {result['total_tokens_per_second']:,.0f} in all",
    )
    yield "within targets", f"{result['good_share']:.1%}, {result['goodput_per_second']:,.2f} requests/s"
    yield "prefix cache hits", f"{result['prefix_hit_rate']:.1%} of the prompt tokens"
    yield "devices busy", f"{result['busy_share']:.1%} of the time"
    yield "preemptions", f"{result['preemptions']:,}"
    hours = result["device_hours_per_million_output_tokens"]
    yield "per million output tokens", f"{hours:,.2f} device hours"
    if "cost_per_million_output_tokens" in result:
        yield "", f"cost {result['cost_per_million_output_tokens']:,.2f}"
    if not result["device_is_measured"]:
        yield "note", f"step times of {result['spec']['device']} are assumed, not measured"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f}"
