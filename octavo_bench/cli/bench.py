"""`octavo bench WHAT`: measure the engine, alone or beside a peer, and keep the raw figures."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import Any

from octavo.cli.settings import above_zero, positive
from octavo.config import DEFAULT_MODEL, EngineConfig, cache_dir
from octavo_bench.cli import ablation, chaos, deciding, drafts, peer, quality, serve, suites, sweeps, tools
from octavo_bench.cli.arguments import engine_config, numbers, reals
from octavo_bench.cli.results import add_kind, flags_of, measure_and_finish
from octavo_bench.report import spread

NAME = "bench"
HELP = "measure throughput, start-up and overheads, alone or beside another engine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One sub-command for each measurement."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="WHAT")
    _add_engine_runs(kinds)
    _add_kernels(kinds)
    _add_surroundings(kinds)
    deciding.add_kinds(kinds)
    tools.add_kinds(kinds)
    tools.add_architectures(kinds)
    ablation.add_kinds(kinds)
    suites.add_kinds(kinds)
    sweeps.add_kinds(kinds)
    drafts.add_kinds(kinds)
    quality.add_kinds(kinds)
    serve.add_kinds(kinds)
    chaos.add_kinds(kinds)


def _add_engine_runs(kinds: Any) -> None:
    """Measurements of an engine that is built in this process."""
    offline = add_kind(
        kinds, "offline", "prefill and decode tokens per second, in this process", _offline, has_engine=True
    )
    peer.add_work(offline)
    offline.add_argument("--temperature", type=float, default=0.0, help="of every request; 0 is greedy")
    offline.add_argument("--top-k", type=int, default=0, help="of every request; 0: off")
    offline.add_argument("--top-p", type=float, default=1.0, help="of every request")
    _add_peak(offline)

    throughput = add_kind(
        kinds, "throughput", "many prompts at once to their end, in this process", _throughput, has_engine=True
    )
    throughput.add_argument("--num-prompts", type=positive, default=1000)
    throughput.add_argument("--input-len", type=positive, default=512, help="prompt tokens of each")
    throughput.add_argument("--output-len", type=positive, default=256, help="output tokens of each")
    throughput.add_argument("--rounds", type=positive, default=3, help="runs; medians are reported")
    _add_peak(throughput)

    profile = add_kind(kinds, "profile", "where the time of a step goes, kernel by kernel", _profile, has_engine=True)
    profile.add_argument("--batches", type=numbers, default=[1, 16, 64, 256], help="sequences of a step")
    profile.add_argument("--context", type=positive, default=256, help="tokens of each sequence")
    profile.add_argument("--steps", type=positive, default=20)
    profile.add_argument("--prefill", type=numbers, default=[2048], help="lengths of prompts computed alone")
    profile.add_argument("--traces", type=Path, help="folder for traces that Perfetto opens; default: a temporary one")

    fidelity = add_kind(
        kinds, "fidelity", "what `octavo simulate` predicts beside what the engine does", _fidelity, has_engine=True
    )
    fidelity.add_argument("--num-prompts", type=positive, default=40, help="requests of a workload in each round")
    fidelity.add_argument(
        "--rounds", type=positive, default=5, help="parts of each workload; all together are compared"
    )


def _add_peak(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peak",
        type=above_zero,
        metavar="TFLOP/S",
        help="of the device, for model FLOPs utilisation; default: dense 16-bit arithmetic by the GPU's data sheet",
    )


def _add_kernels(kinds: Any) -> None:
    """Measurements of a device and of single kernels."""
    add_kind(
        kinds, "ceilings", "how fast the GPU reads memory and multiplies matrices", flags_of("ceilings", on_gpu=True)
    )

    collectives = add_kind(
        kinds,
        "collectives",
        "all-reduces between this host's GPUs, compared with NCCL's",
        flags_of("collectives", "rows", "widths", on_gpu=True),
    )
    collectives.add_argument("--rows", type=numbers, default=[1, 4, 16, 64, 256, 2048])
    collectives.add_argument("--widths", type=numbers, default=[4096, 8192], help="numbers in a row, of bfloat16")

    kernels = add_kind(
        kinds,
        "kernels",
        "time and error of each kernel for CUDA devices, beside the limits",
        flags_of("kernels", "models", "rows", "tune", "deadline", on_gpu=True),
    )
    kernels.add_argument(
        "models",
        nargs="*",
        default=["qwen3-8b", "llama-3.2-1b", "qwen3-0.6b"],
        help="shapes' names; served: all that people serve",
    )
    kernels.add_argument("--rows", type=numbers, default=[1, 2, 4, 8, 16, 32, 64, 128], help="rows of x")
    kernels.add_argument("--tune", action="store_true", help="first write the GPU's shipped table for these models")
    kernels.add_argument("--deadline", type=float, default=float("inf"), help="seconds; what comes later is left out")

    recurrences = add_kind(
        kinds,
        "recurrences",
        "time of layers with recurrent state, for prompts, on a GPU",
        flags_of("recurrences", "models", "tokens", "sequences", on_gpu=True),
    )
    recurrences.add_argument("models", nargs="*", default=["qwen3.5-9b", "nemotron-h-8b"], help="in recurrences.py")
    recurrences.add_argument("--tokens", type=numbers, default=[16, 32, 64, 128, 512, 2048, 8192], help="of a prompt")
    recurrences.add_argument("--sequences", type=numbers, default=[1, 8], help="prompts in a step")

    packed = add_kind(
        kinds,
        "packed",
        "time and error of products with packed weights, by format, on a GPU",
        flags_of("packed_weights", "models", "formats", "rows", "deadline", on_gpu=True),
    )
    packed.add_argument("models", nargs="*", default=["qwen3-8b"], help="shapes' names, also of mixtures")
    packed.add_argument(
        "--formats",
        type=lambda text: text.split(","),
        default=["int4", "mxfp4", "nvfp4", "q4_0", "q4_k", "q6_k"],
        help="comma-separated: int4, int4-zeros, int8, fp8 (groups of 128), mxfp4, nvfp4, q4_0, q4_1, q8_0, q4_k, q6_k",
    )
    packed.add_argument("--rows", type=numbers, default=[1, 2, 16, 64, 256, 1024], help="rows of x, or tokens")
    packed.add_argument("--deadline", type=float, default=float("inf"), help="seconds; what comes later is left out")


def _add_surroundings(kinds: Any) -> None:
    """Measurements of what is around the device's work, and of other engines."""
    peer.add_peer(kinds)
    peer.add_embeddings(kinds)

    served = add_kind(
        kinds, "served", "decoding through the server beside the same in this process", _served, has_engine=True
    )
    peer.add_work(served)

    overhead = add_kind(
        kinds,
        "overhead",
        "the engine's own time per step, with an instant runner",
        flags_of("overhead", "sequences", "prompt", "steps"),
    )
    overhead.add_argument("--sequences", type=numbers, default=[1, 64, 256])
    overhead.add_argument("--prompt", type=positive, default=256)
    overhead.add_argument("--steps", type=positive, default=500)

    front = add_kind(kinds, "front", "processor time of the front process per streamed token", _front)
    front.add_argument("--streams", type=numbers, default=[16, 64])
    front.add_argument("--seconds", type=above_zero, default=2.0, help="length of each stream")
    front.add_argument("--steps-ms", type=reals, default=[10.0], help="paces of the engine behind it")
    front.add_argument("--newcomers", type=float, default=0.0, help="as a load: requests a second with long prompts")
    front.add_argument("--burst", type=positive, default=1, help="newcomers that come together")
    front.add_argument("--schemas", type=float, default=0.0, help="as a load: requests a second with hostile schemas")
    front.add_argument("--rounds", type=positive, default=1)
    front.add_argument("--proxy", action="store_true", help="also through `octavo serve --backend openai`, in turns")
    front.add_argument("--journal", action="store_true", help="also with a journal and keyed requests, in turns")
    front.add_argument("--vllm", metavar="PYTHON", help="an interpreter with vLLM, whose server is measured in turns")

    startup = add_kind(kinds, "startup", "seconds from `octavo serve` to ready and to the first answer", _startup)
    startup.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    startup.add_argument("--rounds", type=positive, default=5)

    peer.add_first_minute(kinds)


