"""``octavo models [MODEL]``: which families there are, and whether a model would load and fit, without loading it."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.cli.settings import add_settings, load_config
from octavo.config import DEFAULT_MODEL, EngineConfig
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.models.config import ModelConfig
    from octavo.models.registry import LoadedModel
    from octavo.weights.checkpoint import Checkpoint

NAME = "models"
HELP = "list model families, or check that a model is supported and fits, without loading it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A model, and the settings that decide whether it fits."""
    add_settings(parser, EngineConfig)


def run(args: argparse.Namespace) -> int:
    """Print the table of families; with a model, what was found, and 1 when it does not fit."""
    if args.model_argument is None and args.model is None:
        print("\n".join(_families()))
        return 0
    return _check(load_config(EngineConfig, args))


def _families() -> Iterator[str]:
    """A line for each architecture: its name in ``config.json``, in GGUF files, and what its module says of it."""
    from octavo.models.registry import ARCHITECTURES
    from octavo.models.text_part import TEXT_PARTS
    from octavo.weights.gguf_families import FAMILIES, MIXTRAL

    in_gguf = {family.architecture: name for name, family in FAMILIES.items()}
    in_gguf |= {MIXTRAL.architecture: "llama", "DeepseekV3ForCausalLM": "deepseek2"}
    yield f"{'architecture':<32}GGUF"
    for name, family in sorted(ARCHITECTURES.items(), key=lambda item: item[0].lower()):
        about = (sys.modules[family.__module__].__doc__ or "").splitlines()[0]
        yield f"{name:<32}{in_gguf.get(name, '-'):<11}{about}"
    for name, (text, _) in TEXT_PARTS.items():
        yield f"{name:<32}{'-':<11}The text part of it, which is {text}."


def _check(config: EngineConfig) -> int:
    from octavo.build import resolve_device, resolve_kv_dtype, weight_format
    from octavo.models.outline import outline
    from octavo.models.registry import read_config
    from octavo.runtime import memory
    from octavo.weights.checkpoint import open_checkpoint
    from octavo.weights.hub import resolve_model

    is_here = config.model.model == DEFAULT_MODEL or Path(config.model.model).expanduser().exists()
    path = resolve_model(config.model) if is_here else resolve_model(config.model, ["*.json"])
    checkpoint = open_checkpoint(path, config.model.load_format if is_here else "dummy")
    model = read_config(checkpoint.config, config.model.max_model_len)
    device = resolve_device(config.model.device)
    form = weight_format(config.model, device, checkpoint)
    loaded = outline(model, checkpoint, form.dtype)
    for line in _describe(model, loaded, checkpoint):
        print(line)
    kv_dtype = resolve_kv_dtype(config.cache.kv_cache_dtype, form, device)
    size = path.stat().st_size if checkpoint.has_blocks and form.scheme else loaded.num_bytes
    free = memory.free_memory(device, config.cache.gpu_memory_utilization) - size
    try:
        limits, budget = memory.settle(config, model, kv_dtype, form.dtype, device.type, weights=size, free=free)
    except ConfigError as error:
        print(f"does not fit on {device}: {error}")
        return 1
    print(f"fits on {device}, with contexts of {limits.max_model_len} tokens:\n{budget.table()}")
    return 0


def _describe(model: ModelConfig, loaded: LoadedModel, checkpoint: Checkpoint) -> Iterator[str]:
    kinds = sorted({checkpoint.describe(name)[0] for name in checkpoint.names()})
    yield f"{model.architecture}: supported"
    yield f"{loaded.num_parameters:,} parameters, " + (f"stored as {', '.join(kinds)}" if kinds else "not looked at")
    shown = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
    values = dataclasses.asdict(model)
    yield ", ".join(f"{name} {values[name]}" for name in (*shown, "max_position_embeddings"))
