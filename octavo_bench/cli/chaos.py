"""`octavo bench chaos`: faults at random times against a server, and a check of every answer."""

from __future__ import annotations

import argparse
import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli.settings import positive
from octavo.errors import ConfigError
from octavo_bench.cli.results import add_kind, say

if TYPE_CHECKING:
    from octavo_bench.chaos.schedule import Findings
    from octavo_bench.chaos.target import ServerUnderTest


def add_kinds(kinds: Any) -> None:
    """Add the sub-command."""
    help = "kill, stop and starve a server under requests, and check every answer"
    chaos = add_kind(kinds, "chaos", help, _chaos, show=_table, is_good=_is_right)
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


def _chaos(args: argparse.Namespace) -> dict[str, Any]:
    import asyncio

    from octavo_bench.chaos.faults import FAULTS, OF_SUPERVISED
    from octavo_bench.chaos.schedule import Chaos, ChaosPlan
    from octavo_bench.chaos.target import ServerUnderTest
    from octavo_bench.chaos.tiny_model import write_tiny_adapter, write_tiny_model
    from octavo_bench.chaos.traffic import ADAPTER, make_requests
    from octavo_bench.serving.server_process import free_port

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
        findings = asyncio.run(Chaos(target, requests, plan, say).run())
    return _result(args, findings, target)


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


WRONG = ("lost", "changed", "twice", "broken", "wrong", "held")
COUNTS = (*WRONG, "reconnections", "begun_again")


def _distribution(times: list[float]) -> dict[str, float]:
    import numpy as np

    return {
        "p50": round(float(np.percentile(times, 50)), 3),
        "p90": round(float(np.percentile(times, 90)), 3),
        "p99": round(float(np.percentile(times, 99)), 3),
        "max": round(max(times), 3),
    }


def _is_right(args: argparse.Namespace, result: Mapping[str, Any]) -> bool:
    return not any(result["counts"][verdict] for verdict in WRONG)


def _table(result: Mapping[str, Any]) -> str:
    from octavo_bench.records.report_tables import markdown_table

    rows = [
        [name, result["faults"][name], *(f"{figures[key]:.2f}" for key in ("p50", "p90", "p99", "max"))]
        for name, figures in sorted(result["recovery_s"].items())
    ]
    counts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in result["counts"].items())
    table = markdown_table(["fault", "times", "answer after p50 s", "p90 s", "p99 s", "max s"], rows)
    return f"{table}\n\n{sum(result['right_answers'].values())} right answers, {counts}"
