"""`octavo bench serve URL`: throughput, latency and goodput of an OpenAI-compatible server that runs already."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli.settings import above_zero, at_least_0, positive
from octavo.errors import ConfigError
from octavo_bench.cli.arguments import json_object, numbers, percentiles, rates, refuse_unused
from octavo_bench.cli.results import add_kind, arguments_of, say

if TYPE_CHECKING:
    from octavo_bench.serving.serve_load import ServeWork, Target

OF_SEARCH = ("search_seconds", "probe_seconds", "clients")
DEFAULT_PROMPTS = 100
NOT_OF_SEARCH = ("csv", "num_warmups", "metric_percentiles", "num_prompts", "sweep", "concurrency", "request_rate")


def add_kinds(kinds: Any) -> None:
    """Add the sub-command; it keeps what it has after each load."""
    serve = add_kind(kinds, "serve", "a running OpenAI-compatible server: throughput, latency and goodput", _serve)
    serve.add_argument("url", metavar="URL", help="such as http://127.0.0.1:8000; OPENAI_API_KEY is sent if it is set")
    serve.add_argument("--model", help="default: the first that the server lists")
    serve.add_argument("--endpoint", choices=("completions", "chat"), default="completions")
    load = serve.add_argument_group("load")
    one = load.add_mutually_exclusive_group()
    one.add_argument(
        *("--concurrency", "--max-concurrency"),
        type=numbers,
        metavar="N,...",
        help="closed loop: clients with one request at a time each",
    )
    one.add_argument(
        "--request-rate", type=rates, metavar="R,...", help="open loop: requests a second; inf: all at once"
    )
    load.add_argument("--burstiness", type=above_zero, default=1.0, help="of arrivals: 1 is Poisson, less is burstier")
    load.add_argument("--sweep", action="store_true", help="double the load until the throughput stops growing")
    load.add_argument(
        "--search", action="store_true", help="find the highest request rate at which 99 %% are within --goodput"
    )
    load.add_argument("--search-seconds", type=above_zero, default=60.0, help="how long --search takes, about")
    load.add_argument("--probe-seconds", type=above_zero, default=5.0, help="for which --search judges each rate")
    load.add_argument("--clients", type=positive, default=1, help="processes that share the requests of --search")
    work = serve.add_argument_group("workload")
    work.add_argument(
        "--workload",
        help="fixed (default), sharegpt, assistant (default of --search), shared-prefix, multi-turn, single, chat, "
        "agent, summary, W1 to W8; with loads of their own: baseline, continuous_batching, paged_attention, "
        "chunked_prefill, prefix_caching, or all of these five",
    )
    work.add_argument("--num-prompts", type=positive, help="requests of each load, later turns included (default: 100)")
    work.add_argument("--num-warmups", type=at_least_0, default=1, help="requests before each load that do not count")
    work.add_argument("--input-len", type=positive, help="mean prompt tokens; default: the workload's")
    work.add_argument("--output-len", type=positive, help="mean output tokens; default: the workload's")
    work.add_argument("--vocab-size", type=positive, default=20_000, help="prompts are made of tokens below this")
    work.add_argument("--extra-body", type=json_object, default={}, help="JSON of more fields; null leaves one out")
    work.add_argument("--seed", type=int, default=0, help="of lengths and arrivals; contents are new in each run")
    work.add_argument("--timeout", type=above_zero, default=600.0, help="seconds that a request may take")
    figures = serve.add_argument_group("figures")
    figures.add_argument("--metric-percentiles", type=percentiles, default=[50, 90, 95, 99])
    figures.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="METRIC:MS",
        help="count requests within these: ttft, itl, tpot, e2el in milliseconds, as in ttft:300 itl:25",
    )
    figures.add_argument("--csv", type=Path, metavar="FILE", help="write a line of figures for each load")


def _serve(args: argparse.Namespace) -> dict[str, Any]:
    from octavo_bench.records.report import keep
    from octavo_bench.serving.serve import WantedFigures, run
    from octavo_bench.serving.serve_figures import parse_goodput, write_csv
    from octavo_bench.serving.serve_load import SERVING, Load, ServeWork, Target

    if args.search:
        refuse_unused(args, NOT_OF_SEARCH, "has no effect on --search")
    else:
        refuse_unused(args, OF_SEARCH, "is for --search")
    names = list(SERVING) if args.workload == "all" else [args.workload] if args.workload in SERVING else []
    if names and (args.search or args.sweep or args.concurrency or args.request_rate):
        raise ConfigError(f"workload: {args.workload} has a load of its own; leave the other flags of the load out")
    loads = [Load(rate=rate) for rate in args.request_rate or ()]
    loads = (
        [] if names else loads or [Load(concurrency=count) for count in args.concurrency or [1 if args.sweep else 16]]
    )
    args.workload = args.workload or ("assistant" if args.search else "fixed")
    args.num_prompts = args.num_prompts or (0 if names else DEFAULT_PROMPTS)
    target = Target(**arguments_of(Target, args), api_key=os.environ.get("OPENAI_API_KEY"))
    work = ServeWork(**arguments_of(ServeWork, args))
    if args.search:
        return _search(args, target, work)
    wanted = WantedFigures(
        loads, args.sweep, args.num_warmups, args.metric_percentiles, parse_goodput(args.goodput), names
    )

    if not names:
        say(f"{work.num_prompts} requests for each load (--num-prompts); a line follows each")

    def keep_row(result: dict[str, Any]) -> None:
        row = result["rows"][-1]
        shown = ("output_tok_s", "ttft_p50_ms", "itl_p50_ms", "goodput_share")
        words = ", ".join(f"{row[name]} {name}" for name in shown if name in row)
        say(f"{row.get('workload', '')} {row['load']}: {words}, {row['failed']} failed")
        keep("serve", result, args.output)
        if args.csv is not None:
            write_csv(result["rows"], args.csv)

    return run(target, work, wanted, keep_row)


def _search(args: argparse.Namespace, target: Target, work: ServeWork) -> dict[str, Any]:
    from octavo_bench.serving.goodput import LIMITS, GoodputSearch, print_probe, search_server, start_clients
    from octavo_bench.serving.serve_figures import parse_goodput

    search = GoodputSearch(parse_goodput(args.goodput) or LIMITS, args.search_seconds, args.probe_seconds)
    clients = start_clients(args.clients)
    try:
        return search_server(target, work, search, clients, print_probe)
    finally:
        clients.close()
