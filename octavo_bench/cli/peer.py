"""`octavo bench peer`: Octavo beside llama.cpp in one process each, or its server beside vLLM's."""

from __future__ import annotations

import argparse
import functools
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from octavo.cli.settings import above_zero, load_config, positive, refuse_settings
from octavo.config import EngineConfig, cache_dir, settings
from octavo.errors import ConfigError
from octavo_bench.cli.arguments import numbers, refuse_unused
from octavo_bench.cli.results import add_kind
from octavo_bench.records.report import beside, keep

SERVED_CONTEXT = 8192
OF_BOTH_SERVERS = {
    *("model", "load_format", "dtype", "max_model_len", "gpu_memory_utilization"),
    *("revision", "offline", "download_dir"),
}
"""Settings that say which model both servers have, and how much memory. Others have names of their own in each."""
FIGURES = ("prefill_tok_s", "decode_tok_s")
OF_LLAMA_CPP = ("sequences", "prompt", "decode", "rounds", "threads")
OF_VLLM = (
    *("python_path", "workloads", "goodput", "search_seconds", "probe_seconds", "visits", "at_once"),
    *("clients", "octavo_args", "vllm_args", "deadline", "logs"),
)
"""Arguments of one kind of peer alone."""


def add_work(parser: Any) -> None:
    """What every sequence of an in-process measurement does."""
    parser.add_argument("--sequences", type=numbers, default=[1, 4, 16], help="how many at once, comma-separated")
    parser.add_argument("--prompt", type=positive, default=512, help="prompt tokens of each sequence")
    parser.add_argument("--decode", type=positive, default=64, help="decode steps that are timed")
    parser.add_argument("--rounds", type=positive, default=3, help="runs of each size; medians are reported")


def add_peer(kinds: Any) -> None:
    """The engine's settings, the peer, and the work for either kind of peer."""
    parser = add_kind(kinds, "peer", "beside another engine on the same work, as ratios", _compare, has_engine=True)
    peer = parser.add_argument_group("peer")
    peer.add_argument("--engine", choices=["llama.cpp", "vllm"], default="llama.cpp")
    peer.add_argument("--python", type=Path, help="interpreter that has the peer; for vLLM by default this one")
    add_work(parser.add_argument_group("llama.cpp", "In-process runs of equal work, in turns."))
    parser.add_argument("--threads", type=positive, default=2, help="threads of llama.cpp")
    served = parser.add_argument_group("vLLM", "Servers one after the other, driven by `vllm bench serve`.")
    served.add_argument("--python-path", help="PYTHONPATH of vLLM, where it is not installed in its interpreter")
    served.add_argument("--workloads", default="W1,W2,W3,W4", help="of W1 to W8, S1 and goodput, comma-separated")
    served.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="METRIC:MS",
        help="limits of workload goodput; default: ttft:300 tpot:25, as for `octavo bench serve --search`",
    )
    served.add_argument(
        "--search-seconds", type=above_zero, default=60.0, help="how long a search for goodput takes, about"
    )
    served.add_argument("--probe-seconds", type=above_zero, default=5.0, help="for which the search judges each rate")
    served.add_argument(
        "--visits", default="octavo:2,vllm:3,octavo:1", help="engines in turn, with rounds of each visit"
    )
    served.add_argument(
        "--at-once",
        type=positive,
        metavar="ROUNDS",
        help="in place of --visits: both servers stay up and take turns in each round. vLLM starts first and takes "
        "the share --gpu-memory-utilization; Octavo then needs a larger one in --octavo-args",
    )
    served.add_argument("--clients", type=positive, default=1, help="how many share each workload")
    served.add_argument("--octavo-args", default="", help="more arguments of `octavo serve`, as one text")
    served.add_argument("--vllm-args", default="", help="more arguments of vLLM's server, as one text")
    served.add_argument(
        "--deadline", type=above_zero, default=540, help="seconds after which nothing is started any more"
    )
    served.add_argument("--logs", type=Path, help="folder for the servers' logs; default: a temporary one")


def add_embeddings(kinds: Any) -> None:
    """The engine's settings, the peer, and how many texts."""
    help = "seconds for texts of mixed lengths beside sentence-transformers, as ratios"
    parser = add_kind(kinds, "embeddings", help, "embeddings.measure", has_engine=True)
    parser.add_argument("--python", type=Path, required=True, help="interpreter that has sentence-transformers")
    parser.add_argument("--texts", type=positive, default=256, help="of 1 to 168 short words")
    parser.add_argument("--rounds", type=positive, default=5, help="in turns; medians are reported")
    parser.add_argument("--batch", type=positive, default=32, help="texts that sentence-transformers takes at a time")


def add_first_minute(kinds: Any) -> None:
    """The model, the load, and the engines that are started one after the other."""
    help = "throughput and ITL by second from a server's start on"
    parser = add_kind(kinds, "first-minute", help, "serving.first_minute.run")
    parser.add_argument("model", help="a model, or a shape, which gets random weights")
    parser.add_argument("--clients", type=positive, default=16, help="requests at a time")
    parser.add_argument("--prompt", type=positive, default=256, help="prompt tokens of each request")
    parser.add_argument("--decode", type=positive, default=64, help="output tokens of each request")
    parser.add_argument("--seconds", type=above_zero, default=60.0, help="for which requests are sent")
    parser.add_argument("--vocab-size", type=positive, default=20_000, help="prompts are made of tokens below this")
    parser.add_argument("--starts", type=positive, default=1, help="starts of Octavo: the first with empty caches")
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter with vLLM, whose server is started too")
    parser.add_argument("--python-path", help="PYTHONPATH of vLLM, where it is not installed in its interpreter")
    parser.add_argument("--octavo-args", default="", help="more arguments of `octavo serve`, as one text")
    parser.add_argument("--vllm-args", default="", help="more arguments of vLLM's server, as one text")
    parser.add_argument("--logs", type=Path, help="folder for the servers' logs; default: a temporary one")


