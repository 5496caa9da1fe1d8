"""`octavo simulate`: simulate a fleet with the real scheduler on a virtual clock."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from octavo.cli.settings import above_zero, add_flag, bounded, flag_name, positive
from octavo.cli.terminal import table
from octavo.config import EngineConfig, settings
from octavo.errors import ConfigError

NAME = "simulate"
HELP = "predict latency, throughput and cost of a fleet; find the cheapest that meets latency targets"
GROUPS = ("cache", "scheduler")
LATENCIES = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2el": "end to end"}
STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The fleet, the workload, the targets, and the engine's cache and scheduler settings."""
    parser.add_argument("--model", default="llama-3.1-8b", help="name of a model shape, or folder with a config.json")
    parser.add_argument("--device", default="h200", help="device type of each replica")
    parser.add_argument("--replicas", type=positive, default=1, help="number of replicas")
    parser.add_argument(
        "--prefill-replicas", type=int, default=0, help="of these, replicas that compute the long prompts of the others"
    )
    parser.add_argument(
        "--transfer-rate", type=gigabytes, help="GB a second of keys and values between replicas; default: measured"
    )
    parser.add_argument("--tensor-parallel-size", type=positive, default=1, help="devices per replica")
    parser.add_argument(
        "--router", default="least-loaded", help="round-robin, random, session, least-loaded or prefix-aware"
    )
    parser.add_argument("--weight-bits", type=bounded, default=16, help="bits per weight")
    parser.add_argument(
        "--cost-log",
        type=Path,
        help="file written by a server with --step-log, to fit step times from; default: a roofline model",
    )
    parser.add_argument("--depth", type=positive, default=2, help="steps in flight; 1 on a CPU")
    work = parser.add_argument_group("workload")
    work.add_argument(
        "--workload",
        default="chat",
        help="single, chat, agent, summary, sharegpt, assistant, fixed, shared-prefix, multi-turn, W1 to W8, S1, or a "
        "recorded trace",
    )
    work.add_argument("--num-prompts", type=positive, default=1000, help="total requests, later turns included")
    work.add_argument("--rate", type=bounded, help="requests per second, later turns included")
    work.add_argument("--burstiness", type=bounded, default=1.0, help="1 is Poisson arrivals, less is burstier")
    work.add_argument("--concurrency", type=positive, help="closed-loop clients, each with one request at a time")
    work.add_argument("--input-len", type=positive, help="mean prompt tokens; default: the workload's")
    work.add_argument("--output-len", type=positive, help="mean output tokens; default: the workload's")
    work.add_argument("--seed", type=int, default=0, help="seed of the workload")
    goal = parser.add_argument_group("targets and results")
    goal.add_argument("--slo-ttft", type=above_zero, default=float("inf"), help="target TTFT in seconds")
    goal.add_argument(
        "--slo-itl", type=above_zero, default=float("inf"), help="target seconds per output token, on average"
    )
    goal.add_argument("--slo-share", type=float, default=0.99, help="fraction of requests that must meet the targets")
    goal.add_argument("--search", action="store_true", help="find the fewest devices that meet the targets")
    goal.add_argument("--price", type=bounded, help="price of a device per hour")
    goal.add_argument("--output", type=Path, help="write the results to this file, as JSON")
    goal.add_argument("--json", action="store_true", help="print the results as JSON instead of tables")
    goal.add_argument("--plot", type=Path, help="write a PNG to this file; needs matplotlib")
    for name in GROUPS:
        group = parser.add_argument_group(f"{name} settings", "as for `octavo serve`")
        for item in settings(EngineConfig):
            if item.group == name and item.name != "step_log":
                add_flag(group, item)
    parser.add_argument("--policy", dest="scheduling_policy", help=f"short for {flag_name('scheduling_policy')}")


def gigabytes(text: str) -> float:
    return above_zero(text) * 1e9


