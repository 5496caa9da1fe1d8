"""`octavo bench WHAT`: measure the engine, alone or beside a peer, and keep the raw figures.

Most of them are functions of the laboratory whose parameters are the flags: see ``results.arguments_of``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from octavo.cli.settings import above_zero, add_some_settings, at_least_0, positive
from octavo.config import POLICY_NAMES
from octavo_bench.cli import chaos, drafts, peer, serve, tools
from octavo_bench.cli.arguments import numbers, reals, words
from octavo_bench.cli.results import add_kind, measure_and_finish
from octavo_bench.drafts.draft_prompts import KINDS
from octavo_bench.records.report_tables import ablation, formats, kernel_shares

NAME = "bench"
HELP = "measure throughput, start-up and overheads, alone or beside another engine"

OF_ABLATION = ("model", "load_format", "device", "seed", "revision", "download_dir", "kv_cache_dtype", "max_num_seqs")
"""Settings that are the same for every engine of the table; all others are the table's own."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One sub-command for each measurement, in the order of docs/benchmarks.md."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="WHAT")
    peer.add_peer(kinds)
    peer.add_embeddings(kinds)
    serve.add_kinds(kinds)
    _add_throughput(kinds)
    _add_ablation(kinds)
    _add_quality(kinds)
    _add_needles(kinds)
    _add_speculate(kinds)
    drafts.add_kinds(kinds)
    peer.add_first_minute(kinds)
    _add_times(kinds)
    _add_kernels(kinds)
    tools.add_checks(kinds)
    chaos.add_kinds(kinds)
    tools.add_tools(kinds)


run = measure_and_finish


def _add_throughput(kinds: Any) -> None:
    """Many requests, or so many at a time, in this process."""
    help = "throughput and latency of many requests, also at several values of a setting or a length"
    throughput = add_kind(kinds, "throughput", help, "throughput.measure", has_engine=True)
    throughput.add_argument("--num-prompts", type=positive, default=1000)
    throughput.add_argument("--input-len", type=positive, default=512, help="prompt tokens of each")
    throughput.add_argument("--output-len", type=positive, default=256, help="output tokens of each")
    throughput.add_argument(
        "--shared-len", type=at_least_0, default=0, help="tokens with which every prompt begins, of these"
    )
    throughput.add_argument("--gap", type=float, default=0.0, help="seconds between two; default: all at once")
    throughput.add_argument("--vary", metavar="NAME", help="a setting, such as block_size, or a length: input_len, ...")
    throughput.add_argument("--values", type=words, default=[], metavar="V,...", help="its values")
    throughput.add_argument("--rounds", type=positive, default=3, help="visits to each value, in turns")
    _add_peak(throughput)

    help = "prefill and decode tokens per second, in this process"
    offline = add_kind(kinds, "offline", help, "offline.measure", has_engine=True)
    peer.add_work(offline)
    offline.add_argument("--temperature", type=float, default=0.0, help="of every request; 0 is greedy")
    offline.add_argument("--top-k", type=int, default=0, help="of every request; 0: off")
    offline.add_argument("--top-p", type=float, default=1.0, help="of every request")
    _add_peak(offline)


def _add_peak(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peak",
        type=above_zero,
        metavar="TFLOP/S",
        help="of the device, for model FLOPs utilisation; default: dense 16-bit arithmetic by the GPU's data sheet",
    )


def _add_ablation(kinds: Any) -> None:
    help = "throughput and latency with one optimisation after another"
    parser = add_kind(kinds, "ablation", help, "ablation.measure", show=ablation)
    add_some_settings(parser, OF_ABLATION)
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--num-prompts", type=positive, help="requests of a visit")
    parser.add_argument("--shared-len", type=at_least_0, help="tokens with which every prompt begins")
    parser.add_argument("--input-len", type=positive, help="tokens of each prompt after these")
    parser.add_argument("--output-len", type=positive, help="output tokens of each")
    parser.add_argument("--contexts", type=positive, help="whole contexts that the KV cache has room for")
    parser.add_argument("--gap", type=float, help="seconds between two requests")
    parser.add_argument(
        "--rounds", type=positive, default=3, help="visits to each engine, in turns; medians are reported"
    )
    parser.add_argument(
        "--deadline",
        type=above_zero,
        default=280,
        help="seconds; after the first round, none begins that would not end by then",
    )


def _add_quality(kinds: Any) -> None:
    quality = add_kind(
        kinds,
        "quality",
        "formats of a model's weights: bytes, perplexity, KL from float32, decode tokens/s",
        "quality.run",
        has_engine=True,
        refuses=({"dtype", "quantization", "quantize_lm_head"}, "name each format to compare in --formats"),
        show=formats,
    )
    quality.add_argument(
        "--formats",
        type=words,
        default=["float32", "bf16", "fp8", "int8", "int4"],
        help="comma-separated: auto, float32, bf16, fp16, fp8, int8, int4; with +lm_head, as in int4+lm_head, the map "
        "to logits is quantised to int8; with +kv_fp8, as in bf16+kv_fp8, keys and values are cached so "
        "(default: float32,bf16,fp8,int8,int4)",
    )
    quality.add_argument(
        "--checkpoints",
        type=Path,
        nargs="+",
        default=[],
        metavar="PATH",
        help="other checkpoints of the same model, such as quantised ones; PATH+lm_head quantises the map to logits",
    )
    quality.add_argument("--text", type=Path, help="file of ordinary text (default: help topics of Python)")
    quality.add_argument("--tokens", type=positive, default=20480, help="tokens of it that count (default: 20480)")
    quality.add_argument("--window", type=positive, default=512, help="tokens of a context (default: 512)")
    quality.add_argument(
        "--needles",
        action="store_true",
        help="plant four sequences of random words in each window, repeat them at its end, and tell how much is known",
    )
    quality.add_argument(
        "--rounds",
        type=at_least_0,
        default=3,
        help="in which decoding is timed; the table has the fastest; 0 for none (default: 3)",
    )


