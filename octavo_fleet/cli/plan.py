"""`octavo plan MODEL --gpus 2xh200`: does a model fit GPUs that need not be here, and how is it best divided?"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli.settings import add_some_settings, load_config, positive
from octavo.cli.terminal import table
from octavo.config import DEFAULT_MODEL, EngineConfig
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo_fleet.sim.placement import Placement

NAME = "plan"
HELP = "what fits on GPUs that need not be here, how to divide a model among them, and tokens/s to expect"
GPUS = re.compile(r"(?:(\d+)x)?(\w+)")
SETTINGS = (
    *("model", "revision", "offline", "download_dir", "quantization", "kv_cache_dtype", "max_model_len"),
    *("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "hf_overrides", "block_size"),
    "enable_expert_parallel",
)
COLUMNS = {
    "tensor_parallel_size": "-tp",
    "data_parallel_size": "-dp",
    "quantization": "weights",
    "kv_cache_dtype": "KV cache",
    "weight_gib": "GiB of weights",
    "max_model_len": "longest context",
    "cached_tokens": "tokens cached",
    "concurrent": "sequences",
    "tokens_per_second": "tokens/s",
    "seconds_per_token": "ms a token, alone",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the GPUs, and the settings that decide what fits; a setting that is given is not varied."""
    parser.usage = f"{parser.prog} MODEL [--gpus 2xh200] [options]"
    add_some_settings(parser, SETTINGS)
    parser.add_argument(
        "model_argument", nargs="?", metavar="MODEL", help="as for serve; or a name of `octavo simulate --model`"
    )
    parser.add_argument("--gpus", default="1xh200", help="such as 2xh200 (default: %(default)s)")
    parser.add_argument(
        "--context", type=positive, default=4096, help="tokens of each sequence that is decoded (default: %(default)s)"
    )
    parser.add_argument(
        "-dcp",
        "--decode-context-parallel-size",
        dest="num_parts",
        type=positive,
        default=1,
        metavar="INT",
        help="GPUs of each engine that divide each sequence's KV cache, as for serve (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Print a line for each way, the fastest that fit first; return 1 if none does."""
    from octavo_fleet.sim.costs.devices import find_device
    from octavo_fleet.sim.placement import placements

    if (found := GPUS.fullmatch(args.gpus)) is None or int(found[1] or 1) < 1:
        raise ConfigError(f"gpus: {args.gpus!r} is not a number and a name, such as 2xh200")
    count, device = int(found[1] or 1), find_device(found[2])
    config = load_config(EngineConfig, args)
    if args.context > (config.model.max_model_len or args.context):
        raise ConfigError(f"context: {args.context} is more than max_model_len, {config.model.max_model_len}")
    name, values = _configuration(config)
    logging.disable(logging.WARNING)  # the table has what a start would warn of
    try:
        ways = placements(config, values, device, count, args.context, args.num_parts)
    finally:
        logging.disable(logging.NOTSET)
    if args.json:
        rows = [dataclasses.asdict(way) for way in ways]
        print(json.dumps({"model": name, "device": device.name, "gpus": count, "context": args.context, "ways": rows}))
    else:
        print(_summary(name, f"{count} x {device.name}", args.context, ways, device.is_measured))
    return 0 if ways[0].problem is None else 1


def _configuration(config: EngineConfig) -> tuple[str, Mapping[str, Any]]:
    """The model's name, and the keys of its ``config.json``, of which no more than this is fetched."""
    from octavo.weights.checkpoint import open_checkpoint
    from octavo.weights.hub import resolve_model
    from octavo_fleet.sim.shapes import SHAPES

    name = config.model.model
    if name in SHAPES:
        return name, SHAPES[name]
    is_here = name == DEFAULT_MODEL or Path(name).expanduser().exists()
    path = resolve_model(config.model) if is_here else resolve_model(config.model, ["*.json"])
    return path.name if is_here else name, open_checkpoint(path, "auto" if path.is_file() else "dummy").config


def _summary(name: str, gpus: str, context: int, ways: list[Placement], is_measured: bool) -> str:
    fitting, others = ([way for way in ways if (way.problem is None) is fits] for fits in (True, False))
    parts = []
    if fitting:
        head = [*COLUMNS.values()]
        rows = [[_cell(key, getattr(way, key)) for key in COLUMNS] for way in fitting]
        shares = "." if is_measured else ", with an H200's shares of what the data sheet of this GPU says."
        exact = next((way for way in fitting if way.is_exact), None)
        parts += [f"{name} on {gpus}: {len(fitting)} of {len(ways)} ways fit. The fastest:"]
        parts += [f"    octavo serve {name}{fitting[0].flags}"]
        if exact not in (None, fitting[0]):
            parts += ["and the fastest with the model's own numbers:", f"    octavo serve {name}{exact.flags}"]
        parts += [
            table([head, *rows], right=[0, 1, *range(4, len(head))]),
            "Each engine has -tp GPUs, and there are -dp engines. Weights are those of each GPU, tokens cached those\n"
            f"of all engines. tokens/s: of so many sequences that are decoded with {context:,} tokens each; computed\n"
            f"by the cost model of `octavo simulate`, not measured{shares}",
        ]
    if others:
        parts.append("\n".join(["Does not fit:", *(f"  {way.flags.strip() or '-'}: {way.problem}" for way in others)]))
    return "\n\n".join(parts)


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if key == "seconds_per_token":
        return f"{1000 * value:.1f}"
    if key == "weight_gib":
        return f"{value:.1f}"
    return f"{value:,.0f}" if isinstance(value, int | float) else str(value)