run = measure_and_finish


def _offline(args: argparse.Namespace) -> dict[str, Any]:
    from octavo.sampling_params import SamplingParams
    from octavo_bench.offline import OfflineBench, Utilisation, bench_config

    config = engine_config(args)
    sampling = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    params = SamplingParams(**sampling, ignore_eos=True)
    bench = OfflineBench(bench_config(config, args.sequences), params)
    used = Utilisation.of(config, bench.info.device, args.peak)
    rows = []
    for count in args.sequences:
        bench.run(count, args.prompt, 4)
        runs = [bench.run(count, args.prompt, args.decode) for _ in range(args.rounds)]
        for run in runs:
            run |= used.prefill(run["prefill_tok_s"], args.prompt)
            run |= used.decode(run["decode_tok_s"], args.prompt + args.decode / 2)
        figures = {name: spread([run[name] for run in runs]) for name in runs[0]}
        memory = {"peak_memory_mib": round(_peak_memory(bench.info.device) / 2**20, 1)}  # so far
        rows.append({"sequences": count, "prompt": args.prompt, "decode": args.decode, **figures, **memory})
        print(f"octavo: {count} sequences measured", file=sys.stderr)
    return {**_engine(config, bench.info), "peak_tflops": used.peak, "sampling": sampling, "rows": rows}