def run(args: argparse.Namespace) -> int:
    """Simulate or search, and print the results."""
    from octavo_fleet.sim.client_metrics import LatencyTargets
    from octavo_fleet.sim.costs.devices import find_device
    from octavo_fleet.sim.plots import plot
    from octavo_fleet.sim.setup import SimulationSpec

    if args.rate is not None and args.concurrency is not None:
        raise ConfigError("--rate and --concurrency: requests come at a rate or from clients; give one of them")
    known = {item.name: item for item in settings(EngineConfig) if item.group in GROUPS}
    given = {name: value for name in known if (value := getattr(args, name, None)) is not None}
    engine = EngineConfig.from_flat({name: known[name].parse(value) for name, value in given.items()})
    own = {item.name for item in fields(SimulationSpec)}
    asked = {name: value for name, value in vars(args).items() if name in own and value is not None}
    spec = SimulationSpec(num_requests=args.num_prompts, tensor_parallel=args.tensor_parallel_size, **asked)
    targets = LatencyTargets(args.slo_ttft, args.slo_itl)
    result = _search(args, spec, engine, targets) if args.search else _simulate(spec, engine, targets)
    result["device_is_measured"] = find_device(args.device).is_measured
    if args.price is not None:
        hours = result["device_hours_per_million_output_tokens"]
        result["cost_per_million_output_tokens"] = args.price * hours
    if args.plot is not None:
        plot(result, args.plot)
    if args.output is not None:
        args.output.write_text(json.dumps(_finite(result), indent=1) + "\n")
    if args.json:
        print(json.dumps(_finite({name: value for name, value in result.items() if name != "queue"}), indent=1))
    else:
        print(summary(result))
    return 0


def _simulate(spec: Any, engine: EngineConfig, targets: Any) -> dict[str, Any]:
    from octavo_fleet.sim import search
    from octavo_fleet.sim.workers import num_processes, simulate

    fleet, workload = spec.fleet(engine), spec.clients()
    figures, took = simulate(fleet, workload, targets, num_processes(fleet, workload, spec.num_requests))
    if spec is not (spec := spec.at_its_rate(figures)):
        return _simulate(spec, engine, targets)
    words = ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in took.items())
    print(f"octavo: simulated in {words}", file=sys.stderr)
    least = search.TIMES_ANSWER * figures["e2el"]["mean"]
    if spec.rate is not None and figures["arriving_seconds"] < least:
        print(
            f"octavo: warning: requests come for {figures['arriving_seconds']:.1f} s, and an answer takes "
            f"{figures['e2el']['mean']:.1f} s: the fleet does not get as full as it would; "
            f"--num-prompts {round(least * spec.rate)} shows it",
            file=sys.stderr,
        )
    return {"spec": _plain(spec), **figures, "took": took}


def _search(args: argparse.Namespace, spec: Any, engine: EngineConfig, targets: Any) -> dict[str, Any]:
    from octavo_fleet.sim.search import cheapest

    if args.slo_ttft == float("inf") and args.slo_itl == float("inf"):
        raise ConfigError("--search needs --slo-ttft, --slo-itl or both")
    found = cheapest(spec, engine, targets, args.slo_share)
    rows = [
        {
            "devices": one.num_devices,
            "replicas": one.spec.replicas,
            "tensor_parallel_size": one.spec.tensor_parallel,
            "max_num_batched_tokens": one.max_num_batched_tokens,
            "ttft_p99": one.figures["ttft"]["p99"],
            "tpot_p99": one.figures["tpot"]["p99"],
            "good_share": one.figures["good_share"],
        }
        for one in found
    ]
    return {"spec": _plain(found[0].spec), "found": rows, **found[0].figures}


def _plain(spec: Any) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(spec).items()}


def _finite(value: Any) -> Any:
    """``value`` with ``None`` in place of infinite numbers and NaN, which JSON lacks."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not abs(value) < float("inf") else value


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
