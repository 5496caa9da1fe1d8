"""`octavo bench chaos`: faults at random times against a server, and a check of every answer; `octavo bench soak`: many
requests, and whether the server grows."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli.settings import positive
from octavo.errors import ConfigError
from octavo_bench.cli.results import EXIT_WORSE, add_results, begin, finish

if TYPE_CHECKING:
    from octavo_bench.chaos.schedule import Findings
    from octavo_bench.chaos.target import ServerUnderTest


def add_kinds(kinds: Any) -> None:
    """Add the sub-command."""
    chaos = kinds.add_parser("chaos", help="kill, stop and starve a server under requests, and check every answer")
    chaos.add_argument("--model", help="default: random weights of a tiny model")
    chaos.add_argument("--server-args", default="", metavar="FLAGS", help="more flags of `octavo serve`")
    chaos.add_argument("--seed", type=int, default=0, help="of requests, faults and their order")
    chaos.add_argument("--num-faults", type=positive, help="faults; default: 20, or what --duration allows")
    chaos.add_argument("--duration", type=float, metavar="SECONDS", help="for which faults are begun")
    chaos.add_argument(
        "--interval", type=float, metavar="SECONDS", help="between faults, also before recovery; needs --duration"
    )
    chaos.add_argument("--clients", type=positive, default=6, help="requests at once")
    chaos.add_argument("--num-requests", type=positive, default=60, help="different requests")
    chaos.add_argument("--max-tokens", type=positive, help="most tokens of an answer; default: up to 1,600")
    chaos.add_argument("--faults", metavar="NAME,...", help="only these; default: all")
    chaos.add_argument("--port", type=int, help="of the server; default: any that is free")
    chaos.add_argument("--logs", type=Path, metavar="DIR", help="keep the server's logs here")
    add_results(chaos)
    chaos.set_defaults(run=_chaos)

    soak = kinds.add_parser("soak", help="whether the front process grows under many requests, with a journal")
    soak.add_argument("--num-requests", type=positive, default=300_000)
    soak.add_argument("--clients", type=positive, default=32, help="requests at once")
    soak.add_argument("--server-args", default="", metavar="FLAGS", help="more flags of `octavo serve`")
    soak.add_argument("--most", type=float, default=1.0, metavar="MIB", help="growth for each 100,000 that is allowed")
    add_results(soak)
    soak.set_defaults(run=_soak)


def _chaos(args: argparse.Namespace) -> int:
    import asyncio

    from octavo_bench.chaos.faults import FAULTS, OF_SUPERVISED
    from octavo_bench.chaos.schedule import Chaos, ChaosPlan
    from octavo_bench.chaos.target import ServerUnderTest
    from octavo_bench.chaos.tiny_model import write_tiny_adapter, write_tiny_model
    from octavo_bench.chaos.traffic import ADAPTER, make_requests
    from octavo_bench.server_process import free_port

    begin(args)
    flags = shlex.split(args.server_args)
    known = OF_SUPERVISED if "--supervise" in flags else FAULTS
    names = args.faults.split(",") if args.faults else list(known)
    if unknown := sorted(set(names) - set(known)):
        raise ConfigError(f"faults: {', '.join(unknown)}: not among {', '.join(known)}")
    num_faults = args.num_faults or (None if args.duration else 20)
    if args.interval is not None and (args.interval <= 0 or args.duration is None):
        raise ConfigError("interval: needs --duration, and must be above 0")
    plan = ChaosPlan(args.seed, num_faults, args.duration, args.clients, faults=names, interval=args.interval)
    with tempfile.TemporaryDirectory(prefix="octavo_chaos_") as place:
        folder = Path(place)
        logs = args.logs or folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        model = [args.model]
        if args.model is None:
            model = [str(write_tiny_model(folder / "tiny")), "--load-format", "dummy"]
            model += ["--enable-lora", "--lora-modules", f"{ADAPTER}={write_tiny_adapter(folder / ADAPTER)}"]
        model += flags
        target = ServerUnderTest(model, args.port or free_port(), folder, logs)
        requests = make_requests(args.num_requests, args.seed, args.model is None, args.max_tokens)
        findings = asyncio.run(Chaos(target, requests, plan, _say).run())
    code = finish(args, _result(args, findings, target), shown=_table(findings))
    return code if findings.is_good else EXIT_WORSE


def _soak(args: argparse.Namespace) -> int:
    from octavo_bench.soak import measure

    begin(args)
    result = measure(args.num_requests, args.clients, shlex.split(args.server_args), _say)
    code = finish(args, result, shown=str({name: value for name, value in result.items() if name != "samples"}))
    return code if result["mib_per_100000"] <= args.most else EXIT_WORSE


def _say(line: str) -> None:
    print(f"octavo: {line}", file=sys.stderr, flush=True)


def _result(args: argparse.Namespace, findings: Findings, target: ServerUnderTest) -> dict[str, Any]:
    return {
        "model": args.model or "tiny, random weights",
        "seed": args.seed,
        "clients": args.clients,
        "max_tokens": args.max_tokens,
        "server_starts": target.num_starts,
        "kills": dict(target.kills),
        "faults": {name: len(times) for name, times in findings.recoveries.items()},
        "right_answers": dict(findings.answers),
        "counts": {name: findings.counts[name] for name in COUNTS},
        "recovery_s": {name: _distribution(times) for name, times in findings.recoveries.items()},
        "held": findings.looks,
        "finish_s": findings.finish_seconds,
        "findings": findings.details,
    }


COUNTS = ("lost", "changed", "twice", "broken", "wrong", "held", "reconnections", "begun_again")


def _distribution(times: list[float]) -> dict[str, float]:
    import numpy as np

    return {
        "p50": round(float(np.percentile(times, 50)), 3),
        "p90": round(float(np.percentile(times, 90)), 3),
        "p99": round(float(np.percentile(times, 99)), 3),
        "max": round(max(times), 3),
    }


def _table(findings: Findings) -> str:
    from octavo_bench.report_tables import markdown_table

    rows = []
    for name, times in sorted(findings.recoveries.items()):
        figures = _distribution(times)
        rows.append([name, len(times), *(f"{figures[key]:.2f}" for key in ("p50", "p90", "p99", "max"))])
    counts = ", ".join(f"{findings.counts[name]} {name.replace('_', ' ')}" for name in COUNTS)
    table = markdown_table(["fault", "times", "answer after p50 s", "p90 s", "p99 s", "max s"], rows)
    return f"{table}\n\n{sum(findings.answers.values())} right answers, {counts}"