def _engine(config: EngineConfig, info: Any) -> dict[str, Any]:
    """What was measured: the model and how it was built."""
    return {
        "model": Path(config.model.model).name,
        "dtype": info.dtype,
        "device": info.device,
        "max_num_seqs": info.max_num_seqs,
        "max_num_batched_tokens": info.max_num_batched_tokens,
        "memory": info.memory,
        "peak_memory_bytes": _peak_memory(info.device),
        "kernels": info.kernels,
    }


def _peak_memory(device: str) -> int:
    """The most bytes held so far: of the process on a CPU, of torch on a GPU."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_reserved()
    import resource

    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _throughput(args: argparse.Namespace) -> dict[str, Any]:
    from octavo_bench.offline import Utilisation, build_prepared, run_all

    config = _without_prefix_cache(engine_config(args))
    engine, info = build_prepared(config)
    work = (args.input_len, args.output_len)
    run_all(engine, info, min(args.num_prompts, info.max_num_seqs), args.input_len, min(args.output_len, 16), 1)
    firsts = range(args.num_prompts, args.num_prompts * (args.rounds + 1), args.num_prompts)
    runs = [run_all(engine, info, args.num_prompts, *work, first + 1) for first in firsts]
    used = Utilisation.of(config, info.device, args.peak)
    for run in runs:
        run |= used.requests(run["requests_s"], *work)
    figures = {name: spread([run[name] for run in runs]) for name in runs[0]}
    asked = {"num_prompts": args.num_prompts, "input_len": args.input_len, "output_len": args.output_len}
    more = {"peak_tflops": used.peak, "preemptions": engine.stats().num_preemptions}
    return {**_engine(config, info), **asked, **more, **figures}


def _without_prefix_cache(config: EngineConfig) -> EngineConfig:
    return dataclasses.replace(config, cache=dataclasses.replace(config.cache, enable_prefix_caching=False))


def _profile(args: argparse.Namespace) -> dict[str, Any]:
    from octavo_bench.offline import build_prepared
    from octavo_bench.step_profile import StepProfiler

    config = _without_prefix_cache(engine_config(args))
    engine, info = build_prepared(config)
    traces = args.traces or Path(tempfile.mkdtemp(prefix="octavo_traces_"))
    profiler = StepProfiler(engine, info, traces)
    rows = [profiler.decode(batch, args.context, args.steps) for batch in args.batches]
    rows += [profiler.prefill(tokens, rounds=5) for tokens in args.prefill]
    print(f"octavo: traces are in {traces}", file=sys.stderr)
    return {**_engine(config, info), "rows": [{**row, **_least_work(config, info, row)} for row in rows]}


def _least_work(config: EngineConfig, info: Any, row: dict[str, Any]) -> dict[str, int]:
    """Bytes and arithmetic that the step cannot do without, with dense weights of the engine's own type."""
    from octavo.weights.checkpoint import open_checkpoint
    from octavo.weights.dtypes import DTYPES
    from octavo.weights.hub import resolve_model
    from octavo_fleet.sim.roofline import decode_work, prefill_work, shape_of

    shape = shape_of(open_checkpoint(resolve_model(config.model), config.model.load_format).config)
    kv_per_token = info.memory["kv_cache"] / (info.num_kv_blocks * info.block_size)
    sizes = (DTYPES[info.dtype].itemsize, kv_per_token / shape.kv_values_per_token)
    if row["kind"] == "decode":
        return decode_work(shape, row["batch"], row["context"], *sizes)._asdict()
    return prefill_work(shape, row["context"], *sizes)._asdict()


def _served(args: argparse.Namespace) -> dict[str, Any]:
    from octavo_bench.offline import bench_config
    from octavo_bench.served import served_and_in_process

    config = bench_config(engine_config(args), args.sequences)
    rows = served_and_in_process(config, args.sequences, args.prompt, args.decode, args.rounds)
    return {"model": config.model.model, "rows": list(rows)}


def _front(args: argparse.Namespace) -> dict[str, Any]:
    from octavo_bench.dummy_models import model_folder
    from octavo_bench.front import FrontPlan, Loads, measure

    loads = Loads(args.newcomers, args.burst, args.schemas)
    plan = FrontPlan(args.streams, args.steps_ms, args.seconds, args.rounds, loads)
    return measure(plan, model_folder("llama-3.2-1b", cache_dir() / "shapes"), args.vllm, args.proxy, args.journal)


def _startup(args: argparse.Namespace) -> dict[str, Any]:
    from octavo_bench.served import start_once

    runs = [start_once([args.model]) for _ in range(args.rounds)]
    return {"model": args.model, **{name: spread([run[name] for run in runs]) for name in runs[0]}}


def _fidelity(args: argparse.Namespace) -> dict[str, Any]:
    from octavo_bench.fidelity import Driver, compare
    from octavo_bench.offline import build_prepared

    config = engine_config(args)
    engine, info = build_prepared(config)
    driver = Driver(engine, info.vocab_size)
    return {**_engine(config, info), **compare(driver, info, config, args.num_prompts, args.rounds)}