def _compare(args: argparse.Namespace) -> dict[str, Any]:
    """Compare with the peer that ``--engine`` names."""
    others, other = (OF_LLAMA_CPP, "llama.cpp") if args.engine == "vllm" else (OF_VLLM, "vllm")
    refuse_unused(args, others, f"is for --engine {other}")
    return _compare_with_vllm(args) if args.engine == "vllm" else _compare_with_llama_cpp(args)


def _compare_with_llama_cpp(args: argparse.Namespace) -> dict[str, Any]:
    from octavo.weights.hub import resolve_model
    from octavo_bench.offline import OfflineBench, bench_config
    from octavo_bench.serving.peer_process import SCRIPTS, PeerProcess

    if args.python is None:
        raise ConfigError("--python: give an interpreter that has llama-cpp-python")
    config = load_config(EngineConfig, args)
    model = resolve_model(config.model)
    peer = PeerProcess([str(args.python), str(SCRIPTS / "run_llama_cpp.py"), str(model), str(args.threads)])
    try:
        ours = OfflineBench(bench_config(config, args.sequences))
        ours.run(max(args.sequences), args.prompt, 4)
        rows = []
        for count in args.sequences:
            work = {"sequences": count, "prompt": args.prompt, "decode": args.decode}
            pairs = [(ours.run(**work), peer.run(work)) for _ in range(args.rounds)]
            figures = {name: beside([(a[name], b[name]) for a, b in pairs], 1) for name in FIGURES}
            rows.append({**work, **figures})
    finally:
        peer.close()
    return {"model": config.model.model, "dtype": ours.info.dtype, "peer": peer.about, "rows": rows}


def _compare_with_vllm(args: argparse.Namespace) -> dict[str, Any]:
    from octavo.weights.hub import resolve_model
    from octavo_bench.dummy_models import model_folder
    from octavo_bench.serving.goodput import LIMITS, GoodputSearch, start_clients
    from octavo_bench.serving.peer_process import SCRIPTS, Clients, PeerProcess, share, vllm_environment
    from octavo_bench.serving.serve_figures import parse_goodput
    from octavo_bench.serving.served_peer import GOODPUT, ServedComparison, named_workloads, parse_visits
    from octavo_bench.serving.server_process import OCTAVO, Server
    from octavo_fleet.sim.closed_loops import WORKLOADS
    from octavo_fleet.sim.shapes import SHAPES

    deadline = time.monotonic() + args.deadline
    visits, workloads = parse_visits(args.visits), named_workloads(args.workloads)
    loops = [name for name in workloads if name != GOODPUT]
    for name in loops:
        share(WORKLOADS[name], args.clients)
    search = GoodputSearch(parse_goodput(args.goodput) or LIMITS, args.search_seconds, args.probe_seconds)
    others = {item.name for item in settings(EngineConfig)} - OF_BOTH_SERVERS
    refuse_settings(args, others, "with --engine vllm, give it to the servers in --octavo-args and --vllm-args")
    config = load_config(EngineConfig, args)
    is_shape = config.model.model in SHAPES
    model = model_folder(config.model.model, cache_dir() / "shapes") if is_shape else resolve_model(config.model)
    flags = (
        *("--load-format", "dummy" if is_shape else config.model.load_format),
        *(() if GOODPUT in workloads else ("--no-enable-prefix-caching",)),  # its requests share a system prompt
        *("--max-model-len", str(config.model.max_model_len or SERVED_CONTEXT)),
        *("--gpu-memory-utilization", str(config.cache.gpu_memory_utilization)),
        *("--dtype", config.model.dtype),
    )
    python, env = str(args.python or sys.executable), vllm_environment(args.python_path)
    servers = {
        "octavo": Server((*OCTAVO, str(model), *flags, *shlex.split(args.octavo_args))),
        "vllm": Server.of_vllm(python, [str(model), *flags, *shlex.split(args.vllm_args)], env),
    }
    logs = args.logs or Path(tempfile.mkdtemp(prefix="octavo_logs_"))
    logs.mkdir(parents=True, exist_ok=True)
    command = [python, str(SCRIPTS / "run_vllm_client.py")]
    client_logs = [logs / f"client_{number}.log" for number in range(args.clients)]
    clients = Clients([functools.partial(PeerProcess, command, env, log) for log in client_logs]) if loops else None
    probers = start_clients(args.clients, logs) if GOODPUT in workloads else None
    kept = functools.partial(keep, "peer", output=args.output)
    comparison = ServedComparison(servers, clients, model, workloads, logs, deadline, kept, probers, search)
    try:
        if args.at_once:
            comparison.alternate(["vllm", "octavo"], args.at_once)  # vLLM wants no memory to change while it starts
            visits = []
        for engine, rounds in visits:
            comparison.visit(engine, rounds)
    finally:
        for each in (clients, probers):
            if each is not None:
                each.close()
        comparison.watch.close()
    return comparison.result()