def _add_needles(kinds: Any) -> None:
    help = "needles found in long contexts and their perplexity, by type of the KV cache, with a model trained for it"
    refuses = ({"kv_cache_dtype", "max_model_len"}, "--caches and --lengths say it")
    needles = add_kind(kinds, "needles", help, "needles.run", has_engine=True, refuses=refuses)
    needles.add_argument("--caches", type=words, default=["auto", "fp8", "int8", "int4"], help="of kv_cache_dtype")
    needles.add_argument("--lengths", type=numbers, default=[8192, 32768, 131072], help="tokens of contexts")
    needles.add_argument("--num-contexts", type=positive, default=4, help="of each length")
    needles.add_argument("--num-needles", type=positive, default=64, help="of each context")
    needles.add_argument("--num-decoys", type=at_least_0, default=4, help="which begin like a needle but for one token")
    needles.add_argument("--max-steps", type=positive, default=1000, help="of training; a folder with a model has none")
    needles.add_argument("--step-tokens", type=positive, default=2**17, help="tokens of a training step")
    needles.add_argument("--longest", type=positive, default=2**17, help="tokens of the longest texts in training")


def _add_speculate(kinds: Any) -> None:
    help = "speculative decoding beside decoding without it"
    speculate = add_kind(kinds, "speculate", help, "drafts.speculate.measure", has_engine=True)
    speculate.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of prompts")
    speculate.add_argument("--batches", type=numbers, default=[1, 4], help="sequences at a time")
    speculate.add_argument("--max-tokens", type=positive, default=128, help="most tokens of an answer")
    speculate.add_argument("--temperature", type=float, default=0.0)
    speculate.add_argument(
        "--rounds", type=positive, default=3, help="in which the two engines take turns, after a first"
    )


def _add_times(kinds: Any) -> None:
    """Where time goes: in deciding, in serving, and in a step."""
    help = "the engine's own time per step, with an instant runner"
    overhead = add_kind(kinds, "overhead", help, "overhead.measure")
    overhead.add_argument("--sequences", type=numbers, default=[1, 64, 256])
    overhead.add_argument("--prompt", type=positive, default=256, help="prompt tokens of each")
    overhead.add_argument("--steps", type=positive, default=500)
    overhead.add_argument("--policies", nargs="+", choices=POLICY_NAMES, default=["fcfs"])
    overhead.add_argument("--waiting", type=at_least_0, default=0, help="more sequences, which wait meanwhile")
    overhead.add_argument("--seen", nargs="+", type=at_least_0, default=[0], help="requests that came and went before")

    help_of_front = "processor time of the front process per streamed token"
    front = add_kind(kinds, "front", help_of_front, "serving.front_cost.measure")
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

    help = "where the time of a step goes, kernel by kernel"
    profile = add_kind(kinds, "profile", help, "device.step_profile.measure", has_engine=True)
    profile.add_argument("--batches", type=numbers, default=[1, 16, 64, 256], help="sequences of a step")
    profile.add_argument("--context", type=positive, default=256, help="tokens of each sequence")
    profile.add_argument("--steps", type=positive, default=20)
    profile.add_argument("--prefill", type=numbers, default=[2048], help="lengths of prompts computed alone")
    profile.add_argument("--traces", type=Path, help="folder for traces that Perfetto opens; default: a temporary one")


def _add_kernels(kinds: Any) -> None:
    """Single kernels, and what GPUs exchange."""
    help = "time of each family of kernels for CUDA devices, beside its floor"
    kernels = add_kind(kinds, "kernels", help, "device.kernels.measure", on_gpu=True, show=kernel_shares)
    shapes = ["llama-3.1-8b", "qwen3-30b-a3b", "gpt-oss-120b", "deepseek-v2-lite", "qwen3.5-9b", "nemotron-h-8b"]
    kernels.add_argument("models", nargs="*", default=shapes, help="shapes' names")
    kernels.add_argument(
        "--formats",
        type=words,
        default=["bf16", "fp8-rows", "int8-rows", "fp8", "int4", "mxfp4", "nvfp4"],
        help="of weights, comma-separated: bf16, fp8-rows, int8-rows (with rounded activations), fp8, int4 (groups of "
        "128), int4-zeros, int8, mxfp4, nvfp4, q4_0, q4_1, q8_0, q4_k, q6_k",
    )
    kernels.add_argument("--rows", type=numbers, default=[1, 16, 64, 256], help="rows of x, or tokens")
    kernels.add_argument("--deadline", type=float, default=float("inf"), help="seconds; what comes later is left out")

    help = "time of layers with recurrent state, for prompts, on a GPU"
    recurrences = add_kind(kinds, "recurrences", help, "device.recurrences.measure", on_gpu=True)
    recurrences.add_argument("models", nargs="*", default=["qwen3.5-9b", "nemotron-h-8b"], help="in recurrences.py")
    recurrences.add_argument("--tokens", type=numbers, default=[16, 32, 64, 128, 512, 2048, 8192], help="of a prompt")
    recurrences.add_argument("--sequences", type=numbers, default=[1, 8], help="prompts in a step")

    help = "what this host's GPUs exchange, compared with NCCL's and torch's"
    collectives = add_kind(kinds, "collectives", help, "device.collectives.measure", on_gpu=True)
    rows = [1, 4, 16, 32, 64, 128, 256, 1024, 2048, 8192]
    collectives.add_argument("--rows", type=numbers, default=rows)
    collectives.add_argument("--widths", type=numbers, default=[4096], help="numbers in a row, of bfloat16")
