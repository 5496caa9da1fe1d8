"""`octavo bench WHAT`: measure the engine, alone or beside a peer, and keep the raw figures."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from octavo.bench.report import publish, spread
from octavo.config import DEFAULT_MODEL

NAME = "bench"
HELP = "measure throughput, start-up and overheads, alone or beside another engine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One sub-command for each measurement."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="WHAT")

    offline = kinds.add_parser("offline", help="prefill and decode tokens per second, in this process")
    _add_work(offline)
    offline.set_defaults(measure=_offline)

    peer = kinds.add_parser("peer", help="the same beside another engine, in turns, as ratios")
    _add_work(peer)
    peer.add_argument("--engine", choices=["llama.cpp"], default="llama.cpp")
    peer.add_argument("--python", type=Path, required=True, help="interpreter that has llama-cpp-python")
    peer.add_argument("--threads", type=int, default=2, help="threads of the peer")
    peer.set_defaults(measure=_peer)

    overhead = kinds.add_parser("overhead", help="the engine's own time per step, with an instant runner")
    overhead.add_argument("--sequences", type=_numbers, default=[1, 64, 256])
    overhead.add_argument("--prompt", type=int, default=256)
    overhead.add_argument("--steps", type=int, default=500)
    overhead.set_defaults(measure=_overhead)

    front = kinds.add_parser("front", help="processor time of the front process per streamed token")
    front.add_argument("--streams", type=_numbers, default=[16, 64])
    front.add_argument("--tokens", type=int, default=200, help="tokens of each stream")
    front.add_argument("--step-ms", type=float, default=10.0, help="pace of the engine behind it")
    front.set_defaults(measure=_front)

    startup = kinds.add_parser("startup", help="seconds from `octavo serve` to ready and to the first answer")
    startup.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    startup.add_argument("--rounds", type=int, default=5)
    startup.set_defaults(measure=_startup)

    for kind in (offline, peer, overhead, front, startup):
        kind.add_argument("--output", type=Path, help="also write the raw JSON to this file")


def _add_work(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--sequences", type=_numbers, default=[1, 4, 16], help="how many at once, comma-separated")
    parser.add_argument("--prompt", type=int, default=512, help="prompt tokens of each sequence")
    parser.add_argument("--decode", type=int, default=64, help="decode steps that are timed")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each size; medians are reported")
    parser.add_argument("--dtype", default="auto")


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write the file that ``--output`` names."""
    publish(args.kind, args.measure(args), args.output)
    return 0


def _offline(args: argparse.Namespace) -> dict[str, Any]:
    bench = _offline_bench(args)
    rows = []
    for count in args.sequences:
        bench.run(count, args.prompt, 4)
        runs = [bench.run(count, args.prompt, args.decode) for _ in range(args.rounds)]
        figures = {name: spread([run[name] for run in runs]) for name in runs[0]}
        rows.append({"sequences": count, "prompt": args.prompt, "decode": args.decode, **figures})
        print(f"octavo: {count} sequences measured", file=sys.stderr)
    return {"model": args.model, "dtype": bench.info.dtype, "kernels": bench.info.kernels, "rows": rows}


def _offline_bench(args: argparse.Namespace) -> Any:
    from octavo.bench.offline import OfflineBench, bench_config

    values = {"model": args.model, "dtype": args.dtype}
    return OfflineBench(bench_config(values, args.sequences, args.prompt, args.decode))


def _peer(args: argparse.Namespace) -> dict[str, Any]:
    from octavo.bench.peer import PeerProcess, compare

    peer = PeerProcess(args.engine, args.python, _model_path(args.model), args.threads)
    ours = _offline_bench(args)
    try:
        ours.run(max(args.sequences), args.prompt, 4)
        rows = compare(ours, peer, args.sequences, args.prompt, args.decode, args.rounds)
    finally:
        peer.close()
    return {"model": args.model, "dtype": ours.info.dtype, "peer": peer.about, "rows": rows}


def _model_path(model: str) -> Path:
    from octavo.config import ModelSettings
    from octavo.weights.hub import resolve_model

    return resolve_model(ModelSettings(model=model))


def _overhead(args: argparse.Namespace) -> dict[str, Any]:
    from octavo.bench.overhead import measure

    return {"rows": measure(args.sequences, args.prompt, args.steps)}


def _front(args: argparse.Namespace) -> dict[str, Any]:
    from octavo.bench.front import measure

    model = _model_path(DEFAULT_MODEL)
    return {"rows": measure(args.streams, args.tokens, args.step_ms, model), "step_ms": args.step_ms}


def _startup(args: argparse.Namespace) -> dict[str, Any]:
    from octavo.bench.startup import start_once

    runs = [start_once([args.model]) for _ in range(args.rounds)]
    return {"model": args.model, **{name: spread([run[name] for run in runs]) for name in runs[0]}}
